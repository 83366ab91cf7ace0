"""docs/how-to/from-accelerate.md and docs/reference/accelerate.md, executed: the programs, and each row with both."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, blocks, sides

import hocket
from hocket_migration.inspecting.tables import sources

pytest.importorskip("accelerate")

FILE = Path(__file__).with_name("accelerate_rows.py")
_SPEC = importlib.util.spec_from_file_location("accelerate_rows", FILE)
rows = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = rows
_SPEC.loader.exec_module(rows)

PAGE = (ROOT / "docs/reference/accelerate.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table of a section, without its two first lines."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


REPLACED, WITHOUT = table("Replace line by line"), table("Replace what has no counterpart")


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Leave what earlier tests have made out of the garbage collections that Accelerate asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def accelerator():
    """Make an Accelerator, whose state is that of the process, and forget it afterwards."""
    from accelerate import Accelerator

    forget()
    yield Accelerator(cpu=True)
    forget()


def forget():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check_equal(before, after):
    """Compare nested values: tensors and floats to rounding, the rest exactly."""
    if isinstance(before, torch.Tensor | float):
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
    elif isinstance(before, list | tuple | dict):
        assert type(before) is type(after)
        assert len(before) == len(after)
        if isinstance(before, dict):
            assert before.keys() == after.keys()
            before, after = before.values(), after.values()
        for one, other in zip(before, after, strict=True):
            check_equal(one, other)
    else:
        assert before == after


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if each.long else []) for name, each in rows.ROWS.items()]
)
def test_a_row_has_the_same_outcome_on_both_sides(name, accelerator, tmp_path):
    one, other = tmp_path / "before", tmp_path / "after"
    one.mkdir(), other.mkdir()
    row = rows.ROWS[name]
    if "Accelerator(" in inspect.getsource(row.before):  # it makes its own, perhaps of another precision
        forget()
    before = row.before(accelerator, one)
    check_equal(before, row.after(hocket.Runtime(device="cpu"), other))


@pytest.mark.parametrize("cells", REPLACED, ids=lambda cells: codes(cells[0])[0])
def test_a_row_of_the_page_is_that_of_a_test(cells):
    def contains(function, cell):
        text = "".join(inspect.getsource(function).split())
        return all("".join(code.split()) in text for code in codes(cell))

    found = [each for each in rows.ROWS.values() if contains(each.before, cells[0]) and contains(each.after, cells[1])]
    assert codes(cells[0]), cells
    assert codes(cells[1]), cells
    assert found, cells
    assert any(each.ranks for each in found) or "one rank" in cells[2] or "launch" in cells[0]


def test_every_tested_row_is_on_the_page():
    assert set(rows.ROWS) <= {code for cells in REPLACED for code in codes(cells[0])}


def test_the_page_and_inspect_say_the_same_about_every_member():
    left = " ".join(code for cells in REPLACED for code in codes(cells[0]))
    replaced = set(re.findall(r"accelerator\.(\w+)", left))
    without = {code for cells in WITHOUT for code in codes(cells[0])}
    kind = sources()["accelerate"].kinds["Accelerator"]
    members = set(kind.members)
    assert members <= replaced | without
    assert replaced <= members
    assert without <= members | set(kind.arguments)
    assert not replaced & without & members
    for name, entry in kind.members.items():
        assert entry.verdict in ({"maps", "changes"} if name in replaced else {"no counterpart", "changes"}), name
    assert set(kind.arguments) <= without | set(re.findall(r"(\w+)=", left)) | members


def test_what_inspect_says_to_write_is_in_the_row_of_the_page():
    kind = sources()["accelerate"].kinds["Accelerator"]
    for name, entry in kind.members.items():
        cells = [each for each in REPLACED if re.search(rf"accelerator\.{name}\b", each[0])]
        said = set(re.findall(r"(?:runtime|model|scheduler|safetensors\.torch)\.(\w+)", entry.text))
        assert not cells or said <= set(re.findall(r"\w+", " ".join(map(" ".join, cells)))), (name, entry.text)


def test_the_programs_print_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    forget()
    printed = []
    for program in sides(*blocks(ROOT / "docs/how-to/from-accelerate.md")):
        exec(compile(program, "from-accelerate.md", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    forget()
    assert len(printed[0].splitlines()) == 3
    assert printed[0] == printed[1]
    assert (tmp_path / "state").is_dir()
    assert (tmp_path / "checkpoint").is_dir()


def differing(start: str) -> list[float]:
    (cells,) = [cells for cells in table("Compare the numbers of both") if cells[0].startswith(start)]
    return [float(cell) for cell in cells[1:]]


def test_the_last_window_of_accumulation_differs(accelerator):
    forget()
    assert list(rows.last_window([4, 4, 2], [2.0, 2.0, 2.0], 2)) == differing(
        "accumulation of 2 over batches of 4, 4 and 2"
    )
    forget()
    assert list(rows.last_window([4, 2], [1.0, 4.0], 1)) == differing("accumulation of 2 over one batch")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}

    def run(*command):
        subprocess.run([sys.executable, "-m", *command], check=True, env=environment, timeout=300)

    theirs = ("accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2")
    (tmp_path / "count.py").write_text("from pathlib import Path; import os; Path(f'{os.getpid()}.started').touch()")
    subprocess.run([sys.executable, "-m", *theirs, "count.py"], check=True, cwd=tmp_path, env=environment, timeout=300)
    started = len(list(tmp_path.glob("*.started")))
    run("torch.distributed.run", "--nproc-per-node", "2", str(FILE), "before", str(tmp_path))
    run("hocket", "launch", "-n", "2", str(FILE), "after", str(tmp_path))
    assert [started, len(list(tmp_path.glob("after-*.pt")))] == differing("processes")
    for rank in range(2):
        before, after = (torch.load(tmp_path / f"{side}-{rank}.pt") for side in ("before", "after"))
        assert [before.pop("learning rate"), after.pop("learning rate")] == differing("learning rate")
        assert len(before) > 25
        for name in before:
            check_equal(before[name], after[name])
