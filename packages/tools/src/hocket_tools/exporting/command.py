"""``hocket export RUN --to FORMAT``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_run, json_alone, json_text

_FORMATS = ("torch-export", "onnx", "safetensors", "huggingface")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the format and the folder."""
    add_run(parser)
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
    parser.add_argument("--overwrite", action="store_true", help="replace an export of another run in the folder")
    parser.add_argument("--json", action="store_true", help="print folder, description and verification as JSON")


def run(args: argparse.Namespace) -> int:
    """Export, and print how much the files differ from the run."""
    from hocket_tools.exporting.exporter import export_trainer
    from hocket_tools.exporting.preparing import Options
    from hocket_tools.progress import Progress
    from hocket_tools.run_source import folder_to_write, source_of_run, trainer_of_run

    # Arguments of a run that do not matter for its predictions.
    instead: dict[str, Any] = {
        "callbacks": (), "device": "cpu", "devices": None, "strategy": "auto", "compile": False, "limit_predict": None,
        "deterministic": False, "duration": None, "schedule": None, "profile": None,
    }  # fmt: skip
    read = source_of_run(args)
    out = folder_to_write(args, read, f"exports/{args.to}", args.to)  # before a model is made
    with (
        json_alone(args.json) as stdout,
        Progress() as line,
        trainer_of_run(args, read, **instead) as (trainer, weights),
    ):
        options = Options(args.to, args.adapters, _dynamic(args.dynamic), weights, args.overwrite, stage=line.show)
        exported = export_trainer(trainer, options, out)
    if args.json:
        batches = [comparison.as_dict() for comparison in exported.comparisons]
        content = {"folder": str(exported.folder), "difference": exported.difference, "batches": batches}
        print(json_text({**content, "export": exported.manifest}), file=stdout)
        return 0
    for comparison in exported.comparisons:
        print(comparison)
    for step in exported.manifest["preprocessing"]:
        print(f"not in the export: {step['where']}: {step['what']}")
    print(f"{args.to} in {exported.folder}")
    return 0


def _dynamic(given: Sequence[str]) -> dict[str, list[int]]:
    """Return the axes by input; none for text of another form, which `axes.lengths` refuses once it knows the inputs."""
    axes: dict[str, list[int]] = {}
    for text in given:
        name, _, axis = text.rpartition(":")
        axes.setdefault(name if axis.isdecimal() else text, []).extend([int(axis)] if axis.isdecimal() else [])
    return axes


command = Command("Export the model of a run, and verify what was written", add_arguments, run)
