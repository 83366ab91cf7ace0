"""Read data of a run beside the run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import OutOfMemoryError

from hocket.data.batches import unpadded
from hocket.data.source import Source, one_epoch
from hocket.errors import Mistake, WrongValue
from hocket.help import failures
from hocket.help.raised import raised
from hocket.state.task import Task


@contextmanager
def beside(source: Source) -> Iterator[Source]:
    """Leave data as they were, after an exception too: their position, and the generators of the loader and its samplers."""
    position = source.position()
    try:
        yield source
    finally:
        source.close()
        source.restore(position)


def batches_of(source: Source, limit: int | None = None) -> Generator[Any, None, None]:
    """Yield the first batches, without padding, and leave the data as they were."""
    with beside(source), one_epoch(source) as batches:
        yield from (batch for batch, is_real in map(unpadded, islice(batches, limit)) if is_real)


@contextmanager
def noted(task: Task, batch: Any) -> Iterator[None]:
    """Add notes to an exception of a forward pass outside of the loops, as they do; `explained` reads them."""
    try:
        yield
    except Exception as error:
        failures.explain(error, "forward", task, batch)
        raise


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Raise WrongValue, one paragraph, for an exception on data that hocket explains: the data do not suit model or loss.

    Args:
        doing: the subject of the sentence, such as "The evaluation".
    """
    try:
        yield
    except Exception as error:
        notes = [each for each in getattr(error, "__notes__", ()) if not each.startswith("Raised by ")]
        unknown = getattr(error, "hocket_cause", None) == ""  # as of a mistake in the model's own code
        if not notes or unknown or isinstance(error, OutOfMemoryError):
            raise
        advice = " ".join(notes)
        if "Trainer(" in advice:
            advice += "«¦ A command takes such arguments as overrides: inputs=NAME targets=NAME.»"
        raise WrongValue(
            f"{error.marked} {advice}" if isinstance(error, Mistake) else raised(doing, error, advice)
        ) from error
