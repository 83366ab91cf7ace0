"""General components: for attributes, and for objects with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hocket.basics.plain_data import encode
from hocket.basics.time import Time, Unit
from hocket.state.component import Check, Component, PerRank, Saved, Tree


class HasState(Protocol):
    """An object with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state: Any, /) -> None:
        """Undo :meth:`state_dict`."""


class Description(Component):
    """A description of the run; nothing is loaded.

    Args:
        describe: returns the description as plain data.
    """

    def __init__(self, path: str, describe: Callable[[], Tree]) -> None:
        self.path, self._describe = path, describe

    def state_dict(self, gather: bool) -> Tree:
        """Return the description."""
        return self._describe()

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which describe less."""
        return Check()

    def load_state_dict(self, saved: Any) -> None:
        """Do nothing."""


class Decoded(Component):
    """A component that decodes its saved state, and accepts any."""

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Decode the saved state."""
        return Check(checkpoint.decode(saved))


class Attribute(Decoded):
    """The value of an object's attribute."""

    def __init__(self, path: str, owner: Any, name: str) -> None:
        self.path, self._owner, self._name = path, owner, name

    def state_dict(self, gather: bool) -> Tree:
        """Return the value."""
        return encode(getattr(self._owner, self._name), self._name)

    def load_state_dict(self, saved: Any) -> None:
        """Set it."""
        setattr(self._owner, self._name, saved)


class TimeAttribute(Attribute):
    """A `hocket.Time`, or None."""

    def state_dict(self, gather: bool) -> Tree:
        """Return number and unit."""
        time = getattr(self._owner, self._name)
        return None if time is None else [time.value, str(time.unit)]

    def load_state_dict(self, saved: Any) -> None:
        """Set it."""
        setattr(self._owner, self._name, None if saved is None else Time(saved[0], Unit(saved[1])))


class AttributeIfNone(Attribute):
    """An attribute that is loaded only if the run has no value."""

    def load_state_dict(self, saved: Any) -> None:
        """Set it if it is None."""
        if getattr(self._owner, self._name) is None:
            super().load_state_dict(saved)


class Stateful(Decoded):
    """An object whose state is identical on all ranks.

    Args:
        what: its name in messages.
        optional: whether it starts fresh from a checkpoint without it, of an older version.
    """

    def __init__(self, path: str, owner: HasState, what: str = "the state", optional: bool = False) -> None:
        self.path, self._owner, self._what, self._optional = path, owner, what, optional

    def absent(self, checkpoint: Saved) -> Check:
        """See :meth:`Component.absent`."""
        return Check() if self._optional else super().absent(checkpoint)

    def complete(self) -> None:
        """Take the state once: the owner raises if that is not possible."""
        self._owner.state_dict()

    def state_dict(self, gather: bool) -> Tree:
        """Return the owner's state."""
        return encode(self._owner.state_dict(), self._what, gather)

    def load_state_dict(self, saved: Any) -> None:
        """Load it."""
        self._owner.load_state_dict(saved)


class StatefulOfRank(Component):
    """An object whose state differs between ranks.

    Args:
        fresh: whether it stays as it is on a new rank; otherwise that continues from the state of rank 0.
    """

    scope = "rank"

    def __init__(self, path: str, owner: HasState, *, fresh: bool) -> None:
        self.path, self._owner, self._fresh = path, owner, fresh

    def state_dict(self, gather: bool) -> Tree:
        """Return the owner's state, which is plain data."""
        return self._owner.state_dict()

    def load_state_dict(self, saved: PerRank) -> None:
        """Load this rank's state."""
        if saved.existed or not self._fresh:
            self._owner.load_state_dict(saved.own)
