"""``hocket predict RUN [DATA] --to FOLDER``, or ``--out FILE``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli.common_options import add_weights, json_alone, json_text

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add run, data, weights, and the folder or file to write."""
    add_weights(
        parser, "predict", "DATA: the label of an evaluation set, module:function, or an installed data set; and "
    )
    parser.add_argument(
        "--set",
        help="the label of the evaluation set to predict on, as DATA; else predict() of a data module, or the only set",
    )
    parser.add_argument(
        "--to", metavar="FOLDER", help="the folder to write files of rows into; a killed command continues in it"
    )
    parser.add_argument(
        "--format", choices=("npz", "parquet", "jsonl"), default="npz", help="of the files in the folder; default: npz"
    )
    parser.add_argument(
        "--batches-per-file", type=int, default=64, metavar="N", help="which are in memory together; default: 64"
    )
    parser.add_argument("--out", metavar="FILE", help="instead, one .safetensors file to write: one tensor `outputs`")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace predictions of other weights, data, code or options there"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the model's outputs for an evaluation set, one row per sample."""
    from hocket_tools.arguments import check_effect
    from hocket_tools.judging.arguments import asked, opened
    from hocket_tools.judging.predictions import check_file
    from hocket_tools.judging.streaming import predict_into, predict_into_file

    if (args.to is None) == (args.out is None):
        given = f"; --to {args.to} and --out {args.out} were both given" if args.to else ""
        raise PluginError(
            f"predict needs one of --to and --out{given}: --to FOLDER for files of rows, such as --to predictions, or --out "
            "outputs.safetensors for one tensor."
        )
    check_effect(args, args.out is None, "--to", format="npz", batches_per_file=64)
    if args.out is not None:
        check_file(args.out)  # before a model is made
    found, *others = asked(args)
    if others:
        raise PluginError(f"predict takes one run, and {found.name} and {others[0].name} are two. Remove one of them.")
    if args.set is not None and found.label is not None:
        raise PluginError(f"--set {args.set} and {found.label} both name data. Remove one of them.")
    with json_alone(args.json) as out, opened(found) as (trainer, checkpoint):
        label = args.set or found.label
        name, where = found.data or label or "", args.out or args.to
        data = _data(trainer, label, "--set {}" if found.label is None else f"{{}} in place of {label}")
        if args.out is not None:
            rows = predict_into_file(trainer, data, args.out, checkpoint, name, args.overwrite)
        else:
            files: dict[str, Any] = {"format": args.format, "batches_per_file": args.batches_per_file}
            files |= {"name": name, "overwrite": args.overwrite}
            rows = predict_into(trainer, data, args.to, **files, checkpoint=checkpoint)
        if trainer.state.strategy.rank == 0:
            print(json_text({"rows": rows, "path": where}) if args.json else f"{rows} rows in {where}", file=out)
    return 0


def _data(trainer: Trainer, label: str | None, write: str) -> Any:
    """Return the data of an evaluation set, or of ``predict()`` of a data module. Raises WrongValue, `label_of`, without it."""
    if label is None and (module := trainer.settings.data) is not None:
        from hocket.data import DataModule

        if type(module).predict is not DataModule.predict:
            made = trainer._data.module
            return None if made is None else made.make("predict")
    from hocket_tools.judging.arguments import label_of

    return trainer.state.eval_sets[label_of(trainer, label, "predict on", write)].data


command = Command("Write a model's outputs for an evaluation set", add_arguments, run)
