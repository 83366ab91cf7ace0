"""The process that fetches ahead: what it fetches, how much, and that it ends; counters of all processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from records import Records, record
from stand_in import Rule, StandIn, serving

from hocket_streaming.store.ahead import Ahead
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.counters import Counters
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files

EACH, COUNT = 50, 20
KEPT = EACH * 64 + 16


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serving() as server:
        yield server


@pytest.fixture
def chunks(server: StandIn, tmp_path: Path) -> Chunks:
    shards = Records(Files(f"{server.url}/bucket/data"), chunks=COUNT, each=EACH)
    server.files |= {f"bucket/data/{number:05}.rec": shards.file(number) for number in range(COUNT)}
    return Chunks(shards, shards.chunks(), Cache(tmp_path / "cache", 100 * KEPT), 4)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def there(chunks: Chunks) -> list[int]:
    return [number for number in range(COUNT) if chunks.cache.has(chunks.name(number))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_fetches_what_is_wanted_in_order_and_no_more(chunks: Chunks, server: StandIn) -> None:
    server.rules = [Rule("00007", 404)]
    with Ahead(chunks, 5 * EACH * 64) as ahead:
        pid = ahead.pid
        assert pid
        ahead.want([9, 7, 3, 12, 0, 5, 6])
        until(lambda: there(chunks) == [0, 3, 9, 12])
        ahead.want([0, 5, 6])
        until(lambda: there(chunks) == [0, 3, 5, 6, 9, 12])
        gets = server.gets()
        assert chunks.shards.get(chunks.open(5), 3) == record(5 * EACH + 3) and server.gets() == gets
        counted = chunks.counters.read()
        assert counted["chunks_fetched"] == 6 and counted["bytes_fetched"] == 6 * EACH * 64 and counted["hits"] == 1
        assert b"torch" not in Path(f"/proc/{pid}/maps").read_bytes()
    assert not alive(pid)
    assert not [file for file in chunks.cache.folder.iterdir() if file.suffix]


def test_is_not_started_for_local_data(tmp_path: Path) -> None:
    shards = Records(Files(tmp_path), chunks=COUNT, each=EACH)
    with Ahead(Chunks(shards, shards.chunks(), Cache(tmp_path / "cache", 1 << 20), 4), 1 << 19) as ahead:
        ahead.want([1, 2])
        assert ahead.pid is None


def test_never_blocks(chunks: Chunks) -> None:
    with Ahead(chunks, 50 * KEPT) as ahead:
        assert ahead.pid
        ahead.want([1])
        until(lambda: there(chunks) == [1])
        os.kill(ahead.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(5000):  # more than a pipe holds
            ahead.want(range(2, COUNT))
        ahead.want([3, 4])
        assert time.monotonic() - began < 2
        os.kill(ahead.pid, signal.SIGCONT)
        time.sleep(0.2)
        ahead.want([5, 6])
        until(lambda: {5, 6} <= set(there(chunks)))
        os.kill(ahead.pid, signal.SIGKILL)
        time.sleep(0.1)
        ahead.want([7])
        ahead.want([8])
    assert chunks.shards.get(chunks.open(8), 3) == record(8 * EACH + 3)


PARENT = """
import os, sys, time
from pathlib import Path
sys.path.append({tests!r})
from records import Records
from hocket_streaming.store.ahead import Ahead
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files
shards = Records(Files({url!r}), chunks=20, each=50)
ahead = Ahead(Chunks(shards, shards.chunks(), Cache({folder!r}, 1 << 20), 4), 1 << 19)
if os.fork() == 0:
    time.sleep(60)  # has the pipe open
    os._exit(0)
ahead.want(range(20))
print(ahead.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ends_when_the_parent_is_killed(server: StandIn, chunks: Chunks) -> None:
    server.rules = [Rule("data", "slow", seconds=30)]
    text = PARENT.format(
        tests=str(Path(__file__).parent), url=f"{server.url}/bucket/data", folder=str(chunks.cache.folder)
    )
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    until(lambda: server.gets() >= 8)
    assert list(chunks.cache.folder.glob("*.part"))
    parent.kill()
    parent.wait()
    until(lambda: not alive(pid), 5)
    assert not list(chunks.cache.folder.glob("*.part"))
    os.killpg(parent.pid, signal.SIGKILL)  # the forked child
    parent.stdout.close()


def add(counters: Counters) -> None:
    for _ in range(1000):
        counters.add(bytes_fetched=3, waited=0.5)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_counters_of_several_processes(method: str) -> None:
    context, counters = multiprocessing.get_context(method), Counters()
    processes = [context.Process(target=add, args=(counters,)) for _ in range(4)]
    for process in processes:
        process.start()
    add(counters)
    for process in processes:
        process.join()
    assert counters.read()["bytes_fetched"] == 15_000 and counters.read()["waited"] == 2500


RUN = """
import multiprocessing, random, sys
sys.path.append({tests!r})
from records import Records, record
from hocket_streaming.store.ahead import Ahead
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files
shards = Records(Files({url!r}), chunks=20, each=50)
chunks = Chunks(shards, shards.chunks(), Cache({folder!r}, 8 * 3216), 2)
def read(seed):
    draws = random.Random(seed)
    while True:
        n = draws.randrange(1000)
        if shards.get(chunks.open(n // 50), n % 50) != record(n):
            print("wrong", flush=True)
ahead = Ahead(chunks, 4 * 3216)
[multiprocessing.get_context("fork").Process(target=read, args=(seed,)).start() for seed in (1, 2)]
draws = random.Random(3)
print("begun", flush=True)
while True:
    ahead.want(draws.sample(range(20), 6))
    chunks.open(draws.randrange(20))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_after_all_are_killed(server: StandIn, chunks: Chunks) -> None:
    server.latency = 0.003
    text = RUN.format(
        tests=str(Path(__file__).parent), url=f"{server.url}/bucket/data", folder=str(chunks.cache.folder)
    )
    draws = random.Random(int(os.environ.get("HOCKET_FAULTS_SEED", "0")))
    small = Chunks(chunks.shards, chunks.chunks, Cache(chunks.cache.folder, 8 * KEPT), 1)
    parts = 0
    for _ in range(8):
        run = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert run.stdout and run.stdout.readline() == "begun\n"
        time.sleep(draws.uniform(0.3, 1.0))
        os.killpg(run.pid, signal.SIGKILL)
        assert run.communicate()[0] == ""
        parts += len(list(chunks.cache.folder.glob("*.part")))
    assert parts > 0, "no kill met a fetch"
    for number in range(COUNT):
        assert small.shards.get(small.open(number), 3) == record(number * EACH + 3)
    assert not list(chunks.cache.folder.glob("*.part")) and len(there(small)) == 8
