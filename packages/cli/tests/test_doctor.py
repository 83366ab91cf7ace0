"""``hocket doctor``: what it finds on this machine, and with a hundred plug-ins of strangers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.plugins import registry
from hocket_cli import health, main


def args(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(folder=str(folder), json=True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that run tests are busy."""
    monkeypatch.setattr(health, "_RENDEZVOUS", 200.0)


def test_two_processes_reach_each_other_over_gloo(tmp_path: Path) -> None:
    found = list(health._backends(args(tmp_path)))
    assert found[0].status == "ok" and "gloo" in found[0].text, found


def test_a_backend_that_cannot_be_reached_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    (found,) = health._backends(args(tmp_path))
    assert found.status == "PROBLEM" and "GLOO_SOCKET_IFNAME" in found.remedy


def test_the_disk_is_that_of_the_folder_and_nothing_stays_there(tmp_path: Path) -> None:
    (found,) = health._disk(args(tmp_path / "not" / "there" / "yet"))
    assert found.status != "PROBLEM" and f"{tmp_path}: " in found.text and "MB/s" in found.text
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    (found,) = health._disk(args(tmp_path / "file"))
    assert found.status == "PROBLEM" and "folder=" in found.remedy


def test_versions_below_their_bounds_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for name, version, requires in (
        ("hocket-acme", "1.0", ["acme-old>=2.1", "acme-new>=2.1,<3", "acme-absent>=1", "acme-extra>=1; extra == 'x'"]),
        ("acme-old", "2.0.9", []),
        ("acme-new", "2.10", []),
    ):
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        )
    monkeypatch.syspath_prepend(str(site))
    wrong = {each.text: each.remedy for each in health._versions(args(tmp_path)) if each.status == "PROBLEM"}
    assert wrong == {
        "acme-old is 2.0.9, and hocket-acme is tested from 2.1 on": "pip install 'acme-old>=2.1'",
        "acme-absent is not installed, and hocket-acme is tested from 1 on": "pip install 'acme-absent>=1'",
    }


def test_more_threads_than_processors_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    (found,) = health._torch(args(tmp_path))
    assert found.status == "WARNING" and "OMP_NUM_THREADS=" in found.remedy


def test_a_check_that_breaks_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def _broken(args: argparse.Namespace) -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(health, "CHECKS", (_broken, health._python))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "WARNING  broken" in printed and "no /proc here" in printed and "ok       python" in printed
    assert printed.endswith("0 problems, 1 warnings\n")


@pytest.mark.long
def test_a_hundred_distributions_are_imported_each_by_itself(tmp_path: Path) -> None:
    """One breaks, one ends the process, one hangs, one is killed, one changes what the others would see."""
    site = tmp_path / "site"
    sources = {
        3: "import not_there",
        5: "import os; os._exit(7)",
        8: "import os; os.kill(os.getpid(), 9)",
        9: "import sys; sys.modules['json'] = None; import builtins; builtins.open = None",
    }
    for number in range(100):
        info = site / f"acme_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hocket.v1.callbacks]\nacme-{number} = acme_{number}:Mine\n")
        body = "import hocket\nclass Mine(hocket.Callback):\n    pass\n"
        (site / f"acme_{number}.py").write_text(f"{sources.get(number, '')}\n{body}")
    code = "import sys; from hocket_cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", "--folder", str(tmp_path)], capture_output=True, text=True,
        timeout=500, check=False, env=os.environ | {"PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    wrong = sorted(each["text"] for each in found if each["status"] == "PROBLEM" and "acme" in each["text"])
    assert len(wrong) == 3
    assert "acme-3" in wrong[0] and "not_there" in wrong[0]
    assert "acme-5" in wrong[1] and "exit code 7" in wrong[1]
    assert "acme-8" in wrong[2] and "exit code -9" in wrong[2]
    ok = next(each for each in found if each["subject"] == "plug-ins" and each["status"] == "ok")
    assert int(ok["text"].split()[0]) >= 97


def test_a_list_without_plug_ins_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = registry.entries
    monkeypatch.setattr(registry, "entries", lambda kind=None: [] if kind in ("datasets", "actions") else every(kind))
    assert main(["plugins", "list", "--kind", "datasets"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("No plug-in of kind datasets is installed. Type: pip install ") and "vision" in line
    assert main(["plugins", "list", "--kind", "actions"]) == 0
    assert capsys.readouterr().out == "No plug-in of kind actions is installed.\n"
    assert main(["plugins", "list", "--kind", "datasets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
