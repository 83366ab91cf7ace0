"""Collective operations of the ranks that a custom training loop runs on."""

from __future__ import annotations

from typing import Any

import torch

from hocket.run.joined import Joined
from hocket_strategies.custom_loops import checks


class Collectives(Joined):
    """The collective operations of a `hocket.Runtime`. All ranks have to call them, in the same order."""

    def all_reduce(self, tensor: torch.Tensor | float, op: str = "mean") -> torch.Tensor:
        """Return the mean, sum, min or max of a tensor, or a number, over ranks.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> runtime.all_reduce(torch.tensor(0.5), "mean")
            tensor(0.5000)

        Raises ValueError for another ``op``.
        """
        checks.check_operation(op)
        reduced: torch.Tensor = self.bus.all_reduce(torch.as_tensor(tensor), op)
        return reduced

    def all_gather(self, item: Any) -> list[Any]:
        """Return the picklable objects of all ranks, by rank."""
        return list(self.bus.all_gather_object(item))

    def broadcast(self, item: Any) -> Any:
        """Return rank 0's picklable object on every rank."""
        return self.bus.broadcast_object(item)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.bus.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.rank == 0:
            print(*values, **options)
