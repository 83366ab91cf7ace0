"""``hocket export RUN --to FORMAT``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.basics.run_files import strict
from hocket.errors import WrongValue
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_trust
from hocket_cli.completion import completes, overrides, paths
from hocket_tools.exporting.run_source import WeightsOfRun, find

_FORMATS = ("torch-export", "onnx", "safetensors", "huggingface")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the format and the folder."""
    source = parser.add_argument(
        "run",
        metavar="RUN",
        help="the folder of a run, such as runs/a; a checkpoint, or best or latest of its checkpoints",
    )
    completes(source, paths)
    parser.add_argument("--to", required=True, choices=_FORMATS, help="the format to write")
    parser.add_argument(
        "--out", metavar="FOLDER", help="the folder to write; exports/FORMAT in the folder of the run unless given"
    )
    parser.add_argument(
        "--adapters", choices=("merged", "apart"), default="merged", help="adapters of peft; merged unless given"
    )
    parser.add_argument(
        "--dynamic", action="append", default=[], metavar="INPUT:AXIS",
        help="an axis that varies besides samples and the length of text, such as image:2; may be repeated",
    )  # fmt: skip
    changes = parser.add_argument(
        "changes", nargs="*", default=[], metavar="key=value", help="overrides of the recorded configuration"
    )
    completes(changes, overrides)
    parser.add_argument("--json", action="store_true", help="print folder, description and verification as JSON")
    add_trust(parser)
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def run(args: argparse.Namespace) -> int:
    """Export, and print how much the files differ from the run."""
    dynamic = _dynamic(args.dynamic)
    source = find(args.run, args.changes)
    out = Path(args.out) if args.out else _default_folder(source, args.to)
    from hocket_tools.exporting.exporter import checked, export_trainer
    from hocket_tools.exporting.preparing import Options

    checked(out)  # before a model is made
    with source.trainer(args) as (trainer, checkpoint):
        options = Options(args.to, args.adapters, dynamic, checkpoint, stage=_stages())
        exported = export_trainer(trainer, options, out)
    if args.json:
        batches = [comparison.as_dict() for comparison in exported.comparisons]
        content = {"folder": str(exported.folder), "difference": exported.difference, "batches": batches}
        print(json.dumps(strict({**content, "export": exported.manifest}), indent=1))
        return 0
    for comparison in exported.comparisons:
        print(comparison)
    for step in exported.manifest["preprocessing"]:
        print(f"not in the export: {step['where']}: {step['what']}")
    print(f"{args.to} in {exported.folder}")
    return 0


def _default_folder(source: WeightsOfRun, to: str) -> Path:
    if source.folder is None:
        raise WrongValue(
            f"{source.weights} is not in the folder of a run, so --out has no default. Write --out FOLDER."
        )
    return source.folder / "exports" / to


def _dynamic(given: Sequence[str]) -> dict[str, list[int]]:
    """Return the axes by input. Raises WrongValue."""
    axes: dict[str, list[int]] = {}
    for text in given:
        name, _, axis = text.rpartition(":")
        if not name or not axis.isdecimal():
            raise WrongValue(f"--dynamic {text} is not an input and the number of its axis. Write --dynamic image:2.")
        axes.setdefault(name, []).append(int(axis))
    return axes


def _stages() -> Callable[[str], None]:
    """Return a function that shows stages with the seconds so far, if stderr is a terminal."""
    began = time.perf_counter()

    def show(name: str) -> None:
        if sys.stderr.isatty():
            print(f"hocket: {name} ({time.perf_counter() - began:.0f} s so far)", file=sys.stderr, flush=True)

    return show


command = Command("Export the model of a run, and verify what was written", add_arguments, run)
