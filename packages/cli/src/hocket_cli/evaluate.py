"""``hocket evaluate config.yaml --weights FILE``."""

from __future__ import annotations

import argparse

from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_weights
from hocket_cli.weights import trainer_with_weights


def run(args: argparse.Namespace) -> int:
    """Print losses and metrics of the evaluation sets in a configuration."""
    with trainer_with_weights(args) as (trainer, checkpoint):
        for name, value in trainer.evaluate(checkpoint=checkpoint).items():
            print(f"{name} {value:.6g}")
    return 0


command = Command("Evaluate weights on the sets of a configuration", add_weights, run)
