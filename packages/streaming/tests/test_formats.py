"""What formats read, refuse and say, on files of the libraries that they are from."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hocket.errors import MissingPackage, Unsupported, WrongFile, WrongType, WrongValue
from hocket.plugins import registry
from hocket_streaming import checksums
from hocket_streaming.formats import compression, find, lines
from hocket_streaming.formats.arrow import Arrow
from hocket_streaming.formats.folders import Folders
from hocket_streaming.formats.litdata import Litdata
from hocket_streaming.formats.mds import MDS
from hocket_streaming.formats.parquet import Parquet
from hocket_streaming.formats.rows import Npy, Safetensors, Tokens
from hocket_streaming.formats.webdataset import WebDataset
from hocket_streaming.store.files import Files
from hocket_testkit import chunks

FILES = Path(__file__).parent / "files"
sys.path.append(str(FILES))
import samples  # noqa: E402


class Counted(Files):
    """Files that note what is read of them."""

    def __init__(self, path):
        super().__init__(path)
        self.ranges = []

    def read(self, name, start=0, size=None, **more):
        data = super().read(name, start, size, **more)
        self.ranges.append((name, start, len(data)))
        return data


def read(shards):
    """Return all samples, of chunks whose checksums are right."""
    listed = list(shards.chunks())
    for chunk in listed:
        assert checksums.matches(chunks.fetched(shards, chunk), chunk.checksum)
    return chunks.samples(shards, listed)


def plain(listed):
    return [chunks.plain(sample) for sample in listed]


# --- MDS


@pytest.mark.parametrize("algorithm", ["zstd", "gz", "bz2", "br", "snappy"])
def test_mds_of_every_compression_is_that_without(algorithm):
    pytest.importorskip("PIL")
    shards = MDS(Files(str(FILES / f"mds-{algorithm}")))
    library = {"br": "brotli", "snappy": "snappy", "zstd": "zstandard"}.get(algorithm, "bz2")
    if importlib.util.find_spec(library) is None:
        with pytest.raises(MissingPackage, match=rf"'{algorithm}' needs {library}.*pip install"):
            read(shards)
    else:
        assert read(shards) == read(MDS(Files(str(FILES / "mds-plain"))))


def test_mds_has_the_checksums_of_its_index():
    algorithms = {
        name: {chunk.checksum.partition(":")[0] for chunk in MDS(Files(str(FILES / f"mds-{name}"))).chunks()}
        for name in ("plain", "zstd", "gz", "bz2", "br", "snappy")
    }
    assert algorithms == {
        "plain": {"xxh64"},
        "zstd": {"sha1"},
        "gz": {"sha256"},
        "bz2": {""},
        "br": {"xxh3_128"},
        "snappy": {"xxh32"},
    }


def test_pickled_columns_are_refused():
    with pytest.raises(Unsupported, match=r"'object' is pickled.*run code"):
        MDS(Files(str(FILES / "mds-pickled"))).chunks()
    with pytest.raises(Unsupported, match=r"pickled.*run code"):
        Litdata(Files(str(FILES / "litdata-pickled"))).chunks()


def changed(folder, change, source="mds-plain"):
    """Return the files of a copy whose index.json was changed."""
    shutil.copytree(FILES / source, folder, dirs_exist_ok=True)
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return Files(str(folder))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", "", None, "s3://other/x"])
def test_an_index_names_no_file_outside(tmp_path, name):
    files = changed(tmp_path, lambda index: index["shards"][0]["raw_data"].update(basename=name))
    with pytest.raises(WrongFile, match="not below it"):
        MDS(files).chunks()


def test_damaged_indexes_say_what_is_wrong(tmp_path):
    (tmp_path / "index.json").write_text('{"shards": [')
    with pytest.raises(WrongFile, match="not JSON"):
        MDS.serves(Files(str(tmp_path)))
    with pytest.raises(WrongFile, match="has no valid 'samples'"):
        MDS(changed(tmp_path / "a", lambda index: index["shards"][1].pop("samples"))).chunks()
    with pytest.raises(WrongFile, match="-3 for samples"):
        MDS(changed(tmp_path / "b", lambda index: index["shards"][1].update(samples=-3))).chunks()
    with pytest.raises(Unsupported, match="the format 'csv'"):
        MDS(changed(tmp_path / "c", lambda index: index["shards"][0].update(format="csv"))).chunks()
    with pytest.raises(Unsupported, match="'lz9' is not supported"):
        index = changed(tmp_path / "d", lambda index: index["shards"][0].update(compression="lz9"), "mds-gz")
        MDS(index).chunks()
    with pytest.raises(Unsupported, match="'text' has the encoding 'own'"):
        encodings = samples.MDS | {"text": "own"}
        columns = [encodings[name] for name in sorted(encodings)]
        MDS(changed(tmp_path / "e", lambda index: index["shards"][0].update(column_encodings=columns))).chunks()


def test_a_compression_gives_as_many_bytes_as_the_index_says():
    bomb = gzip.compress(bytes(10**7))
    with pytest.raises(WrongFile, match="more than 100 bytes"):
        compression.decompress("gz", bomb, 100)
    with pytest.raises(WrongFile, match="cannot be decompressed"):
        compression.decompress("gz", bomb[:-9], 10**7)


# --- litdata


@pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
def test_litdata_of_every_compression_is_that_without(level):
    pytest.importorskip("zstandard")
    pytest.importorskip("torch")
    assert read(Litdata(Files(str(FILES / f"litdata-{level}")))) == plain(samples.of_litdata(k) for k in range(12))


def test_litdata_of_single_values():
    assert read(Litdata(Files(str(FILES / "litdata-single")))) == list(range(7))


def test_litdata_refuses_what_it_does_not_read(tmp_path):
    def config(name, value):
        return changed(tmp_path / name, lambda index: index["config"].update({name: value}), "litdata-single")

    with pytest.raises(Unsupported, match="encryption"):
        Litdata(config("encryption", {"level": "chunk"})).chunks()
    with pytest.raises(Unsupported, match="format='parquet'"):
        Litdata(config("item_loader", "ParquetLoader")).chunks()
    with pytest.raises(Unsupported, match="serializer 'graph'"):
        Litdata(config("data_format", ["graph"])).chunks()
    with pytest.raises(WrongValue, match="length=2048"):
        Litdata(Files(str(FILES / "litdata-tokens"))).chunks()
    with pytest.raises(WrongValue, match="not of tokens"):
        Litdata(Files(str(FILES / "litdata-single")), length=8).chunks()


# --- arrays


def test_arrays_that_are_not_numbers_in_rows_are_refused(tmp_path):
    def npy(array, **options):
        np.save(tmp_path / "a.npy", array)
        return Npy(Files(str(tmp_path)), **options)

    with pytest.raises(Unsupported, match="never read"):
        npy(np.array([[object()]])).chunks()
    with pytest.raises(Unsupported, match="fortran_order"):
        npy(np.asfortranarray(np.ones((3, 2)))).chunks()
    with pytest.raises(WrongValue, match="length=2048"):
        npy(np.ones(3)).chunks()
    with pytest.raises(WrongValue, match="leave out length=2"):
        npy(np.ones((3, 2)), length=2).chunks()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff{")
    with pytest.raises(WrongFile, match=r"not a .npy file"):
        Npy(Files(str(tmp_path))).chunks()


def test_a_structured_array_has_rows_with_fields(tmp_path):
    array = np.zeros((4, 2), [("a", "<i4"), ("b", "<f4", (2,))])
    array["a"] = np.arange(8).reshape(4, 2)
    np.save(tmp_path / "a.npy", array)
    shards = Npy(Files(str(tmp_path)))
    (chunk,) = json.loads(json.dumps([shards.chunks()[0].extra]))  # as in a stored index
    (listed,) = shards.chunks()
    opened = shards.open(listed, memoryview(chunks.fetched(shards, listed)))
    assert all(shards.get(opened, row).tobytes() == array[row].tobytes() for row in range(4))
    assert shards.get(opened, 2)["a"].tolist() == [4, 5]
    assert chunk[0] == [["a", "<i4"], ["b", "<f4", [2]]]


def test_chunks_of_arrays_are_read_by_offset(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1000, 1000), "float32"))
    files = Counted(str(tmp_path))
    listed = Npy(files).chunks()
    assert sum(size for _, _, size in files.ranges) <= 4096
    assert {chunk.size for chunk in listed[:-1]} == {524 * 4000} and sum(chunk.samples for chunk in listed) == 1000


def test_safetensors_say_which_tensors_there_are(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    library.save_file({"x": torch.ones(4, 2), "h": torch.ones(4, 2, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    files = Files(str(tmp_path))
    with pytest.raises(WrongValue, match=r"2 tensors. Write tensor= with one of h, x"):
        Safetensors(files).chunks()
    with pytest.raises(WrongValue, match="no tensor 'y'"):
        Safetensors(files, tensor="y").chunks()
    with pytest.raises(Unsupported, match="BF16"):
        Safetensors(files, tensor="h").chunks()
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:-1])
    with pytest.raises(WrongFile, match="truncated"):
        Safetensors(files, tensor="x").chunks()


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "uint16"}, {"length": 8}, {"dtype": "uint17", "length": 8}, {"dtype": "O", "length": 1}]
)
def test_tokens_need_a_type_and_a_length(tmp_path, options):
    with pytest.raises(WrongValue, match="dtype='uint16', length=2048"):
        Tokens(Files(str(tmp_path)), **options)


# --- Parquet and Arrow


@pytest.fixture
def table():
    pa = pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    numbers = {f"n{k}": rng.random(3000) for k in range(3)}
    return pa.table({"text": [f"{k}" for k in range(3000)], **numbers, "in": [{"x": k, "y": [k]} for k in range(3000)]})


@pytest.mark.long
def test_parquet_fetches_the_bytes_of_its_columns_once(tmp_path, table):
    import pyarrow.parquet as pq

    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    size = (tmp_path / "a.parquet").stat().st_size
    files = Counted(str(tmp_path))
    shards = Parquet(files)
    listed = shards.chunks()
    footers = sum(length for _, _, length in files.ranges)
    assert sum(chunk.size for chunk in listed) <= size and footers <= 1 << 16
    files.ranges.clear()
    for chunk in listed:
        shards.unpack(chunk, chunks.fetched(shards, chunk))
    assert len(files.ranges) == len(listed) == 3, "the footer was read again, or a group was not one range"
    some = Parquet(files, columns=["n2"])
    assert sum(chunk.size for chunk in some.chunks()) < 0.4 * size
    assert [row["n2"] for row in read(some)] == table["n2"].to_pylist()


@pytest.mark.long
def test_parquet_of_columns_with_fields_and_gaps(tmp_path, table):
    import pyarrow.parquet as pq

    wide = table.append_column("blob", [[bytes(np.random.default_rng(k).bytes(60)) for k in range(3000)]])
    wide = wide.select(["text", "blob", "in"])
    pq.write_table(wide, tmp_path / "a.parquet", row_group_size=2000)
    shards = Parquet(Files(str(tmp_path)), columns=["text", "in"])
    listed = shards.chunks()
    assert [len(chunk.parts) for chunk in listed] == [2, 2], "columns far apart are fetched by themselves"
    expected = [row | {"in": row["in"] | {"y": row["in"]["y"]}} for row in wide.select(["text", "in"]).to_pylist()]
    assert read(shards) == expected
    with pytest.raises(WrongValue, match=r"no column 'txt'. It has text, blob, in"):
        Parquet(Files(str(tmp_path)), columns=["txt"]).chunks()


@pytest.mark.long
def test_parquet_without_kept_footers_reads_them_again(tmp_path, table):
    import pyarrow.parquet as pq

    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    files = Files(str(tmp_path))
    shards = Parquet(files)
    listed = shards.chunks()
    assert chunks.samples(Parquet(files), listed) == chunks.samples(shards, listed)


@pytest.mark.long
@pytest.mark.parametrize("end", [b"", b"PAR1", b"PARE", b"\xff\xff\xff\x7fPAR1", b"\x04\x00\x00\x00PAR1"])
def test_damaged_parquet_is_an_error(tmp_path, end):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(20) + end)
    with pytest.raises(WrongFile, match=r"a.parquet"):
        Parquet(Files(str(tmp_path))).chunks()


@pytest.mark.long
def test_arrow_reads_compressed_batches_and_refuses_dictionaries(tmp_path, table):
    import pyarrow as pa

    with pa.ipc.new_file(
        str(tmp_path / "a.arrow"), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table, max_chunksize=800)
    shards = Arrow(Files(str(tmp_path)), columns=["text", "n1"])
    assert [chunk.samples for chunk in shards.chunks()] == [800, 800, 800, 600]
    assert read(shards) == table.select(["text", "n1"]).to_pylist()
    words = pa.table({"word": pa.array(["a", "b", "a"]).dictionary_encode()})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), words.schema) as writer:
        writer.write_table(words)
    with pytest.raises(Unsupported, match="dictionary"):
        Arrow(Files(str(tmp_path))).chunks()
    (tmp_path / "a.arrow").write_bytes(bytes(100))
    with pytest.raises(WrongFile, match="not of Arrow"):
        Arrow(Files(str(tmp_path))).chunks()


# --- lines, tar files, folders


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
@pytest.mark.parametrize("size", [1, 10, 100, 10**6])
def test_lines_are_those_of_the_text(tmp_path, monkeypatch, block, size):
    """Compare with Python's own lines, over blocks that end anywhere."""
    monkeypatch.setattr(lines, "BLOCK", block)
    rng = np.random.default_rng(block + size)
    text = (
        "".join("x" * int(n) + ("\r\n" if n % 3 else "\n") + " " * int(n % 2) for n in rng.integers(0, 40, 60)) + "end"
    )
    (tmp_path / "a.txt").write_bytes(text.encode())
    shards = lines.Text(Files(str(tmp_path)), chunk_bytes=size)
    listed = shards.chunks()
    expected = [line for line in io.StringIO(text, newline=None).read().split("\n") if line.strip()]
    assert read(shards) == expected
    assert all(chunk.size <= size + 45 for chunk in listed)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_compressed_lines_are_one_chunk(tmp_path, ending):
    text = b'{"a": 1}\n\n{"a": 2}'
    if ending == ".zst":
        packed = pytest.importorskip("zstandard").compress(text)
    else:
        packed = __import__({".gz": "gzip", ".bz2": "bz2"}[ending]).compress(text)
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed)
    shards = find(Files(str(tmp_path)))
    assert read(shards) == [{"a": 1}, {"a": 2}] and len(shards.chunks()) == 1
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed[:-5])
    with pytest.raises(WrongFile, match="is damaged"):
        shards.chunks()


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(OSError, match=r"a\.jsonl.*sample 1"):
        read(lines.JsonLines(Files(str(tmp_path))))


def tar(path, names):
    with tarfile.open(path, "w") as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            file.addfile(member, io.BytesIO(b"abc"))


def test_tar_files_that_are_no_samples(tmp_path):
    tar(tmp_path / "a.tar", ["__meta__/x.json", "a.JPG", "a.txt", "noextension", "b.txt", "c/d.seg.png"])
    shards = WebDataset(Files(str(tmp_path)))
    assert [(row["__key__"], sorted(row)[1:]) for row in read(shards)] == [
        ("a", ["jpg", "txt"]), ("b", ["txt"]), ("c/d", ["seg.png"]),
    ]  # fmt: skip
    tar(tmp_path / "a.tar", ["a.txt", "a.TXT"])
    with pytest.raises(WrongFile, match="twice"):
        shards.chunks()
    tar(tmp_path / "a.tar", ["a.txt", "b.txt"])
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1200])
    with pytest.raises(WrongFile, match="not a tar file of samples"):
        shards.chunks()


def test_folders_take_the_files_that_are_asked_for(tmp_path):
    for name in ("cat/1.JPG", "cat/2.png", "dog/.hidden.jpg", "dog/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    shards = Folders(Files(str(tmp_path)), extensions=[".jpg"])
    assert [(row["path"], row["class"]) for row in read(shards)] == [("cat/1.JPG", 0), ("dog/3.jpg", 1)]
    with pytest.raises(WrongFile, match="that end in gif"):
        Folders(Files(str(tmp_path)), extensions=["gif"]).chunks()


# --- find


@pytest.mark.parametrize(
    ("folder", "cls"),
    [
        ("mds-plain", MDS),
        ("mds-zstd", MDS),
        ("litdata-nested", Litdata),
        ("litdata-tokens", Litdata),
        ("webdataset", WebDataset),
    ],
)
def test_the_format_is_found(folder, cls):
    assert type(find(Files(str(FILES / folder)))) is cls


def test_an_index_is_read_once():
    files = Counted(str(FILES / "mds-zstd"))
    find(files).chunks()
    assert [name for name, _, _ in files.ranges] == ["index.json"]


def test_a_single_file_has_a_format_too(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    np.save(tmp_path / "a.npy", np.ones((2, 2)))
    assert read(find(Files(str(tmp_path / "a.jsonl")))) == [{"a": 1}]
    assert len(read(find(Files(str(tmp_path / "a.npy"))))) == 2
    with pytest.raises(WrongFile, match=r"several formats: jsonl, npy. Write format='jsonl'"):
        find(Files(str(tmp_path)))
    assert type(find(Files(str(tmp_path)), "npy")) is Npy
    with pytest.raises(WrongType, match=r"no option lenght=. Did you mean length="):
        find(Files(str(tmp_path)), "npy", lenght=3)


def test_no_format_says_what_there_is(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"x")
    with pytest.raises(WrongFile, match=r"1 \.tfrecord.*arrow, folders, jsonl.*plugins new shards"):
        find(Files(str(tmp_path)))


def test_a_format_of_somebody_else_is_found(tmp_path):
    (tmp_path / "a.own").write_bytes(b"x")

    class Own(MDS):
        @classmethod
        def serves(cls, files):
            return any(name.endswith(".own") for name in files.names())

    registry.register("shards", "own", Own)
    try:
        assert type(find(Files(str(tmp_path)))) is Own
    finally:
        registry.unregister("shards", "own")


def test_formats_are_imported_without_torch():
    modules = sorted({entry.target.partition(":")[0] for entry in registry.entries("shards") if entry.obj is None})
    assert len(modules) >= 8
    program = f"import sys, hocket_streaming.indexes, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
