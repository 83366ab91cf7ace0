"""``--print-config``: a configuration with every key and its documentation, as YAML."""

from __future__ import annotations

import argparse
import textwrap

from hocket.cli.document import Node, dump
from hocket.cli.keys import KINDS, keys
from hocket.cli.overrides import configuration


def print_config(args: argparse.Namespace) -> int:
    """Print a configuration, or the defaults if no file is given. Raises ConfigError for an unknown key."""
    print(template(configuration(args).value if args.config else {}), end="")
    return 0


def template(given: dict[str, Node]) -> str:
    """Return every key with its documentation as a comment; keys at their defaults are comments, too."""
    blocks = ["# Type: hocket train FILE [key=value …]. Keys that begin with # have their defaults.\n"]
    for key, about in keys().items():
        kind = f" Installed: hocket plugins list --kind {KINDS[key]}." if key in KINDS else ""
        lines = textwrap.wrap(about.documentation + kind, 110, break_long_words=False, break_on_hyphens=False)
        value = _line(key, given[key].plain() if key in given else about.default)
        if key not in given:
            value = textwrap.indent(value, "#")
        blocks.append("".join(f"# {line}\n" for line in lines) + value)
    return "\n".join(blocks)


def _line(key: str, value: object) -> str:
    text = dump(value).removesuffix("...\n").rstrip()
    block = isinstance(value, dict | list) and text[0] not in "{["
    return f"{key}:\n{textwrap.indent(text, '  ')}\n" if block else f"{key}: {text}\n"
