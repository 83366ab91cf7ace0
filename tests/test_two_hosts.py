"""Two hosts that are network namespaces of this machine: one is lost in the middle of a training, and comes back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOCKET = (sys.executable, "-c", "import sys; from hocket_cli import main; sys.exit(main())")
NAME = f"hk{os.getpid() % 100000}"  # interfaces have at most 15 characters
ADDRESS = "10.77.0.{}"


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr}")
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with an ``eth0`` each, joined by a bridge."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs Linux, root and iproute2")
    names = [f"{NAME}n{i}" for i in (1, 2)]
    try:
        try:
            ip("link", "add", f"{NAME}b", "type", "bridge")
            ip("link", "set", f"{NAME}b", "up")
            for i, name in enumerate(names, 1):
                ip("netns", "add", name)
                ip("link", "add", f"{NAME}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", f"{NAME}v{i}", "master", f"{NAME}b", "up")
                ip("-n", name, "addr", "add", f"{ADDRESS.format(i)}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    ip("-n", name, "link", "set", device, "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                kill(name)
                ip("netns", "del", name)
        for link in ("v1", "v2", "b"):  # a namespace lives on while its last connections close
            with contextlib.suppress(OSError):
                ip("link", "del", NAME + link)


def kill(host: str) -> None:
    for pid in ip("netns", "pids", host).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


SCRIPT = """
import sys, time
from pathlib import Path
import hocket, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[1])


class Watch(hocket.Callback):
    def batch_end(self, state):
        time.sleep(0.1)
        with (folder / "seen").open("a") as file:
            file.write(f"{state.strategy.world_size}\\n")
        if (folder / "stop").exists():
            state.request(hocket.Decision.STOP)


data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
hocket.Trainer(
    model=nn.Linear(2, 1), loss=nn.functional.mse_loss, train_data=DataLoader(data, 4), optimizer="sgd(lr=0.1)",
    duration="100000ba", device="cpu", strategy="ddp", callbacks=[Watch()], folder=folder,
).fit()
"""  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_host_is_lost_and_comes_back(hosts, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = "join_timeout=60,last_call_timeout=2,timeout=120,keep_alive_interval=2,keep_alive_max_attempt=2"

    def start(i: int) -> subprocess.Popen[bytes]:
        command = [
            "ip", "netns", "exec", hosts[i - 1], *HOCKET, "launch", "--nnodes", "1:2", "-n", "1", "--max-restarts", "5",
            "--rdzv-endpoint", f"{ADDRESS.format(1)}:29400", "--rdzv-id", "job", "--local-addr", ADDRESS.format(i),
            "--rdzv-conf", f"{settings},is_host={int(i == 1)}", str(tmp_path / "script.py"), str(tmp_path),
        ]  # fmt: skip
        with (tmp_path / f"log{i}").open("ab") as log:
            more = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, env={**os.environ, **more}, stdout=log, stderr=log)

    def logs() -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(tmp_path.glob("log*")))

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 110
        while not condition():
            assert time.monotonic() < until, f"waited in vain for {what}\n{logs()}"
            time.sleep(0.2)

    def seen(world_size: int, since: int) -> bool:
        file = Path(tmp_path / "seen")
        return file.exists() and file.read_text().split()[since:].count(str(world_size)) >= 5

    first, second = start(1), start(2)
    wait_for(lambda: seen(2, 0), "both hosts")
    kill(hosts[1])
    second.wait(10)
    lines = len((tmp_path / "seen").read_text().split())
    wait_for(lambda: seen(1, lines), "the first host to go on alone")
    second = start(2)
    lines = len((tmp_path / "seen").read_text().split())
    wait_for(lambda: seen(2, lines), "the second host to come back")
    (tmp_path / "stop").touch()
    assert (first.wait(60), second.wait(60)) == (0, 0), logs()
