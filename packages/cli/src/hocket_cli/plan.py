"""``hocket plan config.yaml``."""

from __future__ import annotations

import argparse

from hocket.basics.safe_files import escaped
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_arguments
from hocket_cli.template import print_config


def run(args: argparse.Namespace) -> int:
    """Set up the run and print its plan, without training."""
    if args.print_config:
        return print_config(args)
    from hocket_cli.config import trainer_from

    with trainer_from(args) as trainer:
        print(escaped(str(trainer.plan())))
    return 0


command = Command("Print the plan of a run: call orders and surgery", add_arguments, run)
