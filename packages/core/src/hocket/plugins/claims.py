"""Which Trainer a plug-in instance belongs to: it keeps what it has learned in one, and must not begin another with that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hocket.plugins.errors import PluginError
from hocket.plugins.kinds import singular
from hocket.plugins.spec import Attachment

#: By the id of an instance that a Trainer was made with: a reference to it, and the name of that run.
_claimed: dict[int, tuple[Callable[[], Any], str]] = {}
#: Arguments of the Trainer that take one plug-in; those of the other kinds take lists.
_ARGUMENTS = {"strategies": "strategy={}", "precisions": "precision={}", "actions": "actions={}"}


def check(attachments: Sequence[Attachment]) -> None:
    """Refuse an instance that another Trainer was made with, closed or not, or that is given twice. Raises PluginError."""
    seen: set[int] = set()
    for attachment in filter(_claimable, attachments):
        what, cls, key = (
            f"{singular(attachment.kind)} '{attachment.name}'",
            type(attachment.obj).__name__,
            id(attachment.obj),
        )
        if key in seen:
            raise PluginError(f"The {what} is one {cls} that is given twice. Give it once, or make a second one.")
        seen.add(key)
        if key in _claimed and _claimed[key][0]() is attachment.obj:
            argument = _ARGUMENTS.get(attachment.kind, f"{attachment.kind}=[{{}}]")
            raise PluginError(
                f"The {what} is an instance of {cls} that another Trainer was made with (run '{_claimed[key][1]}'), and may "
                f"hold state of that run. Make a new one for each Trainer, {argument.format(f'{cls}(…)')}, or give its name or "
                "configuration, with which each Trainer makes its own."
            )


def claim(attachments: Sequence[Attachment], run: str) -> None:
    """Record that these instances belong to a Trainer, once it is made."""
    for attachment in filter(_claimable, attachments):
        _claimed[id(attachment.obj)] = _reference(attachment.obj), run


def _claimable(attachment: Attachment) -> bool:
    """Whether it is an instance, of a class that does not say ``begins_anew = True``: that it keeps nothing of another run."""
    return attachment.instance and not getattr(attachment.obj, "begins_anew", False)


def _reference(obj: Any) -> Callable[[], Any]:
    key = id(obj)
    try:
        return weakref.ref(obj, lambda _: _claimed.pop(key, None))
    except TypeError:  # a class with __slots__ and no place for weak references: it is kept
        return lambda: obj
