"""The stages of a fit: what a later fit or a resumed run continues with if the fit ends there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.errors import WrongState
from hocket.help import warn

if TYPE_CHECKING:
    from hocket.loop.fit import FitLoop
    from hocket.state.state import State


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of a fit, in which a checkpoint is taken or an exception raised.

    ``name``: in checkpoints. ``resume_with``: what the next fit does first, to complete the batch or epoch.

    ``checkpoint``: whether checkpoints are taken in it. ``complete``: whether the state may be saved after an exception in it.
    ``inexact``: the warning after an exception, with the number of the batch for ``{}``, if training then does not continue as
    if there had been none; empty if it does.
    """

    name: str
    resume_with: Callable[[FitLoop], None] = lambda loop: None
    checkpoint: bool = False
    complete: bool = True
    inexact: str = ""


def _begin_batch_again(loop: FitLoop) -> None:
    loop.state.progress.begin_batch_again()


# In the order of a fit:
START = Stage("start")
EPOCH_START = Stage(
    "epoch_start", inexact="in epoch_start after batch {}. All plug-ins are called with epoch_start again."
)
DATA = Stage("data")
GRADIENTS = Stage(
    "gradients",
    _begin_batch_again,
    complete=False,
    inexact="in batch {}, before the optimizer stepped. Training continues with that batch, from the weights before it, "
    "but random numbers, batch statistics and metrics may have advanced. Resume from a checkpoint for a bitwise identical run.",
)
#: Weights or learning rates are updated: after an exception the fit cannot be continued.
STEP = Stage("step", complete=False)
BATCH_END = Stage(
    "batch_end",
    lambda loop: loop.after_batch(),
    inexact="in batch_end after batch {}. Training continues after it; the remaining plug-ins miss that batch_end.",
)
AFTER_BATCH = Stage("after_batch", lambda loop: loop.after_batch())
BATCH = Stage("batch", lambda loop: loop.batch_completed(), checkpoint=True)
EPOCH_END = Stage(
    "epoch_end",
    lambda loop: loop.after_epoch(),
    inexact="in epoch_end after batch {}. Training continues after it; the remaining plug-ins miss that epoch_end.",
)
AFTER_EPOCH = Stage("after_epoch", lambda loop: loop.after_epoch())
EPOCH = Stage("epoch", lambda loop: loop.write_logs(), checkpoint=True)
END = Stage("end")
OVER = Stage("over", checkpoint=True)

STAGES = {
    stage.name: stage
    for stage in (
        START, EPOCH_START, DATA, GRADIENTS, STEP, BATCH_END, AFTER_BATCH, BATCH, EPOCH_END, AFTER_EPOCH, EPOCH, END, OVER,
    )
}  # fmt: skip


def check(state: State, left: str, raised: str) -> None:
    """Raise RuntimeError if the last fit cannot be continued after its exception; warn if it continues inexactly.

    Args:
        left: the name of the stage that it was left in; "" if it ended.
        raised: the exception, as text; "" for none.
    """
    batch = state.timestamp.batch
    if state.strategy.world_size > 1:
        places = state.bus.all_gather_object((left, batch))
        if len(set(places)) > 1:
            raise WrongState(
                "An exception left the ranks at different places: "
                + ", ".join(f"rank {rank} after batch {batch}" for rank, (_, batch) in enumerate(places))
                + ". Start the run again, with «resume='auto'» to continue from its latest checkpoint."
            )
    if left == STEP.name:
        raise WrongState(
            f"The last fit raised {raised} while weights or learning rates were updated, in batch {batch}, so that some may "
            "be new and others not, and training cannot be continued from there. Make a new Trainer: with «resume='auto'» it "
            "continues from the latest checkpoint, with «model=trainer.state.model» it begins a run from these weights."
        )
    if raised and left and (inexact := STAGES[left].inexact):
        warn(f"The last fit raised {raised} {inexact.format(batch)}")


def check_complete(stage: Stage | None, left: str | None, evaluating: bool) -> None:
    """Raise RuntimeError if the state cannot be saved now.

    Args:
        stage: the current stage, None outside of a fit.
        left: outside of a fit, the stage in which an exception ended the last one; None if none did.
    """
    complete = (stage is None or stage.checkpoint) if left is None else STAGES[left].complete
    if not complete or evaluating:
        raise WrongState(
            "The state is not complete in the middle of a batch or an evaluation. Take it in a callback's "
            "batch_checkpoint(state), epoch_checkpoint(state) or fit_end(state), or between fits."
        )
