"""The writer: what it writes is read by a reader of its own here, in the order of a uniform permutation, and after kills."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import writing_source
import xxhash
from stand_in import Rule, serving

from hocket.errors import ExistingFile, WrongFile, WrongValue
from hocket_streaming.errors import AccessDenied, MissingData
from hocket_streaming.order.sampler import GlobalOrder
from hocket_streaming.writing import job, progress, runs
from hocket_streaming.writing.columns import Columns, infer
from hocket_streaming.writing.mds import MDSWriter
from hocket_streaming.writing.planning import Sized
from hocket_streaming.writing.write import write

HERE = Path(__file__).parent
ARRAYS = {34: "<f4", 65: "<i8"}


def read_mds(folder: Path) -> Iterator[dict[str, Any]]:
    """Read MDS by the description of the format, without hocket."""
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    for shard in index["shards"]:
        raw = (folder / (shard["zip_data"] or shard["raw_data"])["basename"]).read_bytes()
        if shard["zip_data"]:
            import zstandard

            assert len(raw) == shard["zip_data"]["bytes"]
            raw = zstandard.ZstdDecompressor().decompress(raw)
        about = shard["raw_data"]
        assert len(raw) == about["bytes"]
        assert about["hashes"].get("xxh64", xxhash.xxh64(raw).hexdigest()) == xxhash.xxh64(raw).hexdigest()
        assert about["hashes"].get("sha1", hashlib.sha1(raw).hexdigest()) == hashlib.sha1(raw).hexdigest()
        (count,) = struct.unpack_from("<I", raw)
        assert count == shard["samples"]
        offsets = struct.unpack_from(f"<{count + 1}I", raw, 4)
        config = json.loads(raw[4 * (count + 2) : offsets[0]])
        assert {key: shard[key] for key in config} == config
        assert offsets[-1] == len(raw)
        for start, end in pairwise(offsets):
            yield decoded(shard, raw[start:end])


def decoded(shard: dict[str, Any], raw: bytes) -> dict[str, Any]:
    sizes, at, sample = [], 0, {}
    for fixed in shard["column_sizes"]:
        if fixed is None:
            sizes.append(struct.unpack_from("<I", raw, at)[0])
            at += 4
        else:
            sizes.append(fixed)
    for name, kind, size in zip(shard["column_names"], shard["column_encodings"], sizes, strict=True):
        value, at = raw[at : at + size], at + size
        if kind == "int":
            sample[name] = struct.unpack("<q", value)[0]
        elif kind == "str":
            sample[name] = value.decode()
        elif kind == "ndarray:float32":
            axes, width = value[0] >> 2, 1 << (value[0] & 3)
            shape = np.frombuffer(value, f"<u{width}", axes, 1)
            sample[name] = np.frombuffer(value, "<f4", offset=1 + axes * width).reshape(shape)
        else:
            sample[name] = value
    assert at == len(raw)
    return sample


def expected(count: int = 2000) -> list[dict[str, Any]]:
    return list(writing_source.numbered(0, 1))[:count]


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compression", ["", "zstd:5"])
def test_samples_are_read_back_without_hocket(tmp_path: Path, compression: str) -> None:
    done = write("writing_source:numbered", str(tmp_path / "a"), parts=3, size_limit=20_000, compression=compression,
                 hashes=["xxh64", "sha1"])  # fmt: skip
    read = list(read_mds(tmp_path / "a"))
    assert done.samples == len(read) == 2000 and done.files > 3
    numbers = [sample["number"] for sample in read]
    assert numbers != sorted(numbers)
    assert all(map(equal, sorted(read, key=lambda sample: sample["number"]), expected()))
    assert os.listdir(tmp_path) == ["a"], "the work and its files are removed"


def test_bytes_depend_on_neither_memory_nor_size_of_runs(tmp_path: Path) -> None:
    for name, memory in (("a", 1 << 17), ("b", 1 << 30)):
        write("writing_source:numbered", str(tmp_path / name), parts=3, size_limit=30_000, memory=memory)
    write("writing_source:numbered", str(tmp_path / "c"), parts=3, size_limit=30_000, seed=1)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("shuffle", [True, False])
def test_many_runs_are_merged_first(tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write("writing_source:numbered", str(tmp_path / "a"), parts=7, size_limit=30_000, shuffle=shuffle)
    monkeypatch.setattr(job, "MOST", 2)
    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "make", None)  # ends after the merges, as a kill would
        with pytest.raises(TypeError):
            write("writing_source:numbered", str(tmp_path / "b"), parts=7, size_limit=30_000, shuffle=shuffle)
    assert sum(path.name.startswith(("run-", "merged")) for path in (tmp_path / ".b.writing").iterdir()) == 2
    write("writing_source:numbered", str(tmp_path / "b"), parts=7, size_limit=30_000, shuffle=shuffle)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_without_shuffle_parts_are_in_order_and_shards_full(tmp_path: Path) -> None:
    write("writing_source:numbered", str(tmp_path / "a"), parts=2, shuffle=False, size_limit=10_000, memory=1 << 17)
    assert [sample["number"] for sample in read_mds(tmp_path / "a")] == [*range(0, 2000, 2), *range(1, 2000, 2)]
    sizes = [len(raw) for name, raw in contents(tmp_path / "a").items() if name != "index.json"]
    assert max(sizes) <= 10_000 and sorted(sizes)[1] > 9_800


def test_shuffle_is_uniform(tmp_path: Path) -> None:
    counts = np.zeros((20, 20))
    for seed in range(3):
        write("writing_source:numbered", str(tmp_path / str(seed)), parts=5, seed=seed)
        for place, sample in enumerate(read_mds(tmp_path / str(seed))):
            counts[place * 20 // 2000, sample["number"] * 20 // 2000] += 1
    mean = counts.mean()
    freedom = 19 * 19
    assert ((counts - mean) ** 2 / mean).sum() < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.long
def test_every_permutation_is_as_frequent(tmp_path: Path) -> None:
    counts: dict[bytes, int] = {}
    for seed in range(720):
        names = []
        for part in range(2):
            samples = (bytes([2 * part + row]) for row in range(2))
            names += runs.write_runs(samples, runs.keys_of(part, True, seed), tmp_path, part, 1)
        opened = [runs.Run(tmp_path / name) for name in names]
        (whole,) = runs.ranges(opened, runs.Filling(1000))
        order = b"".join(runs.read(opened, whole))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 30) ** 2 / 30 for count in counts.values()) < 23 + 4 * 46**0.5


def test_tokens_are_cut_exactly(tmp_path: Path) -> None:
    text = b"".join(each.encode() + b"|" for each in writing_source.documents())
    tokens = [256 if byte == ord("|") else byte for byte in text]
    done = write("writing_source:documents", str(tmp_path / "t"), format="tokens", tokenizer="byte", length=8,
                 size_limit=100, shuffle=False)  # fmt: skip
    about = json.loads((tmp_path / "t/tokens.json").read_text())
    assert (about["dtype"], about["length"], about["end_of_text"], done.samples) == ("uint16", 8, 256, 4)
    raw = [(tmp_path / "t" / each["file"]).read_bytes() for each in about["files"]]
    assert np.frombuffer(b"".join(raw), "<u2").tolist() == tokens
    assert {len(each) for each in raw[:-1]} == {96} and sum(each["tokens"] for each in about["files"]) == len(tokens)


@pytest.mark.parametrize("cut", [False, True])
def test_files_have_all_samples_once_for_any_sizes(tmp_path: Path, cut: bool) -> None:
    rng = random.Random(5)
    for case in range(10):
        folder = tmp_path / str(case)
        folder.mkdir()
        samples = [bytes([rng.randrange(256)]) * rng.choice([0, 1, 7, 50]) for _ in range(rng.randrange(1, 80))]
        names = []
        for part in range(3):
            names += runs.write_runs(
                samples[part::3], runs.keys_of(part, True, case), folder, part, rng.choice([1, 300, 9999])
            )
        opened = [runs.Run(folder / name) for name in names]
        filling = runs.Filling(40, 0 if cut else 3, 0 if cut else 2, cut)
        wanted = runs.ranges(opened, filling, most=rng.choice([1, 10, 1000]))
        read = [runs.read(opened, each) for each in wanted]
        keys = {part: runs.keys_of(part, True, case) for part in range(3)}
        order = sorted((next(keys[number % 3]), sample) for number, sample in enumerate(samples))
        assert b"".join(b"".join(each) for each in read) == b"".join(sample for _, sample in order)
        assert sum(each.samples for each in wanted) == len(samples) or (cut and not any(samples))
        if cut:
            assert all(each.size == 40 for each in wanted[:-1])
        else:
            assert [sample for each in read for sample in each] == [sample for _, sample in order]
            assert all(len(each) == 1 or sum(len(s) + 2 for s in each) + 3 <= 40 for each in read)


def test_parquet_is_read_by_pyarrow(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write("writing_source:numbered", str(tmp_path / "p"), format="parquet", group=5_000, size_limit=30_000, parts=1,
          compression="zstd")  # fmt: skip
    files = sorted((tmp_path / "p").iterdir())
    assert len(files) > 1 and parquet.ParquetFile(files[0]).num_row_groups > 2
    rows = sorted(
        (row for file in files for row in parquet.read_table(file).to_pylist()), key=lambda row: row["number"]
    )
    assert [{**row, "x": np.array(row["x"])} for row in rows][7]["x"].shape == (2, 3)
    assert all(map(equal, rows, expected()))


def test_writer_as_context_manager(tmp_path: Path) -> None:
    columns = {"number": "int", "text": "str", "x": "ndarray:float32"}
    with MDSWriter(str(tmp_path), columns, size_limit=20_000) as out:
        for sample in expected():
            out.write(sample)
    assert all(map(equal, read_mds(tmp_path), expected())) and out.samples == 2000
    with pytest.raises(ExistingFile, match="another folder"):
        MDSWriter(str(tmp_path), columns)


def test_no_index_after_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(WrongValue, match="'a' is 'int', and a sample has str"),
        MDSWriter(str(tmp_path), {"a": "int"}) as out,
    ):
        out.write({"a": 1})
        out.write({"a": "x"})
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    ("values", "encoding"),
    [([1, 2.5], "float64"), ([True], "json"), ([None, 3], "json"), ([b"a"], "bytes"), ([[1, 2]], "json"),
     ([np.float32(1)], "float32"), ([np.zeros(2), np.zeros(2, "int8")], "ndarray"), ([np.zeros(0)], "json")],
)  # fmt: skip
def test_encodings_hold_all_first_values(values: list[Any], encoding: str) -> None:
    encodings = infer({"a": value} for value in values)
    assert encodings == {"a": encoding}
    for value in values:
        decoded = Columns(encodings).decode(Columns(encodings).encode({"a": value}))["a"]
        assert np.array_equal(decoded, value)


@pytest.mark.parametrize(
    ("value", "encoding"),
    [(300, "uint8"), (1.5, "int32"), ("1", "float32"), (True, "int"), (1 << 63, "int"), (b"GIF", "jpeg"),
     (np.zeros(3), "ndarray:float32"), (np.zeros(3, "float32"), "ndarray:float32:4"), (np.zeros(0), "ndarray")],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(value: Any, encoding: str) -> None:
    with pytest.raises(WrongValue, match="Column 'a' is"):
        Columns({"a": encoding}).encode({"a": value})


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(WrongFile, match="has no samples"):
        write("writing_source:nothing", str(tmp_path / "a"))
    with pytest.raises(WrongValue, match="executes code"):
        MDSWriter(str(tmp_path / "a"), {"a": "pkl"})
    with pytest.raises(WrongValue, match="no module 'absent'"):
        write("absent:samples", str(tmp_path / "a"))
    with pytest.raises(WrongValue, match="arguments part and parts"):
        write("writing_source:late", str(tmp_path / "a"), parts=2)
    with pytest.raises(WrongValue, match="--columns score=json"):
        write("writing_source:late", str(tmp_path / "a"))
    with pytest.raises(WrongValue, match="score=json"), pytest.warns(UserWarning, match="begins anew"):
        write("writing_source:late", str(tmp_path / "a"), seed=3)
    assert write("writing_source:late", str(tmp_path / "b"), columns={"score": "json"}).samples == 1500
    with pytest.raises(ExistingFile, match="is there already"):
        write("writing_source:late", str(tmp_path / "b"))


def test_tokens_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match="uint8 in the first sample, and int64 that do not fit"):
        write("writing_source:tokens", str(tmp_path / "a"), format="tokens", length=2)
    write("writing_source:latin", str(tmp_path / "b"), format="tokens", length=2, tokenizer="byte")
    assert np.fromfile(tmp_path / "b/tokens.00000.bin", "<u2").tolist() == [*b"caf\xe9", 256]
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    made.save(str(tmp_path / "t.json"))
    with pytest.raises(WrongValue, match="not text in UTF-8"):
        write(
            "writing_source:latin", str(tmp_path / "c"), format="tokens", length=2, tokenizer=str(tmp_path / "t.json")
        )


PARTS = """
def samples(part, parts):
    if part == 5 and {fails}:
        raise RuntimeError("no such page")
    yield {{"number": part, "code": "{code}"}}
"""


def test_a_mended_function_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source, target, other = tmp_path / "mended_source.py", str(tmp_path / "a"), tmp_path / "scratch/mine.txt"
    other.parent.mkdir()
    other.write_text("kept")
    for code in ("old", "new"):
        source.write_text(PARTS.format(fails=code == "old", code=code))
        sys.modules.pop("mended_source", None)
        importlib.invalidate_caches()
        if code == "old":
            with pytest.raises(RuntimeError, match="no such page"):
                write("mended_source:samples", target, parts=8, work=other.parent)
        else:
            with pytest.warns(UserWarning, match="begins anew"):
                write("mended_source:samples", target, parts=8, work=other.parent)
    assert sorted((sample["number"], sample["code"]) for sample in read_mds(tmp_path / "a")) == [
        (number, "new") for number in range(8)
    ]
    assert [*other.parent.iterdir()] == [other], "the folder of work is the user's"


def test_a_file_that_changed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}')
    for second in (1, 2):
        os.utime(file, (second, second))
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True, action="always") as warned:
            if second == 1:
                patch.setattr(job.Job, "make", None)  # ends after the merges, as a kill would
            with pytest.raises(TypeError) if second == 1 else nullcontext():
                write(str(file), str(tmp_path / "out"))
    assert [*read_mds(tmp_path / "out")] == [{"text": "a"}] and "begins anew" in str(warned[0].message)


def test_memory_store(tmp_path: Path) -> None:
    import fsspec

    write("writing_source:numbered", "memory://bucket/mds", parts=2, size_limit=30_000)
    write("writing_source:numbered", str(tmp_path / "a"), parts=2, size_limit=30_000)
    system = fsspec.filesystem("memory")
    assert {name.rpartition("/")[2]: system.cat(name) for name in system.find("/bucket/mds")} == contents(
        tmp_path / "a"
    )
    with pytest.raises(ExistingFile):
        write("writing_source:numbered", "memory://bucket/mds", parts=2)


COMMAND = """
from hocket_streaming.writing.write import write
if __name__ == "__main__":
    write("writing_source:{source}", {target!r}, parts=6, workers={workers}, size_limit={size}, memory={memory})
"""


def process(target: Path, workers: int, source: str = "numbered", size: int = 20_000, memory: int = 1 << 20) -> Any:
    script = target.with_suffix(".py")
    script.write_text(COMMAND.format(target=str(target), workers=workers, source=source, size=size, memory=memory))
    return subprocess.Popen([sys.executable, str(script)], start_new_session=True)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 3])
def test_bytes_after_kills_are_those_without(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_TEST_SAMPLES", "120000")
    assert process(tmp_path / "whole", 0).wait() == 0
    target, kills = tmp_path / "killed", 0
    rng = random.Random(workers)
    while not target.exists():
        writer = process(target, workers)
        try:
            writer.wait(0.3 + rng.random() * (0.5 + kills / 3))
            break
        except subprocess.TimeoutExpired:
            kills += 1
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert kills < 40
        if target.exists():
            break
        assert not list(tmp_path.glob("killed/*")), "a data set that is not complete has no name"
    assert writer.wait() in (0, -signal.SIGKILL) and kills
    assert contents(target) == contents(tmp_path / "whole")
    time.sleep(1)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(target) not in left, "processes end with the one that began them"


@pytest.mark.long
def test_memory_is_bounded(tmp_path: Path) -> None:
    code = COMMAND.format(target=str(tmp_path / "a"), workers=0, source="heavy", size=4_000_000, memory=16_000_000)
    code += "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    base = "import numpy, fsspec, xxhash, hocket_streaming.writing.write, resource\n" + code.splitlines()[-1]
    small, large = (
        int(subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=True).stdout) * 1024
        for each in (base, code)
    )
    assert large - small < 60_000_000, "of 200 MB of samples"


def test_a_store_that_fails_now_and_then_and_one_that_refuses(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    options = {"parts": 2, "size_limit": 100_000}
    write("writing_source:numbered", str(tmp_path / "a"), **options)  # type: ignore[arg-type]
    with serving() as store:
        options["storage_options"] = store.options()
        store.rules.append(Rule("shard.00000", 503, times=2))
        write("writing_source:numbered", "s3://bucket/mds", **options)  # type: ignore[arg-type]
        assert {name.removeprefix("bucket/mds/"): data for name, data in store.files.items()} == contents(
            tmp_path / "a"
        )
        assert list(store.files)[-1] == "bucket/mds/index.json"
        store.rules.append(Rule("other/shard.00001", 403))
        began = time.monotonic()
        with pytest.raises(AccessDenied, match=r"s3://bucket/other/shard\.00001"):
            write("writing_source:numbered", "s3://bucket/other", **options)  # type: ignore[arg-type]
        store.rules.append(Rule("absent/", 404))
        with pytest.raises(MissingData, match="the bucket does not exist"):
            write("writing_source:numbered", "s3://absent/mds", **options)  # type: ignore[arg-type]
        assert "bucket/other/index.json" not in store.files and time.monotonic() - began < 10
        store.rules.clear()
        write("writing_source:numbered", "s3://bucket/other", **options)  # type: ignore[arg-type]
        assert {name.rpartition("/")[2]: data for name, data in store.files.items() if "other" in name} == contents(
            tmp_path / "a"
        )


def test_progress_says_what_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter(range(0, 10_000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    with progress.Progress() as quiet:
        quiet.start("files:", 9)
    assert not capsys.readouterr().err, "not a terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress() as line:
        line.start("files:", 9, done=5)
        line.step()
        line.step()
    first, *_, last, end = capsys.readouterr().err.split("\r\033[K")[1:]
    assert (first, end) == ("files: 5 of 9", "") and last.startswith("files: 7 of 9, 0:0") and last.endswith(" left")


@pytest.mark.long
@pytest.mark.parametrize(("shuffle", "least", "most"), [(True, 0.9, 1.1), (False, 0.75 * 17, 1.25 * 17)])
def test_classes_in_batches_of_sorted_data(tmp_path: Path, shuffle: bool, least: float, most: float) -> None:
    """Shuffled by the writer, batches are as a full shuffle; sorted, χ² per degree of freedom is about 1 + G / K."""
    write("writing_source:sorted_by_class", str(tmp_path / "a"), shuffle=shuffle, size_limit=2300)
    labels = np.array([sample["number"] for sample in read_mds(tmp_path / "a")])
    index = json.loads((tmp_path / "a/index.json").read_text())
    sizes = [shard["samples"] for shard in index["shards"]]
    assert 100 < np.mean(sizes) < 200
    order = GlobalOrder([Sized(sizes, sizes, sizes)], 256, seed=3, lanes=1, window=16, drop_last=True)
    found = []
    for epoch in range(4):
        order.set_epoch(epoch)
        found += [np.bincount(labels[batch], minlength=10) for batch in order]
    chi = [((counts - 25.6) ** 2 / 25.6).sum() / 9 for counts in found]
    assert least < float(np.mean(chi)) < most
