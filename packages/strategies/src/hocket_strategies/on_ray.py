"""Run a command on a node of a Ray cluster: ``python -m hocket_strategies.on_ray --num-gpus 1 command …``.

The command runs in the current folder, which the nodes share. Its output is printed here, SIGINT and SIGTERM are passed on
to it, and its exit code is this process's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hocket.help import installing

#: Seconds between two looks at a command.
_INTERVAL = 0.2


class RemoteCommand:
    """A command in a process of the node on which Ray places this actor. Its environment adds ``environment`` to the node's.

    Example:
        >>> import os, sys, time
        >>> from hocket_strategies.on_ray import RemoteCommand
        >>> command = RemoteCommand([sys.executable, "-c", "print('here')"], os.getcwd(), {})
        >>> time.sleep(1)
        >>> command.poll()
        (b'here\\n', 0)
    """

    def __init__(self, command: Sequence[str], folder: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=folder, env={**environment, **os.environ}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def poll(self) -> tuple[bytes, int | None]:
        """Return the output since the last call, and the exit code once the command has ended."""
        code = self._process.poll()  # first: what it wrote before its end is read below
        return self._output.read() or b"", code

    def send_signal(self, number: int) -> None:
        """Send a signal to the command."""
        self._process.send_signal(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code; 128 plus the number of the signal that ended it."""
    parser = argparse.ArgumentParser(
        prog="python -m hocket_strategies.on_ray", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--num-cpus", type=float, default=1, metavar="N", help="processors of the command (default 1)")
    parser.add_argument("--num-gpus", type=float, default=0, metavar="N", help="GPUs of the command (default 0)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("there is no command; write it after the options, such as: python train.py")
    ray = _connected()
    received: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own handlers, which end this process
        signal.signal(each, lambda number, _: received.append(number))
    actor = ray.remote(RemoteCommand).options(num_cpus=args.num_cpus, num_gpus=args.num_gpus)
    command = actor.remote(args.command, os.getcwd(), dict(os.environ))
    code = None
    while code is None:
        looked = command.poll.remote()
        while not ray.wait([looked], timeout=_INTERVAL)[0]:  # the command waits for resources
            if received:
                return 128 + received[0]
        output, code = ray.get(looked)
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
        while received and code is None:
            ray.get(command.send_signal.remote(received.pop(0)))
        time.sleep(0 if output or code is not None else _INTERVAL)
    return code if code >= 0 else 128 - code


def _connected() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        sys.exit(
            f"on_ray needs the package ray, which is not installed. Type: {installing.command('ray', 'hocket-strategies')}."
        )
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except ConnectionError:
        sys.exit(
            "on_ray found no Ray cluster. Start one with `ray start --head`, or set RAY_ADDRESS to that of a running cluster, "
            "such as 10.0.0.1:6379."
        )
    return ray


if __name__ == "__main__":
    sys.exit(main())
