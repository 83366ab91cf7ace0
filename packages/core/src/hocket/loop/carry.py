"""Values of samples carried from batch to batch: the ``carry`` of a step, and the ``kept`` of its `hocket.Loss`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hocket.data import batches
from hocket.data.batches import unpadded
from hocket.data.reading import holds_scalars, samples_of_fields
from hocket.errors import WrongValue
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State


def check_carry(state: State, batch: Batch, carry: Batch) -> None:
    """Raise ValueError if ``carry`` has another number of samples than the batch, unless the task splits batches itself."""
    kind = type(state.task)
    if carry is None or (kind.split, kind.count) != (Task.split, Task.count):
        return
    try:
        carried, samples = samples_of_fields(carry), batches.count(batch).samples
    except ValueError:  # splitting it, if that is needed, says why
        return
    if carried != samples:
        raise WrongValue(
            f"step(…, carry=…) was given a carry of {carried} samples with a batch of {samples}, and needs one entry for each "
            "sample along dimension 0. If the last batch of an epoch is smaller, drop it with DataLoader(…, drop_last=True), "
            "or start anew with «carry=None» where the sizes differ. A hidden state of shape (layers, samples, features) is "
            f"carried as hidden.transpose(0, 1); or define split and join in {kind.__name__}. Values that do not belong to "
            "samples are not carried: keep them in attributes of the model."
        )


def split_carry(
    state: State, microbatches: Sequence[Batch], split: Callable[[Any], Sequence[Any]] | None
) -> Sequence[tuple[Any, ...]]:
    """Split the step's ``carry`` as the batch was split, and return the loss function's extra arguments per microbatch."""
    carry = state.step.carry
    if not carry or carry[0] is None or len(microbatches) == 1:
        return [carry] * len(microbatches)
    if split is not None:
        parts = split(carry[0])
    else:
        assert state.microbatch is not None
        parts = state.bus.split_batch(state, carry[0], state.microbatch)
    if len(parts) != len(microbatches):
        raise WrongValue(
            f"A batch was split into {len(microbatches)} microbatches, and its carry into {len(parts)}. Both need one "
            "entry for each sample along dimension 0 (a hidden state of shape (layers, samples, features) is carried as "
            f"hidden.transpose(0, 1)); or define split(batch, size) in {type(state.task).__name__} for both."
        )
    return [(unpadded(part)[0],) for part in parts]


def check_kept(state: State, kept: Batch, samples: int) -> None:
    """Raise ValueError unless ``kept`` has one entry for each sample, so that it can be joined over microbatches."""
    task = state.task
    if type(task).join is not Task.join:
        return
    try:
        per_sample = samples_of_fields(kept) == samples
        batches.take_samples(kept, [0], samples)
    except ValueError:
        per_sample = False
    if not per_sample or holds_scalars(kept):
        raise WrongValue(
            f"A loss function kept {type(kept).__name__} that does not have one entry for each of the {samples} samples along "
            "dimension 0, so it cannot be joined over microbatches. Keep a hidden state of shape (layers, samples, features) "
            f"transposed, return numbers as named losses, or define split and join in {type(task).__name__}."
        )
