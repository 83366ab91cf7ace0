"""Write the files of this folder with the library that each format is from, which is in an environment of its own.

The committed files were written by mosaicml-streaming 0.13.0, litdata 0.2.76 and webdataset 1.0.2, of this folder, by::

    python write.py mosaic . && python write.py litdata . && python write.py webdataset .

with the library (and Pillow) installed. `nox -s streaming` writes them anew and compares. `read` prints what a library reads
from a folder that hocket wrote, as lines of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import samples

#: Compressions of MDS, and the checksums of the index beside them.
PACKED = {
    "": ["xxh64"],
    "zstd:7": ["sha1"],
    "gz": ["md5", "sha256"],
    "bz2:3": [],
    "br:4": ["xxh3_128"],
    "snappy": ["xxh32"],
}


def mosaic(folder: Path) -> None:
    from PIL import Image
    from streaming import MDSWriter

    for compression, hashes in PACKED.items():
        out = folder / f"mds-{compression.partition(':')[0] or 'plain'}"
        arguments = {"compression": compression or None, "hashes": hashes, "size_limit": 6000}
        with MDSWriter(out=str(out), columns=samples.MDS, **arguments) as writer:
            for k in range(12):
                writer.write(samples.of_mds(k, Image.fromarray))
    with MDSWriter(out=str(folder / "mds-pickled"), columns={"number": "int", "object": "pkl"}) as writer:
        writer.write({"number": 1, "object": {1, 2}})


def litdata(folder: Path) -> None:
    import torch
    from litdata.streaming.cache import Cache
    from litdata.streaming.item_loader import TokensLoader

    def write(name: str, values: list[object], **arguments: object) -> None:
        cache = Cache(str(folder / name), **arguments)
        for number, value in enumerate(values):
            cache[number] = value
        cache.done()
        cache.merge()

    everything = [samples.of_litdata(k, torch) for k in range(12)]
    write("litdata-nested", everything, chunk_size=5)
    for level in ("chunk", "batch", "sample"):
        write(f"litdata-{level}", everything, chunk_size=5, compression="zstd", compression_level=level)
    write("litdata-table", [samples.plain(k) | {"list": [k] * k} for k in range(12)], chunk_size=5)
    write("litdata-single", list(range(7)), chunk_size=3)
    documents = [torch.from_numpy(samples.tokens(k)) for k in range(8)]
    write("litdata-tokens", documents, chunk_bytes=4 * 50, item_loader=TokensLoader(block_size=8))
    write("litdata-pickled", [{"object": {1, 2}}], chunk_size=5)


def webdataset(folder: Path) -> None:
    import webdataset as wds

    (folder / "webdataset").mkdir(parents=True, exist_ok=True)
    with wds.ShardWriter(str(folder / "webdataset/%03d.tar"), maxcount=5, verbose=0, mtime=0) as sink:
        for k in range(12):
            sample = samples.plain(k)
            sink.write({"__key__": f"a/{k:05}", "cls": k, "txt": sample["text"], "seg.bin": sample["raw"]})


def read(library: str, folder: Path) -> None:
    """Print the columns number, text and raw of every sample that a library reads."""
    if library == "mosaic":
        from streaming import StreamingDataset

        rows = StreamingDataset(local=str(folder), shuffle=False, batch_size=1, validate_hash="xxh64")
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(folder).to_pylist()
    for k in range(len(rows)):
        row = rows[k]
        print(json.dumps([int(row["number"]), row["text"], row["raw"].hex()]))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(sys.argv[2], Path(sys.argv[3]))
    else:
        {"mosaic": mosaic, "litdata": litdata, "webdataset": webdataset}[sys.argv[1]](Path(sys.argv[2]))
