"""Advice in the spelling of a configuration: messages of the Trainer quote Python, such as ``duration='3ep'``."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Mapping
from typing import Any

from hocket.help import names
from hocket_cli.document import flow
from hocket_cli.keys import keys

_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
#: What the command line has in place of a call.
_COMMANDS = (
    (r"print\(trainer\.plan\(\)\)|trainer\.plan\(\)", "`hocket plan`"),
    (r"(?<![\w.])fit\((duration=…)\)", r"\1"),
    (r"trainer\.fit\([^()]*\)", "`hocket train`"),
    (r"hocket\.Trainer\((?:…, )?([a-z_]+=[^()]*)\)", r"\1"),
    (
        r"To omit parts, call trainer\.load_state_dict\(tree, ignore=\['…'\]\), or with strict=False\.",
        "To begin a new run instead, write resume=None, and another folder in checkpoints=.",
    ),
    (
        r"Pass remap=.* or strict=False\.",
        "Give the configuration that they were trained with, such as config.yaml in the folder of their run.",
    ),
    (r"Pass data to evaluate\(\), or eval_data= to the Trainer", "Write `eval_data: module:function`"),
    (r", or no metrics= here and trainer\.evaluate\([^()]*\) after the fit", ", or no metrics"),
    (r",? or omit [\w' ]+ by (?:trainer\.load_state_dict\(tree, )?ignore=\[[^\]]*\]\)?", ""),
)
#: Keys whose mappings are arguments of one class, and that class.
_DESCRIBED = {"checkpoints": "hocket.Checkpoints"}


#: Where Python begins in a message: an argument, a function of the parameters, a call of a class.
_PYTHON = re.compile(
    r"(?<![\w.'\"\[{=-])(?<!\S\()"
    r"(?:([a-z_]+)=(?![=])|(?=lambda parameters: |(?:torch|hocket)\.(?!Trainer|Runtime)[\w.]*[A-Z]\w*\())"
)


class _Unknown(Exception):
    """An expression that no configuration has."""


def in_yaml(message: str, override: bool = False) -> str:
    """Return a message whose Python advice, such as ``resume='auto'``, is written as in a file: ```resume: auto```.

    What a file cannot say, and text that is in backquotes already, stays as it is.

    Args:
        override: write it as on the command line, ``resume=auto``.
    """
    parts = message.split("`")
    for place in range(0, len(parts), 2):
        for pattern, instead in _COMMANDS:
            parts[place] = re.sub(pattern, instead, parts[place])
    parts = "`".join(parts).split("`")
    parts[::2] = [_rewritten(each, override) for each in parts[::2]]
    return "`".join(parts)


def _rewritten(text: str, override: bool) -> str:
    found: list[str] = []
    place = 0
    for match in _PYTHON.finditer(text):
        key = match[1]
        if match.start() < place or (text[: match.start()].endswith("(") and key not in keys()):  # (width=3)
            continue
        end = _end(text, match.end())
        written = text[match.end() : end]
        if key is not None and not written and key in keys():
            instead = key
        else:
            try:
                made = _value(written, key)
            except (_Unknown, SyntaxError, ValueError):
                continue
            value = flow(made)
            if key is not None:
                value = _quoted(f"{key}={value}") if override else f"{key}: {value}"
            instead = f"`{value}`"
        found += [_words(text[place : match.start()]), instead]
        place = end
    return "".join([*found, _words(text[place:])])


def _quoted(text: str) -> str:
    """Return text as one word of a shell; in double quotes if it has single ones, which are easier to read so."""
    return f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


def _words(text: str) -> str:
    return re.sub(r"(?<!['\"])\b(None|True|False)\b(?!['\"])", lambda each: _CONSTANTS[each[0]], text)


def _end(text: str, start: int) -> int:
    """Return the end of the expression that begins here: brackets and quotes are closed, and nothing follows directly."""
    if function := re.match(r"lambda [\w, ]*: ", text[start:]):
        start += function.end()
    depth, quote, place = 0, "", start
    while place < len(text):
        character = text[place]
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
        elif not depth and (character in ",;)]}" or character.isspace()):
            break
        place += 1
    return start + len(text[start:place].rstrip(".:?!"))


def _value(written: str, key: str | None) -> Any:
    """Return the plain value with which a configuration says what a Python expression does. Raises _Unknown, SyntaxError."""
    value = _plain(ast.parse(written.replace("…", "..."), mode="eval").body)
    inside = value.get(_path(_DESCRIBED[key])) if key in _DESCRIBED and isinstance(value, dict) else None
    if inside is None:
        return value
    if isinstance(inside, list) and len(inside) == 1:
        return inside[0]
    return inside


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return (
            "…" if node.value is ... else node.value.replace("...", "…") if isinstance(node.value, str) else node.value
        )
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(each) for each in node.elts]
    if isinstance(node, ast.Set):
        return {"…": "…"}
    if isinstance(node, ast.Dict):
        return {
            _plain(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.literal_eval(node)
    if isinstance(node, ast.Name | ast.Attribute):
        return _path(ast.unparse(node))
    if isinstance(node, ast.Lambda):
        body, given = node.body, [each.arg for each in node.args.args]
        if isinstance(body, ast.Call) and body.args and ast.unparse(body.args[0]) in given:
            return _plain(ast.Call(body.func, body.args[1:], body.keywords))
        return "module:function"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        return _called(ast.unparse(node.func), node)
    raise _Unknown


def _called(name: str, node: ast.Call) -> Any:
    given = [_plain(each) for each in node.args]
    named = {each.arg: _plain(each.value) for each in node.keywords if each.arg is not None}
    if given and named:
        named = dict(zip(_positional(name), given, strict=False)) | named
    return {_path(name): named or given} if named or given else _path(name)


def _positional(name: str) -> list[str]:
    """Return the names of the positional arguments of a function of hocket or torch. Raises _Unknown."""
    module, _, attribute = name.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), attribute)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        raise _Unknown from None


def _path(name: str) -> str:
    """Return the import path of a name as Python writes it; a name alone is one of the user's."""
    module, dot, attribute = name.rpartition(".")
    return f"{module if dot else 'module'}:{attribute}"


# --- names of other libraries


def key_of(name: str, value: Any, override: bool = False) -> str:
    """Return what to write for a key that another library has at the top level, or empty if it is not known."""
    text = names.listed(name, "keys") or names.listed(name, "arguments", "Trainer")
    if text is None:
        return ""
    said = in_yaml(names.filled(text, name, value, _shown(value)), override)
    return said.replace(f"module:{value}", value) if isinstance(value, str) else said


def _shown(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1e4 batches
    return value if isinstance(value, str | int | float) else "…"


def argument_of(target: Any, name: object, value: Any, known: Mapping[str, Any] | list[str]) -> str:
    """Return the argument of a class that another library calls ``name``, as text to write, or empty."""
    if not isinstance(name, str):
        return ""
    text = names.listed(name, "arguments", getattr(target, "__qualname__", ""))
    if text is None:
        theirs = names.argument(name, known)
        return f"Write `{theirs}: {flow(value)}`." if theirs else ""
    key, equals, _ = text.partition("=")
    if not equals or key not in known:
        return f"Write {text}."
    return f"Write {in_yaml(names.filled(text, name, value, _shown(value)))}."
