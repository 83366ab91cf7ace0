"""docs/how-to/port-from-*.md: each program before and after the port prints the same loss. Other frameworks run elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, blocks, sides, write

GUIDES = ROOT / "docs/how-to"
#: The environment variable that names the Python in which a framework is installed; see the session `porting` in noxfile.py.
PYTHONS = {
    "pytorch": None, "lightning": "PEERS_PYTHON", "transformers": "PEERS_PYTHON", "accelerate": "PEERS_PYTHON",
    "composer": "COMPOSER_PYTHON",
}  # fmt: skip


@pytest.mark.parametrize(
    "framework", [pytest.param(each, marks=pytest.mark.long if each == "pytorch" else ()) for each in PYTHONS]
)
def test_port(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    before, after = _programs(framework)
    for block in blocks(GUIDES / "porting.md"):
        if "file" in block.words:
            write(block, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with torch.random.fork_rng(devices=[]):
            exec(compile(after, f"port-from-{framework}.md", "exec"), {"__name__": "__main__"})
    finally:
        sys.modules.pop("digits", None)
    ours = _last_number(capsys.readouterr().out)
    assert 0.9 < ours < 1.2  # trained: an untrained network has a loss of 2.3

    variable = PYTHONS[framework]
    if variable is not None and variable not in os.environ:
        pytest.skip(f"{framework} is in an environment of its own, which nox -s porting makes")
    (tmp_path / "program.py").write_text(before, encoding="utf-8")
    python = sys.executable if variable is None else os.environ[variable]
    done = subprocess.run([python, "program.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ours == pytest.approx(_last_number(done.stdout), rel=1e-4 if framework == "composer" else 1e-5)  # it rounds


def _programs(framework: str) -> tuple[str, str]:
    """Return the programs before and after the port: two blocks, or the sides of one block of differences."""
    shown = blocks(GUIDES / f"port-from-{framework}.md")
    before, after = sides(*shown) if len(shown) == 1 else (each.text for each in shown)
    return before, after


def _last_number(printed: str) -> float:
    return float(re.findall(r"\d+\.\d+", printed)[-1])
