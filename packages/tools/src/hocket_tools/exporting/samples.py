"""Real batches of the evaluation data: of a few numbers of samples, and of half the length."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from itertools import islice
from typing import Any

from torch import Tensor

from hocket.basics import seeding
from hocket.data.adapters import adapt
from hocket.data.checks import check_batches
from hocket.data.loaders import independent
from hocket.data.nesting import map_tensors
from hocket.data.source import empty
from hocket.errors import WrongValue
from hocket.state.state import State
from hocket.state.task import Task
from hocket_tools import beside
from hocket_tools.exporting.named_tensors import named_tensors

#: The numbers of samples that exports are verified with.
VERIFIED = (1, 7)
#: Batches of the data that are joined at most to get enough samples.
_BATCHES = 20
#: The number of samples that suffices.
_SAMPLES = 11


def data_of(state: State, data: Iterable[Any] | None) -> tuple[Generator[Any, None, None], Any]:
    """Return batches of the data, else of the first evaluation set, else of the training data; and what has them.

    Raises WrongValue if there are none.
    """
    if data is None and state.eval_sets:
        data = next(iter(state.eval_sets.values())).data
    if data is not None:
        if not isinstance(data, list):  # of which any items may be batches
            check_batches(data, "data")
        return beside.batches_of(adapt(independent(data), given=data)), data
    if state.another_epoch is None:
        raise WrongValue(
            "An export is verified on real samples, and this run has no data. «Pass data=loader to export, or eval_data= to "
            "the Trainer¦Write `eval_data: {test: module:loader}`»."
        )
    return _training_batches(state), state.train_data


def _training_batches(state: State) -> Generator[Any, None, None]:
    assert state.another_epoch is not None
    with state.another_epoch() as batches:
        yield from (batch for batch, is_real in batches if is_real)


def batches_of(state: State, data: Generator[Any, None, None], given: Any) -> tuple[list[Any], list[int]]:
    """Return batches of a few samples to trace, and of `VERIFIED`, and their numbers of samples.

    The number to trace is one that no other axis has. Data of fewer samples are repeated.

    Args:
        data, given: as `data_of` returns them.

    Raises DataError for data without samples.
    """
    task, taken, samples = state.task, list[Any](), 0
    with seeding.preserved(devices=False), closing(data) as batches:
        for batch in islice(batches, _BATCHES):
            taken.append(batch)
            samples += _count(task, batch)
            if samples >= _SAMPLES:
                break
    if not samples:
        about = "train_data" if given is state.train_data else "eval_data"
        raise empty(given, "The data that an export is verified with", about, "sample")
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
