"""The call order of plug-ins on a hook: by kind, phase, constraints and the user's order, then by the options of `hookimpl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from hocket.basics.plugin_errors import ConflictError, OrderError
from hocket.hookspecs.attachment import Attachment

#: On an event, kinds run in this order; an action asks them in reverse, and the last of them wraps all others.
KINDS_IN_ORDER = ("actions", "strategies", "precisions", "algorithms", "task", "callbacks", "loggers")


def check_combination(algorithms: Sequence[Attachment]) -> None:
    """Check the algorithms of one run. Raises ConflictError for a conflict, OrderError for a cycle, both naming the members."""
    names = {attachment.name for attachment in algorithms}
    for attachment in algorithms:
        for other in sorted(names & set(attachment.obj.conflicts)):
            raise ConflictError(
                f"Algorithms '{attachment.name}' and '{other}' cannot be combined: '{attachment.name}' declares that it "
                f"conflicts with '{other}'. Remove one of them from «algorithms=[…]»."
            )
    _sort(algorithms, _constraints(algorithms), key=lambda attachment: 0)


class _Implementation(Protocol):
    """What pluggy says of an implementation of a hook."""

    @property
    def wrapper(self) -> bool: ...
    @property
    def tryfirst(self) -> bool: ...
    @property
    def trylast(self) -> bool: ...


Implementation = TypeVar("Implementation", bound=_Implementation)


def by_option(implementations: Iterable[Implementation]) -> list[Implementation]:
    """Sort stably by the options of `hookimpl`: wrappers, which enclose the rest; ``tryfirst``; without; ``trylast``."""
    return sorted(
        implementations,
        key=lambda impl: (False, False, False) if impl.wrapper else (True, impl.trylast, not impl.tryfirst),
    )


def order(
    hook: str, attachments: Iterable[Attachment], listens: Callable[[Attachment, str], bool], action: bool = False
) -> list[Attachment]:
    """Return the plug-ins of one hook in call order: by kind, and algorithms by phase, constraints and user order.

    An ``action`` asks kinds in reverse: the default actions last. On ``after_x`` the user order is reversed. Algorithms that
    also listen to ``before_x`` act last, in the reverse of their order there. ``listens(attachment, hook)`` returns whether a
    plug-in implements a hook.
    """
    user = {attachment: index for index, attachment in enumerate(attachments)}
    algorithms = [attachment for attachment in user if attachment.kind == "algorithms"]
    edges = _constraints(algorithms)
    if hook.startswith("after_"):
        before = f"before_{hook.removeprefix('after_')}"
        closing = {attachment for attachment in algorithms if listens(attachment, before)}
        edges = {(b, a) if a in closing and b in closing else (a, b) for a, b in edges}

        def key(attachment: Attachment) -> tuple[int, ...]:
            phase = int(attachment.obj.phase)
            return (1, -phase, -user[attachment]) if attachment in closing else (0, phase, -user[attachment])
    else:

        def key(attachment: Attachment) -> tuple[int, ...]:
            return (int(attachment.obj.phase), user[attachment])

    sorted_algorithms = _sort(algorithms, edges, key)
    by_kind = {kind: [attachment for attachment in user if attachment.kind == kind] for kind in KINDS_IN_ORDER}
    by_kind["algorithms"] = sorted_algorithms
    kinds = reversed(KINDS_IN_ORDER) if action else KINDS_IN_ORDER
    return [attachment for kind in kinds for attachment in by_kind[kind]]


def _constraints(algorithms: Sequence[Attachment]) -> set[tuple[Attachment, Attachment]]:
    """Return pairs (earlier, later) from ``before`` and ``after``; names that are not attached are ignored."""
    edges = set()
    for attachment in algorithms:
        for other in algorithms:
            if other is attachment:
                continue
            if other.name in attachment.obj.before:
                edges.add((attachment, other))
            if other.name in attachment.obj.after:
                edges.add((other, attachment))
    return edges


def _sort(
    attachments: Sequence[Attachment], edges: set[tuple[Attachment, Attachment]], key: Callable[[Attachment], Any]
) -> list[Attachment]:
    """Sort topologically, with ties broken by ``key``."""
    left = sorted(attachments, key=key)
    result: list[Attachment] = []
    while left:
        free = next((v for v in left if not any(later is v and earlier in left for earlier, later in edges)), None)
        if free is None:
            raise OrderError(
                f"Algorithms {_cycle(left, edges)} each have to act before the next, which is a cycle. Remove one of them "
                "from «algorithms=[…]», or change the `before` / `after` of an algorithm of yours."
            )
        left.remove(free)
        result.append(free)
    return result


def _cycle(left: Sequence[Attachment], edges: set[tuple[Attachment, Attachment]]) -> str:
    """Return a cycle among ``left`` as text. Every member has a predecessor in ``left``: walk back until one repeats."""
    path = [left[0]]
    while path.count(path[-1]) < 2:
        path.append(next(earlier for earlier, later in edges if later is path[-1] and earlier in left))
    start = path.index(path[-1])
    return " → ".join(f"'{attachment.name}'" for attachment in reversed(path[start:]))
