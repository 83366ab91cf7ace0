"""``hocket predict config.yaml --weights FILE --out FILE``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli.common_options import add_weights
from hocket_cli.weights import trainer_with_weights

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add configuration, weights, evaluation set and output file."""
    add_weights(parser)
    parser.add_argument(
        "--set", help="the label of the evaluation set to predict on; else predict() of a data module, or the only set"
    )
    parser.add_argument("--out", required=True, help="the .safetensors file to write: one tensor `outputs`")


def run(args: argparse.Namespace) -> int:
    """Write the model's outputs for an evaluation set, one row per sample."""
    if Path(args.out).suffix != ".safetensors":
        better = shlex.quote(str(Path(args.out).with_suffix(".safetensors")))
        raise PluginError(
            f"--out {args.out} does not end in .safetensors, the one format that this command writes. Write --out "
            f"{better}; safetensors.torch.load_file reads it. For other formats, use "
            "Trainer.predict."
        )
    import torch
    from safetensors import SafetensorError, safe_open

    from hocket.basics import safe_files
    from hocket_checkpoints.weights import write_tensors

    if Path(args.out).exists():
        try:
            safe_files.check(os.stat(args.out), args.out)
            with safe_open(args.out, "pt") as file:
                earlier = list(file.keys()) == ["outputs"]
        except (OSError, SafetensorError):
            earlier = False
        if not earlier:
            raise PluginError(
                f"--out {args.out} exists and holds no outputs of an earlier prediction, such as weights; it is not replaced. "
                "Write another file, such as --out outputs.safetensors."
            )
    with trainer_with_weights(args) as (trainer, checkpoint):
        outputs = trainer.predict(_data(trainer, args.set), checkpoint=checkpoint)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise PluginError(
                "The model's output is not a tensor; this command writes tensors only. Use Trainer.predict."
            )
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        write_tensors({"outputs": torch.cat(outputs).contiguous()}, Path(args.out))
        print(f"{sum(map(len, outputs))} rows in {args.out}")
    return 0


def _data(trainer: Trainer, label: str | None) -> Any:
    """Return the data of an evaluation set; None for ``predict()`` of a data module. Raises PluginError without such a set."""
    if label is None and (module := trainer.settings.data) is not None:
        from hocket.data import DataModule

        if type(module).predict is not DataModule.predict:
            return None
    trainer._data.make("eval", running=trainer._running)
    sets = trainer.state.eval_sets
    label = next(iter(sets)) if label is None and len(sets) == 1 else label
    if label is None or label not in sets:
        there = ", ".join(sets) or "none"
        write = f"--set {shlex.quote(next(iter(sets), ''))}"
        if label is None and sets:
            raise PluginError(
                f"The configuration has the evaluation sets {there}. Name the one to predict on, such as {write}."
            )
        given = "no evaluation set" if label is None else f"no evaluation set '{label}'"
        write = f"Write {write}." if sets else "Write `eval_data: {test: module:loader}` in it."
        raise PluginError(f"There is {given}; the configuration has {there}. {write}")
    return sets[label].data


command = Command("Write a model's outputs for an evaluation set", add_arguments, run)
