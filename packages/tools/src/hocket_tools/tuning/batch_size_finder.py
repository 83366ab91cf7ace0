"""Find the largest number of samples that fit in memory at once, by doubling and then bisecting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hocket.data.batches import Window
from hocket.data.source import empty
from hocket.errors import WrongValue
from hocket.help import optional_packages, warn
from hocket.hookspecs.needs import Need
from hocket.state.step import count
from hocket_tools.arguments import check_least
from hocket_tools.tuning.trial import EndOfTrial, Progress, take_steps

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket.state.state import State


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The largest number of samples that fit in memory at once on every rank, and what to write.

    Example:
        >>> from hocket_tools.tuning.batch_size_finder import BatchSize
        >>> print(BatchSize(largest=13, batch=32, ranks=1, limited=False))
        microbatch: 11
          because 13 samples fit in memory at once, and 14 do not; a batch has 32, which are 3 microbatches
    """

    #: Samples that fit at once: forward, backward, gradients and optimizer state, on the rank with the least memory.
    largest: int
    #: Samples of a batch of the training data on this rank, as it is now.
    batch: int
    ranks: int
    #: Whether the search ended at its limit, where everything still fitted.
    limited: bool
    #: Whether that limit is the number of samples of an epoch.
    of_epoch: bool = False

    @property
    def microbatch(self) -> int | None:
        """The value for ``microbatch=``: the fewest microbatches that fit, evenly sized. None if a batch fits undivided."""
        if self.largest >= self.batch:
            return None
        parts = -(-self.batch // self.largest)
        return -(-self.batch // parts)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "largest": self.largest, "batch": self.batch, "ranks": self.ranks, "limited": self.limited,
            "microbatch": self.microbatch,
        }  # fmt: skip

    def __str__(self) -> str:
        each = " on each rank" if self.ranks > 1 else ""
        beyond = ", which are those of an epoch" if self.of_epoch else ""
        more = f", for which the limit must be {self.batch} or more" if self.microbatch is not None else ""
        beyond += f"; larger batches were not tried{more}" if self.limited else f", and {self.largest + 1} do not"
        fits = f"{self.largest} {'sample fits' if self.largest == 1 else 'samples fit'} in memory at once{each}{beyond}"
        if self.microbatch is not None:
            parts = -(-self.batch // self.microbatch)
            return f"microbatch: {self.microbatch}\n  because {fits}; a batch has {self.batch}, which are {parts} microbatches"
        return (
            f"batch size: {self.largest}\n  because {fits}; a batch has {self.batch}{each} now. Write batch_size="
            f"{self.largest} in the DataLoader, or global_batch={self.largest * self.ranks}; another batch size needs another "
            "learning rate: write this one first, and then search with `hocket tune --lr`"
        )


def find(trainer: Trainer, *, limit: int | None, progress: Progress) -> BatchSize:
    """Return the largest batch that fits; see `hocket_tools.tune`."""
    check_least(1, 4096, limit=1 if limit is None else limit)
    if Need.FULL_PARAMETERS not in trainer.state.strategy.offers:
        raise WrongValue(
            f"{type(trainer.state.strategy).__name__} shards parameters, so that a forward pass needs the other ranks, which "
            "would wait for a rank that runs out of memory. Predict instead: hocket estimate CONFIG."
        )
    if limit is None and trainer.state.device.type == "cpu":
        warn(
            "Where the memory of a CPU runs out, the system may end the process instead of raising an error, and nothing is "
            "found. Give a number of samples that certainly is not too many, such as «limit=4096¦--limit 4096»."
        )
    memory = optional_packages.module("hocket_general.auto_microbatch", "the search for a batch size")
    found: list[BatchSize] = []

    def hooks(state: State) -> Mapping[str, Callable[..., Any]]:
        def gradients(state: State) -> bool:
            found.append(_search(state, memory.fits, limit, progress))
            raise EndOfTrial

        return {"gradients": gradients}

    take_steps(trainer, 1, hooks)
    if not found:
        raise empty(trainer.state.train_data, "The training data", "train_data", "sample")
    return found[0]


def _search(state: State, fits: Callable[[State, Any, int], bool], limit: int | None, progress: Progress) -> BatchSize:
    """Search on this rank alone, so that none waits for one that ran out of memory; then agree on the smallest."""
    step = state.step
    if type(step.batch) is Window:  # its batches are computed on separately
        step.batch = max(step.batch.batches, key=lambda each: count(state, each).samples)
    batch, samples = step.batch, count(state, step.batch).samples
    length = state.progress.epoch_length
    # Samples that a loss function carries from batch to batch have the size of the batch.
    most = limit or (samples if step.carry else max(samples * length, samples) if length else 2**20)

    def tried(size: int) -> bool:
        progress("trying a batch of", size, most)
        if size <= samples:
            return fits(state, batch, size)
        step.batch = state.bus.split_batch(state, state.task.join([batch] * -(-size // samples)), size)[0]
        try:
            return fits(state, step.batch, size)
        finally:
            step.batch = batch

    largest, too_large = _largest(tried, min(samples, most), most) if samples else (most, most + 1)

    def on_all_ranks(value: int, how: str) -> int:
        return int(state.bus.all_reduce(torch.tensor(value), how).item())

    agreed = on_all_ranks(largest, "min")
    limited = on_all_ranks(largest == agreed and too_large > most, "max")
    if not agreed:
        raise torch.OutOfMemoryError(
            f"Not even one sample fits on {state.device} together with the model's gradients and the optimizer's state. Use a "
            "smaller model or samples, a precision of 16 bits, or a strategy that shards parameters."
        )
    of_epoch = bool(limited and length and not limit and not step.carry)
    return BatchSize(agreed, on_all_ranks(samples, "max"), state.strategy.world_size, bool(limited), of_epoch)


def _largest(tried: Callable[[int], bool], size: int, most: int) -> tuple[int, int]:
    """Return the largest size that fits, 0 if none does, and the smallest that does not; ``most`` + 1 if that fits."""
    largest, too_large = 0, most + 1
    while size < too_large:
        if tried(size):
            largest, size = size, min(2 * size, most) if size < most else most + 1
        else:
            too_large = size
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if tried(middle):
            largest = middle
        else:
            too_large = middle
    return largest, too_large
