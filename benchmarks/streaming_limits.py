"""What a stream may cost: until a resumed run's first batch, for the order, in bytes of machines, and in room of the cache.

Machines are ranks with caches of their own, in processes of their own at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import Series, table
from streaming_data import BUCKET, SIZES, Store

BATCH, SIZE = 64, 2_048
#: Fetches at the same time on one machine: 8 threads of each worker and of the process that fetches ahead.
FETCHES = 3 * 8
ORDER = """
import json, resource, sys, time
import numpy, torch
from hocket_streaming.order.sampler import GlobalOrder
class Data:
    sizes, identity = [5_000] * 20_000, "data"
    def ahead(self, chunks, at_once): pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
order = GlobalOrder([Data()], 4096, seed=17)
next(order.after(int(len(order) * float(sys.argv[1])))[0])
seconds = time.perf_counter() - began
print(json.dumps([seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6]))
"""


def run(folder: Path, cache: Path, store: Store, repeats: int) -> dict[str, Any]:
    """Return a table, the raw figures, and the limits that are exceeded."""
    from streaming import asked

    data = folder / str(SIZE) / "mds"
    sizes = [file.stat().st_size for file in data.glob("*.mds")]
    total, largest, chunks = sum(sizes), max(sizes), len(sizes)
    ask: dict[str, Any] = {
        "reader": "hocket", "path": f"s3://{BUCKET}/{SIZE}/mds", "options": store.options, "cache": str(cache),
    }  # fmt: skip
    rows: list[tuple[str, float, float, list[float]]] = []

    def first(skip: int) -> float:
        shutil.rmtree(cache, ignore_errors=True)
        return float(asked(ask | {"skip": skip, "batches": 1})["epochs"][0]["first"])

    batches = -(-SIZES[SIZE][0] // BATCH)
    starts = [(first(0), first(batches * 9 // 10)) for _ in range(repeats)]
    ratios = [resumed / new for new, resumed in starts]
    rows.append(("first batch at 90 % of an epoch ÷ at 0", median(ratios), 1.2, ratios))

    for part in (0.0, 0.5, 0.9):
        ordered = [_order(part) for _ in range(3)]
        name = f"order of 1e8 samples in 20,000 chunks, at {part:.0%}"
        rows.append((f"{name}, s", median(each[0] for each in ordered), 1.0, [each[0] for each in ordered]))
        rows.append((f"{name}, MB more", median(each[1] for each in ordered), 200.0, [each[1] for each in ordered]))

    for ranks in (1, 2, 3, 4):
        store.counted()
        owns = [cache.with_name(f"cache-{rank}") for rank in range(ranks)]
        for own in owns:
            shutil.rmtree(own, ignore_errors=True)
        asks = [ask | {"cache": str(own), "rank": rank, "ranks": ranks} for rank, own in enumerate(owns)]
        with ThreadPoolExecutor(ranks) as pool:
            answers = list(pool.map(asked, asks))
        assert sum(answer["epochs"][0]["samples"] for answer in answers) == SIZES[SIZE][0], answers
        fetched = store.counted()["bytes"] / total
        rows.append((f"bytes fetched by {ranks} machines ÷ data", fetched, 1 + (16 + ranks) / chunks, [fetched]))

    lanes, window = 4, 2
    limit = 2 * lanes * window * largest
    gets, peaks = [], []
    for _ in range(repeats):
        shutil.rmtree(cache, ignore_errors=True)
        store.counted()
        with _watched(cache) as peak:
            answer = asked(ask | {"lanes": lanes, "window": window, "cache_limit": limit})
        assert answer["epochs"][0]["distinct"] == SIZES[SIZE][0], answer
        gets.append(store.counted()["chunks"] / chunks)
        peaks.append(peak[0] / 1e6)
    rows.append((f"GETs ÷ chunks with the least cache, {limit / 1e6:.1f} MB", median(gets), 1.25, gets))
    rows.append(("peak of that cache, MB", max(peaks), (limit + FETCHES * largest) / 1e6, peaks))

    above = [f"{name}: {value:.3g}, not {bound:.3g}" for name, value, bound, _ in rows if value > bound]
    shown = [[name, str(Series(all_)), f"{bound:.3g}"] for name, value, bound, all_ in rows]
    return {
        "values": {name: values for name, _, _, values in rows},
        "above": above,
        "table": table([["", "measured", "at most"], *shown]),
    }


def _order(part: float) -> tuple[float, float]:
    done = subprocess.run([sys.executable, "-c", ORDER, str(part)], capture_output=True, text=True, check=True)
    seconds, megabytes = json.loads(done.stdout)
    return seconds, megabytes


@contextmanager
def _watched(folder: Path) -> Iterator[list[int]]:
    """Look at the bytes of the files of a folder every few milliseconds, and keep the most."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            try:
                with os.scandir(folder) as entries:
                    peak[0] = max(peak[0], sum(_size(entry) for entry in entries))
            except OSError:
                pass
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
