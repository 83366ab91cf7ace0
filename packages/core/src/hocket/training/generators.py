"""Random numbers of plug-ins: seeded, each their own, kept in checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Generators:
    """One generator on the CPU for each key that was asked for.

    Args:
        seed: of the run; None for what the process's torch generator was seeded with.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._made: dict[str, torch.Generator] = {}

    def of(self, key: str) -> torch.Generator:
        """The generator of this key: the same numbers for one seed, whatever others there are."""
        if key not in self._made:
            seed = torch.initial_seed() if self._seed is None else self._seed
            self._made[key] = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(key.encode())) % 2**63)
        return self._made[key]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Whatever is drawn inside, afterwards all are as before; one that was made inside begins anew."""
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
        """Where they are on this rank."""
        return {key: generator.get_state() for key, generator in self._made.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Undo :meth:`state_dict`; who holds a generator already finds it changed."""
        for key, state in states.items():
            self._made.setdefault(key, torch.Generator()).set_state(state)
