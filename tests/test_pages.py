"""README.md and the pages for users: what they show runs, from an empty folder, in the order of the page."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, blocks, write_files

import hocket

PAGES = (
    "README.md",
    "docs/tutorials/your-model.md",
    "docs/how-to/evaluation.md",
    "docs/how-to/logging.md",
    "docs/how-to/language.md",
    "docs/how-to/optimizers.md",
    "docs/how-to/loggers.md",
    "docs/how-to/monitors.md",
    "docs/how-to/profiling.md",
    pytest.param("docs/how-to/sweeps.md", marks=pytest.mark.long),  # a dozen processes
    "docs/how-to/report.md",
    pytest.param("docs/how-to/estimating.md", marks=pytest.mark.long),
    "docs/how-to/from-composer.md",
    pytest.param("docs/how-to/runtime.md", marks=pytest.mark.long),
)


@pytest.mark.parametrize("name", PAGES)
def test_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torchmetrics")
    if name == "docs/how-to/optimizers.md":
        pytest.importorskip("schedulefree")
    if name == "docs/how-to/language.md":
        pytest.importorskip("peft")
    if name == "docs/how-to/report.md":
        pytest.importorskip("vl_convert")
    page = ROOT / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(page, tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    ran, before = 0, set(sys.modules)
    try:
        with torch.random.fork_rng(devices=[]):
            for block in blocks(page):
                if block.language == "python" and "file" not in block.words:
                    # As many empty lines as the page has above, so that a traceback names the page's line.
                    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
                    ran += 1
                elif block.language == "console":
                    ran += _commands(block.text, tmp_path)
    finally:
        for module in set(sys.modules) - before:
            if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[module]
    assert ran


def test_defaults_in_the_table_of_monitors_are_those_of_the_constructors() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\|([^|]*)\|$", (ROOT / "docs/how-to/monitors.md").read_text(), re.MULTILINE)
    checked = 0
    for name, defaults in rows:
        for argument, value in re.findall(r"`(\w+)=([^`]+)`", defaults):
            if value == '"train"':  # another choice, not the default
                continue
            parameters = inspect.signature(hocket.plugins.get("callbacks", name)).parameters
            assert parameters[argument].default == ast.literal_eval(value), (name, argument)
            checked += 1
    assert checked >= 11


def _commands(text: str, folder: Path) -> int:
    """Run the lines that begin with ``$ hocket``, and return their number."""
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ hocket")]
    for line in lines:
        command = [sys.executable, "-m", "hocket", *shlex.split(line, comments=True)[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return len(lines)
