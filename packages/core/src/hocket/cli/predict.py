"""``hocket predict config.yaml --weights FILE --out FILE``."""

from __future__ import annotations

import argparse

from hocket.cli.arguments import add_weights
from hocket.cli.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Configuration, weights, set and where to write."""
    add_weights(parser)
    parser.add_argument("--set", default="test", help="the label of the evaluation set whose outputs are wanted")
    parser.add_argument("--out", required=True, help="the .safetensors file to write: one tensor `outputs`")


def run(args: argparse.Namespace) -> int:
    """Write the model's outputs for a set, one row per sample."""
    import torch
    from safetensors.torch import save_file

    from hocket.cli.config import trainer_from

    with trainer_from(args) as trainer:
        trainer.load_weights(args.weights)
        sets = trainer.state.eval_sets
        if args.set not in sets:
            raise SystemExit(
                f"There is no evaluation set '{args.set}'; the configuration has {', '.join(sets) or 'none'}."
            )
        outputs = trainer.predict(sets[args.set].data)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise SystemExit("The model returns something other than a tensor, which this command cannot write down.")
        save_file({"outputs": torch.cat(outputs).contiguous()}, args.out)
        print(f"{sum(map(len, outputs))} rows in {args.out}")
    return 0


command = Command("Write a model's outputs for a set of a configuration", add_arguments, run)
