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

    def after_train_batch(self, state: State) -> None:
        """Log the rates before the step, since schedules have not changed them yet."""
        several = len(state.optimizers) > 1
        rates = {}
        for name, optimizer in zip(state.optimizer_names, state.optimizers, strict=True):
            named = f"optimizer{name}" if name.isdecimal() else name
            prefix = f"lr/{named}/group" if several else "lr/group"
            for index, group in enumerate(optimizer.param_groups):
                rate = group.get("lr")
                if rate is not None:
                    # Schedules update a tensor rate in place, and logged tensors are read later.
                    rates[f"{prefix}{index}"] = rate.clone() if isinstance(rate, Tensor) else rate
        state.log(rates)
