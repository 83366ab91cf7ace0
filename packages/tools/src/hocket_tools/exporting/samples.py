"""Real batches of the evaluation data: of a few numbers of samples, and of half the length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from hocket.basics import seeding
from hocket.data.nesting import map_tensors
from hocket.errors import WrongValue
from hocket.state.task import Task
from hocket_tools.exporting.named_tensors import named_tensors

#: The numbers of samples that exports are verified with.
VERIFIED = (1, 7)
#: Batches of the data that are joined at most to get enough samples.
_BATCHES = 20


def batches_of(task: Task, data: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Return batches of a few samples to trace, and of `VERIFIED`, and their numbers of samples.

    The number to trace is one that no other axis has. Data of fewer samples are repeated.

    Raises WrongValue for data without batches.
    """
    with seeding.preserved(devices=False):
        taken, samples = [], 0
        for batch in islice(data, _BATCHES):
            taken.append(batch)
            samples += _count(task, batch)
            if samples >= 11:
                break
    if not samples:
        raise WrongValue("An export is verified on real samples, and the evaluation data have none. Pass data=.")
    sizes = {size for tensor in named_tensors(taken[0], "batch").values() for size in tensor.shape[1:]}
    traced = next((number for number in (5, 4, 6, 3, 8, 9, 10, 11) if number not in sizes), 5)
    enough = _joined(task, taken, samples, max(traced, *VERIFIED))
    counts = [traced, *VERIFIED]
    return [task.split(enough, count)[0] for count in counts], counts


def _joined(task: Task, taken: list[Any], samples: int, least: int) -> Any:
    if _count(task, taken[0]) >= least:
        return taken[0]
    if samples >= least:
        try:
            return task.join(taken)
        except (RuntimeError, ValueError):  # batches padded to different lengths
            pass
    first = _count(task, taken[0])
    return task.join([taken[0]] * -(-least // first))


def _count(task: Task, batch: Any) -> int:
    counted = task.count(batch)
    return int(counted[0] if isinstance(counted, tuple) else counted)


def shortened(batch: Any, inputs: Mapping[str, Tensor], chosen: Mapping[tuple[str, int], str]) -> Any:
    """Return the batch with the first half of those axes that the model gets as the chosen axes of its inputs.

    For ``"length"`` these are axis 1 of all matrices of integers of that length, labels too; for others the axis of the tensors
    that have the shape of the input.
    """

    def cut(tensor: Tensor) -> Tensor:
        shape = tensor.shape
        for (name, axis), label in chosen.items():
            is_matrix = tensor.dim() == 2 and not tensor.is_floating_point()
            if shape == inputs[name].shape and (is_matrix or label != "length"):
                tensor = tensor.narrow(axis, 0, shape[axis] // 2)
                if label == "length":
                    break
        return tensor

    return map_tensors(cut, batch)
