"""``hocket compress RUN --to int8-static,pruned``: smaller models, and what they cost and gain, in one table."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from hocket.errors import WrongValue
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_run, json_alone, json_text
from hocket_tools.arguments import check_effect

if TYPE_CHECKING:
    from torch import nn

    from hocket.run.trainer import Trainer
    from hocket_tools.compression.quantization import Kind

_TO = ("int8", "int8-static", "int4", "pruned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the kinds of compression, where to write, and what is measured."""
    add_run(parser)
    parser.add_argument("--to", required=True, help=f"kinds of compression, separated by commas: {', '.join(_TO)}")
    where = "where to write a folder for each kind; compressed in the folder of the run unless given"
    parser.add_argument("--out", metavar="FOLDER", help=where)
    parser.add_argument("--overwrite", action="store_true", help="replace models of another run in the folders")
    parser.add_argument(
        "--metric", help="label/name of the metric to compare, such as test/accuracy; default: the first one"
    )
    parser.add_argument(
        "--amount", type=float, default=0.5, help="fraction of the channels that pruned removes; default: 0.5"
    )
    batches = "batches of the training data for int8-static; default: 16"
    parser.add_argument("--calibration", type=int, default=16, metavar="N", help=batches)
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="calls of each model to time; default: 50")
    parser.add_argument(
        "--compile", action="store_true", help="time models compiled by torch.compile, also the original"
    )
    parser.add_argument("--json", action="store_true", help="print the rows, and where each model is, as JSON")


def run(args: argparse.Namespace) -> int:
    """Compress the model of a run, write the models, and print what they cost and gain."""
    kinds = list(dict.fromkeys(each.strip() for each in args.to.split(",")))
    if unknown := [kind for kind in kinds if kind not in _TO]:
        raise WrongValue(
            f"--to {args.to!r} has {unknown[0]!r}. Give some of {', '.join(_TO)} (which removes channels), separated by "
            "commas alone, such as --to int8-static,pruned."
        )
    check_effect(args, "pruned" in kinds, "--to pruned", amount=0.5)
    check_effect(args, "int8-static" in kinds, "--to int8-static", calibration=16)
    if args.calibration < 1:
        raise WrongValue(f"--calibration {args.calibration} is no number of batches. Write --calibration 16.")
    from hocket_checkpoints.checkpoint_evaluation import weights_of
    from hocket_tools.beside import explained
    from hocket_tools.compression.comparison import compare_compressed, evaluated_model, table
    from hocket_tools.compression.writing import write
    from hocket_tools.exporting.preparing import Options
    from hocket_tools.progress import Progress
    from hocket_tools.run_source import folder_to_write, source_of_run, trainer_of_run

    read = source_of_run(args)
    folders = {kind: folder_to_write(args, read, "compressed", "torch-export", kind) for kind in kinds}
    with (
        json_alone(args.json) as stdout,
        trainer_of_run(args, read, callbacks=()) as (trainer, weights),
        Progress() as line,
    ):
        state = trainer.state
        loaded = weights_of(state, weights, trainer.settings.checkpoints) if weights else nullcontext()
        with loaded, explained("The compression"):
            trainer._data.make("eval", running=trainer._running)
            original = evaluated_model(trainer)
            models = _compressed(trainer, original, kinds, args)
            rows = compare_compressed(
                trainer, models, metric=args.metric, repeats=args.repeats, compile=args.compile, progress=line.show
            )
            written, options = {}, Options("torch-export", checkpoint=weights, overwrite=args.overwrite)
            for number, (name, kind) in enumerate(zip(models, kinds, strict=True)):
                line.show("writing models", number, len(kinds))
                written[name] = write(trainer, original, models[name], kind, folders[kind], options)
    if args.json:
        content = {
            "rows": [asdict(row) for row in rows],
            "models": {name: str(each.folder) for name, each in written.items()},
        }
        print(json_text(content), file=stdout)
        return 0
    print(table(rows))
    for name, each in written.items():
        print(f"{name} in {each.folder}, largest difference {each.difference:.2g}")
    return 0


def _compressed(trainer: Trainer, model: nn.Module, kinds: list[str], args: argparse.Namespace) -> dict[str, nn.Module]:
    """Return the compressed models by kind. What cannot be done is refused before anything is."""
    from hocket.data.source import empty
    from hocket_tools.compression import quantization
    from hocket_tools.compression.channels import prune_channels
    from hocket_tools.compression.model_inputs import inputs_of_batches
    from hocket_tools.progress import say

    state = trainer.state
    quantized: list[Any] = [kind for kind in kinds if kind in quantization.KINDS]
    for kind in quantized:
        quantization.check(state.model, kind, calibrated=True)
    needs_inputs = "int8-static" in kinds or "pruned" in kinds
    if needs_inputs and state.train_loader is None:
        raise WrongValue(
            f"--to {','.join(kinds)} takes inputs from the training data, and {args.run} has no train_data. Add an override: "
            "train_data=module:loader."
        )
    calibration = []
    if needs_inputs:
        state.task.eval()
        batches = (state.bus.move_batch(state, batch) for batch in state.train_loader)
        calibration = inputs_of_batches(state.task, batches, args.calibration if "int8-static" in kinds else 1)
        if not calibration:
            raise empty(state.train_data, "The training data", "train_data")
    models: dict[str, nn.Module] = {}
    for kind in kinds:
        if kind == "pruned":
            import copy

            models[f"pruned {args.amount:.0%}"] = prune_channels(copy.deepcopy(model), calibration[0], args.amount)[0]
            say("pruned is not fine-tuned here. Train with algorithms=[channel-pruning] for that.")
        else:
            models[kind] = quantization.quantize(
                model, cast("Kind", kind), calibration if kind == "int8-static" else None
            )
    return models


command = Command("Write compressed models of a run, compared with the original", add_arguments, run)
