"""Chunks from disk, cache and store: the right records, or an error that says what is wrong, soon; within the limit."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from records import Records, record
from stand_in import Rule, StandIn, serving

from hocket_streaming.errors import AccessDenied, DamagedData, MissingData, StreamError, Unreachable
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files

EACH, COUNT = 50, 12
KEPT = EACH * 64 + 16


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with serving() as server:
        yield server


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.long), "http"])
def make(request: pytest.FixtureRequest, tmp_path: Path, server: StandIn) -> Callable[..., Chunks]:
    server.rules.clear()
    server.log.clear()
    server.files.clear()

    def make(limit: int = 1 << 20, keep: int = 4, folder: Path = tmp_path / "cache", **options: Any) -> Chunks:
        files = (
            Files("s3://bucket/data", server.options()) if request.param == "s3" else Files(f"{server.url}/bucket/data")
        )
        shards = Records(files, chunks=COUNT, each=EACH, **options)
        server.files |= {f"bucket/data/{number:05}.rec": shards.file(number) for number in range(COUNT)}
        return Chunks(shards, shards.chunks(), Cache(folder, limit), keep)

    return make


def right(chunks: Chunks, number: int) -> bool:
    opened = chunks.open(number)
    return all(chunks.shards.get(opened, row) == record(number * EACH + row) for row in range(EACH))


def used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != ".total")


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"parts": 3}, {"sums": False}])
def test_fetches_a_chunk_once(make: Callable[..., Chunks], server: StandIn, options: dict[str, Any]) -> None:
    chunks = make(**options)
    assert all(right(chunks, number) for number in range(COUNT))
    gets = server.gets()
    assert gets == COUNT  # parts that follow each other are one request
    again = pickle.loads(pickle.dumps(chunks))
    assert all(right(again, number) for number in (*range(COUNT), 3, 3)) and server.gets() == gets
    counted = chunks.counters.read()
    assert counted["chunks_fetched"] == COUNT and counted["bytes_fetched"] == sum(map(len, server.files.values()))
    assert again.counters.read()["hits"] == COUNT + 1  # 3 was no longer open, then it was
    assert {file.suffix for file in chunks.cache.folder.iterdir()} == {""}


def test_keeps_within_the_limit_least_recently_used_first(make: Callable[..., Chunks], server: StandIn) -> None:
    chunks = make(limit=5 * KEPT, keep=1)
    for number in range(COUNT):
        assert right(chunks, number) and used(chunks.cache.folder) <= 5 * KEPT
        assert right(chunks, 0)
    assert server.gets("00000") == 1 and server.gets() == COUNT
    assert all(chunks.cache.has(chunks.name(number)) for number in (0, COUNT - 1, COUNT - 2, COUNT - 3, COUNT - 4))


def test_protected_chunks_go_last(make: Callable[..., Chunks]) -> None:
    chunks = make(limit=5 * KEPT, keep=1)
    for number in (0, 1):
        chunks.fetch_ahead(number)
    chunks.cache.protect([chunks.name(0), chunks.name(1)], 60)
    for number in range(2, COUNT):
        assert right(chunks, number)
    assert chunks.cache.has(chunks.name(0)) and chunks.cache.has(chunks.name(1))
    assert right(chunks, 0)
    for number in range(2, COUNT):
        assert right(chunks, number)
    assert not chunks.cache.has(chunks.name(0)) and chunks.cache.has(chunks.name(1))


def test_limits_that_differ_and_a_limit_below_a_chunk(make: Callable[..., Chunks]) -> None:
    large, small, none = make(limit=10 * KEPT, keep=1), make(limit=3 * KEPT, keep=1), make(limit=KEPT - 1, keep=1)
    for number in range(COUNT):
        assert right(large, number) and right(none, number)
    assert used(large.cache.folder) == 10 * KEPT
    for number in range(3, COUNT):
        assert right(small, number - 3) and right(large, number)
        assert used(large.cache.folder) <= 10 * KEPT
    assert right(small, 11) and right(small, 1) and used(small.cache.folder) <= 10 * KEPT


@pytest.mark.parametrize(
    "fault", [500, "cut", "corrupt", *(pytest.param(one, marks=pytest.mark.long) for one in (503, "short"))]
)
def test_passing_faults_are_right(make: Callable[..., Chunks], server: StandIn, fault: int | str) -> None:
    chunks = make()
    server.rules = [Rule("00003", fault, 2)]
    assert right(chunks, 3) and server.gets("00003") == 3 and chunks.counters.read()["retries"] == 2


@pytest.mark.parametrize(
    ("fault", "kind", "cause"),
    [(403, AccessDenied, "may not be read"), (404, MissingData, "does not exist"), ("short", DamagedData, "has 1,600 bytes"),
     ("corrupt", DamagedData, "its checksum is xxh64:[0-9a-f]{16}, and its index says"),
     pytest.param(503, Unreachable, "in 5 attempts", marks=pytest.mark.long),
     pytest.param("cut", Unreachable, "attempts", marks=pytest.mark.long),
     pytest.param("silent", Unreachable, "in 2 attempts", marks=pytest.mark.long)],
)  # fmt: skip
def test_lasting_faults_are_errors(
    make: Callable[..., Chunks], server: StandIn, fault: int | str, kind: type[StreamError], cause: str
) -> None:
    chunks, began = make(), time.monotonic()
    server.rules = [Rule("00003", fault, seconds=12)]
    with pytest.raises(kind, match=rf"Chunk 3 of 12.*bucket/data/00003\.rec.*{cause}"):
        chunks.open(3)
    print(f"{fault}: {time.monotonic() - began:.2f} s, {server.gets('00003')} GETs")
    assert time.monotonic() - began < 10
    server.rules.clear()
    assert right(chunks, 3) and right(chunks, 4)


@pytest.mark.long
def test_damage_without_a_checksum_that_unpacking_meets(make: Callable[..., Chunks], server: StandIn) -> None:
    chunks = make(packed=True, sums=False)
    server.rules = [Rule("00003", "corrupt", 2), Rule("00004", "corrupt")]
    assert right(chunks, 3)
    with pytest.raises(DamagedData, match=r"Chunk 4 of 12, .*00004\.rec, is damaged: it cannot be unpacked"):
        chunks.open(4)


def test_a_cache_that_is_damaged_or_removed(make: Callable[..., Chunks], server: StandIn) -> None:
    chunks = make(keep=1)
    assert right(chunks, 3) and right(chunks, 4)
    path = chunks.cache.folder / chunks.name(3)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(b"?")
    assert right(chunks, 3) and server.gets("00003") == 2
    opened = chunks.open(3)
    shutil.rmtree(chunks.cache.folder)
    assert chunks.shards.get(opened, 7) == record(3 * EACH + 7)
    assert right(chunks, 4) and right(chunks, 5) and used(chunks.cache.folder) == 2 * KEPT


def test_a_disk_without_room(make: Callable[..., Chunks], server: StandIn) -> None:
    chunks = make(keep=1)
    assert right(chunks, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (EACH * 32, before[1]))  # writing beyond it fails
    try:
        with pytest.warns(UserWarning, match=r"cache .* cannot be written: .*too large.* fetched into memory"):
            assert right(chunks, 3)
        assert right(chunks, 4) and right(chunks, 1) and right(chunks, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert server.gets("00003") == 2 and used(chunks.cache.folder) == KEPT
    assert right(chunks, 4) and right(chunks, 3) and used(chunks.cache.folder) == 3 * KEPT


def test_a_folder_that_cannot_be_one(make: Callable[..., Chunks], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chunks = make(folder=tmp_path / "file/cache")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert right(chunks, 3)


@pytest.mark.parametrize("options", [{}, {"parts": 3}, {"packed": True}])
def test_local_files_are_mapped_where_they_are(tmp_path: Path, options: dict[str, Any]) -> None:
    shards = Records(Files(tmp_path / "data"), chunks=COUNT, each=EACH, **options)
    shards.write(tmp_path / "data")
    chunks = Chunks(shards, shards.chunks(), Cache(tmp_path / "cache", 1 << 20), 2)
    assert all(right(chunks, number) for number in range(COUNT))
    assert (tmp_path / "cache").exists() == bool(options.get("packed"))
    path = tmp_path / "data/00003.rec"
    chunks = Chunks(shards, shards.chunks(), Cache(tmp_path / "cache2", 1 << 20), 2)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedData, match=r"Chunk 3 of 12, .*00003\.rec, is damaged: its checksum is xxh64"):
        chunks.open(3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedData, match=r"Chunk 3 of 12.*00003\.rec.* bytes"):
        chunks.open(3)
    path.unlink()
    with pytest.raises(MissingData, match=r"Chunk 3 of 12.*00003\.rec does not exist"):
        chunks.open(3)


def test_closed_chunks_free_their_files(tmp_path: Path) -> None:
    shards = Records(Files(tmp_path / "data"), chunks=COUNT, each=EACH)
    shards.write(tmp_path / "data")
    chunks = Chunks(shards, shards.chunks(), Cache(tmp_path / "cache", 1 << 20), 2)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    assert all(right(chunks, number) for number in range(COUNT))
    gc.collect()
    assert not before or len(os.listdir("/proc/self/fd")) <= before + 2


def test_the_store_imports_no_torch() -> None:
    modules = [f"hocket_streaming.store.{name}" for name in ("files", "cache", "fetching", "counters")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
