"""Names that other libraries give to plug-ins and hooks, which are looked up before the spelling is compared."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


@functools.cache
def table(*path: str) -> dict[str, str]:
    """Return a table of ``others.toml``; empty if there is none."""
    entries: Any = _tables()
    for part in path:
        entries = entries.get(part, {})
    return dict(entries)


@functools.cache
def _tables() -> dict[str, Any]:
    import tomllib  # only needed for error messages

    return tomllib.loads((Path(__file__).parent / "others.toml").read_text(encoding="utf-8"))


def listed(name: str, *path: str, near: bool = False) -> str | None:
    """Return the text of the entry of a table that lists ``name``, or with ``near`` a name that is spelled like it, or None."""
    wanted = plain(name)
    known = {plain(word): text for others, text in table(*path).items() for word in others.split()}
    return known.get((closest(wanted, known, 0.85) if near else wanted) or "")


def filled(text: str, name: str, value: object, shown: object) -> str:
    """Return the text of an entry for a name and its value, as it is shown. Text that is no number has its own unit."""
    if isinstance(value, str) and not re.fullmatch(r"[\d._e]+", value):
        text = re.sub(r"\{0\}(ep|ba|dur)\b", "{0}", text)
    return text.format(shown, name=name)


def own_name(name: str, *path: str) -> str | None:
    """Return the key of the entry of a table whose text lists ``name``, or None."""
    return next((key for key, others in table(*path).items() if name in others.split()), None)


def closest(name: object, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the name most like this one, such as ``eval/loss`` for ``eval_loss``, or None if none is ``alike`` (0 to 1)."""
    return next(iter(difflib.get_close_matches(str(name), list(known), 1, alike)), None)


def plain(name: str) -> str:
    """Return a name in lower case and without punctuation, so that different conventions compare equal."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def alias(kind: str, name: str, known: Iterable[str]) -> str | None:
    """Return this library's name for what another one calls ``name``, or None.

    A name in another case or with other punctuation comes first. ``known`` are the names that exist.
    """
    wanted = plain(name.partition(":")[0] if kind == "devices" else name)  # "cuda:0"
    return next((each for each in known if plain(each) == wanted), None) or own_name(wanted, "plugins", kind)


def elsewhere(kind: str, name: str) -> str | None:
    """Return where to give what another library has among the plug-ins of this kind, or None."""
    return listed(name, "elsewhere", kind)


def hook(name: str) -> str | None:
    """Return the hook of this library that corresponds to another library's, such as ``on_train_batch_end``, or None."""
    plain_name = name.casefold().removeprefix("on_")
    return plain_name if plain_name in table("hooks") else own_name(plain_name, "hooks")


def argument(name: str, known: Iterable[str]) -> str | None:
    """Return the argument of a plug-in that another library calls ``name``, or None."""
    wanted, known, theirs = plain(name), list(known), table("plugin-arguments")
    same = (candidate for candidate in known if plain(candidate) == wanted)
    return next(same, None) or next((item for item in known if wanted in theirs.get(item, "").split()), None)


def example(target: object, argument: str) -> str:
    """Return a value for an argument, as code: that in the docstring's example, the default, a usual one, or an ellipsis."""
    with suppress(SyntaxError, ValueError, TypeError, KeyError):  # no Python, no literal, no signature
        code = "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)", getattr(target, "__doc__", None) or "", re.MULTILINE))
        parameters = inspect.signature(target).parameters  # type: ignore[arg-type]
        for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
            its = ast.unparse(call.func).rpartition(".")[2] == target.__name__  # type: ignore[attr-defined]
            given = dict(zip(parameters, call.args, strict=False)) if its else {}
            if value := (given | {each.arg: each.value for each in call.keywords}).get(argument):
                return repr(ast.literal_eval(value))
        default = parameters[argument].default
        if default not in (None, (), inspect.Parameter.empty):
            return repr(default)
    return table("examples").get(argument, "…")


def library(obj: object) -> str | None:
    """Return the library that an object, or a class, comes from or inherits from, or None for other libraries."""
    cls = obj if isinstance(obj, type) else type(obj)
    libraries = (table("libraries").get(base.__module__.partition(".")[0]) for base in cls.__mro__)
    return next((library for library in libraries if library), None)
