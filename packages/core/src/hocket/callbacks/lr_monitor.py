"""Logging of learning rates."""

from __future__ import annotations

from torch import Tensor

from hocket.callback import Callback
from hocket.state import State


class LRMonitor(Callback):
    """Log the learning rate of every parameter group, as used in the current step.

    The names are ``lr/group0``, ``lr/group1`` …; with several optimizers ``lr/optimizer0/group0`` and so on, or their names
    instead of ``optimizer0``. Groups without ``"lr"`` are skipped.

    Example:
        >>> import hocket, torch
        >>> from hocket.callbacks.lr_monitor import LRMonitor
        >>> from hocket.loggers.memory import MemoryLogger
        >>> logger = MemoryLogger()
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu", log_every="1ba",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 4, duration="1ep", schedule="linear",
        ...     callbacks=[LRMonitor()], loggers=[logger],  # or callbacks=["lr-monitor"]
        ... )
        >>> result = trainer.fit()
        >>> [round(rate, 3) for batch, rate in logger.metrics["lr/group0"]]
        [0.1, 0.075, 0.05, 0.025]
    """

    def __init__(self) -> None:
        #: The names of the groups of each optimizer; built once, because the rates are read in every step.
        self._names: list[list[str]] = []

    def fit_start(self, state: State) -> None:
        """Name the parameter groups, since optimizers may have changed."""
        self._names = []

    def after_train_batch(self, state: State) -> None:
        """Log the rates before the step, since schedules have not changed them yet."""
        groups = [optimizer.param_groups for optimizer in state.optimizers]
        if [*map(len, groups)] != [*map(len, self._names)]:
            self._names = _names(state)
        rates = {}
        for names, each in zip(self._names, groups, strict=True):
            for name, group in zip(names, each, strict=True):
                rate = group.get("lr")
                if rate is not None:
                    # Schedules update a tensor rate in place, and logged tensors are read later.
                    rates[name] = rate.clone() if isinstance(rate, Tensor) else rate
        state.log(rates)


def _names(state: State) -> list[list[str]]:
    if len(state.optimizers) == 1:
        prefixes = ["lr/group"]
    else:
        prefixes = [f"lr/{f'optimizer{name}' if name.isdecimal() else name}/group" for name in state.optimizer_names]
    return [
        [f"{prefix}{index}" for index in range(len(optimizer.param_groups))]
        for prefix, optimizer in zip(prefixes, state.optimizers, strict=True)
    ]
