"""``hocket train config.yaml``."""

from __future__ import annotations

import argparse

from hocket.cli.arguments import add_arguments
from hocket.cli.command import Command
from hocket.cli.template import print_config


def run(args: argparse.Namespace) -> int:
    """Print the plan, fit, and write the weights into the run's folder."""
    if args.print_config:
        return print_config(args)
    from safetensors.torch import save_file

    from hocket.cli.config import trainer_from

    with trainer_from(args, needs=("train_data", "duration")) as trainer:
        changes = [each for each in args.changes if not each.startswith("resume=")]
        trainer.command = ("hocket", "train", args.config, *changes, "resume=auto")
        print(trainer.plan(), flush=True)
        folder = trainer.state.folder
        folder.check()  # fail before training if the weights cannot be written there
        result = trainer.fit()
        weights = trainer.model_state_dict(evaluated=True)
        if trainer.state.strategy.rank == 0:
            for name, value in result.metrics.items():
                print(f"{name} {value:.6g}")
            if folder.lasting:
                # Copies: tied weights share memory, which safetensors does not support.
                file = folder.claim() / "weights.safetensors"
                save_file({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, file)
                print(f"weights in {file}")
    return 0


command = Command("Train a model as a configuration describes", add_arguments, run)
