"""``hocket train config.yaml``."""

from __future__ import annotations

import argparse

from hocket.cli.arguments import add_arguments
from hocket.cli.command import Command


def run(args: argparse.Namespace) -> int:
    """Plan, fit, and leave the weights in the run's folder."""
    from safetensors.torch import save_file

    from hocket.cli.config import trainer_from

    with trainer_from(args) as trainer:
        print(trainer.plan(), flush=True)
        folder = trainer.state.folder
        folder.check()  # before training: the weights go there
        result = trainer.fit()
        weights = trainer.model_state_dict(evaluated=True)
        if trainer.state.strategy.rank == 0:
            for name, value in result.metrics.items():
                print(f"{name} {value:.6g}")
            if folder.lasting:
                # Copies, because weights that are tied share memory, which the format does not have.
                file = folder.claim() / "weights.safetensors"
                save_file({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, file)
                print(f"weights in {file}")
    return 0


command = Command("Train what a configuration describes", add_arguments, run)
