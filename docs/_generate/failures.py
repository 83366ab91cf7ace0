"""Pages of errors by their text: those that hocket raises, from its sources, and those of torch that it explains."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from markup import SOURCES, code, document, link, module_of, page, plain, sources, table

from hocket import errors
from hocket_insight.failures import collating
from hocket_insight.failures.causes import CAUSES

#: A text with fewer words is a part of a message and cannot be looked up.
WORDS = 4


class Message(NamedTuple):
    """The text of an error, with … for what differs, the name of its class, and the module that raises it."""

    text: str
    kind: str
    module: str


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by name."""
    by_package: dict[str, set[Message]] = {}
    for file, source in sources().items():
        by_package.setdefault(file.relative_to(SOURCES).parts[0], set()).update(messages(source, module_of(file)))
    found = {f"errors/{package}": _of_package(package, each) for package, each in sorted(by_package.items()) if each}
    found["errors/explained"] = _explained()
    rows = [
        [f"[{name.rpartition('/')[2]}]({name.rpartition('/')[2]}.md)", _opening(text)] for name, text in found.items()
    ]
    kinds = [
        [
            f"{{py:exc}}`hocket.errors.{name}`",
            ", ".join(code(base.__name__) for base in kind.__bases__),
            plain(kind.__doc__ or ""),
        ]
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.Mistake)
    ]
    found["errors/index"] = page(
        "Errors",
        "Look up here an error by its text: what it means and what to write. Search the package's page with the browser's own "
        "search.",
        f"The [most frequent ones]({link(document('errors.md'), folder, 'errors/index')}) have causes and examples.",
        table(["page", "what it lists"], rows),
        "## Classes",
        "Each error of a user's is one of these, or a subclass, and can be caught by the built-in class that it inherits from.",
        table(["class", "is a", "meaning"], kinds),
    )
    return found


def messages(source: str, module: str) -> Iterator[Message]:
    """Yield the messages of the errors of users that a source raises."""
    if not re.search("^ *raise ", source, re.MULTILINE):
        return
    tree = ast.parse(source)
    texts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        kind = ast.unparse(node.exc.func).rpartition(".")[2]
        for argument in node.exc.args if kind in mistakes() else ():
            if len((text := text_of(argument, texts)).replace("…", " ").split()) >= WORDS:
                yield Message(text, kind, module)


@functools.cache
def mistakes() -> frozenset[str]:
    """Return the names of the errors of users, from the definitions of all packages."""
    definitions = [
        each for text in sources().values() for each in re.findall(r"^class (\w+)\((.*)\)", text, re.MULTILINE)
    ]
    known, before = {errors.Mistake.__name__}, 0
    while len(known) > before:
        before = len(known)
        known |= {name for name, bases in definitions if known & set(re.findall(r"\w+", bases))}
    return frozenset(known)


def text_of(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """Return the text of an expression, with … for what it inserts."""
    if isinstance(node, ast.Constant):
        return errors.rendered(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        pieces = (str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
        return errors.rendered("".join(pieces))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(side, texts) or "…" for side in (node.left, node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{\w*\}", "…", text_of(node.func.value, texts))
    if isinstance(node, ast.Name) and node.id in texts:
        return text_of(texts[node.id], {})
    return ""


def _of_package(package: str, found: set[Message]) -> str:
    rows = dict.fromkeys((*_divided(each.text), code(each.kind)) for each in sorted(found))
    opening = f"Look up here an error of hocket's package {package} by its text. An … stands for what differs."
    return page(f"Errors of {package}", opening, table(["text", "what to do", "class"], rows))


def _divided(text: str) -> tuple[str, str]:
    """Return what was wrong, and what the message says to write."""
    first, *others = re.split(r"(?<=[.!?]) (?=[A-Z`'])", " ".join(text.split()))
    return plain(first), plain(" ".join(others))


def _explained() -> str:
    """Return the page of errors of torch, to which hocket adds a note with the cause."""
    names = {"forward": "the model", "loss": "the loss", "backward": "the backward pass"}
    rows = [
        [f"in {names[place]}", code(pattern) or "any", plain(text)]
        for place, causes in CAUSES.items()
        for pattern, cause in causes
        for text in _returned(cause)
    ]
    rows += [["in the loader's batches", code(pattern), plain(note)] for pattern, note in collating._CAUSES]
    opening = (
        "Look up here what hocket adds to an error of torch in your model, loss or data: the cause, and what to write. "
        "The pattern is a regular expression of torch's message; an … stands for what differs."
    )
    return page("Errors of torch that hocket explains", opening, table(["where", "message", "cause and remedy"], rows))


def _returned(cause: Callable[..., Any]) -> Iterator[str]:
    """Yield the texts that a function returns."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cause)))):
        if isinstance(node, ast.Return) and node.value is not None:
            for each in (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,):
                if len((text := text_of(each, {})).split()) >= WORDS:
                    yield text


def _opening(text: str) -> str:
    return text.split("\n\n")[1]
