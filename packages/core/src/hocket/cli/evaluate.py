"""``hocket evaluate config.yaml --weights FILE``."""

from __future__ import annotations

import argparse

from hocket.cli.arguments import WITHOUT_FILES, add_weights
from hocket.cli.command import Command


def run(args: argparse.Namespace) -> int:
    """Print losses and metrics of the evaluation sets in a configuration."""
    from hocket.cli.config import trainer_from

    with trainer_from(args, **WITHOUT_FILES) as trainer:
        trainer.load_weights(args.weights)
        for name, value in trainer.evaluate().items():
            print(f"{name} {value:.6g}")
    return 0


command = Command("Evaluate weights on the sets of a configuration", add_weights, run)
