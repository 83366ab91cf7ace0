"""Which place in a file an error is about."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hocket.errors import Mistake
from hocket_cli.document import Node


def blamed(nodes: Mapping[str, Node], error: BaseException) -> Node | None:
    """Return the argument that an error is about: that it names with the value given here, or that it names first."""
    if not isinstance(error, Mistake):
        return _mentioned(nodes, str(error))
    for name, value in error.settings:
        if name in nodes and value in (repr(plain := nodes[name].plain()), str(plain)):
            return nodes[name]
    named = [error.about, *(name for name, _ in error.settings)]
    return next((nodes[name] for name in named if name in nodes), None)


def _mentioned(nodes: Mapping[str, Node], message: str) -> Node | None:
    """Return the one argument whose name, or value, is a word of the message of somebody else's error."""
    for text in (lambda name, node: name, lambda name, node: repr(node.plain())):
        words = {name: rf"(?<![\w.]){re.escape(text(name, node))}(?!\w)" for name, node in nodes.items()}
        if len(about := [nodes[name] for name, word in words.items() if re.search(word, message)]) == 1:
            return about[0]
    return None
