"""Many processes on one cache below the working set, killed at random: right samples, a bounded cache, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from records import Records, record
from stand_in import Rule, StandIn, serving
from torch.utils.data import DataLoader, Dataset

from hocket_streaming.errors import AccessDenied, StreamError
from hocket_streaming.store.ahead import Ahead
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.counters import Counters
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files

EACH, COUNT, SIZE = 100, 40, 1024
CHUNK = EACH * SIZE


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serving(0.005) as server:
        yield server


def make(server: StandIn, folder: Path, limit: int, protocol: str = "http", **options: Any) -> Chunks:
    files = Files("s3://bucket/data", server.options()) if protocol == "s3" else Files(f"{server.url}/bucket/data")
    shards = Records(files, chunks=COUNT, each=EACH, size=SIZE, **options)
    server.files |= {f"bucket/data/{number:05}.rec": shards.file(number) for number in range(COUNT)}
    return Chunks(shards, shards.chunks(), Cache(folder, limit), 3, Counters())


def read(chunks: Chunks, seed: int, count: int, say: Any) -> None:
    """Read random chunks; say each number once its samples were right."""
    draws = random.Random(seed)
    for _ in range(count):
        number, row = draws.randrange(COUNT), draws.randrange(EACH)
        assert chunks.shards.get(chunks.open(number), row) == record(number * EACH + row, SIZE), number
        say.put(number)
    say.put("end")


class Peak(threading.Thread):
    """Measures the largest sum of sizes in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.largest, self.samples, self.ended = folder, 0, 0, False
        self.start()

    def run(self) -> None:
        while not self.ended:
            sizes = {}  # by name, since a temporary file may be renamed meanwhile
            try:
                for entry in os.scandir(self.folder):
                    sizes[entry.name.removesuffix(".part")] = entry.stat().st_size
            except FileNotFoundError:
                continue
            self.largest, self.samples = max(self.largest, sum(sizes.values())), self.samples + 1
            time.sleep(0.001)

    def stop(self) -> int:
        self.ended = True
        self.join()
        assert self.samples > 50
        return self.largest


def left(chunks: Chunks) -> list[str]:
    """Return what is in the cache besides complete chunks, after a process has begun and fetched."""
    names = {chunks.name(number) for number in range(COUNT)}
    return [file.name for file in chunks.cache.folder.iterdir() if file.name not in names | {".total"}]


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("protocol", ["s3", "http"])
def test_many_processes_below_the_working_set(server: StandIn, tmp_path: Path, method: str, protocol: str) -> None:
    limit, processes = 10 * CHUNK, 8
    chunks = make(server, tmp_path / "cache", limit, protocol)
    chunks.open(0)  # opens a client here, which forked processes must not use
    faults: list[int | str] = [503, "cut", "corrupt", "slow"]
    server.rules = [Rule(f"{number:05}", faults[number % 4], 2, 0.3) for number in range(1, COUNT)]
    context = multiprocessing.get_context(method)
    said, peak = context.Queue(), Peak(chunks.cache.folder)
    running = [context.Process(target=read, args=(chunks, seed, 150, said)) for seed in range(processes)]
    for process in running:
        process.start()
    ended = 0
    while ended < processes:
        ended += said.get(timeout=60) == "end"
        assert not [process.exitcode for process in running if process.exitcode], "a reader failed"
    for process in running:
        process.join(20)
    assert [process.exitcode for process in running] == [0] * processes
    largest = peak.stop()
    counted = chunks.counters.read()
    print(f"{protocol}, {method}: peak {largest / CHUNK:.2f} chunks, limit 10, {server.gets()} GETs, {counted}")
    assert largest <= limit + processes * (CHUNK + 16)
    assert (
        counted["chunks_fetched"] + counted["hits"] <= 8 * 150 + 1
        and server.gets() == counted["chunks_fetched"] + 2 * 29
        and counted["retries"] == 2 * 29
    )
    assert not left(chunks)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_random_kills(server: StandIn, tmp_path: Path, method: str) -> None:
    limit, draws = 8 * CHUNK, random.Random(int(os.environ.get("HOCKET_FAULTS_SEED", "0")))
    chunks = make(server, tmp_path / "cache", limit)
    context = multiprocessing.get_context(method)
    peak, kills = Peak(chunks.cache.folder), 0
    running: dict[int, tuple[Any, Any]] = {}

    def start(seed: int) -> None:
        said = context.SimpleQueue()
        process = context.Process(target=read, args=(chunks, seed, 100_000, said))
        process.start()
        running[seed] = process, said

    for seed in range(6):
        start(seed)
    end, seed = time.monotonic() + 20, 6
    while time.monotonic() < end:
        time.sleep(draws.uniform(0.05, 0.3) if method == "fork" else draws.uniform(0.8, 1.2))
        victim = draws.choice(list(running))
        process, said = running.pop(victim)
        assert process.exitcode is None, (
            f"a reader failed: HOCKET_FAULTS_SEED={os.environ.get('HOCKET_FAULTS_SEED', '0')}"
        )
        process.kill()
        process.join()
        said.close()
        kills += 1
        start(seed)
        seed += 1
    for process, said in running.values():
        process.kill()
        process.join()
        said.close()
    largest = peak.stop()
    began = time.monotonic()
    after = make(server, tmp_path / "cache", limit)
    for number in range(COUNT):
        assert after.shards.get(after.open(number), 7) == record(number * EACH + 7, SIZE)
    seconds = time.monotonic() - began
    print(f"{method}: {kills} kills, peak {largest / CHUNK:.2f} chunks, limit 8; 40 chunks after that: {seconds:.2f} s")
    assert largest <= limit + 6 * (CHUNK + 16) and seconds < 10
    assert not left(after) and sum(file.stat().st_size for file in after.cache.folder.iterdir()) <= limit + 8


def fail(chunks: Chunks, said: Any) -> None:
    began = time.monotonic()
    try:
        chunks.open(3)
    except StreamError as error:
        said.put((type(error).__name__, str(error), time.monotonic() - began))


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("fault", [403, 503, "silent", "corrupt"])
def test_all_processes_that_wait_raise_the_error_soon(
    server: StandIn, tmp_path: Path, method: str, fault: int | str
) -> None:
    chunks = make(server, tmp_path / "cache", 10 * CHUNK)
    server.rules = [Rule("00003", fault, seconds=12)]
    context = multiprocessing.get_context(method)
    said = context.Queue()
    running = [context.Process(target=fail, args=(chunks, said)) for _ in range(6)]
    for process in running:
        process.start()
    got = [said.get(timeout=60) for _ in running]
    for process in running:
        process.join()
    print(f"{method}, {fault}: {max(seconds for _, _, seconds in got):.2f} s, {server.gets('00003')} GETs")
    assert all("Chunk 3 of 40" in text and "00003.rec" in text and seconds < 10 for _, text, seconds in got)
    assert len({kind for kind, _, _ in got}) == 1


EXIT = """
import multiprocessing, os, sys
sys.path.append({tests!r})
from records import Records
from hocket_streaming.store.ahead import Ahead
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files
files = Files({path!r}, {options!r})
shards = Records(files, chunks=40, each=100, size=1024)
chunks = Chunks(shards, shards.chunks(), Cache({folder!r}, 1), 1)  # too small: everything is fetched
def work(start):
    for number in range(start, start + 3):
        chunks.open(number)
def main():
    chunks.open(0)
    context = multiprocessing.get_context({method!r})
    for _ in range(2):
        processes = [context.Process(target=work, args=(k,)) for k in (1, 2)]
        [process.start() for process in processes]
        [process.join() for process in processes]
        assert all(process.exitcode == 0 for process in processes)
        chunks.open(1)
    if os.fork() == 0:  # ends as a main process does, with finalizers
        import gc
        gc.collect()
        chunks.open(7)
        sys.exit(0)
    os.wait()
if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("protocol", ["s3", "http"])
def test_ends_without_a_message(server: StandIn, tmp_path: Path, method: str, protocol: str) -> None:
    make(server, tmp_path / "cache", 1)
    path, options = ("s3://bucket/data", server.options()) if protocol == "s3" else (f"{server.url}/bucket/data", None)
    program = tmp_path / "program.py"
    program.write_text(
        EXIT.format(
            tests=str(Path(__file__).parent), path=path, options=options, folder=str(tmp_path / "cache"), method=method
        )
    )
    done = subprocess.run([sys.executable, "-W", "always", str(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_a_stopped_process_holds_nobody_up_for_ever(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket_streaming.store.cache._PATIENCE", 2.0)
    chunks = make(server, tmp_path / "cache", 10 * CHUNK)
    server.rules = [Rule("00003", "slow", 1, 3.0)]
    process = multiprocessing.get_context("fork").Process(target=chunks.open, args=(3,))
    process.start()
    while not list(tmp_path.glob("cache/*.part")):
        time.sleep(0.01)
    assert process.pid
    os.kill(process.pid, signal.SIGSTOP)
    assert chunks.shards.get(chunks.open(3), 7) == record(3 * EACH + 7, SIZE)
    process.kill()
    process.join()


def worker(chunks: Chunks, asked: Any, said: Any) -> None:
    """Read the records of batches, as a worker of a DataLoader does."""
    while (batch := asked.get()) is not None:
        said.put(all(chunks.shards.get(chunks.open(n // EACH), n % EACH) == record(n, SIZE) for n in batch))


@pytest.mark.long
@pytest.mark.parametrize("fetches_ahead", [True, False])
def test_at_the_computed_minimum_of_the_cache(server: StandIn, tmp_path: Path, fetches_ahead: bool) -> None:
    """Lanes × window chunks are open and as many come next: room for both is enough to fetch almost every chunk once."""
    lanes, window, batch = 4, 2, 64
    chunks = make(server, tmp_path / "cache", 2 * lanes * window * (CHUNK + 16))
    draws, order, blocks = random.Random(0), list(range(COUNT)), []
    draws.shuffle(order)
    streams: list[list[int]] = []
    for lane in range(lanes):
        mine = order[lane * COUNT // lanes : (lane + 1) * COUNT // lanes]
        blocks.append([mine[k : k + window] for k in range(0, len(mine), window)])
        stream = []
        for block in blocks[-1]:
            records = [number * EACH + row for number in block for row in range(EACH)]
            draws.shuffle(records)
            stream += records
        streams.append(stream)
    context = multiprocessing.get_context("fork")
    asked, said = [context.Queue(), context.Queue()], context.Queue()
    workers = [context.Process(target=worker, args=(chunks, one, said)) for one in asked]
    for process in workers:
        process.start()
    peak = Peak(chunks.cache.folder)
    ahead = Ahead(chunks, chunks.cache.limit // 2) if fetches_ahead else None
    sent = done = 0
    part, total = batch // lanes, len(streams[0]) * lanes // batch
    while done < total:
        if sent < total and sent - done < 4:
            at = sent * part // (window * EACH)
            if ahead and sent * part % (window * EACH) < part:
                ahead.want(
                    [number for k in (at, at + 1) for lane in blocks for number in (lane[k] if k < len(lane) else [])]
                )
            asked[sent % 2].put([n for stream in streams for n in stream[sent * part : (sent + 1) * part]])
            sent += 1
            continue
        assert said.get(timeout=30)
        done += 1
    for one, process in zip(asked, workers, strict=True):
        one.put(None)
        process.join()
    if ahead:
        ahead.close()
    largest, counted = peak.stop(), chunks.counters.read()
    print(
        f"ahead {fetches_ahead}: {server.gets()} GETs of {COUNT}, peak {largest / CHUNK:.2f} of {2 * lanes * window}, {counted}"
    )
    assert server.gets() <= 1.25 * COUNT
    assert largest <= chunks.cache.limit + (8 + 2) * (CHUNK + 16)


class Samples(Dataset[int]):
    """Numbers of records, read by workers of a DataLoader."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks

    def __len__(self) -> int:
        return EACH * COUNT

    def __getitem__(self, n: int) -> int:
        sample = self.chunks.shards.get(self.chunks.open(n // EACH), n % EACH)
        assert sample == record(n, SIZE)
        return n


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("protocol", ["s3", "http"])
def test_workers_of_a_loader(server: StandIn, tmp_path: Path, method: str, protocol: str) -> None:
    chunks = make(server, tmp_path / "cache", 10 * CHUNK, protocol)
    loader = DataLoader(Samples(chunks), 50, num_workers=2, multiprocessing_context=method)
    assert torch.cat(list(loader)).tolist() == list(range(EACH * COUNT))
    assert server.gets() == COUNT == chunks.counters.read()["chunks_fetched"]
    server.rules = [Rule("00003", 400 if protocol == "s3" else 403)]
    chunks = make(server, tmp_path / "other", 10 * CHUNK, protocol)
    began = time.monotonic()
    cause = "credentials have expired" if protocol == "s3" else "may not be read"
    with pytest.raises(AccessDenied, match=rf"(?s)Chunk 3 of 40.*bucket/data/00003\.rec.*{cause}"):
        list(DataLoader(Samples(chunks), 50, num_workers=2, multiprocessing_context=method))
    assert time.monotonic() - began < 10 + (5 if method == "spawn" else 0)  # seconds to start
