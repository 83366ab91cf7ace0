"""Whether the arguments that a configuration gives fit a signature, and what to write where they do not."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.help import names
from hocket_cli.document import ConfigError, Node, suggestion
from hocket_cli.yaml_messages import value_in_yaml

#: The kinds of arguments that a configuration gives by name.
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(target: Any, leading: int = 0) -> list[inspect.Parameter] | None:
    """Return the parameters of a class or function after the leading ones; None for built-ins that have no signature."""
    try:
        return list(inspect.signature(target).parameters.values())[leading:]
    except (TypeError, ValueError):
        return None


def lacking(target: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments without a default that are not given."""
    kinds, parameters = (inspect.Parameter.POSITIONAL_ONLY, *BY_NAME), parameters_of(target, len(positional)) or []
    needed = [each.name for each in parameters if each.kind in kinds and each.default is each.empty]
    return [each for each in needed if each not in named]


def lacks(target: Any, name: str, missing: Sequence[str], where: str, leading: int = 0) -> ConfigError:
    """Return the error that arguments are missing."""
    given = ", ".join(f"{each}: {value_in_yaml(names.example(target, each))}" for each in missing)
    said = f"{name} needs {', '.join(missing)}. Write `{{{name}: {{{given}}}}}`."
    return ConfigError(where, f"{said} {takes(target, leading)}.")


def takes(target: Any, leading: int) -> str:
    """Return the signature as configurations write it: names with defaults."""
    if (parameters := parameters_of(target, leading)) is None:
        return "its signature is unknown"
    shown = [
        each.name if each.default is each.empty else f"{each.name}: {value_in_yaml(repr(each.default))}"
        for each in parameters
        if each.kind in BY_NAME
    ]
    return f"Its arguments are {', '.join(shown)}" if shown else "It takes no arguments"


def unexpected(target: Any, node: Node, error: Exception) -> str:
    """Return what to write for a key that ``**kwargs`` took to a base class that has no such argument; else empty."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(target, type) else None
    if found is None or not isinstance(node.value, dict) or found[1] not in node.value:
        return ""
    return f" {suggestion(found[1], _declared(target) - {found[1]}, '')}".rstrip()


def _declared(target: type) -> set[str]:
    """Return the names of the arguments that a class and its bases declare."""
    parameters = [each for init in _inits(target) for each in init]
    return {each.name for each in parameters if each.kind in BY_NAME} - {"self"}


def _inits(target: type) -> list[list[inspect.Parameter]]:
    """Return the parameters of the constructors of a class and its bases, in method resolution order."""
    inits = [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls) and cls is not object]
    return [list(inspect.signature(init).parameters.values()) for init in inits]


def almost(target: Any, key: object, given: Mapping[Any, Any]) -> str:
    """Return the declared argument that a name for ``**kwargs`` almost is, such as a letter less; or empty.

    If that is given too, the name is refused only where ``**kwargs`` go to a base class that does not accept any name.
    """
    try:
        declared = _declared(target) if isinstance(target, type) else set(inspect.signature(target).parameters)
        inits = _inits(target) if isinstance(target, type) else []
    except (TypeError, ValueError):
        return ""
    if not isinstance(key, str) or len(key) < 3 or key in declared:
        return ""
    closed = any(all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in init) for init in inits)
    near = difflib.get_close_matches(key, declared - (set() if closed else set(given)), 1, 0.8)
    return near[0] if near else ""
