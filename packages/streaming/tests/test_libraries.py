"""Read what the libraries write here and now, and let them read what hocket writes. `nox -s streaming` installs them.

Each is in an environment of its own, whose Python is in ``STREAMING_PYTHONS``: JSON of names and paths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hocket_streaming
from hocket_streaming.formats import find
from hocket_streaming.store.files import Files
from hocket_testkit import chunks

FILES = Path(__file__).parent / "files"
sys.path.append(str(FILES))
import samples  # noqa: E402

PYTHONS = json.loads(os.environ.get("STREAMING_PYTHONS", "{}"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHONS, reason="the libraries are in environments of their own, which `nox -s streaming` makes"
    ),
]


def run(library, *arguments):
    """Run the script beside the files with the Python of a library, and return the lines of JSON that it prints."""
    command = [PYTHONS[library], str(FILES / "write.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def read(folder, **options):
    shards = find(Files(str(folder)), **options)
    return chunks.samples(shards, shards.chunks())


@pytest.mark.parametrize("library", ["mosaic", "litdata", "webdataset"])
def test_what_a_library_writes_now_is_read_as_the_files_here(library, tmp_path):
    """The tests of conformance compare those with the samples that were written."""
    run(library, library, tmp_path)
    written = [folder for folder in sorted(tmp_path.iterdir()) if not folder.name.endswith("-pickled")]
    for folder in written:
        options = {"length": 8} if folder.name.endswith("tokens") else {}
        assert read(folder, **options) == read(FILES / folder.name, **options), folder.name
    start = "mds" if library == "mosaic" else library
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == sorted(
        path.name for path in FILES.glob(f"{start}*")
    )


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_mosaic_reads_what_hocket_writes(compression, tmp_path):
    columns = {"number": "int", "text": "str", "raw": "bytes"}
    with hocket_streaming.MDSWriter(str(tmp_path), columns, compression=compression, size_limit=1000) as writer:
        for k in range(50):
            writer.write(samples.plain(k))
    assert len(list(tmp_path.glob("*.mds*"))) > 1
    assert run("mosaic", "read", "mosaic", tmp_path) == expected(50)


def test_pyarrow_reads_what_hocket_writes(tmp_path):
    mds = tmp_path / "mds"
    with hocket_streaming.MDSWriter(str(mds), {"number": "int", "text": "str", "raw": "bytes"}) as writer:
        for k in range(50):
            writer.write(samples.plain(k))
    hocket_streaming.write(
        str(mds), str(tmp_path / "parquet"), format="parquet", shuffle=False, size_limit=2000, group=500
    )
    assert run("pyarrow", "read", "pyarrow", tmp_path / "parquet") == expected(50)
    rows = read(tmp_path / "parquet")
    assert [[row["number"], row["text"], row["raw"].hex()] for row in rows] == expected(50)


def expected(count):
    listed = map(samples.plain, range(count))
    return [[row["number"], row["text"], row["raw"].hex()] for row in listed]
