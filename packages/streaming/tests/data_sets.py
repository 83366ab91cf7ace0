"""A data set of numbered samples in every format that can be written here, and how to get the number of a sample."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

import hocket_streaming

SAMPLES, CHUNK = 192, 6


def numbers(sample: Any) -> int:
    """The number of a sample of any of the formats below; a function of a module, which spawned workers can import."""
    if isinstance(sample, dict):
        for key in ("number", "txt", "bytes", "data"):
            if key in sample:
                sample = sample[key]
                break
        else:
            raise AssertionError(sample)
    if isinstance(sample, bytes):
        sample = sample.decode()
    return int(np.asarray(sample).reshape(-1)[0]) if not isinstance(sample, str) else int(sample)


def write(kind: str, folder: Path, samples: int = SAMPLES, chunk: int = CHUNK) -> tuple[str, dict[str, Any]]:
    """Write the data set, and return its path and the options of its format."""
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {}
    if kind.startswith("mds"):
        # a sample takes 8 bytes and 4 of its offset; the head of a shard, with its columns, 178
        with hocket_streaming.MDSWriter(
            str(folder / "data"), columns={"number": "int"}, size_limit=180 + 12 * chunk, compression=kind[4:]
        ) as out:
            for number in range(samples):
                out.write({"number": number})
        return str(folder / "data"), options
    if kind == "npy":
        np.save(folder / "data.npy", np.arange(samples * 2).reshape(samples, 2) // 2)
        return str(folder / "data.npy"), {"chunk_bytes": 16 * chunk}
    if kind == "bin":
        (folder / "data.bin").write_bytes(np.repeat(np.arange(samples, dtype="<u4"), 4).tobytes())
        return str(folder / "data.bin"), {"dtype": "uint32", "length": 4, "chunk_bytes": 16 * chunk}
    if kind in ("parquet", "arrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"number": pa.array(range(samples))})
        if kind == "parquet":
            pq.write_table(table, folder / "data.parquet", row_group_size=chunk)
        else:
            with pa.ipc.new_file(folder / "data.arrow", table.schema) as out:
                out.write_table(table, max_chunksize=chunk)
        return str(folder), options
    if kind == "webdataset":
        for shard in range(0, samples, chunk):
            with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
                for number in range(shard, min(shard + chunk, samples)):
                    about = tarfile.TarInfo(f"{number:05}.txt")
                    about.size = len(text := str(number).encode())
                    tar.addfile(about, io.BytesIO(text))
        return str(folder), options
    if kind == "jsonl":
        for shard in range(0, samples, chunk):
            lines = [json.dumps({"number": number}) for number in range(shard, min(shard + chunk, samples))]
            (folder / f"{shard:05}.jsonl").write_text("\n".join(lines) + "\n")
        return str(folder), options
    if kind == "text":
        (folder / "data.txt").write_text("".join(f"{number}\n" for number in range(samples)))
        return str(folder / "data.txt"), {"chunk_bytes": 4 * chunk}
    assert kind == "folders"
    for number in range(samples):
        (folder / f"class{number % 3}").mkdir(exist_ok=True)
        (folder / f"class{number % 3}" / f"{number:05}.txt").write_text(str(number))
    return str(folder), {"chunk_bytes": 3 * chunk}


KINDS = ("mds", "mds:zstd", "npy", "bin", "parquet", "arrow", "webdataset", "jsonl", "text", "folders")
