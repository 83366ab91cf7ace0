"""The page of the keys of a configuration: type, default and an example of each."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path

import yaml
from markup import ROOT, code, page, plain, table

import hocket
from hocket_cli.document import flow
from hocket_cli.keys import KIND_OF_KEY, Key, keys


def pages(folder: Path) -> dict[str, str]:
    """Return the page by its name."""
    opening = "Look up here what a configuration file may say, and what `key=value` on the command line may change."
    return {"configuration-keys": page("Configuration keys", opening, *map(_section, keys().values()))}


def _section(key: Key) -> str:
    parameter = inspect.signature(hocket.Trainer).parameters[key.name]
    kind = KIND_OF_KEY.get(key.name)
    rows = [["type in Python", code(str(parameter.annotation))]]
    rows.append(["default", "none: it is required" if key.required else code(flow(key.default))])
    if kind:
        rows.append(["plug-ins", f"[{kind}](plugins/{kind}/index.md)"])
    example = _examples().get(key.name)
    shown = f"```yaml\n{example}\n```" if example else ""
    return "\n\n".join(filter(None, [f"## {key.name}", plain(key.documentation), table(["", ""], rows), shown]))


@functools.cache
def _examples() -> dict[str, str]:
    """Return an example of each key: the shortest of the configurations in docs and examples, which tests run."""
    files = sorted({*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.yaml"), *ROOT.glob("examples/**/*.md")})
    texts = [file.read_text(encoding="utf-8") for file in files]
    blocks = [
        block
        for file, text in zip(files, texts, strict=True)
        for block in ([text] if file.suffix == ".yaml" else re.findall(r"^```yaml.*\n(.*?)^```$", text, re.M | re.S))
    ]
    found: dict[str, str] = {}
    for block in blocks:
        try:
            values = yaml.safe_load(block)
        except yaml.YAMLError:  # shown in part
            continue
        if isinstance(values, dict) and values.keys() & keys().keys():
            for name, value in values.items():
                if value is not None:
                    found[name] = min(filter(None, [found.get(name), f"{name}: {flow(value)}"]), key=len)
    return found
