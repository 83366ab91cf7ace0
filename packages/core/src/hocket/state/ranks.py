"""Several processes that write or read one checkpoint together: if one fails, all fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hocket.errors import CheckpointError, WrongState

_T = TypeVar("_T")


class Ranks:
    """This process among those that act together; by default it is the only one.

    Args:
        rank: the rank of this process, from 0.
        size: the number of ranks.
        gather: returns one picklable object of every rank, by rank. Its channel must not be used for anything else meanwhile.

    Example:
        >>> from hocket.checkpoints import Ranks
        >>> Ranks().first(lambda: "the only rank calls this")
        'the only rank calls this'
    """

    def __init__(self, rank: int = 0, size: int = 1, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self.rank, self.size = rank, size
        self.gather: Callable[[Any], list[Any]] = gather or (lambda item: [item])

    def agree(self, function: Callable[[], _T]) -> _T:
        """Call the function on every rank and return its result here, once it has returned on all.

        If it fails on some ranks, they re-raise; all others raise a CheckpointError or RuntimeError naming the failed rank.
        """
        if self.size == 1:
            return function()
        failure, result = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        kind = CheckpointError if isinstance(failure, CheckpointError) else WrongState
        report = None if failure is None else (kind, str(failure) or type(failure).__name__)
        failures = {rank: failure for rank, failure in enumerate(self.gather(report)) if failure is not None}
        if failure is not None:
            raise failure
        for rank, (kind, message) in failures.items():
            raise kind(f"Rank {rank}: {message}")
        return result  # type: ignore[return-value]  # it has returned

    def first(self, function: Callable[[], _T]) -> _T:
        """Call the function on rank 0 only, and return its result on every rank."""
        result = self.agree(function if self.rank == 0 else lambda: None)
        return self.gather(result)[0]  # type: ignore[no-any-return]


ALONE = Ranks()
