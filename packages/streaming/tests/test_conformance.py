"""Every format passes the suite of its kind, on files that the library of the format wrote."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import hocket.testkit
from hocket_streaming.formats import arrow, folders, lines, litdata, mds, parquet, rows, webdataset
from hocket_streaming.store.files import Files

FILES = Path(__file__).parent / "files"
sys.path.append(str(FILES))
import samples  # noqa: E402


class Suite(hocket.testkit.ShardsConformance):
    options: dict = {}
    #: The folder of `FILES` that the library of the format wrote.
    written = ""

    def make(self):
        return self.format(Files(str(self.source)), **self.options)

    def copied(self, folder):
        shutil.copytree(FILES / self.written, folder, dirs_exist_ok=True)


class TestMDS(Suite):
    format, written = mds.MDS, "mds-plain"

    def write(self, folder):
        self.copied(folder)
        written = [samples.of_mds(k) | {"jpeg": _as_jpeg(samples.pixels(k))} for k in range(12)]
        return [dict(sorted(sample.items())) for sample in written]  # mosaicml-streaming sorts columns


def _as_jpeg(pixels):
    """Return the pixels after the lossy compression, which this Pillow computes as the one that wrote the files did."""
    image = pytest.importorskip("PIL.Image")
    image.fromarray(pixels).save(file := io.BytesIO(), "JPEG")
    return np.asarray(image.open(file))


@pytest.mark.long
class TestTokens(Suite):
    format, options = rows.Tokens, {"dtype": "uint16", "length": 8, "chunk_bytes": 64}

    def write(self, folder):
        tokens = np.arange(100, dtype="uint16")
        tokens.tofile(folder / "a.bin")
        tokens[:20].tofile(folder / "b.bin")
        return [*tokens[:96].reshape(12, 8), *tokens[:16].reshape(2, 8)]


@pytest.mark.long
class TestNpy(Suite):
    format, options = rows.Npy, {"chunk_bytes": 50}

    def write(self, folder):
        array = np.arange(60, dtype="float32").reshape(5, 3, 4)
        np.save(folder / "a.npy", array)
        np.save(folder / "b.npy", array[:1])
        return [*array, array[0]]


@pytest.mark.long
class TestSafetensors(Suite):
    format, options = rows.Safetensors, {"tensor": "x", "chunk_bytes": 64}

    def write(self, folder):
        library = pytest.importorskip("safetensors.numpy")
        array = np.arange(60, dtype="int32").reshape(10, 6)
        library.save_file({"w": array[:1].copy(), "x": array}, folder / "a.safetensors")
        return list(array)


@pytest.mark.long
class TestParquet(Suite):
    format = parquet.Parquet
    heavy = ("pyarrow",)

    def write(self, folder):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        listed = [samples.plain(k) | {"list": [k] * k, "in": {"a": k, "b": [None, f"{k}"]}} for k in range(12)]
        pq.write_table(pa.Table.from_pylist(listed[:9]), folder / "a.parquet", row_group_size=4)
        pq.write_table(pa.Table.from_pylist(listed[9:]), folder / "b.parquet", compression="zstd")
        return [row | {"list": np.array(row["list"], "int64")} for row in listed]


@pytest.mark.long
class TestArrow(Suite):
    format = arrow.Arrow
    heavy = ("pyarrow",)

    def write(self, folder):
        pa = pytest.importorskip("pyarrow")
        listed = [samples.plain(k) | {"list": [k / 2] * k} for k in range(12)]
        table = pa.Table.from_pylist(listed)
        with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
            writer.write_table(table[:7], max_chunksize=3)
        with pa.ipc.new_stream(str(folder / "b.arrow"), table.schema) as writer:
            writer.write_table(table[7:], max_chunksize=2)
        return [row | {"list": np.array(row["list"], "float64")} for row in listed]


@pytest.mark.long
class TestLitdata(Suite):
    format, written = litdata.Litdata, "litdata-nested"

    def write(self, folder):
        self.copied(folder)
        return [samples.of_litdata(k) for k in range(12)]


@pytest.mark.long
class TestLitdataFrames(TestLitdata):
    written = "litdata-batch"


@pytest.mark.long
class TestLitdataTable(TestLitdata):
    written = "litdata-table"
    heavy = ("pyarrow",)

    def write(self, folder):
        self.copied(folder)
        return [samples.plain(k) | {"list": [k] * k} for k in range(12)]


@pytest.mark.long
class TestLitdataTokens(TestLitdata):
    written, options = "litdata-tokens", {"length": 8}

    def write(self, folder):
        self.copied(folder)
        chunks = json.loads((folder / "index.json").read_text())["chunks"]
        documents, expected = iter(range(8)), []
        for chunk in chunks:
            tokens = np.concatenate([samples.tokens(next(documents)) for _ in range(chunk["chunk_size"])])
            expected += list(tokens[: len(tokens) // 8 * 8].reshape(-1, 8))
        return expected


@pytest.mark.long
class TestWebDataset(Suite):
    format, written = webdataset.WebDataset, "webdataset"

    def write(self, folder):
        self.copied(folder)
        listed = [(k, samples.plain(k)) for k in range(12)]
        return [
            {"__key__": f"a/{k:05}", "cls": str(k).encode(), "seg.bin": row["raw"], "txt": row["text"].encode()}
            for k, row in listed
        ]


@pytest.mark.long
class TestJsonLines(Suite):
    format, options = lines.JsonLines, {"chunk_bytes": 100}

    def write(self, folder):
        listed = [{"text": samples.TEXTS[k % 5], "k": [k]} for k in range(30)]
        text = ["\n", *(json.dumps(row, ensure_ascii=k % 2 == 0) + "\n" for k, row in enumerate(listed[:20])), " \r\n"]
        (folder / "a.jsonl").write_text("".join(text))
        (folder / "b.jsonl").write_text("\n\n".join(map(json.dumps, listed[20:])))
        return listed


@pytest.mark.long
class TestText(Suite):
    format, options = lines.Text, {"chunk_bytes": 10}

    def write(self, folder):
        (folder / "a.txt").write_bytes("\ufeffdo\r\n\nré\n  mi \n".encode())
        (folder / "b.txt").write_bytes(b"fa")
        return ["do", "ré", "  mi ", "fa"]


@pytest.mark.long
class TestFolders(Suite):
    format, options = folders.Folders, {"chunk_files": 3}

    def write(self, folder):
        expected = []
        for number, name in enumerate(("cat", "dog")):
            for k in range(4):
                path = f"{name}/deep/{k}.jpg"
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(bytes(range(k)))
                expected.append({"bytes": bytes(range(k)), "path": path, "class": number})
        (folder / "README").write_text("not in a folder")
        return expected
