"""The data that benchmarks of streams read, and a stand-in for S3 in a process of its own.

``streaming_data.py litdata FOLDER`` writes litdata's chunks with litdata, and ``serve FOLDER LATENCY`` serves a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1] / "packages/streaming/tests"
#: Bytes of a sample: how many samples, and how many of them a chunk has.
SIZES = {2_048: (20_000, 500), 100_000: (2_000, 20)}
BUCKET = "bucket"


def write(folder: Path, litdata: str | None, sizes: Sequence[int], parquet: bool = True) -> None:
    """Write the data sets in every format; litdata's chunks where the Python of an environment with litdata is given."""
    import pyarrow
    import pyarrow.parquet

    import hocket_streaming

    for size in sizes:
        samples, chunk = SIZES[size]
        rows = np.random.default_rng(17).integers(0, 256, (samples, size), np.uint8)
        rows[:, :8] = np.arange(samples)[:, None].view(np.uint8)
        to = folder / str(size)
        (to / "npy").mkdir(parents=True)
        np.save(to / "npy/rows.npy", rows)
        # A sample takes its bytes and 4 of its offset; the rest is the header of a shard.
        limit = chunk * (size + 4) + 600
        with hocket_streaming.MDSWriter(
            str(to / "mds"), columns={"data": f"ndarray:uint8:{size}"}, size_limit=limit
        ) as out:
            for row in rows:
                out.write({"data": row})
        if not parquet:
            continue
        (to / "parquet").mkdir()
        for number, part in enumerate(np.array_split(rows, 10)):
            column = pyarrow.array([row.tobytes() for row in part], pyarrow.binary())
            pyarrow.parquet.write_table(
                pyarrow.table({"data": column}), to / f"parquet/{number}.parquet", row_group_size=chunk,
                compression="none", use_dictionary=False,
            )  # fmt: skip
    if litdata:
        subprocess.run([litdata, __file__, "litdata", str(folder)], check=True, stdout=subprocess.DEVNULL)
    os.sync()


def write_litdata(folder: Path) -> None:
    """Write litdata's chunks of the rows that are there, and its index of Parquet; in an environment with litdata."""
    from litdata import index_parquet_dataset
    from litdata.streaming.cache import Cache

    for size, (_, chunk) in SIZES.items():
        cache = Cache(str(folder / str(size) / "litdata"), chunk_size=chunk)
        for number, row in enumerate(np.load(folder / str(size) / "npy/rows.npy")):
            cache[number] = {"data": row}
        cache.done()
        cache.merge()
        if (folder / str(size) / "parquet").exists():
            index_parquet_dataset(str(folder / str(size) / "parquet"))


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of the files in memory."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Store:
    """A stand-in for S3, in a process of its own, that serves a folder as a bucket."""

    def __init__(self, folder: Path, latency: float = 0.01) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(folder), str(latency)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.options: dict[str, Any] = json.loads(self._process.stdout.readline())

    def counted(self) -> dict[str, int]:
        """Return the GETs and the bytes since the last time: of all files, and without indexes of formats."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def serve(folder: Path, latency: float) -> None:
    """Serve until the input ends; each line of it is answered with what was asked for since the last one."""
    sys.path.insert(0, str(TESTS))
    from stand_in import serving

    with serving(latency) as server:
        server.files = {
            f"{BUCKET}/{file.relative_to(folder).as_posix()}": file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        print(json.dumps(server.options()), flush=True)
        for _ in sys.stdin:
            log, server.log[:] = list(server.log), []
            gets = [(path, size) for method, path, _, size in log if method == "GET" and size]
            data = [size for path, size in gets if not path.endswith(".json")]
            counts = {"gets": len(gets), "chunks": len(data), "bytes": sum(size for _, size in gets)}
            print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "litdata":
        write_litdata(Path(sys.argv[2]))
    else:
        serve(Path(sys.argv[2]), float(sys.argv[3]))
