"""Components that need no class of their own: attributes, and objects with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hocket.checkpoints.component import Check, Component, PerRank, Saved, Tree
from hocket.checkpoints.storage.plain import encode
from hocket.time import Time, Unit


class HasState(Protocol):
    """An object that saves itself."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state: Any, /) -> None:
        """Undo :meth:`state_dict`."""


class Description(Component):
    """What a checkpoint says about the run; nothing is loaded.

    Args:
        describe: returns it, as plain data.
    """

    def __init__(self, path: str, describe: Callable[[], Tree]) -> None:
        self.path, self._describe = path, describe

    def state_dict(self, gather: bool) -> Tree:
        """Return the description."""
        return self._describe()

    def absent(self, checkpoint: Saved) -> Check:
        """Older checkpoints say less."""
        return Check()

    def load_state_dict(self, saved: Any) -> None:
        """Nothing to load."""


class Attribute(Component):
    """The value of an object's attribute."""

    def __init__(self, path: str, owner: Any, name: str) -> None:
        self.path, self._owner, self._name = path, owner, name

    def state_dict(self, gather: bool) -> Tree:
        """The value."""
        return encode(getattr(self._owner, self._name), self._name)

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Whatever was saved fits."""
        return Check(checkpoint.decode(saved))

    def load_state_dict(self, saved: Any) -> None:
        """Set it."""
        setattr(self._owner, self._name, saved)


class TimeAttribute(Attribute):
    """A `hocket.Time`, or None."""

    def state_dict(self, gather: bool) -> Tree:
        """Number and unit."""
        time = getattr(self._owner, self._name)
        return None if time is None else [time.value, str(time.unit)]

    def load_state_dict(self, saved: Any) -> None:
        """Set it."""
        setattr(self._owner, self._name, None if saved is None else Time(saved[0], Unit(saved[1])))


class AttributeIfNone(Attribute):
    """Loaded only where the run does not know the value by itself."""

    def load_state_dict(self, saved: Any) -> None:
        """Set it if it is None."""
        if getattr(self._owner, self._name) is None:
            super().load_state_dict(saved)


class Stateful(Component):
    """An object whose state is identical on all ranks.

    Args:
        what: its name in messages.
    """

    def __init__(self, path: str, owner: HasState, what: str = "the state") -> None:
        self.path, self._owner, self._what = path, owner, what

    def complete(self) -> None:
        """The owner raises if its state cannot be taken."""
        self._owner.state_dict()

    def state_dict(self, gather: bool) -> Tree:
        """The owner's."""
        return encode(self._owner.state_dict(), self._what, gather)

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Whatever was saved fits."""
        return Check(checkpoint.decode(saved))

    def load_state_dict(self, saved: Any) -> None:
        """Load it."""
        self._owner.load_state_dict(saved)


class StatefulOfRank(Component):
    """An object with a state of its own on every rank.

    Args:
        fresh: whether it stays as it is on a rank that did not exist, or continues from the state of rank 0.
    """

    scope = "rank"

    def __init__(self, path: str, owner: HasState, *, fresh: bool) -> None:
        self.path, self._owner, self._fresh = path, owner, fresh

    def state_dict(self, gather: bool) -> Tree:
        """The owner's, which is plain data."""
        return self._owner.state_dict()

    def load_state_dict(self, saved: PerRank) -> None:
        """Load this rank's."""
        if saved.existed or not self._fresh:
            self._owner.load_state_dict(saved.own)
