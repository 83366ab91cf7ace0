"""``hocket plugins index``: a page of the plug-ins of wheels, and the same as JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from hocket.errors import MissingFile, WrongFile
from hocket_cli.index import simple, wheels

#: The file with the results of `hocket plugins check --json`, if it is beside the wheels.
CHECKS = "checks.json"


def run(args: argparse.Namespace) -> int:
    """Write ``index.html`` and ``plugins.json`` into a folder."""
    folder = Path(args.source)
    if "://" in args.source:
        simple.check(args.source, "--from")
        found, beside = simple.plugins(args.source), None
    elif folder.is_dir():
        found, beside = [wheels.of_wheel(each) for each in sorted(folder.glob("*.whl"))], folder / CHECKS
    else:
        raise MissingFile(f"{args.source} is neither a folder nor an address. Write a folder of wheels, or https://….")
    newest = wheels.newest(found)
    if not newest:
        raise MissingFile(_nothing(args.source, len(found)))
    checks = Path(args.checks) if args.checks else beside
    listed = _with_tiers(newest, _checked(checks) if checks and (args.checks or checks.exists()) else {})
    into = Path(args.into)
    into.mkdir(parents=True, exist_ok=True)
    (into / "plugins.json").write_text(json.dumps({"distributions": listed}, indent=1) + "\n", encoding="utf-8")
    (into / "index.html").write_text(html(listed), encoding="utf-8")
    plugins = sum(len(each["plugins"]) for each in listed)
    print(f"{plugins} plug-ins of {len(listed)} distributions in {into / 'index.html'} and plugins.json")
    return 0


def _nothing(source: str, distributions: int) -> str:
    """Return that no plug-in is in a source, what was looked for, and what to write."""
    if distributions:
        what = f"none of its {distributions} distributions has an entry point of a kind of plug-in, such as hocket.v1.callbacks"
        return f"{source} has no plug-ins: {what}. `hocket plugins new` writes a distribution that has."
    if "://" in source:
        return f"{source} has no plug-ins: no project whose name begins with hocket- has a wheel. Check the address."
    below = next((f" Write --from {each.parent}" for each in sorted(Path(source).glob("*/*.whl"))), "")
    return f"{source} has no plug-ins: no wheel (*.whl) is directly in it.{below or ' `uv build` writes wheels into dist'}."


def _checked(file: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the tier of each checked plug-in, and its failed checks, by distribution, version, kind and name."""
    try:
        return {
            tuple(str(each[key]) for key in ("distribution", "version", "kind", "name")): {
                "tier": str(each["tier"] or ""),
                "failed": [str(check["name"]) for check in each["checks"] if check["outcome"] == "failed"],
            }
            for each in json.loads(file.read_text(encoding="utf-8"))["plugins"]
        }
    except OSError as error:
        raise WrongFile(f"{file} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WrongFile(
            f"{file} does not have the results of checks ({type(error).__name__}: {error}). Write it by "
            f"`hocket plugins check --json > {file.name}`."
        ) from error


def _with_tiers(found: list[wheels.About], checked: dict[tuple[str, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    unchecked: dict[str, Any] = {"tier": "", "failed": []}
    return [
        asdict(each)
        | {
            "plugins": [
                plugin._asdict() | checked.get((each.name, each.version, plugin.kind, plugin.name), unchecked)
                for plugin in each.plugins
            ]
        }
        for each in found
    ]


def html(listed: list[dict[str, Any]]) -> str:
    """Return a page without scripts and links, whose texts are escaped: they come from whoever built the wheels."""
    rows = "".join(_row(each, plugin) for each in listed for plugin in each["plugins"])
    return _HTML.format(rows=rows, policy="default-src 'none'; style-src 'unsafe-inline'")


def _row(about: dict[str, Any], plugin: dict[str, Any]) -> str:
    tier = plugin["tier"] if plugin["tier"] in ("bronze", "silver", "gold") else ""
    badge = f'<span class="{tier}">{tier}</span>' if tier else "checked: none" if plugin["failed"] else "not checked"
    title = f' title="failed: {escape(", ".join(plugin["failed"]))}"' if plugin["failed"] else ""
    texts = (
        plugin["kind"], plugin["name"], about["summary"], f"{about['name']} {about['version']}", about["author"],
        f"{about['requires'] or 'any'}; {', '.join(plugin['apis'])}",
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + f"<td{title}>{badge}</td></tr>\n"


_HTML = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<title>Plug-ins for hocket</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }}
table {{ border-collapse: collapse; }}
td, th {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }}
.bronze {{ color: #8a5a2b; }} .silver {{ color: #667; }} .gold {{ color: #a07800; }}
</style>
</head>
<body>
<h1>Plug-ins for hocket</h1>
<p>Install one with <code>hocket plugins install DISTRIBUTION</code>. Texts are those of the authors of each distribution.</p>
<table>
<tr><th>kind</th><th>name</th><th>summary</th><th>distribution</th><th>author</th><th>for hocket</th><th>checks</th></tr>
{rows}</table>
</body>
</html>
"""
