"""Batch-size warm-up: small batches at the beginning of training, the full batch later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hocket.basics.time import Time, Unit
from hocket.errors import WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.needs import Need

if TYPE_CHECKING:
    from hocket.state.state import State


def batch_size_steps(done: float, initial: float = 0.125) -> int:
    """Return the number of parts to divide a batch into, with an optimizer step on each, during a linear warm-up.

    The batch size grows linearly from ``initial`` of the full batch to all of it, as in Brown et al. 2020, "Language Models are
    Few-Shot Learners", section 2.3 and appendix B (arXiv 2005.14165). The result is the fewest parts that are not larger,
    divided as by :func:`torch.tensor_split`: their sizes differ by at most one sample.

    Args:
        done: the fraction of the warm-up that is over; 1 or more for none.
        initial: the first size as a fraction of the full batch, in (0, 1].

    Raises:
        ValueError: ``initial`` is outside (0, 1], or ``done`` is negative.

    Example:
        >>> from hocket_general.functional import batch_size_steps
        >>> [batch_size_steps(done / 4, initial=0.25) for done in range(6)]
        [4, 3, 2, 2, 1, 1]
    """
    if not 0 < initial <= 1 or not done >= 0:
        raise WrongValue(
            f"initial is {initial} and done is {done}, but initial is a fraction of the full batch in (0, 1], such as 0.125, "
            "and done the fraction of the warm-up that is over, 0 or more."
        )
    return math.ceil(1 / (initial + (1 - initial) * min(done, 1.0)) - 1e-9)


class BatchSizeWarmup(Algorithm):
    """Take several optimizer steps on each batch at first, on equal parts of it, and one step on the full batch later.

    The sizes of parts differ by at most one sample on each rank. A batch with fewer samples than parts gets one step for each
    sample, with a warning.

    The batch size grows linearly (Brown et al. 2020, "Language Models are Few-Shot Learners", section 2.3, arXiv 2005.14165):
    the noise of small batches matters little early in training, when gradients are large (McCandlish et al. 2018, arXiv
    1812.06162; Smith et al. 2018, arXiv 1711.00489). The loader is not affected: it returns full batches, each of which is one
    batch of the timestamp, of the duration and of the learning-rate schedule, and whose samples are trained on once. With
    ``accumulate=`` the full batch is a window of the loader's batches. Values that are logged as the loss are means over the
    full batch. The number of steps depends only on the time, so a resumed run continues exactly.

    Args:
        initial: the first batch size, as a fraction of the full batch, in (0, 1].
        warmup: the time until the batch is full: a fraction of the duration such as ``"0.1dur"``, or a time in ep, ba, sp or
            tok. Fractions and epochs advance by batch.

    Raises:
        ValueError: ``initial`` is outside (0, 1], or ``warmup`` is in seconds or not positive.
        PlanError: later, for a task that takes its own steps in ``train_batch``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10,
        ...     algorithms=[hocket_general.BatchSizeWarmup(initial=0.25, warmup="0.5dur")],
        ... )
        >>> trainer.fit().timestamp.batch
        10
    """

    events = {Event.BATCH_START}
    phase = Phase.SELECT
    needs = Need.SEVERAL_STEPS

    def __init__(self, initial: float = 0.125, warmup: str | Time = "0.1dur") -> None:
        if not 0 < initial <= 1:
            raise WrongValue(
                f"BatchSizeWarmup was given «initial={initial}», but it is a fraction of the full batch: give a number in "
                "(0, 1], such as 0.125 for an eighth."
            )
        self.initial = initial
        self.warmup = Time.parse(warmup)
        if self.warmup.unit is Unit.SECOND or not self.warmup.value > 0:
            raise WrongValue(
                f"BatchSizeWarmup was given «warmup='{warmup}'», which is not a positive time that all ranks reach at the same "
                "batch: give a fraction of the duration such as '0.1dur', or epochs, batches, samples or tokens."
            )

    def no_effect(self, state: State) -> str:
        """Return that it begins with the full batch, if so."""
        return "it begins with the full batch, «initial=1». Give a smaller fraction." if self.initial == 1 else ""

    def apply(self, event: Event, state: State) -> None:
        """Request the number of steps that makes batches of the current size."""
        steps = batch_size_steps(state.completed(self.warmup.unit) / self.warmup.value, self.initial)
        state.request_steps(steps)
        state.log({"batch-size-warmup/steps": steps})
