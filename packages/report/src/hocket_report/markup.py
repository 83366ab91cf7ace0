"""Pieces of HTML. Every text is escaped here, and nowhere else: runs are not trusted."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    """Return a value as HTML text; characters that cannot be encoded are replaced."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(str(value).encode("utf-8", "replace").decode("utf-8")))


def tag(name: str, *content: Any, **attributes: Any) -> Markup:
    """Return an element. ``class_`` is the attribute ``class``; None and False omit an attribute, True gives it no value."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(value)}"')
    return Markup(f"<{' '.join(words)}>{''.join(map(escape, content))}</{name}>")


def joined(parts: Iterable[Any]) -> Markup:
    """Return the parts, one after another."""
    return Markup("".join(map(escape, parts)))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], class_: str | None = None) -> Markup:
    """Return a table that scrolls within its panel, the first cell of each row as its heading."""
    body = [tag("tr", *(tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))) for row in rows]
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))) if head else ""
    return tag("div", tag("table", top, tag("tbody", *body), class_=class_), class_="scroll", tabindex="0")


def section(name: str, title: str, *content: Any) -> Markup:
    """Return a panel of the page."""
    return tag("section", tag("h2", title), *content, id=name)


def hint(text: Any) -> Markup:
    """Return the line of a panel without data."""
    return tag("p", text, class_="hint")


def code(text: Any) -> Markup:
    """Return text to type."""
    return tag("code", text)
