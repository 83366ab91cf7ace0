"""``hocket plugins list | info | doctor | check | hooks | new | index | install``: show, check, begin and install plug-ins."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import sys

from hocket.help import installing
from hocket.hookspecs.command import Command
from hocket.plugins import KINDS, Entry, PluginError, UnknownPluginError, registry, switches
from hocket_cli.completion import completes, plugin_names
from hocket_cli.plugin_summaries import summary
from hocket_cli.scaffold import LICENSES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a sub-parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser(
        "list", help="list all plug-ins: kind, name, summary, distribution, version; imports nothing"
    )
    info = actions.add_parser(
        "info", help="show one plug-in: signature, docstring, events, phase, needs; imports only that one"
    )
    completes(info.add_argument("name", help="the plug-in, also as distribution/name"), plugin_names)
    doctor = actions.add_parser(
        "doctor", help="import each plug-in separately and report problems; exit code 1 if there are any"
    )
    check = actions.add_parser(
        "check", help="run the conformance suite on installed plug-ins, each check a line; exit code 1 if one fails"
    )
    names = check.add_argument(
        "names", nargs="*", metavar="NAME", help="plug-ins; all that are not hocket's without one"
    )
    completes(names, plugin_names)
    for action in (listing, info, doctor, check):
        action.add_argument("--kind", choices=KINDS, help="plug-ins of this kind only")
    check.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one check (120)")
    for action in (listing, doctor, check):
        action.add_argument("--json", action="store_true", help="print JSON")
    actions.add_parser("hooks", help="list all hooks in call order, with arguments and return types")
    new = actions.add_parser(
        "new", help="write the distribution of a new plug-in, with its tests, ready to be published"
    )
    new.add_argument("kind", choices=KINDS, help="the kind of plug-in, in the plural")
    new.add_argument("name", help="what users will type, such as gradient-noise; the distribution is hocket-NAME")
    new.add_argument(
        "--into", default=".", metavar="FOLDER", help="where to write the folder hocket-NAME; by default here"
    )
    new.add_argument("--author", metavar="'NAME <ADDRESS>'", help="the author; by default the user of git")
    new.add_argument("--license", default=LICENSES[0], choices=LICENSES, help=f"by default {LICENSES[0]}")
    new.add_argument("--url", help="of the repository, for the metadata")
    index = actions.add_parser("index", help="write a page and a JSON file of the plug-ins in wheels; imports nothing")
    index.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="WHEELS_OR_URL",
        help="a folder of wheels, or the URL of a simple index",
    )
    index.add_argument(
        "--checks", metavar="FILE", help="results of `hocket plugins check --json` (default checks.json there)"
    )
    index.add_argument(
        "--into", default="plugin-index", metavar="FOLDER", help="the folder to write (default plugin-index)"
    )
    install = actions.add_parser("install", help="show what distributions bring, ask, and install them by pip or uv")
    install.add_argument("names", nargs="+", metavar="NAME", help="a distribution, or a plug-in of the index")
    install.add_argument("--index", metavar="URL", help="the simple index to install from")
    install.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    if args.action == "list":
        return _list(args)
    if args.action == "info":
        return _info(args)
    if args.action == "hooks":
        return _hooks()
    if args.action == "new":
        from hocket_cli.scaffold.writing import run as new

        return new(args)
    if args.action == "check":
        from hocket_cli.check import run as check

        return check(args)
    if args.action == "index":
        from hocket_cli.index.page import run as index

        return index(args)
    if args.action == "install":
        from hocket_cli.index.install import run as install

        return install(args)
    from hocket_cli.plugin_doctor import run as doctor

    return doctor(args)


def _list(args: argparse.Namespace) -> int:
    allowed = switches.current()
    rows = [
        {
            "kind": entry.kind,
            "name": entry.name,
            "summary": summary(entry),
            "distribution": entry.dist,
            "version": entry.version,
            "status": status(entry, allowed),
        }
        for entry in registry.entries(args.kind)
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows and args.kind:
        print(f"No plug-in of kind {args.kind} is installed.{_to_install(args.kind)}")
    widths = {
        key: max((len(row[key]) for row in rows), default=0) for key in ("kind", "name", "distribution", "version")
    }
    for row in rows:
        where = f"{row['distribution']:<{widths['distribution']}}  {row['version']:<{widths['version']}}"
        note = f"[{row['status']}] " if row["status"] != "usable" else ""
        print(
            f"{row['kind']:<{widths['kind']}}  {row['name']:<{widths['name']}}  {where}  {note}{row['summary']}".rstrip()
        )
    return 0


def _to_install(kind: str) -> str:
    """Return a sentence on what brings hocket's plug-ins of a kind; empty if core alone has some."""
    extras = dict.fromkeys(registry.known().get(kind, {}).values())
    return f" Type: {', or '.join(map(installing.command, extras))}." if extras else ""


def status(entry: Entry, allowed: switches.Switches) -> str:
    """Return ``usable``, or why the entry cannot be used."""
    if entry.api != registry.API:
        return f"plug-in API {entry.api}"
    if entry.problem:
        return f"cannot be used: {entry.problem}"
    return "usable" if allowed.permit(entry) else "disabled"


def _info(args: argparse.Namespace) -> int:
    for kind in kinds_of(args.name, args.kind):
        entry = registry.find(kind, args.name)
        obj = entry.load()
        print(f"{registry.singular(kind)} {entry.name}")
        print(f"from {entry.dist} {entry.version}, {entry.target}".replace("  ", " "))
        print(f"{entry.name}{signature(obj)}")
        for label, names in declared(obj).items():
            print(f"{label:<10} {names}")
        print(f"\n{inspect.getdoc(obj) or 'It has no docstring.'}\n")
    return 0


def kinds_of(name: str, kind: str | None) -> list[str]:
    """Return the kinds that have a plug-in of a name, or the kind that was given. Raises PluginError if none has."""
    kinds = [kind] if kind else [each for each in KINDS if name.rpartition("/")[2] in registry.names(each)]
    if kinds:
        return kinds

    def likeness(kind: str) -> float:
        others = (*registry.names(kind), *registry.known().get(kind, ()))
        return max((difflib.SequenceMatcher(None, name, other).ratio() for other in others), default=0.0)

    for each in sorted(KINDS, key=likeness, reverse=True):  # the message of the kind in which the name is almost right
        try:
            registry.find(each, name)
        except UnknownPluginError as error:
            if any(words in str(error) for words in ("Did you mean", "pip install", "plug-in API", "disables it")):
                raise
    raise PluginError(f"There is no plug-in '{name}', nor one of a similar name. `hocket plugins list` shows all.")


def signature(obj: object) -> str:
    try:
        return str(inspect.signature(obj)) if callable(obj) else ""
    except (TypeError, ValueError):
        return "(…)"


def declared(obj: object) -> dict[str, str]:
    """Return the declarations of a class: events, phase, needs, constraints and hooks."""
    from hocket.hookspecs import SPECS

    found: dict[str, str] = {}
    if events := getattr(obj, "events", None):
        found["events"] = ", ".join(sorted(event.value for event in events))
    if phase := getattr(obj, "phase", None):
        found["phase"] = phase.name.lower()
    if needs := getattr(obj, "needs", None):
        found["needs"] = ", ".join(need.name.lower() for need in needs)
    for name in ("before", "after", "conflicts"):
        if names := getattr(obj, name, None):
            found[name] = ", ".join(sorted(names))
    known = {hook for spec in SPECS for hook in vars(spec) if not hook.startswith("_")}
    if hooks := [name for name in vars(obj) if name in known] if isinstance(obj, type) else []:
        found["hooks"] = ", ".join(hooks)
    return found


def _hooks() -> int:
    from hocket.hookspecs import SPECS

    for spec in SPECS:
        print(
            f"\n{spec.__module__.rpartition('.')[2]}: {(sys.modules[spec.__module__].__doc__ or '').strip().splitlines()[0]}"
        )
        for name, hook in vars(spec).items():
            if name.startswith("_"):
                continue
            signature = inspect.signature(hook)
            arguments = ", ".join(parameter for parameter in signature.parameters if parameter != "self")
            returned = str(signature.return_annotation).replace("torch.", "")
            who = f"first result counts -> {returned}" if hook.hocket_spec["firstresult"] else "all listeners run"
            print(f"  {name}({arguments})  [{who}]\n      {' '.join((hook.__doc__ or '').split())}")
    return 0


command = Command(
    "Show, check, begin and install plug-ins: list, info, check, new, index, install …", add_arguments, run
)
