"""``hocket data``: what it writes, checks and plans, its exit codes, and Control-C."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket_cli import main
from hocket_streaming import formats
from hocket_streaming.indexes import indexed
from hocket_streaming.store.files import Files
from hocket_streaming.writing.chunk_reading import opened
from hocket_streaming.writing.job import Job

HERE = Path(__file__).parent
ROWS = [{"number": number, "text": f"do {number}", "score": number / 4} for number in range(900)]


def read(path: Path) -> list[Any]:
    shards = formats.find(Files(path))
    return [
        shards.get(data, row)
        for chunk in indexed(shards)
        for data in [opened(shards, chunk)]
        for row in range(chunk.samples)
    ]


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in sample.items()}


def by_number(samples: list[Any]) -> list[Any]:
    return sorted(map(plain, samples), key=lambda sample: sample["number"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def hocket(*argv: str) -> int:
    return main(["data", *argv])


WRITE = ("write", "a.jsonl", "mds", "--workers", "0", "--size-limit", "2kB")


def test_lines_are_written_shuffled_and_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hocket(*WRITE) == 0
    assert "900 samples in " in capsys.readouterr().out
    samples = read(tmp_path / "mds")
    assert by_number(samples) == ROWS != list(map(plain, samples))
    pytest.importorskip("pyarrow")
    assert hocket("convert", "mds", "pq", "--format", "parquet", "--workers", "0", "--no-shuffle", "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 900
    assert list(map(plain, read(tmp_path / "pq"))) == list(map(plain, samples))


def test_tables_of_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with (tmp_path / "a.csv").open("w") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    assert hocket("write", "a.csv", "out", "--workers", "0", "--columns", "score=float32") == 0
    assert by_number(read(tmp_path / "out")) == ROWS


def test_tokens_say_how_they_are_read(tmp_path: Path) -> None:
    assert hocket("write", "a.jsonl", "tok", "--format", "tokens", "--tokenizer", "byte", "--length", "16", "--workers", "0",
                  "--no-shuffle") == 0  # fmt: skip
    rows = read(tmp_path / "tok")
    text = "".join(f"{row['text']}|" for row in ROWS)
    expected = [256 if each == "|" else ord(each) for each in text]
    assert np.concatenate(rows).tolist() == expected[: len(expected) // 16 * 16]


def test_a_changed_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("write", "a.jsonl", "x", "--workers", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "make", None)  # ends after the merges, as a kill would
        with pytest.raises(TypeError):
            hocket(*argv)
    assert hocket(*argv, "--seed", "1") == 0
    assert capsys.readouterr().err == (
        f"hocket data: The source or the settings are not those of the work in {tmp_path}/.x.writing: the write begins anew.\n"
    )


def test_files_of_text_are_documents_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "s/.git").mkdir(parents=True)
    for name, text in {"a.py": "é\n\n b\r\n", "b.md": "b\n", ".git/config": "-"}.items():
        (tmp_path / "s" / name).write_bytes(text.encode())
    argv = ("--format", "tokens", "--tokenizer", "byte", "--length", "2", "--workers", "0", "--no-shuffle")
    assert hocket("write", "s", "tok", *argv, "--source-format", "text") == 0
    texts = [*"é\n\n b\r\n".encode(), 256, *b"b\n", 256]
    assert np.fromfile(tmp_path / "tok/tokens.00000.bin", "<u2").tolist() == texts
    assert hocket("write", "s", "md", *argv, "--source-format", "text", "--option", 'extensions=["md"]') == 0
    assert np.fromfile(tmp_path / "md/tokens.00000.bin", "<u2").tolist() == [*b"b\n", 256]
    assert hocket("write", "s", "lines", "--source-format", "text", "--workers", "0", "--no-shuffle") == 0
    assert read(tmp_path / "lines") == [{"text": "é"}, {"text": " b"}, {"text": "b"}]
    (tmp_path / "s/c.py").write_bytes(b"\xff")
    assert hocket("write", "s", "bad", *argv, "--source-format", "text") == 2


def test_tokenizer_of_a_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"do": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert hocket("write", "a.jsonl", "tok", "--format", "tokens", "--tokenizer", "tokenizer.json", "--length", "3",
                  "--workers", "0") == 0  # fmt: skip
    assert [row.tolist() for row in read(tmp_path / "tok")] == [[0, 1, 2]] * 900


def test_every_damage_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hocket(*WRITE)
    capsys.readouterr()
    assert hocket("check", "mds") == 0 and ": none damaged" in capsys.readouterr().out
    shards = sorted((tmp_path / "mds").glob("*.mds"))
    shards[0].unlink()
    raw = bytearray(shards[1].read_bytes())
    raw[-1] ^= 1
    shards[1].write_bytes(raw)
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    assert hocket("check", "mds", "--json") == 1
    (report,) = json.loads(capsys.readouterr().out)
    counts = [shard["samples"] for shard in json.loads((tmp_path / "mds/index.json").read_text())["shards"]]
    assert [(each["chunk"], each["first"], each["last"]) for each in report["damages"]] == [
        (number, sum(counts[:number]), sum(counts[: number + 1]) - 1) for number in range(3)
    ]
    for damage, shard, cause in zip(report["damages"], shards, ("does not exist", "checksum", "bytes"), strict=False):
        assert damage["url"] == str(shard) and cause in damage["cause"]
    assert hocket("check", "mds", "--share", "0.1", "--threads", "1") == 1
    assert f": {-(-len(counts) // 10)} chunks, " in capsys.readouterr().out


def test_index_is_stored_beside_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "data/a.jsonl")
    assert hocket("index", "data", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["samples"] == 900 and (tmp_path / "data/hocket-index.json").is_file()
    assert hocket("index", "data/a.jsonl") == 2 and "Give the folder" in capsys.readouterr().err


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    hocket(*WRITE)
    capsys.readouterr()
    argv = [
        "plan",
        "mds",
        "--machines",
        "2",
        "--global-batch",
        "32",
        "--lanes",
        "4",
        "--window",
        "1",
        "--cache-limit",
        "5kB",
        "--bandwidth",
        "1Gbit/s",
    ]
    assert hocket(*argv) == 0
    assert "Raise --cache-limit" in capsys.readouterr().out
    assert hocket(*argv, "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    index = json.loads(Path("mds/index.json").read_text())
    sizes = [shard["raw_data"]["bytes"] for shard in index["shards"]]
    assert (report["samples"], report["bytes"], report["quality"]) == (900, sum(sizes), 1 + 32 / 4)
    assert report["cache"] == 2 * 2 * 1 * max(sizes) and not report["cache_suffices"]
    assert sum(sizes) <= report["all"]["bytes"] <= (1 + (4 + 2) / len(sizes)) * sum(sizes)


LATE = """
def number(): return 5


def raising():
    yield {"a": 1}
    {}["page"]
"""


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("write", "a.jsonl", "a.jsonl"), "is there already"),
        (("write", "absent:samples", "x"), "no module 'absent'"),
        (("write", "a.jsonl", "x", "--memory", "much"), "is not a size"),
        (("write", "a.jsonl", "x", "--columns", "text"), "NAME=VALUE"),
        (("write", "a.jsonl", "x", "--columns", "txt=str"), "no column 'txt'"),
        (("write", "a.jsonl", "x", "--compression", "gzip"), "Write 'zstd'"),
        (("write", "a.jsonl", "x", "--format", "tokens", "--length", "8"), "tokenizer"),
        (("plan", "a.jsonl", "--machines", "3", "--ranks", "4"), "multiple of --machines"),
        (("check", "nowhere"), "does not exist"),
        (("write", "a.jsonl", "x", "--size-limit", "0"), "--size-limit 0"),
        (("write", "a.jsonl", "x", "--tokenizer", "byte"), "Write --format tokens"),
        (("write", ".", "x"), "is inside the source"),
        (("write", "empty.jsonl", "x"), "empty.jsonl has no samples"),
        (("write", "a.jsonl", "a.jsonl/x"), "a.jsonl"),
        (("write", "a.jsonl", "/proc/x"), "/proc/.x.writing"),
        (("write", "late_source:number", "x"), "late_source.py, line 2: TypeError: 'int'"),
        (("write", "late_source:raising", "x"), "late_source.py, line 7: KeyError: 'page'"),
        (("write", "a.jsonl", "x", "--work", "w", "--columns", "score=int8"), "can be deleted"),
        (("index", "/proc/1/task"), "/proc"),
        (("plan", "a.jsonl", "--bandwidth", "fast"), "--bandwidth"),
        (("plan", "a.jsonl", "--machines", "0"), "--machines 0"),
        (("check", "mds/index.json"), "Name its folder: "),
        (("check", "*.jsonl"), "list the files"),
        (("check", "t.bin", "--option", "dtype=unit16", "--option", "length=2"), "dtype='unit16'"),
        (("check", "t.bin", "--option", "dtype=uint16", "--option", "length=0"), "length=0"),
        (("check", "t.bin", "--option", "dtype=uint16", "--option", "length=2", "--option", "skip=9"), "skip=9"),
        (("check", "tok", "--option", "dtype=uint32"), "dtype='uint32' contradicts"),
        (("check", "tok", "--option", "skip=1"), "skip=1 contradicts"),
        (("write", "source.py", "x"), "'source:samples'"),
        (("check", "a.jsonl", "--share", "2"), "--share 2"),
    ],
)
def test_mistakes_are_one_paragraph(argv: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.jsonl").touch()
    Path("t.bin").write_bytes(bytes(8))
    Path("late_source.py").write_text(LATE)
    Path("mds").mkdir()
    Path("mds/index.json").write_text('{"version": 2, "shards": []}')
    Path("tok").mkdir()
    Path("tok/tokens.json").write_text('{"dtype": "uint16", "length": 2}')
    Path("tok/a.bin").write_bytes(bytes(8))
    assert hocket(*argv) == 2
    out, err = capsys.readouterr()
    assert error in err and err.count("\n") == 1 and not out and not Path("x").exists()


@pytest.mark.long
def test_control_c_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("HOCKET_TEST_SAMPLES", "300000")
    argv = [
        sys.executable,
        "-m",
        "hocket",
        "data",
        "write",
        "writing_source:numbered",
        "out",
        "--workers",
        "2",
        "--parts",
        "8",
    ]
    writer = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob(".out.writing/part-*")):
        time.sleep(0.01)
    os.killpg(writer.pid, signal.SIGINT)
    _, err = writer.communicate(timeout=20)
    assert (
        writer.returncode == -signal.SIGINT
        and err.startswith("hocket data: interrupted. The same command continues from ")
        and f"{tmp_path}/.out.writing" in err
        and err.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()
    assert subprocess.run(argv, check=True).returncode == 0
    assert sorted(sample["number"] for sample in read(tmp_path / "out")) == list(range(300_000))
