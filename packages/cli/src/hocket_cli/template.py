"""``--print-config``: a configuration with every key and its documentation, as YAML."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from hocket_cli.document import dump
from hocket_cli.keys import KIND_OF_KEY, keys
from hocket_cli.overrides import source


def print_config(args: argparse.Namespace) -> int:
    """Print every key of a configuration with its value, or a template if no file is given. Raises ConfigError.

    Nothing that the file names is imported.
    """
    if args.config is None and getattr(args, "source", None) is None:
        print(
            f"# Type: hocket train FILE [key=value …]. Keys that begin with # have their defaults.\n\n{template({})}",
            end="",
        )
        return 0
    from hocket_cli.config import Configuration

    read = source(args)
    read.announce()
    print(template(Configuration(read.document).resolved()), end="")
    return 0


def template(given: dict[str, Any]) -> str:
    """Return every key with its documentation as a comment; keys that are not given are comments, too."""
    blocks = []
    for key, about in keys().items():
        kind = f" Installed: hocket plugins list --kind {KIND_OF_KEY[key]}." if key in KIND_OF_KEY else ""
        lines = textwrap.wrap(about.documentation + kind, 110, break_long_words=False, break_on_hyphens=False)
        value = _line(key, given.get(key, about.default))
        if key not in given:
            value = textwrap.indent(value, "#")
        blocks.append("".join(f"# {line}\n" for line in lines) + value)
    return "\n".join(blocks)


def _line(key: str, value: object) -> str:
    text = dump(value).removesuffix("...\n").removesuffix("\n")
    block = isinstance(value, dict | list) and text[0] not in "{["
    return f"{key}:\n{textwrap.indent(text, '  ')}\n" if block else f"{key}: {text}\n"
