"""Learning rates."""

from __future__ import annotations

from torch import Tensor

from hocket.callback import Callback
from hocket.state import State


class LRMonitor(Callback):
    """Logs the learning rate of every parameter group, as it is used for the step under way.

    ``lr/group0``, ``lr/group1`` …; with several optimizers ``lr/optimizer0/group0`` and so on, or their names instead of
    ``optimizer0``. Optimizers whose groups have no ``"lr"`` are left out.

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
        """Before the step: schedules have not moved on yet."""
        several = len(state.optimizers) > 1
        rates = {}
        for name, optimizer in zip(state.optimizer_names, state.optimizers, strict=True):
            named = f"optimizer{name}" if name.isdecimal() else name
            prefix = f"lr/{named}/group" if several else "lr/group"
            for index, group in enumerate(optimizer.param_groups):
                rate = group.get("lr")
                if rate is not None:
                    # Schedules write into a rate that is a tensor; what is logged is read later.
                    rates[f"{prefix}{index}"] = rate.clone() if isinstance(rate, Tensor) else rate
        state.log(rates)
