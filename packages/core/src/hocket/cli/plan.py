"""``hocket plan config.yaml``."""

from __future__ import annotations

import argparse

from hocket.cli.arguments import add_arguments
from hocket.cli.command import Command


def run(args: argparse.Namespace) -> int:
    """Set everything up, print the plan, train nothing."""
    from hocket.cli.config import trainer_from

    with trainer_from(args) as trainer:
        print(trainer.plan())
    return 0


command = Command("Print what training would do: who acts when, what surgery touches", add_arguments, run)
