"""Who comes first on a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hocket.plugins.errors import ConflictError, OrderError
from hocket.plugins.spec import Voice

#: On an event, kinds run in this order; around an action, the last of them is outermost.
KINDS_IN_ORDER = ("actions", "strategies", "precisions", "algorithms", "callbacks", "loggers")


def check_combination(algorithms: Sequence[Voice]) -> None:
    """Refuse conflicts and cycles among the algorithms of one run. Raises ConflictError or OrderError naming the members."""
    names = {voice.name for voice in algorithms}
    for voice in algorithms:
        for other in sorted(names & set(voice.obj.conflicts)):
            raise ConflictError(
                f"Algorithms '{voice.name}' and '{other}' cannot be combined: '{voice.name}' declares that it conflicts "
                f"with '{other}'. Leave one of them out of algorithms=[…]."
            )
    _sort(algorithms, _constraints(algorithms), key=lambda voice: 0)


def order(hook: str, voices: Iterable[Voice], listens: Callable[[Voice, str], bool]) -> list[Voice]:
    """The voices of one hook in the order in which they act: by kind; algorithms by phase, constraints and user order.

    On ``after_x`` the user order is reversed, and algorithms that also listen to ``before_x`` act last, in the reverse of
    their order there. ``listens(voice, hook)`` says who listens to what.
    """
    user = {voice: index for index, voice in enumerate(voices)}
    algorithms = [voice for voice in user if voice.kind == "algorithms"]
    edges = _constraints(algorithms)
    if hook.startswith("after_"):
        before = f"before_{hook.removeprefix('after_')}"
        closing = {voice for voice in algorithms if listens(voice, before)}
        edges = {(b, a) if a in closing and b in closing else (a, b) for a, b in edges}

        def key(voice: Voice) -> tuple[int, ...]:
            phase = int(voice.obj.phase)
            return (1, -phase, -user[voice]) if voice in closing else (0, phase, -user[voice])
    else:

        def key(voice: Voice) -> tuple[int, ...]:
            return (int(voice.obj.phase), user[voice])

    sorted_algorithms = _sort(algorithms, edges, key)
    by_kind = {kind: [voice for voice in user if voice.kind == kind] for kind in KINDS_IN_ORDER}
    by_kind["algorithms"] = sorted_algorithms
    return [voice for kind in KINDS_IN_ORDER for voice in by_kind[kind]]


def _constraints(algorithms: Sequence[Voice]) -> set[tuple[Voice, Voice]]:
    """Pairs (earlier, later), from ``before`` and ``after``; names that are not there do not matter."""
    edges = set()
    for voice in algorithms:
        for other in algorithms:
            if other is voice:
                continue
            if other.name in voice.obj.before:
                edges.add((voice, other))
            if other.name in voice.obj.after:
                edges.add((other, voice))
    return edges


def _sort(voices: Sequence[Voice], edges: set[tuple[Voice, Voice]], key: Callable[[Voice], Any]) -> list[Voice]:
    """Topological, and by ``key`` where the edges leave a choice."""
    left = sorted(voices, key=key)
    result: list[Voice] = []
    while left:
        free = next((v for v in left if not any(later is v and earlier in left for earlier, later in edges)), None)
        if free is None:
            raise OrderError(
                f"Algorithms {_cycle(left, edges)} each want to act before the next, which is a cycle. Leave one of them out "
                "of algorithms=[…], or change the `before` / `after` of one that is yours."
            )
        left.remove(free)
        result.append(free)
    return result


def _cycle(left: Sequence[Voice], edges: set[tuple[Voice, Voice]]) -> str:
    """A cycle among ``left``, as readable text. Everything in ``left`` has a predecessor there: walk back until one repeats."""
    path = [left[0]]
    while path.count(path[-1]) < 2:
        path.append(next(earlier for earlier, later in edges if later is path[-1] and earlier in left))
    start = path.index(path[-1])
    return " → ".join(f"'{voice.name}'" for voice in reversed(path[start:]))
