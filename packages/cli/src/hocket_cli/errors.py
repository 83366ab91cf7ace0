"""Which place in a file an error is about."""

from __future__ import annotations

from collections.abc import Mapping

from hocket_cli.document import Node


def blamed(nodes: Mapping[str, Node], error: BaseException) -> Node | None:
    """Return the argument that an error is about: that it names with the value given here, or that it names first."""
    settings = getattr(error, "settings", ())
    for name, value in settings:
        if name in nodes and value in (repr(plain := nodes[name].plain()), str(plain)):
            return nodes[name]
    about = getattr(error, "about", None)
    return nodes.get(about) if about is not None else None
