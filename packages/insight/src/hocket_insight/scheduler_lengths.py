"""Lengths of torch's schedulers that do not fit a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler

from hocket.basics.time import Unit
from hocket.errors import WrongValue
from hocket.help import warn

if TYPE_CHECKING:
    from hocket.state.state import State


def check(scheduler: object, state: State, by_default: bool) -> None:
    """Compare a torch scheduler's lengths, in steps, with those of a run that steps it after each batch.

    Raises ValueError for one whose steps are fewer than the run's. Warns of one that seems to count epochs, unless somebody
    asked for batches.
    """
    duration, batches = state.max_duration, None
    if duration is not None and duration.unit is Unit.EPOCH and state.epoch_length:
        batches = int(duration.value) * state.epoch_length
    elif duration is not None and duration.unit is Unit.BATCH:
        batches = int(duration.value)
    name, known = type(scheduler).__name__, vars(scheduler)
    if batches is not None and name == "OneCycleLR" and known["total_steps"] < batches:
        raise WrongValue(
            f"{name} has «total_steps={known['total_steps']}», and this run of {duration} steps it after each of its {batches} "
            f"batches. Write «total_steps={batches}»; or pass «schedule_every='1ep'», so that it counts epochs."
        )
    if batches is not None and name == "OneCycleLR" and known["total_steps"] > batches:
        warn(
            f"{name} has «total_steps={known['total_steps']}», and this run of {duration} takes {batches} steps, so it does "
            f"not reach its end. Write «total_steps={batches}»."
        )
    if not by_default or duration is None or duration.unit is not Unit.EPOCH or (state.epoch_length or 2) < 2:
        return
    lengths = [known[key] for key in ("step_size", "T_max", "T_0", "total_iters") if key in known]
    lengths += list(known.get("milestones", ()))
    counts_epochs = lengths and max(lengths) <= duration.value
    codes = [getattr(function, "__code__", None) for function in known.get("lr_lambdas", ())]
    named = any("epoch" in code.co_varnames[:1] for code in codes if code is not None)
    if isinstance(scheduler, LRScheduler) and (counts_epochs or name == "ExponentialLR" or named):
        length = f" of {max(lengths)}" if counts_epochs else ""
        warn(
            f"{name}{length} is stepped after each batch, not each epoch. For epochs write «schedule_every='1ep'» in the "
            "Trainer; if batches are meant, «schedule_every='1ba'»."
        )
