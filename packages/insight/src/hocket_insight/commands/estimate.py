"""``hocket estimate config.yaml``."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_arguments as add_configuration
from hocket_cli.template import print_config

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket_insight.memory.rehearsal import Make, Rehearsal, Stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, the strategies to compare, and the memory that there is."""
    add_configuration(parser)
    parser.add_argument(
        "--strategies", help="strategies to compare, such as single,ddp,fsdp; default: the configuration's"
    )
    parser.add_argument("--ranks", type=int, help="number of ranks; default: devices of the configuration, or 1")
    parser.add_argument(
        "--memory", help="memory of a device, such as 24GiB, to find the largest microbatch for; default: this one's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Print the peak memory of a rank, rehearsed without computing or allocating anything."""
    if args.print_config:
        return print_config(args)
    from hocket_cli.overrides import configuration
    from hocket_insight.memory.estimate import as_json, largest_microbatch, size_of, table
    from hocket_insight.memory.rehearsal import rehearse

    given = configuration(args).value
    devices = given["devices"].value if "devices" in given else None
    ranks = args.ranks if args.ranks is not None else devices if isinstance(devices, int) else 1
    if ranks < 1:
        raise WrongValue(f"--ranks {ranks} is not a number of ranks. Write --ranks 2.")
    available = None if args.memory is None else size_of(args.memory)
    rehearsals: dict[str, Rehearsal] = {}
    microbatches: dict[str, int] = {}
    memory: dict[str, int] = {}
    for strategy in (args.strategies or "").split(","):
        world = 1 if strategy == "single" else ranks
        label = (strategy or "run") + (f" x {world}" if world > 1 else "")

        def make(stage: Stage, arguments: dict[str, Any], strategy: str = strategy) -> AbstractContextManager[Trainer]:
            from hocket_insight.commands.rehearsal_trainer import trainer_of

            return trainer_of(args, stage, strategy, arguments)

        rehearsals[label] = first = rehearse(make, world)
        if limit := available or first.memory:
            memory[label] = limit
            if available is not None or first.peak > limit:

                def at(size: int, make: Make = make, world: int = world) -> Rehearsal:
                    return rehearse(make, world, size)

                microbatches[label] = largest_microbatch(first, at, limit)
    if args.json:
        print(json.dumps(as_json(rehearsals, microbatches), indent=2))
    else:
        print(table(rehearsals, microbatches, memory))
    return 0


command = Command("Predict the memory of a run on each rank, without computing anything", add_arguments, run)
