"""``hocket summary config.yaml``."""

from __future__ import annotations

import argparse

from hocket.errors import WrongValue
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_arguments as add_configuration
from hocket_cli.template import print_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration and the levels of modules."""
    add_configuration(parser)
    parser.add_argument("--depth", type=int, default=3, help="levels of modules to list; default: 3")


def run(args: argparse.Namespace) -> int:
    """Print layers, shapes, parameters and FLOPs of the model, for the first batch of the training data."""
    if args.print_config:
        return print_config(args)
    if args.depth < 0:
        raise WrongValue(
            f"--depth {args.depth} is not a number of levels. Write --depth 1, or --depth 0 for the total only."
        )
    from hocket_insight.commands.rehearsal_trainer import trainer_of
    from hocket_insight.memory.rehearsal import ARGUMENTS, Stage
    from hocket_insight.model_table import of_state

    stage = Stage()
    with stage.swapping(), trainer_of(args, stage, "single", dict(ARGUMENTS)) as trainer:
        state = trainer.state
        print(of_state(state, next(iter(state.train_loader)), args.depth, stage.hollow))
        for note in stage.notes:
            print(note)
    return 0


command = Command("Print layers, output shapes, parameters and FLOPs of a model", add_arguments, run)
