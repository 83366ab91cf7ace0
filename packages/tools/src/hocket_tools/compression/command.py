"""``hocket compress RUN --to int8-static,pruned``: what compression costs and gains, in one table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from hocket.errors import WrongValue
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_trust
from hocket_cli.completion import completes, paths

if TYPE_CHECKING:
    from torch import nn

    from hocket.run.trainer import Trainer
    from hocket_tools.compression.quantization import Kind

_TO = ("int8", "int8-static", "int4", "pruned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the kinds of compression, and what is measured."""
    run = parser.add_argument("run", metavar="RUN", help="the folder of a run of hocket train, such as runs/a")
    completes(run, paths)
    parser.add_argument("changes", nargs="*", default=[], metavar="key=value", help="overrides of its configuration")
    parser.add_argument("--to", required=True, help=f"kinds of compression, separated by commas: {', '.join(_TO)}")
    parser.add_argument("--weights", help="a checkpoint, or a file of weights; default: the weights of the run's end")
    parser.add_argument(
        "--metric", help="label/name of the metric to compare, such as test/accuracy; default: the first one"
    )
    parser.add_argument(
        "--amount", type=float, default=0.5, help="fraction of the channels that pruned removes; default: 0.5"
    )
    parser.add_argument(
        "--calibration",
        type=int,
        default=16,
        metavar="N",
        help="batches of the training data for int8-static; default: 16",
    )
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="calls of each model to time; default: 50")
    parser.add_argument(
        "--compile", action="store_true", help="time models compiled by torch.compile, also the original"
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    add_trust(parser)
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def run(args: argparse.Namespace) -> int:
    """Compress the model of a run, and print what it costs and gains. Writes nothing."""
    kinds = list(dict.fromkeys(args.to.split(",")))
    if unknown := [kind for kind in kinds if kind not in _TO]:
        raise WrongValue(f"--to {args.to} has '{unknown[0]}'. Give some of {', '.join(_TO)}, such as --to int8-static.")
    if args.calibration < 1:
        raise WrongValue(f"--calibration {args.calibration} is no number of batches. Write --calibration 16.")
    args.config = os.path.join(args.run, "config.yaml")
    if not os.path.isfile(args.config):
        raise WrongValue(
            f"{args.run} is no folder of a run: it has no config.yaml. Give one that `hocket train` wrote, such as runs/a."
        )
    args.weights = args.weights or args.run
    from hocket_checkpoints.checkpoint_evaluation import weights_of
    from hocket_cli.weights import trainer_with_weights
    from hocket_tools.compression.comparison import as_json, compare_compressed, table

    with trainer_with_weights(args) as (trainer, checkpoint):
        state = trainer.state
        with weights_of(state, checkpoint, trainer.settings.checkpoints) if checkpoint else nullcontext():
            models = _compressed(trainer, kinds, args)
            progress = _Progress()
            rows = compare_compressed(
                trainer, models, metric=args.metric, repeats=args.repeats, compile=args.compile, progress=progress
            )
            progress.end()
    print(json.dumps(as_json(rows), indent=1) if args.json else table(rows))
    return 0


def _compressed(trainer: Trainer, kinds: list[str], args: argparse.Namespace) -> dict[str, nn.Module]:
    """Return the compressed models by kind. What cannot be done is refused before anything is."""
    from hocket_tools.compression import quantization
    from hocket_tools.compression.channels import prune_channels
    from hocket_tools.compression.comparison import evaluated_model
    from hocket_tools.compression.model_inputs import inputs_of_batches

    state = trainer.state
    quantized: list[Any] = [kind for kind in kinds if kind in quantization.KINDS]
    for kind in quantized:
        quantization.check(state.model, kind, calibrated=True)
    needs_inputs = "int8-static" in kinds or "pruned" in kinds
    if needs_inputs and state.train_loader is None:
        raise WrongValue(
            f"{' and '.join(kinds)} need inputs of the model, and {args.run} has no train_data. Add «train_data=»."
        )
    model = evaluated_model(trainer)
    calibration = []
    if needs_inputs:
        state.task.eval()
        batches = (state.bus.move_batch(state, batch) for batch in state.train_loader)
        calibration = inputs_of_batches(state.task, batches, args.calibration if "int8-static" in kinds else 1)
    models: dict[str, nn.Module] = {}
    for kind in kinds:
        if kind == "pruned":
            import copy

            models[f"pruned {args.amount:.0%}"] = prune_channels(copy.deepcopy(model), calibration[0], args.amount)[0]
            print(
                "hocket: pruned is not fine-tuned here. Train with algorithms=[channel-pruning] for that.",
                file=sys.stderr,
            )
        else:
            models[kind] = quantization.quantize(
                model, cast("Kind", kind), calibration if kind == "int8-static" else None
            )
    return models


class _Progress:
    """A line on a terminal with the completed part and the time left."""

    def __init__(self) -> None:
        import time

        self._now = time.monotonic
        self._start = self._shown = self._now()

    def __call__(self, part: float) -> None:
        now = self._now()
        if not sys.stderr.isatty() or now - self._shown < 0.2 or not part:
            return
        self._shown = now
        left = (now - self._start) * (1 - part) / part
        print(f"\rhocket: comparing, {part:.0%}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


command = Command("Compare compressed models of a run with the original", add_arguments, run)
