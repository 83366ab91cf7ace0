"""Switches that restrict the installed plug-ins. They match names, before anything is imported.

* ``HOCKET_PLUGINS=0`` switches off the autoload of installed plug-ins, but for those of core, checkpoints, cli, data, insight,
  loggers and testkit; ``HOCKET_PLUGINS=a,b`` permits these names as well.
* ``HOCKET_DISABLE_PLUGINS=a,dist:b`` disables plug-ins named ``a`` and all plug-ins of the distribution ``b``.
* ``Trainer(plugins=False)`` or ``plugins=["a", "b"]``, and ``--no-plugins``, do the same for one Trainer or command.

Instances and plug-ins registered in this process are not affected, since the user chose them explicitly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.errors import WrongType
from hocket.help import warn
from hocket.help.names import closest
from hocket.help.ours import PARTS
from hocket.plugins.entry_points import normal

if TYPE_CHECKING:
    from hocket.plugins.registry import Entry


@dataclass(frozen=True, slots=True)
class Switches:
    """The permitted and disabled plug-ins."""

    #: Permitted short names besides core's, or None for all.
    only: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()
    disabled_dists: frozenset[str] = frozenset()
    #: The variables and arguments that set the switches, for messages.
    source: str = ""

    def permit(self, entry: Entry) -> bool:
        """Whether an entry may be used."""
        if entry.obj is not None:
            return True
        if entry.name in self.disabled or normal(entry.dist) in self.disabled_dists:
            return False
        return self.only is None or entry.dist in PARTS or entry.name in self.only

    def warn_about_unmatched(self, entries: Iterable[Entry]) -> None:
        """Warn about a name that matches no plug-in, since it is probably misspelt."""
        if self in _warned or not (self.only or self.disabled or self.disabled_dists):
            return
        _warned.add(self)
        entries = list(entries)
        names, dists = {entry.name for entry in entries}, {normal(entry.dist) for entry in entries}
        for name in sorted(((self.only or frozenset()) | self.disabled) - names):
            near = closest(name, names)
            write = f"Did you mean '{near}'?" if near else "`hocket plugins list` prints the installed plug-ins."
            warn(f"{self.source} names '{name}', but there is no plug-in of that name. {write}")
        for dist in sorted(self.disabled_dists - dists):
            warn(f"{self.source} names 'dist:{dist}', but no distribution of that name has plug-ins.")


_warned: set[Switches] = set()
_argument: ContextVar[bool | tuple[str, ...] | None] = ContextVar("hocket_plugins", default=None)


def current() -> Switches:
    """Return the combined switches of the environment and of the current Trainer or command."""
    chosen = _argument.get()
    variable = os.environ.get("HOCKET_PLUGINS", "")
    disable = [item.strip() for item in os.environ.get("HOCKET_DISABLE_PLUGINS", "").split(",") if item.strip()]
    only: frozenset[str] | None = None
    sources = []
    if variable:
        only = (
            frozenset() if variable == "0" else frozenset(item.strip() for item in variable.split(",") if item.strip())
        )
        sources.append(f"HOCKET_PLUGINS={variable}")
    if chosen is not None and chosen is not True:
        given = frozenset(chosen or ())
        only = given if only is None else only & given
        sources.append(f"plugins={list(chosen) if chosen else False}")
    if disable:
        sources.append(f"HOCKET_DISABLE_PLUGINS={','.join(disable)}")
    return Switches(
        only,
        frozenset(item for item in disable if not item.startswith("dist:")),
        frozenset(normal(item.removeprefix("dist:")) for item in disable if item.startswith("dist:")),
        " and ".join(sources),
    )


@contextmanager
def use(plugins: bool | Sequence[str] | None) -> Iterator[None]:
    """Apply a ``plugins=`` argument to all lookups inside the context."""
    if isinstance(plugins, str):
        raise WrongType(
            f"«plugins={plugins!r}» should be a list of names, such as «plugins=['{plugins}']», or «True» or «False»."
        )
    token = _argument.set(plugins if plugins is None or isinstance(plugins, bool) else tuple(plugins))
    try:
        yield
    finally:
        _argument.reset(token)
