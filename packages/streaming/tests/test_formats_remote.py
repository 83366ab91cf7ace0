"""Every format from a stand-in of S3 and from plain HTTP, through the cache: the samples of the disk, in few requests."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import numpy as np
import pytest
from stand_in import Rule, serving

from hocket.plugins import registry
from hocket_streaming import indexes
from hocket_streaming.errors import AccessDenied, StreamError, Unreachable
from hocket_streaming.formats import find
from hocket_streaming.formats.webdataset import WebDataset
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files
from hocket_testkit import chunks as kit

FILES = Path(__file__).parent / "files"
WRITTEN = ("mds-plain", "mds-zstd", "litdata-nested", "litdata-batch", "litdata-chunk", "litdata-table", "webdataset")
pytestmark = pytest.mark.long


def made(folder, name):
    """Write a data set of a format whose library is here, and return the options of the format."""
    rng = np.random.default_rng(0)
    if name == "npy":
        np.save(folder / "a.npy", rng.random((300, 7)))
        return {"chunk_bytes": 5000}
    if name == "tokens":
        rng.integers(0, 9, 5000).astype("uint16").tofile(folder / "a.bin")
        return {"dtype": "uint16", "length": 64, "chunk_bytes": 1024}
    if name in ("jsonl", "text"):
        line = '{{"a": {}}}\n' if name == "jsonl" else "line {}\n"
        (folder / f"a.{name.replace('text', 'txt')}").write_text("".join(map(line.format, range(500))))
        return {"chunk_bytes": 1000}
    if name == "folders":
        for k in range(20):
            (folder / f"{k % 3}").mkdir(exist_ok=True)
            (folder / f"{k % 3}/{k}.jpg").write_bytes(bytes(k))
        return {"chunk_files": 6}
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"a": range(300), "b": [f"{k}" * k for k in range(300)], "c": [[k] * 3 for k in range(300)]})
    if name == "parquet":
        parquet.write_table(table, folder / "a.parquet", row_group_size=90)
        return {"columns": ["a", "c"]}
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    return {}


@pytest.mark.parametrize("name", [*WRITTEN, "npy", "tokens", "jsonl", "text", "folders", "parquet", "arrow"])
def test_a_store_gives_the_samples_of_the_disk(name, tmp_path):
    folder = FILES / name
    options = {}
    if name not in WRITTEN:
        (folder := tmp_path / "data").mkdir()
        options = made(folder, name)
    local = find(Files(str(folder)), **options)
    expected = kit.samples(local, local.chunks())
    with serving() as server:
        contents = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        server.files |= {f"bucket/data/{path}": data for path, data in contents.items()}
        remote = find(Files("s3://bucket/data", server.options()), **options)
        listed = indexes.indexed(remote, checksums=True, cache=tmp_path / "indexes")
        server.log.clear()
        assert read(remote, listed, tmp_path / "s3") == expected
        gets = [request for request in server.log if request[0] == "GET"]
        # A folder's chunk has a request for each file; Arrow's schema is read once; a column of Parquet may be apart.
        assert len(gets) <= sum(len(chunk.parts) for chunk in listed) + (name == "arrow")
        index = indexes.dumps(remote, listed)
        server.files["bucket/data/hocket-index.json"] = index
        web = find(Files(f"{server.url}/bucket/data"), **(options if (folder / "index.json").exists() else {}))
        assert read(web, indexes.indexed(web, cache=tmp_path / "indexes"), tmp_path / "http") == expected


def test_a_format_that_lists_files_does_not_hide_others_on_plain_http(tmp_path):
    class Listing(WebDataset):
        @classmethod
        def serves(cls, files):
            return any(name.endswith(".own") for name in files.names())

    registry.register("shards", "listing", Listing)
    try:
        with serving() as server:
            for path in (FILES / "litdata-single").iterdir():
                server.files[f"bucket/data/{path.name}"] = path.read_bytes()
            shards = find(Files(f"{server.url}/bucket/data"))
            assert read(shards, shards.chunks(), tmp_path) == list(range(7))
            with pytest.raises(StreamError, match="cannot be listed"):
                find(Files(f"{server.url}/bucket/nothing"))
            server.rules.append(Rule("", 403))
            with pytest.raises(AccessDenied):
                find(Files("s3://bucket/data", server.options()))
    finally:
        registry.unregister("shards", "listing")


def read(shards, listed, folder):
    chunks = Chunks(shards, listed, Cache(folder, 1 << 24), 2)
    return [
        kit.plain(shards.get(chunks.open(number), row))
        for number, chunk in enumerate(listed)
        for row in range(chunk.samples)
    ]


@pytest.mark.long
def test_a_store_that_does_not_answer_is_an_error_once_and_not_for_every_format():
    with socket.socket() as closed:  # a port that nobody listens to
        closed.bind(("127.0.0.1", 0))
        options = {"key": "key", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        began = time.monotonic()
        with pytest.raises(Unreachable, match="s3://bucket/x could not be read"):
            find(Files("s3://bucket/x", options))
    assert time.monotonic() - began < 10
