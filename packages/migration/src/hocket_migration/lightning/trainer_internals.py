"""What Lightning's own code uses of a trainer's inside: ``log``, ``clip_gradients`` and its callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hocket.optim.clipping import clip_gradients

if TYPE_CHECKING:
    from hocket_migration.lightning.trainer_view import TrainerView


class Connector:
    """What ``LightningModule.log`` and Lightning's callbacks use of the trainer's logging."""

    _current_fx: str | None = None

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    def should_reset_tensors(self, hook: str) -> bool:
        """Whether values of an earlier epoch are still there: never, `Results` forgets them at its end."""
        return False

    @property
    def should_update_logs(self) -> bool:
        """Whether values are passed to loggers after this batch."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        return every > 0 and ((trainer.batches_that_stepped + 1) % every == 0 or trainer.should_stop)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Pass values to the loggers, without the callbacks' metrics."""
        self._trainer.write(metrics, step)


class Clipping:
    """``trainer.precision_plugin``, for ``LightningModule.clip_gradients``."""

    def clip_gradients(self, optimizer: Any, clip_val: float | None = 0.0, algorithm: Any = "norm") -> None:
        """Clip the gradients of an optimizer by their norm, or by value."""
        if clip_val is None or clip_val <= 0:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        clip_gradients(parameters, getattr(algorithm, "value", algorithm), float(clip_val))


class Loop(SimpleNamespace):
    """The counters of a loop. Those that are arguments of the Trainer can be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.change(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name} of Lightning's loops is not available under hocket. Read trainer.current_epoch, global_step, "
            "is_last_batch, num_training_batches or estimated_stepping_batches (no setup_data() is needed), or "
            "trainer.hocket.state."
        )


class BatchProgress:
    """Where training is in the epoch."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    @property
    def is_last_batch(self) -> bool:
        """See `TrainerView.is_last_batch`."""
        return self._trainer.is_last_batch
