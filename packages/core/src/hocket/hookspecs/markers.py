"""The two pluggy markers of hocket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pluggy

SpecT = TypeVar("SpecT", bound=type)

#: Marks a specification; `hooks` applies it.
hookspec = pluggy.HookspecMarker("hocket")

#: Marks an implementation that needs options: ``@hookimpl(wrapper=True)`` wraps an action (``result = yield``), and
#: ``@hookimpl(trylast=True)`` runs after all others. A plain implementation needs no marker.
hookimpl = pluggy.HookimplMarker("hocket")


def hooks(*, firstresult: bool = False) -> Callable[[SpecT], SpecT]:
    """Decorate a class whose public methods all specify hooks.

    Args:
        firstresult: whether the first implementation that returns a value other than None counts; otherwise all run.
    """

    def mark(spec: SpecT) -> SpecT:
        for name, method in vars(spec).items():
            if not name.startswith("_"):
                hookspec(method, firstresult=firstresult)
        return spec

    return mark
