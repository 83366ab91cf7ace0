"""``hocket evaluate RUN [DATA]``: metrics with intervals, classes, worst samples, corrupted images, comparisons."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli.common_options import add_weights, json_alone, json_text

if TYPE_CHECKING:
    from hocket_tools.judging.arguments import Asked
    from hocket_tools.judging.judgement import How, Judgement

#: Options that only a judgement has, with their defaults.
_DEFAULTS = {
    "metrics": None, "level": 0.95, "resamples": 2000, "interval": "bca", "seed": 0, "worst": 10, "compare": False,
    "corruptions": None, "severity": "1,2,3,4,5", "mean": "0", "std": "1", "report": False, "json": False,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add runs, data, weights, metrics and their intervals, corruptions and comparisons."""
    add_weights(
        parser, "evaluate",
        "DATA: the label of an evaluation set, module:function, or an installed data set; RUN_B with --compare; and ",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", metavar="NAME,…",
        help="loss, accuracy, balanced-accuracy, precision, recall, f1, mae, mse, rmse, or metrics of the configuration; "
        "default: those that apply",
    )  # fmt: skip
    parser.add_argument("--level", type=float, help="the level of confidence intervals; default: 0.95")
    parser.add_argument("--interval", choices=("bca", "percentile"), help="the bootstrap's interval; default: bca")
    parser.add_argument("--resamples", type=int, metavar="N", help="sets that are drawn; default: 2000")
    parser.add_argument("--seed", type=int, help="of resamples and corruptions; default: 0")
    parser.add_argument("--worst", type=int, metavar="N", help="how many of the worst samples to name; default: 10")
    parser.add_argument("--compare", action="store_true", help="test whether a second run differs on the same samples")
    parser.add_argument(
        "--corruptions", metavar="NAME,…", help="all, or kinds such as gaussian-noise,fog: errors on corrupted images"
    )
    parser.add_argument("--severity", metavar="N,…", help="their severities; default: 1,2,3,4,5")
    parser.add_argument("--mean", metavar="X,…", help="with which pixels in [0, 1] were normalized, by channel")
    parser.add_argument("--std", metavar="X,…", help="by which they were then divided")
    parser.add_argument(
        "--report", action="store_true", help="add tables and worst images to the run, for hocket report"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(**_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Print losses and metrics of a configuration's sets; of a run, or with any option, a judgement of one set."""
    from hocket_tools.arguments import check_effect
    from hocket_tools.judging.arguments import asked

    runs = asked(args)
    check_effect(args, args.corruptions is not None, "--corruptions", severity="1,2,3,4,5", mean="0", std="1")
    plain = all(getattr(args, name) == default for name, default in _DEFAULTS.items())
    if plain and len(runs) == 1 and runs[0].label is None and runs[0].args.run is None:
        return _print_values(runs[0])
    if args.compare != (len(runs) == 2) or len(runs) > 2:
        raise PluginError(
            f"{len(runs)} run{'s are' if runs[1:] else ' is'} named. Write hocket evaluate RUN_A RUN_B [DATA] --compare for "
            "two, and hocket evaluate RUN [DATA] for one."
        )
    of_runs = any(each.args.run is not None for each in runs)
    if args.compare and of_runs and args.weights not in (None, "best", "latest"):
        raise PluginError(
            f"--weights {args.weights} names the weights of one run, and --compare would evaluate them for both. Write hocket "
            f"evaluate {runs[0].name} {runs[1].name} --compare for the runs' own weights, or --weights best for their best."
        )
    from hocket_tools import resampling
    from hocket_tools.judging.judgement import How, compared

    resampling.check(args.level, args.resamples, args.seed)
    how = How(args.level, args.resamples, args.interval, args.seed)

    with json_alone(args.json):
        judged = [found for each in runs if (found := _judged(each, args, how)) is not None]
        differences = compared(judged[0], judged[1], how) if judged and args.compare else None
    if judged:  # rank 0 prints
        _print(judged, differences, args.json, how)
    return 0


def _print_values(found: Asked) -> int:
    from hocket_cli.weights import trainer_with_weights
    from hocket_tools.beside import explained
    from hocket_tools.progress import say

    with trainer_with_weights(found.args) as (trainer, checkpoint), explained("The evaluation"):
        for name, value in trainer.evaluate(checkpoint=checkpoint).items():
            print(f"{name} {value:.6g}")
            if not math.isfinite(value):
                say(
                    f"{name} is {value:.6g}: outputs, targets or weights are NaN or infinite. Other metrics may hide it."
                )
    return 0


def _judged(found: Asked, args: argparse.Namespace, how: How) -> Judgement | None:
    """Return the judgement of a run; on ranks other than 0 None."""
    from hocket_tools.judging import arguments, judgement, printing

    kinds, severities = _corruptions(args)
    mean, std = _numbers(args.mean, "--mean"), _numbers(args.std, "--std")
    if args.report:
        printing.marked(Path(found.name))
    judgement.Normalized(mean, std)  # refuses before the evaluation
    metrics = [each for each in (args.metrics or "").split(",") if each]
    with arguments.opened(found, callbacks=()) as (trainer, checkpoint):
        label = arguments.label_of(trainer, found.label, "evaluate", f"hocket evaluate {found.name} {{}}")
        judged = judgement.judge(
            trainer, label, run=found.name, checkpoint=checkpoint, metrics=metrics, worst=args.worst, how=how
        )
        if kinds:
            judgement.withstand(trainer, judged, kinds, severities, checkpoint=checkpoint, mean=mean, std=std, how=how)
        if trainer.state.strategy.rank:
            return None
        if args.report:
            images = judgement.images_of(trainer, label, [row["sample"] for row in judged.worst])
            printing.into_run(Path(found.name), judged, images)
    return judged


def _corruptions(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Return kinds and severities. Raises ValueError before anything is evaluated."""
    if args.corruptions is None:
        return [], []
    import torch

    from hocket_tools.judging.corruptions import CORRUPTIONS, corrupt

    kinds = list(CORRUPTIONS) if args.corruptions == "all" else args.corruptions.split(",")
    if "all" in kinds or "" in kinds:
        raise PluginError(
            f"--corruptions {args.corruptions!r} is neither all nor a list of kinds. Write --corruptions all alone, or kinds "
            "such as --corruptions gaussian-noise,fog."
        )
    severities = _numbers(args.severity, "--severity", int, "1 to 5", "1,3,5")
    for kind in kinds:
        for severity in severities:
            corrupt(torch.zeros(0, 3, 8, 8), kind, severity)
    return kinds, severities


def _numbers(
    text: str, option: str, kind: type = float, of: str = "numbers by channel", such: str = "0.485,0.456,0.406"
) -> list[Any]:
    try:
        return [kind(each) for each in text.split(",")]
    except ValueError:
        raise PluginError(f"{option} {text} is not a list of {of}. Write {option} {such}.") from None


def _print(judged: list[Any], differences: Any, as_json: bool, how: How) -> None:
    from hocket_tools.judging import printing

    if as_json:
        about = {"level": how.level, "resamples": how.resamples, "interval": how.method, "seed": how.seed}
        found: dict[str, Any] = {**about, "runs": [each.as_json() for each in judged]}
        if differences is not None:
            found["differences"] = {name: asdict(each) for name, each in differences.items()}
        print(json_text(found))
        return
    if differences is None:
        print(printing.text(judged[0], how))
        return
    first, second = judged
    print(f"{first.run} and {second.run} on {first.label}: {len(first.samples)} samples")
    print(printing.differences(first.run, second.run, differences, how))
    if first.corruption_error is not None:
        errors = first.corruption_error.value, second.corruption_error.value
        print(f"mean corruption error {errors[0]:.4g} and {errors[1]:.4g}")


command = Command("Evaluate a run: metrics with intervals, classes, worst samples", add_arguments, run)
