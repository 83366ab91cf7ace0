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
        #: The names of the groups of all optimizers; built once, because the rates are read in every step.
        self._names: list[str] = []

    def fit_start(self, state: State) -> None:
        """Name the parameter groups, since optimizers may have changed."""
        self._names = _names(state)

    def after_train_batch(self, state: State) -> None:
        """Log the rates before the step, since schedules have not changed them yet."""
        names, index, rates = self._names, 0, {}
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                if index == len(names):  # a group was added
                    names = self._names = _names(state)
                rate = group.get("lr")
                if type(rate) is not float and isinstance(rate, Tensor):
                    rate = rate.clone()  # schedules update it in place, and logged tensors are read later
                if rate is not None:
                    rates[names[index]] = rate
                index += 1
        state.log(rates)


def _names(state: State) -> list[str]:
    if len(state.optimizers) == 1:
        prefixes = ["lr/group"]
    else:
        prefixes = [f"lr/{f'optimizer{name}' if name.isdecimal() else name}/group" for name in state.optimizer_names]
    return [
        f"{prefix}{index}"
        for prefix, optimizer in zip(prefixes, state.optimizers, strict=True)
        for index in range(len(optimizer.param_groups))
    ]
