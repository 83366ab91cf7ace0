"""Random number generators among the attributes of loaders, samplers and data sets."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hocket.basics.plain_data import decode, encode
from hocket.data.stateful import has_state, one_sided
from hocket.help import warn


class DataGenerators:
    """The generators of a loader, its samplers and its data set (torch's, Python's and NumPy's), and stateful samplers.

    Only generators that are attributes of one of these objects are found; each is identified by the attribute. Samplers and
    data sets that count or draw in another way should define ``state_dict`` and ``load_state_dict``, or ``set_epoch``.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        for owner in self._owners().values():
            if problem := one_sided(owner):
                warn(problem)

    def capture(self) -> dict[str, Any]:
        """Return the state of each as a tree."""
        return {place: encode(_state_of(source), place) for place, source in self._found()}

    def restore(self, states: Mapping[str, Any], *, samplers: bool = True) -> None:
        """Undo :meth:`capture` for those that exist. ``samplers``: whether to restore stateful samplers too."""
        for place, source in self._found():
            if place in states and (samplers or not has_state(source)):
                _restore(source, decode(states[place]))

    def restore_data_set(self, states: Mapping[str, Any]) -> None:
        """Restore generators of the data set only."""
        self.restore({place: state for place, state in states.items() if place.startswith("dataset")}, samplers=False)

    def _owners(self) -> dict[str, Any]:
        batch_sampler = getattr(self._data, "batch_sampler", None)
        return {
            "loader": self._data,
            "batch_sampler": batch_sampler,
            "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
            "sampler": getattr(self._data, "sampler", None),
            "dataset": getattr(self._data, "dataset", None),
        }

    def _found(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for role, owner in self._owners().items():
            if "sampler" in role and has_state(owner) and id(owner) not in seen:
                seen.add(id(owner))
                yield role, owner
            for name, value in getattr(owner, "__dict__", {}).items():
                if _is_generator(value) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{role}.{name}", value


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _state_of(source: Any) -> Any:
    if has_state(source):
        return source.state_dict()
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, random.Random):
        return source.getstate()
    if hasattr(source, "bit_generator"):
        return source.bit_generator.state
    return source.get_state(legacy=False)


def _restore(source: Any, state: Any) -> None:
    if has_state(source):
        source.load_state_dict(state)
    elif isinstance(source, torch.Generator):
        source.set_state(state)
    elif isinstance(source, random.Random):
        source.setstate(state)
    elif hasattr(source, "bit_generator"):
        source.bit_generator.state = state
    else:
        source.set_state(state)
