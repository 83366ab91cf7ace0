"""``hocket tune config.yaml``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli.common_options import add_arguments as add_configuration, json_alone, json_text, run_of
from hocket_cli.exit_codes import ExitCode
from hocket_cli.template import print_config

_FORMATS = (".png", ".pdf", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration or the run, and what to search for."""
    add_configuration(parser, "a YAML file, or the folder of a run, such as runs/a")
    parser.add_argument("--lr", action="store_true", help="search for learning rates only; by default for both")
    parser.add_argument("--batch-size", action="store_true", help="search for the largest batch that fits only")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the range test (100)")
    parser.add_argument("--run-steps", type=int, metavar="N", help="steps of each short run; 0 for none (40)")
    parser.add_argument("--limit", type=int, metavar="N", help="samples of the largest batch; default: an epoch")
    parser.add_argument("--plot", metavar="FILE", help="draw losses by learning rate into a .png, .pdf or .svg file")
    parser.add_argument("--json", action="store_true", help="print JSON, with the table of learning rates and losses")


def run(args: argparse.Namespace) -> int:
    """Print suggestions: a batch size, a learning rate, or, without options, both. Nothing is trained or logged."""
    if args.print_config:
        return print_config(args)
    from hocket_tools.arguments import check_effect

    both = not (args.lr or args.batch_size)
    steps = {name: getattr(args, name) for name in ("steps", "run_steps") if getattr(args, name) is not None}
    check_effect(args, both or args.lr, "--lr", steps=None, run_steps=None, plot=None)
    check_effect(args, both or args.batch_size, "--batch-size", limit=None)
    if args.plot is not None:
        if Path(args.plot).suffix not in _FORMATS:
            raise PluginError(f"--plot {args.plot} is not a {', '.join(_FORMATS)} file. Write --plot lr.png.")
        if os.path.lexists(args.plot):
            raise PluginError(f"--plot {args.plot} exists. Give another name, or remove that file.")
        from hocket_tools.tuning.plotting import check_library
        from hocket_tools.writable import check_writable

        check_library()  # before a search, rather than after it
        check_writable(args.plot)
    args.run = run_of(args.config)
    from hocket_cli.config import trainer_from
    from hocket_cli.overrides import source
    from hocket_tools.progress import Progress, say
    from hocket_tools.tuning.lr_finder import check_range
    from hocket_tools.tuning.tune import tune

    found: dict[str, Any] = {}
    instead: dict[str, Any] = {"loggers": [], "callbacks": [], "summary": False, "profile": None, "checkpoints": None}
    read = source(args)
    resume = read.document.value.get("resume")
    auto = resume is not None and resume.value in ("auto", True)
    if args.run or auto:
        instead["resume"] = None
    with (
        json_alone(args.json) as out,
        trainer_from(args, ("train_data",), read=read, **instead) as trainer,
        Progress() as line,
    ):
        check_range(**steps)  # before the search for a batch size, which comes first
        prints = trainer.state.strategy.rank == 0
        if auto and not args.run and prints:
            say("tune ignores resume: auto, and begins with new weights. Write resume=CHECKPOINT to begin with others.")
        searches = {"batch_size": (args.batch_size, {"limit": args.limit}), "lr": (args.lr, steps)}
        for what, (wanted, options) in searches.items():
            if wanted or both:
                found[what] = tune(trainer, what, **options, progress=line.show)  # type: ignore[call-overload]
                line.clear()
                if prints and not args.json:
                    print(found[what], flush=True)
    rates = found.get("lr", ())
    if prints and args.plot is not None:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        rates.figure().savefig(args.plot)
        say(f"losses by learning rate in {args.plot}")
    if prints and args.json:
        content = {"batch_size": found["batch_size"].as_json()} if "batch_size" in found else {}
        content |= {"learning_rates": [each.as_json() for each in rates]} if rates else {}
        print(json_text(content), file=out)
    return ExitCode.FAILED if any(each.suggestion is None for each in rates) else ExitCode.DONE


command = Command("Find a learning rate and a batch size for a configuration", add_arguments, run)
