"""Switches: which of the installed plug-ins may be used. Matched against names, before anything is imported.

* ``HOCKET_PLUGINS=0`` leaves core's own only; ``HOCKET_PLUGINS=a,b`` those and these names.
* ``HOCKET_DISABLE_PLUGINS=a,dist:b`` takes out plug-ins named ``a`` and everything of the distribution ``b``.
* ``Trainer(plugins=False)`` or ``plugins=["a", "b"]``, and ``--no-plugins``, say the same for one Trainer or command.

Instances and what the process registered itself are not affected: they were not found but given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.plugins.distributions import normal

if TYPE_CHECKING:
    from hocket.plugins.catalog import Entry

_CORE = "hocket"


@dataclass(frozen=True, slots=True)
class Switches:
    """What is allowed."""

    #: Short names besides core's, or None for all.
    only: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()
    disabled_dists: frozenset[str] = frozenset()
    #: What set them, for messages.
    source: str = ""

    def permit(self, entry: Entry) -> bool:
        """Whether an entry may be used."""
        if entry.obj is not None:
            return True
        if entry.name in self.disabled or normal(entry.dist) in self.disabled_dists:
            return False
        return self.only is None or entry.dist == _CORE or entry.name in self.only

    def warn_about_unmatched(self, entries: Iterable[Entry]) -> None:
        """A name that matches nothing is probably misspelt."""
        if self in _warned or not (self.only or self.disabled or self.disabled_dists):
            return
        _warned.add(self)
        entries = list(entries)
        names, dists = {entry.name for entry in entries}, {normal(entry.dist) for entry in entries}
        for name in sorted((self.only or frozenset()) | self.disabled):
            if name not in names:
                warnings.warn(f"{self.source} names '{name}', but no plug-in is called that.", stacklevel=4)
        for dist in sorted(self.disabled_dists - dists):
            warnings.warn(
                f"{self.source} names 'dist:{dist}', but no distribution of that name has plug-ins.", stacklevel=4
            )


_warned: set[Switches] = set()
_argument: ContextVar[bool | tuple[str, ...] | None] = ContextVar("hocket_plugins", default=None)


def current() -> Switches:
    """What the environment and the Trainer (or command) under way say together."""
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
    """What a ``plugins=`` argument says, for everything that is looked up inside."""
    if isinstance(plugins, str):
        raise TypeError(
            f"plugins={plugins!r} should be a list of names, such as plugins=['{plugins}'], or True or False."
        )
    token = _argument.set(plugins if plugins is None or isinstance(plugins, bool) else tuple(plugins))
    try:
        yield
    finally:
        _argument.reset(token)
