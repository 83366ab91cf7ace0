"""The index that hocket stores: right, compact, out of date, damaged, hostile."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import time
from pathlib import Path

import pytest
import xxhash

from hocket_streaming import indexes
from hocket_streaming.formats import find
from hocket_streaming.formats.lines import JsonLines
from hocket_streaming.formats.litdata import Litdata
from hocket_streaming.formats.mds import MDS
from hocket_streaming.formats.webdataset import WebDataset
from hocket_streaming.shards import INDEX, Chunk, Part
from hocket_streaming.store.files import Files

FILES = Path(__file__).parent / "files"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FILES / "webdataset", tmp_path / "data")
    return tmp_path / "data"


def read_by(shards, monkeypatch):
    """Return a list to which the names of files are added that are read."""
    names = []
    plain = shards.files.read
    monkeypatch.setattr(
        shards.files, "read", lambda name, *rest, **more: names.append(name) or plain(name, *rest, **more)
    )
    return names


def test_an_index_is_built_once_and_read_from_the_cache(folder, tmp_path, monkeypatch):
    shards = find(Files(str(folder)))
    built = indexes.indexed(shards, cache=tmp_path / "cache")
    assert [chunk.checksum for chunk in built] == [
        f"xxh64:{xxhash.xxh64((folder / name).read_bytes()).hexdigest()}" for name in ("000.tar", "001.tar", "002.tar")
    ]
    again = find(Files(str(folder)))
    names = read_by(again, monkeypatch)
    assert indexes.indexed(again, cache=tmp_path / "cache") == built and not names
    assert not (folder / INDEX).exists(), "only `hocket data index` writes beside the data"


def test_a_file_that_changes_makes_another_index(folder, tmp_path):
    cache = tmp_path / "cache"
    assert sum(chunk.samples for chunk in indexes.indexed(find(Files(str(folder))), cache=cache)) == 12
    with tarfile.open(folder / "003.tar", "w") as file:
        file.addfile(tarfile.TarInfo("z.txt"), io.BytesIO())
    assert sum(chunk.samples for chunk in indexes.indexed(find(Files(str(folder))), cache=cache)) == 13


def test_the_index_beside_the_data_is_used_while_it_agrees(folder, tmp_path, monkeypatch):
    shards = find(Files(str(folder)))
    built = indexes.build(shards)
    assert indexes.store(shards, built).endswith(INDEX)
    names = read_by(shards, monkeypatch)
    assert indexes.indexed(shards, cache=tmp_path / "cache") == built and names == [INDEX]
    (folder / "002.tar").unlink()
    with pytest.warns(
        UserWarning, match=r"hocket-index.json is not used.*1 of its files, such as 002.tar.*hocket data index"
    ):
        assert len(indexes.indexed(find(Files(str(folder))), cache=tmp_path / "cache")) == 2


def test_an_index_of_other_options_is_not_used(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 100)
    shards = JsonLines(Files(str(tmp_path)), chunk_bytes=100)
    indexes.store(shards, indexes.build(shards))
    assert len(indexes.indexed(shards)) == 9
    with pytest.warns(UserWarning, match="options"):
        assert len(indexes.indexed(JsonLines(Files(str(tmp_path))), cache=tmp_path / "cache")) == 1


def test_checksums_are_added_where_a_format_has_none(tmp_path):
    shards = Litdata(Files(str(FILES / "litdata-nested")))
    assert not any(chunk.checksum for chunk in indexes.indexed(shards, cache=tmp_path))
    added = indexes.indexed(shards, checksums=True, cache=tmp_path)
    assert [chunk.checksum for chunk in added] == [
        f"xxh64:{xxhash.xxh64((FILES / 'litdata-nested' / f'chunk-0-{k}.bin').read_bytes()).hexdigest()}"
        for k in range(3)
    ]
    mosaic = MDS(Files(str(FILES / "mds-zstd")))
    assert indexes.indexed(mosaic, checksums=True, cache=tmp_path) == mosaic.chunks(), "it has checksums of its own"


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert len(indexes.indexed(find(Files(str(folder))), cache=tmp_path / "file" / "cache")) == 3


def test_a_store_that_cannot_list_is_read_by_its_index(folder, monkeypatch):
    shards = find(Files(str(folder)))
    built = indexes.build(shards)
    indexes.store(shards, built)

    def unlistable(self):
        raise OSError("plain http cannot list")

    monkeypatch.setattr(Files, "names", unlistable)
    there = find(Files(str(folder)))
    assert type(there) is WebDataset and indexes.indexed(there) == built


@pytest.mark.long
def test_an_index_of_many_chunks_is_small_and_fast(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    shards = JsonLines(Files(str(tmp_path)))
    parts = [(Part("a.jsonl", 3),), (Part("big.jsonl", 10**6, 10**6 * 77), Part("big.jsonl", 5, 10**12))]
    many = [Chunk(parts[k % 2], 10**4 + k, f"xxh64:{k:016x}", 0, [["text"] * 50, None]) for k in range(20_000)]
    start = time.perf_counter()
    data = indexes.dumps(shards, many)
    assert len(data) < 20_000 * 75
    files = dict(map(tuple, json.loads(data)["files"]))
    shards.data_files = lambda: files  # the file of a terabyte is not here
    assert indexes.loads(data, shards) == many
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hocket", 2), ("format", 3), ("files", [["../x", 3]]), ("files", [["/x", 3]]), ("files", 3),
        ("files", [["000.tar", -1]]),
        ("chunks", [[1, "", 0, 0, 99]]), ("chunks", [[0, "", 0, 0, 0]]), ("chunks", [[1, "", -1, 0, 0]]),
        ("chunks", [[1, "", 0, 0, [0, 0, 10**9]]]), ("chunks", [[1, "rot13:00", 0, 0, 0]]), ("chunks", [[1, "", 0, -1, 0]]),
        ("chunks", [[True, "", 0, 0, 0]]), ("chunks", [7]), ("extras", []),
    ],
)  # fmt: skip
def test_a_hostile_index_is_refused(folder, tmp_path, key, value):
    shards = find(Files(str(folder)))
    content = json.loads(indexes.dumps(shards, indexes.build(shards)))
    content[key] = value
    with pytest.raises(OSError):
        indexes.loads(json.dumps(content).encode(), shards)
    with pytest.raises(OSError):
        indexes.loads(b"[" * 10**5, shards)
