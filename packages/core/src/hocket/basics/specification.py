"""Read a plug-in and its arguments from text, such as ``cosine(warmup=0.05dur)``. Nothing is evaluated."""

from __future__ import annotations

import ast
import re
from typing import Any

from hocket.basics.plugin_errors import PluginConfigError


def parse_spec(text: str, hides: bool = True) -> tuple[str, dict[str, Any]]:
    """Parse ``name`` or ``name(key=value, …)``. A value that is not a Python literal is text, such as in ``warmup=0.05dur``.

    Raises PluginConfigError for any other form, without the secrets in the text if it ``hides`` them. Nothing is evaluated.
    """

    def shown(given: str) -> str:
        from hocket.basics.masking import masked

        return str(masked(given)) if hides else given

    match = re.fullmatch(r"\s*([\w./-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        if text.count("(") != text.count(")"):
            raise PluginConfigError(f"Brackets in {shown(text)!r} do not match. Close each one.")
        raise PluginConfigError(
            f"{shown(text)!r} does not name a plug-in. Write a name, or a name with arguments such as 'name(key=value)'."
        )
    name, inside = match[1], match[2]
    config: dict[str, Any] = {}
    parts = _split(inside or "")
    if parts is None:
        raise PluginConfigError(f"Brackets or quotes in {shown(text)!r} do not match. Close each one.")
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or not value.strip():
            raise PluginConfigError(
                f"'{shown(part.strip())}' in {shown(text)!r} is not key=value. Write '{name}(key=value, …)'."
            )
        if key in config:
            raise PluginConfigError(f"{key} is given twice in {shown(text)!r}.")
        config[key] = literal(value.strip())
    return name, config


def _split(inside: str) -> list[str] | None:
    """Split at commas outside of brackets and quotes; None if these do not match."""
    parts, depth, quote, start, escaped = [], 0, "", 0, False
    for index, character in enumerate(inside):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and not depth:
            parts.append(inside[start:index])
            start = index + 1
    if depth or quote:
        return None
    parts.append(inside[start:])
    return [] if not inside.strip() else parts if parts[-1].strip() else parts[:-1]


def literal(text: str) -> Any:
    """Return the Python literal that a text is, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False, "null": None}.get(text, text)
