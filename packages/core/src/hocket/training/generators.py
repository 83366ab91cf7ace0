"""Seeded random number generators of plug-ins, saved in checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Generators:
    """CPU generators by key, created on request.

    Args:
        seed: the run's seed; None for the initial seed of the process's torch generator.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._made: dict[str, torch.Generator] = {}

    def of(self, key: str) -> torch.Generator:
        """Return the generator of this key. Its numbers depend on the seed and the key only."""
        if key not in self._made:
            seed = torch.initial_seed() if self._seed is None else self._seed
            self._made[key] = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(key.encode())) % 2**63)
        return self._made[key]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators afterwards; those created inside are reseeded."""
        states = self.state_dict()
        try:
            yield
        finally:
            for key, generator in self._made.items():
                if key in states:
                    generator.set_state(states[key])
                else:
                    generator.manual_seed(generator.initial_seed())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of each generator of this rank, by key."""
        return {key: generator.get_state() for key, generator in self._made.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Undo :meth:`state_dict`, in place: references to existing generators stay valid."""
        for key, state in states.items():
            self._made.setdefault(key, torch.Generator()).set_state(state)
