"""Ownership of plug-in instances: an instance holds state of its Trainer's run, so another Trainer must not reuse it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hocket.basics.kinds import singular
from hocket.basics.plugin_errors import PluginError
from hocket.hookspecs.attachment import Attachment

#: id of a claimed instance -> (reference to the instance, name of its Trainer's run).
_claimed: dict[int, tuple[Callable[[], Any], str]] = {}
#: Trainer arguments that take a single plug-in; the arguments for other kinds take lists.
_ARGUMENTS = {"strategies": "strategy={}", "precisions": "precision={}", "actions": "actions={}"}


def check(attachments: Sequence[Attachment]) -> None:
    """Raise PluginError for an instance that belongs to another Trainer, closed or not, or that is given twice."""
    seen: set[int] = set()
    for attachment in filter(_claimable, attachments):
        what = f"{singular(attachment.kind)} '{attachment.name}'"
        cls, key = type(attachment.obj).__name__, id(attachment.obj)
        if key in seen:
            raise PluginError(f"The {what} is one {cls} that is given twice. Give it once, or create a second one.")
        seen.add(key)
        if key in _claimed and _claimed[key][0]() is attachment.obj:
            argument = _ARGUMENTS.get(attachment.kind, f"{attachment.kind}=[{{}}]")
            raise PluginError(
                f"The {what} is an instance of {cls} that belongs to another Trainer (run '{_claimed[key][1]}'), and may "
                f"hold state of that run. Create a new one for each Trainer, {argument.format(f'{cls}(…)')}, or give its name "
                "or configuration, from which each Trainer creates its own."
            )


def claim(attachments: Sequence[Attachment], run: str) -> None:
    """Record that these instances belong to the Trainer of this run, once the Trainer is complete."""
    for attachment in filter(_claimable, attachments):
        _claimed[id(attachment.obj)] = _reference(attachment.obj), run


def _claimable(attachment: Attachment) -> bool:
    """Whether this is an instance whose class does not set ``begins_anew = True`` (meaning it keeps no state across runs)."""
    return attachment.instance and not getattr(attachment.obj, "begins_anew", False)


def _reference(obj: object) -> Callable[[], Any]:
    key = id(obj)
    try:
        return weakref.ref(obj, lambda _: _claimed.pop(key, None))
    except TypeError:  # a class with __slots__ and no __weakref__: keep a strong reference
        return lambda: obj
