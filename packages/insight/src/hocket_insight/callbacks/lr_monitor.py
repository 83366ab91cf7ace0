"""Logging of learning rates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hocket.hookspecs.callback import Callback
from hocket.state.state import State


class LRMonitor(Callback):
    """Log the learning rate of every parameter group, as used in the current step.

    The names are ``lr/group0``, ``lr/group1`` …; with several optimizers ``lr/optimizer0/group0`` and so on, or their names
    instead of ``optimizer0``. Groups without ``"lr"`` are skipped.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.lr_monitor import LRMonitor
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
        #: The names of the groups of all optimizers, and what was logged last; read in every step.
        self._names: list[str] = []
        self._rates: list[Any] = []

    def fit_start(self, state: State) -> None:
        """Name the parameter groups, since optimizers may have changed."""
        self._names, self._rates = _names(state), []

    def after_train_batch(self, state: State) -> None:
        """Log the rates before the step, since schedules have not changed them yet."""
        rates = [group.get("lr") for optimizer in state.optimizers for group in optimizer.param_groups]
        if rates and rates == self._rates and self._names[0] in state.logged:
            return  # nothing is new since the last row of the loggers
        if len(rates) != len(self._names):  # a group was added
            self._names = _names(state)
        found = dict(zip(self._names, rates, strict=True))
        tensors = {name: rate.clone() for name, rate in found.items() if isinstance(rate, Tensor)}
        # Schedules update tensors in place, and logged ones are read later.
        self._rates = [] if tensors else rates
        state.log({name: rate for name, rate in {**found, **tensors}.items() if rate is not None})


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
