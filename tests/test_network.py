"""No telemetry: an ordinary run with everything of `hocket[standard]` asks nothing of a network, and opens no port."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Each look-up, connection, datagram and port of Python ends the process with exit code 70. At the end no descriptor may be
#: a socket of the internet's families either, whoever opened it.
PROGRAM = """
import os, sys

FORBIDDEN = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}

def refuse(event, arguments):
    if event in FORBIDDEN:
        os.write(2, f"{event} {arguments[-1]}".encode())
        os._exit(70)

sys.addaudithook(refuse)

import torch, hocket
from hocket_cli import main

def train(duration):
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    return hocket.Trainer(
        torch.nn.Linear(4, 3), [batch] * 3, eval_data=[batch], loss="cross_entropy", metrics=["accuracy"],
        optimizer="adamw(lr=0.1)", schedule="cosine", duration=duration, algorithms=["ema(half_life='1ba')"],
        callbacks=["lr-monitor", "speed-monitor"], loggers=["jsonl", "progress", "csv"],
        checkpoints=hocket.Checkpoints("runs/a"), resume="auto", device="cpu",
    )

train("1ep").fit()
trainer = train("2ep")
trainer.fit()
assert trainer.predict([torch.randn(2, 4)])
for command in (["plugins", "list"], ["runs", "runs"], ["checkpoint", "verify", "runs/a"]):
    assert main(command) in (0, None), command

internet = set()
for table in ("tcp", "tcp6", "udp", "udp6"):
    try:
        internet |= {line.split()[9] for line in open(f"/proc/self/net/{table}").readlines()[1:]}
    except OSError:
        pass
for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        continue
    assert target[8:-1] not in internet, target

print("quiet")
"""


@pytest.mark.long
def test_an_ordinary_run_asks_nothing_of_the_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("quiet\n"), done.stderr[-3000:]


def test_the_check_sees_a_connection() -> None:
    program = PROGRAM[: PROGRAM.index("import torch")] + "import socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70 and done.stderr.startswith("socket.")
