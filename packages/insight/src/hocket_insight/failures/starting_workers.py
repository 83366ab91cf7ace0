"""Explain why the worker processes of a DataLoader did not start: a part of the loader that pickle refuses."""

from __future__ import annotations

import multiprocessing
import pickle
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any


def explain(error: BaseException, loader: Any) -> None:
    """Add a note that names the part, unless workers are forked or the exception has another cause. Never raises."""
    with suppress(Exception):
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
        parts = {name: getattr(loader, name) for name in ("dataset", "collate_fn", "generator")}
        parts["worker_init_fn"] = getattr(loader.worker_init_fn, "initialize", loader.worker_init_fn)
        if method == "fork" or not (found := _unpicklable(parts, str(error), "loader")):
            return
        place, value = found
        error.add_note(
            f"Workers that are started by {method!r} get the parts of the loader by pickle, which refuses {place}, "
            f"{_what(value)}. It takes functions and classes that a module defines at its top level, and objects of such "
            f"classes whose attributes it takes. {_remedy(value)}, or write num_workers=0 in the DataLoader."
        )


def _unpicklable(value: object, text: str, place: str, depth: int = 8) -> tuple[str, Any] | None:
    """Return the innermost part of a value that pickle refuses with this message, and its place; None if there is none."""
    for where, part in _parts(value, place) if depth else ():
        try:
            pickle.Pickler(_Nowhere()).dump(part)
        except Exception as error:
            if str(error) == text:
                return _unpicklable(part, text, where, depth - 1) or (where, part)
    return None


def _parts(value: object, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from (
            (f"{place}.{key}" if place == "loader" else f"{place}[{key!r}]", each) for key, each in value.items()
        )
    elif isinstance(value, list | tuple | set):
        yield from ((f"{place}[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield f"{place}.__self__", value.__self__
    elif not isinstance(value, types.ModuleType | type):
        inside = {name: getattr(value, name) for name in ("func", "args", "keywords") if hasattr(value, "keywords")}
        yield from ((f"{place}.{name}", each) for name, each in {**inside, **getattr(value, "__dict__", {})}.items())


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _what(value: object) -> str:
    if isinstance(value, types.FunctionType | type):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__qualname__}"
    return f"an object of the class {type(value).__qualname__}"


def _remedy(value: object) -> str:
    if isinstance(value, types.FunctionType):
        return "Write def … at the top level of a module and give that function"
    if isinstance(value, type) or "<locals>" in type(value).__qualname__:
        return "Define the class at the top level of a module"
    return "Make the object where it is used, in __getitem__ on the first call or in worker_init_fn"
