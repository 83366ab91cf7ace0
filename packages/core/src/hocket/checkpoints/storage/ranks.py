"""Several processes that write or read one checkpoint together: what one cannot do, none has done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hocket.checkpoints.storage.errors import CheckpointError

_T = TypeVar("_T")


class Ranks:
    """This process among those that do something together; by default it is the only one.

    Args:
        rank: which one, from 0.
        size: how many there are.
        gather: one picklable object of every rank, by rank. Nobody else uses its channel meanwhile.

    Example:
        >>> from hocket.checkpoints import Ranks
        >>> Ranks().first(lambda: "the only rank calls this")
        'the only rank calls this'
    """

    def __init__(self, rank: int = 0, size: int = 1, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self.rank, self.size = rank, size
        self.gather: Callable[[Any], list[Any]] = gather or (lambda item: [item])

    def agree(self, function: Callable[[], _T]) -> _T:
        """What the function returns here, once it has returned on every rank.

        Where it raises on some, those raise that, and the others a CheckpointError, or RuntimeError, that says it.
        """
        if self.size == 1:
            return function()
        failure, result = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        kind = CheckpointError if isinstance(failure, CheckpointError) else RuntimeError
        told = None if failure is None else (kind, str(failure) or type(failure).__name__)
        failures = {rank: each for rank, each in enumerate(self.gather(told)) if each is not None}
        if failure is not None:
            raise failure
        for rank, (kind, message) in failures.items():
            raise kind(f"Rank {rank}: {message}")
        return result  # type: ignore[return-value]  # it has returned

    def first(self, function: Callable[[], _T]) -> _T:
        """What the function returns on rank 0, where alone it is called, on every rank."""
        result = self.agree(function if self.rank == 0 else lambda: None)
        return self.gather(result)[0]  # type: ignore[no-any-return]


ALONE = Ranks()


def of_a_thread(rank: int, size: int) -> Ranks:
    """Ranks whose collectives do not meet those of training: over a process group of its own, which all of them make here."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # ranks that are left out get something else

    def gather(item: Any) -> list[Any]:
        items: list[Any] = [None] * size
        dist.all_gather_object(items, item, group=group)
        return items

    return Ranks(rank, size, gather)
