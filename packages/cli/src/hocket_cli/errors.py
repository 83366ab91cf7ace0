"""Which place in a file the message of an error is about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket_cli.document import Node


def blamed(node: Node, message: str, otherwise: str) -> str:
    """Return the place of the one argument that a message is about, by its name or its value; else another place."""
    children = node.value if isinstance(node.value, dict) else {}
    for pattern in ("{key}={value!r}", "'{key}'", "{key}", "{value!r}"):
        about = [
            child for key, child in children.items() if mentions(message, pattern.format(key=key, value=child.plain()))
        ]
        if len(about) == 1:
            return about[0].where
    return otherwise


def mentions(message: str, text: str) -> bool:
    """Whether a message has a text as a word."""
    return re.search(rf"(?<![\w.]){re.escape(text)}" + ("" if text.endswith("=") else r"(?!\w)"), message) is not None
