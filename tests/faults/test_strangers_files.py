"""Files of somebody else that hang, exhaust or trick whoever reads them, by every reader."""

from __future__ import annotations

import io
import json
import math
import os
import random
import socket
import stat
import sys
import zipfile
from array import array
from pathlib import Path
from typing import Any

import guarded
import numpy as np
import pytest
import torch
import yaml
from test_fuzz import composer, lightning

from hocket.basics import run_files as files, safe_files
from hocket_cli import document, main, recorded_config, run_listing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such files there")
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def special(path: Path, kind: str) -> None:
    """Make something that is no file with an end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        Path("private").write_text('{"batch": 1, "secret": 123}\n')
        path.symlink_to(Path("private").resolve())


KINDS = ("pipe", "endless", "socket", "folder", "sparse", "link")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run.json", "summary.json", "metrics.jsonl", "config.yaml", "media/metrics.jsonl"])
def test_runs_and_reports_read_regular_files_of_the_folder_only(name: str, kind: str, capsys: Any) -> None:
    other = "summary.json" if name == "metrics.jsonl" else "metrics.jsonl"
    Path("runs/a").mkdir(parents=True)
    Path("runs/a", other).write_text('{"batch": 1, "x": 1}\n')
    special(Path("runs/a", name), kind)
    assert main(["runs"]) == 0 and main(["report", "runs/a"]) == 0
    assert "123" not in capsys.readouterr().out and "secret" not in Path("report.html").read_text()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_commands_name_configurations_that_are_no_files(kind: str, capsys: Any) -> None:
    special(Path("c.yaml"), kind)
    special(Path("run/config.yaml"), kind)
    for command in (["plan", "c.yaml"], ["train", "c.yaml"], ["sweep", "c.yaml"], ["train", "--from", "run"]):
        assert main(command) == 2
        assert ("c.yaml" if "c.yaml" in command else "run") in capsys.readouterr().err


def test_a_link_out_of_the_folder_of_a_run_is_no_configuration(capsys: Any) -> None:
    special(Path("run/config.yaml"), "link")
    assert main(["train", "--from", "run"]) == 2 and "it is a link out of run" in capsys.readouterr().err


def test_a_file_is_never_opened_before_it_is_known_to_be_regular(monkeypatch: pytest.MonkeyPatch) -> None:
    special(Path("a"), "pipe")
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(safe_files.UnsafeFileError, match="a pipe"):
        safe_files.opened("a")


def test_limits_of_bytes_and_lines() -> None:
    Path("a").write_bytes(b"x" * 100)
    assert safe_files.content("a", 100) == b"x" * 100
    with pytest.raises(safe_files.UnsafeFileError, match="100 bytes; at most 99"):
        safe_files.content("a", 99)
    Path("b").write_bytes(b'{"a": 1}\n' + b" " * (safe_files.LINE + 2))
    assert list(files.lines(Path("b"))) == [{"a": 1}]
    with pytest.raises(safe_files.UnsafeFileError, match="a line has more than"):
        list(safe_files.blocks("b"))


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_those_of_a_line_by_line_reader(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any size, nested and malformed lines, and a truncated last one."""
    rng = random.Random(seed)
    monkeypatch.setattr(safe_files, "BLOCK", rng.choice((1, 7, 64, 1 << 20)))
    kinds = [
        '{"batch": 1}',
        '{"a": {"b": [1]}}',
        "",
        "5",
        "{",
        '{"a": "{"}',
        '{"a":1},{"b":2}',
        "[]",
        '"x"',
        "\xff",
        '{"é": 1e999}',
    ]
    lines = [rng.choice(kinds) for _ in range(rng.randrange(30))]
    raw = "\n".join(lines).encode("latin-1" if "\xff" in lines else "utf-8")
    Path("a.jsonl").write_bytes(raw)

    def value(line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    with io.BytesIO(raw) as file:
        expected = [value(line) for line in file if value(line) or line.endswith(b"\n")]
    assert list(files.lines(Path("a.jsonl"))) == expected


def test_nesting_is_limited() -> None:
    deep: Any = json.loads("[" * safe_files.DEPTH + "]" * safe_files.DEPTH)
    assert safe_files.parsed(json.dumps(deep)) == deep
    for text in ("[" * 501 + "]" * 501, '{"a":' * 501 + "1" + "}" * 501, "[" * 100_000):
        with pytest.raises(ValueError):
            safe_files.parsed(text)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)),
        "a: &a [1, *a]",
        "a: " + "[" * 5000,
        "a: " + "[" * 70 + "]" * 70,
        "a: " + "9" * 5000,
        "a: !!int x",
        "a: !!timestamp 2001-99-99",
        "a: !!float ''",
        "? !!bool x\n: 1",
    ],
)
def test_bombs_of_yaml_end_at_once_with_a_sentence(text: str) -> None:
    with pytest.raises(document.ConfigError):
        document.parse(text, "c.yaml")


def test_ordinary_aliases_read_as_before() -> None:
    text = "a: &a {lr: 0.1, betas: &b [1, 2]}\nb: [*a, *a, *b]\nc: {<<: *a, x: *b}\n" + "".join(
        f"k{n}: *a\n" for n in range(500)
    )
    root = document.parse(text, "c.yaml")
    assert root.plain() == yaml.safe_load(text)
    root.value["a"].value["lr"].value = 7  # an override of one place is none of the others
    assert root.plain()["k3"]["lr"] == 0.1


def test_replaced_files_follow_no_link_and_keep_no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("v").write_text("precious")
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))  # as if the name could be known
    Path(f".a.{bytes(8).hex()}").symlink_to("v")
    with pytest.raises(FileExistsError):
        safe_files.replace("a", "x")
    assert Path("v").read_text() == "precious"
    monkeypatch.setattr(os, "urandom", lambda n: bytes(range(n)))
    Path("b").symlink_to("v")
    before = os.umask(0o027)
    try:
        safe_files.replace("b", "x")
    finally:
        os.umask(before)
    assert Path("v").read_text() == "precious" and not Path("b").is_symlink()
    assert stat.S_IMODE(Path("b").stat().st_mode) == 0o640
    with pytest.raises(ZeroDivisionError), safe_files.replacing("b") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (
        Path("b").read_text() == "x" and sorted(each.name for each in Path().iterdir() if each.name[:2] == ".b") == []
    )


def test_hocket_runs_controls_no_terminal(capsys: Any) -> None:
    Path("runs/a").mkdir(parents=True)
    evil = "\x1b[2J\x9b31m\u202e\nx"
    Path("runs/a/run.json").write_text(json.dumps({"run": "1", "name": evil, "began": evil}))
    summary = {
        "run": "1",
        "status": "failed",
        "error": evil,
        "values": {f"test/{evil}": [1, 1, 1]},
        "evaluated": [f"test/{evil}"],
    }
    Path("runs/a/summary.json").write_text(json.dumps(summary))
    assert main(["runs"]) == 0
    assert main(["runs", "--sort", "other"]) == 2
    said = "".join(capsys.readouterr())
    assert all(each.isprintable() or each == "\n" for each in said) and "\\x1b[2J" in said


def test_a_recorded_configuration_may_hold_anything(capsys: Any) -> None:
    Path("a").mkdir()
    for made in (
        "{run: 1, environment: 5}",
        "{run: 1, overrides: x, versions: [1]}",
        "{changed: 3, modules: 1, sources: 2, run: 1}",
    ):
        Path("a/config.yaml").write_text(f"model: mod:f\nx-hocket: {made}\n")
        assert main(["train", "--from", "a"]) == 2
    now = "1: 2\nx-hocket: {run: 1, changed: 3}\n"
    for made in ("text", "[1]", "{run: [1]}", "{run: 1, changed: 3}"):
        Path("a/config.yaml").write_text(f"model: mod:f\nx-hocket: {made}\n")
        assert recorded_config.continued(Path("a/config.yaml"), now).startswith(("1: 2", "#"))


@pytest.mark.parametrize("most", [40, 4096])
def test_thinned_curves_keep_ends_and_extremes_of_their_columns(most: int) -> None:
    from hocket_report.logged_values import Curve, read

    rng = random.Random(most)
    values = [rng.choice((rng.gauss(0, 1), math.nan, 1e308, -1e308)) for _ in range(30_000)]
    with Path("metrics.jsonl").open("w") as file:
        for batch, value in enumerate(values):
            row = {
                "batch": batch,
                "epoch": batch // 100,
                "x": value if batch % 3 else str(value).replace("nan", "NaN"),
                "y": 1,
            }
            file.write(json.dumps(row | ({"z": batch} if batch % 7 == 0 else {})) + "\n")
    logged = read(Path("metrics.jsonl"), most)
    given = [(batch, value) for batch, value in enumerate(values) if batch % 3 or math.isnan(value)]
    curve: Curve = logged.series["x"]
    assert curve.count == len(given) and len(curve.values) <= most
    assert curve.odd == sum(math.isnan(value) for _, value in given)
    kept: dict[int, list[tuple[int, float]]] = {}
    for number, row, value in zip(curve.numbers, curve.rows, curve.values, strict=True):
        assert given[number][0] == row and (value == given[number][1] or math.isnan(value))
        kept.setdefault(number // curve.width, []).append((number, value))
    for column in range(-(-len(given) // curve.width)):
        part = [value for _, value in given[column * curve.width : (column + 1) * curve.width]]
        finite = [value for value in part if math.isfinite(value)]
        shown = [value for _, value in kept[column] if math.isfinite(value)]
        assert (kept[column][0][0], kept[column][-1][0]) == (column * curve.width, column * curve.width + len(part) - 1)
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    assert curve.range[1:] == (
        min(v for _, v in given if math.isfinite(v)),
        max(v for _, v in given if math.isfinite(v)),
    )
    assert logged.series["z"].count == len(range(0, 30_000, 7)) and logged.last["batch"] == 29_999
    assert array("q", sorted({row for each in logged.series.values() for row in each.rows})) == logged.kept


def test_a_report_reads_what_a_scan_reads() -> None:
    """Of a run without a summary, the report and `hocket runs` say the same."""
    from hocket_report import run_contents

    Path("runs/a").mkdir(parents=True)
    rng = random.Random(1)
    rows = [{"batch": n, "epoch": n // 9, "a": rng.choice((1, 2.5, "NaN", True, "x", None))} for n in range(1000)]
    Path("runs/a/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ours, theirs = run_contents.read(Path("runs/a"), 400, lambda: None).about, run_listing.read(Path("runs/a"))
    assert ours.position == theirs.position and ours.values == theirs.values


def pickled(name: str, content: bytes) -> None:
    with zipfile.ZipFile(name, "w") as archive:
        for part, raw in (("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"a/{part}", raw)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}X\x0a\x00\x00\x00state_dictcbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85Rs.",  # 2 GB by their number alone
        b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00K\x01s.",  # a key that takes forever to hash
        b"\x80\x02]q\x00h\x00a.",  # a list that contains itself
        b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b".",
        b"\x80\x02.",
        b"",
    ],
)
def test_readers_of_peers_checkpoints_check_pickles_first(content: bytes) -> None:
    """In a fork: without the check, most of them end neither soon nor in little memory."""
    pickled("a.ckpt", content)
    for read in (lightning, composer):
        ended = guarded.call(lambda read=read: read("a.ckpt"), Path.cwd())
        assert ended.fault == "" and "'a.ckpt'" in ended.output and ended.seconds < 5


@pytest.mark.parametrize("kind", KINDS[:-2])
def test_readers_of_peers_checkpoints_refuse_other_things_than_files(kind: str) -> None:
    special(Path("a.ckpt"), kind)
    assert "regular file" in guarded.call(lambda: lightning("a.ckpt"), Path.cwd()).output
    if kind != "folder":
        assert "regular file" in guarded.call(lambda: composer("a.ckpt"), Path.cwd()).output


def test_random_numbers_of_numpy_are_read_and_allocate_what_the_file_has() -> None:
    """An array that a file wants to be large has no more elements than bytes in the file."""
    from hocket_migration.composer.checkpoint_loading import find

    state = np.random.RandomState(1).get_state()
    torch.save({"state": {}, "rng": [{"numpy": state}]}, "a.pt")
    loaded = find("a.pt")
    assert loaded is not None and np.array_equal(loaded.tree["rng"][0]["numpy"][1], state[1])

    class Large:
        def __reduce__(self) -> Any:
            return np.zeros(0).__reduce__()[0], (np.ndarray, (1 << 40,), b"b")

    torch.save({"state": {}, "rng": Large()}, "b.pt")
    loaded = find("b.pt")
    assert loaded is not None and loaded.tree["rng"].size == 0


def test_exported_weights_have_the_mode_of_other_files() -> None:
    from hocket.checkpoints import export

    torch.save(torch.nn.Linear(2, 1).state_dict(), "a.pt")
    before = os.umask(0o027)
    try:
        export("a.pt", "a.safetensors")
        Path("other").touch()
    finally:
        os.umask(before)
    assert Path("a.safetensors").stat().st_mode == Path("other").stat().st_mode
