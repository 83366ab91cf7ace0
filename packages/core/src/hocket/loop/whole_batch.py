"""Losses over a whole batch, such as contrastive ones: refuse what would divide the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.basics.losses import WHOLE
from hocket.basics.plugin_errors import PlanError

if TYPE_CHECKING:
    from hocket.loop.settings import Settings
    from hocket.state.state import State


def check_plan(reduction: str | None, settings: Settings, strategy: Any, devices: int | None = None) -> None:
    """Raise PlanError if the run would divide the batches of a loss over whole batches.

    Args:
        devices: the number of processes to start, before they are; None once ``strategy`` has joined them.
    """
    if reduction not in WHOLE:
        return
    for name, given in (("microbatch", settings.microbatch), ("accumulate", settings.accumulate)):
        if given is not None:
            raise PlanError(_refusal(reduction, f"{name}= divides it into microbatches. Omit {name}="))
    ranks = strategy.data_ranks
    if devices is not None:  # the number is known in advance unless the strategy decides which ranks get the same data
        from hocket.strategies.base import Strategy

        ranks = devices if type(strategy).data_ranks is Strategy.data_ranks else 1
    if ranks > 1:
        _check_ranks(reduction, ranks, strategy.averages_gradients)


def check_part(state: State, reduction: str, samples: int) -> None:
    """Raise PlanError if a (micro)batch of ``samples`` samples is only a part of a batch of a loss over whole batches."""
    if samples != state.step.samples:
        raise PlanError(
            _refusal(
                reduction,
                f"this is a microbatch of {samples} of {state.step.samples} samples. Omit «microbatch=» and «accumulate=»",
            )
        )
    if state.strategy.data_ranks > 1:
        _check_ranks(reduction, state.strategy.data_ranks, state.strategy.averages_gradients)


def _check_ranks(reduction: str, ranks: int, averages: bool) -> None:
    if reduction == "batch":
        raise PlanError(
            _refusal(
                reduction,
                f"{ranks} ranks would each compute it on a slice. Train on one rank; or have the loss gather the outputs of "
                "all ranks, with gradients, by torch.distributed.nn.functional.all_gather, and say 'gathered' in place of "
                "'batch'",
            )
        )
    if not averages:
        raise PlanError(
            _refusal(
                reduction,
                "it gathers the outputs of all ranks, whose gradients this strategy does not average. Write «strategy='ddp'»",
            )
        )


def _refusal(reduction: str, why: str) -> str:
    return f"The loss is declared to be one of the whole batch (reduction {reduction!r}), and {why}."
