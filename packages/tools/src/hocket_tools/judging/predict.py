"""``hocket predict RUN [DATA] --to FOLDER``, or ``--out FILE``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
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
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the model's outputs for an evaluation set, one row per sample."""
    from hocket_tools.arguments import check_effect
    from hocket_tools.judging.arguments import asked, opened

    if (args.to is None) == (args.out is None):
        given = f"; --to {args.to} and --out {args.out} were both given" if args.to else ""
        raise PluginError(
            f"predict needs one of --to and --out{given}: --to FOLDER for files of rows, such as --to predictions, or --out "
            "outputs.safetensors for one tensor."
        )
    check_effect(args, args.out is None, "--to", format="npz", batches_per_file=64)
    if args.out is not None:
        _check(args.out)
    found, *others = asked(args)
    if others:
        raise PluginError(f"predict takes one run, and {found.name} and {others[0].name} are two. Remove one of them.")
    if args.set is not None and found.label is not None:
        raise PluginError(f"--set {args.set} and {found.label} both name data. Remove one of them.")
    with json_alone(args.json) as out, opened(found) as (trainer, checkpoint):
        label = args.set or found.label
        data = _data(trainer, label)
        if args.out is not None:
            rows, where = _into_file(trainer, data, checkpoint, args.out), args.out
        else:
            from hocket_tools.judging.streaming import predict_into

            files: dict[str, Any] = {"format": args.format, "batches_per_file": args.batches_per_file}
            name = found.data or label or ""
            rows = predict_into(trainer, data, args.to, **files, checkpoint=checkpoint, name=name)
            where = args.to
        if trainer.state.strategy.rank == 0:
            print(json_text({"rows": rows, "path": where}) if args.json else f"{rows} rows in {where}", file=out)
    return 0


def _check(out: str) -> None:
    """Raise PluginError for a file that is not one of outputs."""
    if Path(out).suffix != ".safetensors":
        better = shlex.quote(str(Path(out).with_suffix(".safetensors")))
        raise PluginError(
            f"--out {out} does not end in .safetensors, the one format of a single file. Write --out {better}; "
            "safetensors.torch.load_file reads it. For other formats, write --to FOLDER --format npz, parquet or jsonl."
        )
    from safetensors import SafetensorError, safe_open

    from hocket.basics import safe_files
    from hocket_tools.writable import check_writable

    check_writable(out)
    if Path(out).exists():
        try:
            safe_files.check(os.stat(out), out)
            with safe_open(out, "pt") as file:
                earlier = list(file.keys()) == ["outputs"]
        except (OSError, SafetensorError):
            earlier = False
        if not earlier:
            raise PluginError(
                f"--out {out} exists and holds no outputs of an earlier prediction, such as weights; it is not replaced. "
                "Write another file, such as --out outputs.safetensors."
            )


def _into_file(trainer: Trainer, data: Any, checkpoint: str | None, out: str) -> int:
    """Write one tensor with the rows of all batches, and return their number."""
    import torch

    from hocket.data.source import empty
    from hocket_checkpoints.weights import write_tensors
    from hocket_tools.beside import explained
    from hocket_tools.judging.recording import nonfinite, say_nonfinite
    from hocket_tools.progress import say
    from hocket_tools.writable import writing

    if (ranks := trainer.state.strategy.world_size) > 1:
        raise PluginError(
            f"--out writes one file, and there are {ranks} ranks. Write --to FOLDER, or start one process."
        )
    with explained("The prediction"):
        outputs = trainer.predict(data, checkpoint=checkpoint)
    if not all(isinstance(each, torch.Tensor) for each in outputs):
        raise PluginError(
            "The model's output is not a tensor; --out writes one tensor only. Write --to FOLDER, which writes the parts of "
            "outputs as columns."
        )
    if not (rows := sum(map(len, outputs))):
        raise empty(data, "The data to predict on", "eval_data", "sample")
    if Path(out).exists():
        say(f"{out} had the outputs of an earlier prediction, which are replaced.")
    with writing(out):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_tensors({"outputs": torch.cat(outputs).contiguous()}, Path(out))
    where = nonfinite(torch.cat(outputs), rows).nonzero().flatten().tolist()
    say_nonfinite(len(where), [f"row {row}" for row in where[:5]], rows)
    return rows


def _data(trainer: Trainer, label: str | None) -> Any:
    """Return the data of an evaluation set, or of ``predict()`` of a data module. Raises PluginError without such a set."""
    if label is None and (module := trainer.settings.data) is not None:
        from hocket.data import DataModule

        if type(module).predict is not DataModule.predict:
            made = trainer._data.module
            return None if made is None else made.make("predict")
    from hocket_tools.judging.arguments import label_of

    return trainer.state.eval_sets[label_of(trainer, label, "predict on", "--set {}")].data


command = Command("Write a model's outputs for an evaluation set", add_arguments, run)
