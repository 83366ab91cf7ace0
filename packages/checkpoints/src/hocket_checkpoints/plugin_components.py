"""Components that plug-ins and the Task add by ``checkpoint_components(state)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hocket.basics.plain_data import encode
from hocket.basics.plugin_errors import PluginError
from hocket.data.stateful import one_sided
from hocket.plugins import registry
from hocket.state.component import Check, Component, Like, PerRank, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.content import OFFERED


def offered(state: State) -> list[Component]:
    """Return these components, in order of attachment.

    Raises PluginError for an object that is not a component, or for two components with one path.
    """
    found: dict[str, tuple[Component, str]] = {}
    for owner, what in _owners(state):
        offer = getattr(owner, "checkpoint_components", None)
        for each in offer(state) if callable(offer) else ():
            if not isinstance(each, Component) or not isinstance(getattr(each, "path", None), str):
                raise PluginError(
                    f"checkpoint_components(state) of {what} returned {each!r}. It returns a list of "
                    "hocket.checkpoints.Component, each with a path."
                )
            if each.path in found:
                raise PluginError(
                    f"The checkpoint components of {found[each.path][1]} and of {what} have one path, '{each.path}'. Give each "
                    "its own; state.attachment_of(plugin).name differs between plug-ins of one class."
                )
            found[each.path] = _Encoded(each, what), what
    return [component for component, _ in found.values()]


def check(state: State) -> None:
    """Raise PluginError for a plug-in, Task or component that saves a state which it cannot restore, or the reverse."""
    owners = [*_owners(state), *((each.inner, each.what) for each in offered(state) if isinstance(each, _Encoded))]
    for owner, what in owners:
        if problem := one_sided(owner):
            raise PluginError(f"{what[:1].upper()}{what[1:]}: {problem}")


def _owners(state: State) -> Iterator[tuple[Any, str]]:
    for attachment in state.bus.attachments:
        yield attachment.obj, f"{registry.singular(attachment.kind)} '{attachment.name}'"
    yield state.task, type(state.task).__name__


class _Encoded(Component):
    """Wrap a component: encode any nesting that `encode` knows, and put its path below `OFFERED`."""

    def __init__(self, inner: Component, what: str) -> None:
        self.path, self.scope = f"{OFFERED}.{inner.path}", inner.scope
        self.inner, self.what = inner, what

    def complete(self) -> None:
        self.inner.complete()

    def worth_saving(self) -> bool:
        return self.inner.worth_saving()

    def state_dict(self, gather: bool) -> Tree:
        return encode(self.inner.state_dict(gather), f"'{self.inner.path}' of {self.what}", gather)

    def like(self) -> Like:
        return self.inner.like()

    def check(self, saved: Any, checkpoint: Saved) -> Check:
        if isinstance(saved, PerRank):
            states = [checkpoint.decode(each) for each in saved.states]
            return self.inner.check(PerRank(states, saved.rank, saved.world_size), checkpoint)
        return self.inner.check(checkpoint.decode(saved), checkpoint)

    def absent(self, checkpoint: Saved) -> Check:
        return self.inner.absent(checkpoint)

    def load_state_dict(self, saved: Any) -> None:
        self.inner.load_state_dict(saved)
