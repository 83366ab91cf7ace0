"""``hocket launch -n 4 train.py …``: run the same script in several processes that train together."""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hocket.errors import WrongValue
from hocket.help import optional_packages
from hocket.hookspecs.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, the machines and the processes."""
    parser.add_argument(
        "-n",
        "--processes",
        metavar="N",
        default="auto",
        help="processes on this machine; auto (the default): one per GPU, or one without GPUs",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as in python -m")
    parser.add_argument("--nnodes", default="1", metavar="N", help="number of machines, or minimum and maximum: 1:2")
    parser.add_argument("--node-rank", type=_count, metavar="N", help="this machine's number, for a static rendezvous")
    parser.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help="address of the rendezvous")
    parser.add_argument("--rdzv-backend", default="", metavar="NAME", help="c10d (the default), static or etcd-v2")
    parser.add_argument("--rdzv-id", default="", metavar="NAME", help="the job's name, identical on all machines")
    parser.add_argument(
        "--rdzv-conf", default="", metavar="KEY=VALUE,…", help="backend options, such as is_host=1,join_timeout=30"
    )
    parser.add_argument("--local-addr", metavar="HOST", help="address of this machine for the other machines")
    parser.add_argument(
        "--max-restarts", type=_count, default=0, metavar="N", help="how often to restart all ranks after a failure"
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="threads per worker (default: OMP_NUM_THREADS, or the processors divided by the workers)",
    )
    parser.add_argument(
        "--log-folder", type=Path, metavar="FOLDER", help="write each rank's output to a separate file there"
    )
    parser.add_argument("target", help="a Python script, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the target")


def run(args: argparse.Namespace) -> int:
    """Run the processes and return the exit code of the rank that failed first, or 0."""
    try:
        _check_target(args.target, args.module)
        nodes, settings = _nodes(args.nnodes), _settings(args.rdzv_conf)
        processes = _processes(args.processes)
        elastic = optional_packages.module("hocket_strategies.launching.elastic", "hocket launch")
        target = [*(["-m"] if args.module else []), args.target, *args.arguments]
        return elastic.run(
            elastic.Job(
                target,
                processes,
                nodes,
                args.node_rank,
                args.rdzv_endpoint,
                args.rdzv_backend,
                args.rdzv_id,
                settings,
                args.local_addr,
                args.max_restarts,
                args.threads,
                args.log_folder,
            )
        )
    except ValueError as error:
        print(f"hocket launch: {error}", file=sys.stderr)
        return 2


def _check_target(target: str, module: bool) -> None:
    """Raise ValueError for a target that python cannot run, before any process is started."""
    if module:
        if PathFinder.find_spec(target.partition(".")[0], ["", *sys.path]) is None:
            raise WrongValue(f"-m {target}: there is no module {target.partition('.')[0]}, neither here nor installed.")
        return
    file = Path(target)
    if file.is_dir():
        if not (file / "__main__.py").is_file():
            raise WrongValue(f"The folder {target} has no __main__.py. Give a script, or -m and a module.")
        return
    if not file.is_file():
        module_of_it = target.removesuffix(".py").replace("/", ".")
        raise WrongValue(f"There is no file {target} in {Path.cwd()}. If it is a module, write -m {module_of_it}.")
    with file.open("rb") as opened:
        line = opened.readline(200)
    if file.suffix not in (".py", ".pyc", ".pyz", ".pyw") and not (line.startswith(b"#!") and b"python" in line):
        raise WrongValue(
            f"{target} is not a Python script (it has neither the suffix .py nor a first line that names python), and ranks "
            f"are started with {Path(sys.executable).name}. Give the script that it runs, or -m and a module."
        )


def _processes(given: str) -> int:
    if given != "auto":
        return _positive_in("-n", given)
    import torch

    return max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 1)


def _nodes(given: str) -> tuple[int, int]:
    fewest, _, most = given.partition(":")
    nodes = _positive_in("--nnodes", fewest), _positive_in("--nnodes", most or fewest)
    if nodes[0] > nodes[1]:
        raise WrongValue(f"--nnodes {given}: the minimum comes first, as in {nodes[1]}:{nodes[0]}.")
    return nodes


def _settings(given: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in given.split(",") if part]
    if wrong := next((key for key, equals, _ in pairs if not equals), None):
        raise WrongValue(f"--rdzv-conf {given}: '{wrong}' has no value; write key=value,key=value.")
    return {key: int(value) if value.isdecimal() else value for key, _, value in pairs}


def _positive_in(option: str, given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise WrongValue(f"{option} {given} is not a positive integer{', or auto' if option == '-n' else ''}.")
    return int(given)


def _count(given: str) -> int:
    if not given.isdecimal():
        raise argparse.ArgumentTypeError(f"{given} is not an integer of 0 or more")
    return int(given)


def _positive(given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given} is not a positive integer")
    return int(given)


command = Command("Start a script in several processes that train together", add_arguments, run)
