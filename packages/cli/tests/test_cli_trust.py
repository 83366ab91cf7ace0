"""Recorded runs of other people: nothing of theirs is imported before the user has read what, and has said --trust."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hocket_cli import main

#: Notes that it was imported.
MODULE = """
import pathlib, torch
with open({noted!r}, "a") as file: file.write(__name__ + " ")
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(3, 1)
def loader(): return [(torch.ones(4, 3), torch.ones(4, 1))] * 2
"""
CONFIG = """\
model: {name}:Net
loss: mse_loss
train_data: {name}:loader
optimizer: sgd(lr=0.1)
duration: 1ba
device: cpu
"""
#: Modules of the standard library that are not loaded at start, of installed distributions, and others.
NAMES = ["trust_mine", "json", "tabnanny", "code", "yaml", "_pytest", "torch"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for each in ("home", "stranger/evil"):
        (tmp_path / each).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()
    yield tmp_path / "noted"
    for name in ("trust_mine", "tabnanny"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(noted: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        return main([*arguments]), *capsys.readouterr()

    return call


def stranger(folder: Path, noted: Path, name: str = "trust_mine", more: str = "") -> Path:
    """Write a run that has a module, also under other names, and return its folder."""
    (folder / "evil").mkdir(parents=True, exist_ok=True)
    for each in {name, *NAMES[1:]}:
        (folder / "evil" / f"{each}.py").write_text(MODULE.format(noted=str(noted)))
    made = {"run": "1", "sources": {name: [f"evil/{name}.py", str(folder / "evil" / f"{name}.py")]}}
    (folder / "config.yaml").write_text(CONFIG.format(name=name) + more + yaml.safe_dump({"x-hocket": made}))
    return folder


COMMANDS = {
    "train --from": ["train", "--from", "{run}"],
    "train": ["train", "{run}/config.yaml"],
    "plan": ["plan", "{run}/config.yaml"],
    "estimate": ["estimate", "{run}/config.yaml"],
    "summary": ["summary", "{run}/config.yaml"],
    "evaluate": ["evaluate", "{run}/config.yaml", "--weights", "w.safetensors"],
    "predict": ["predict", "{run}/config.yaml", "--weights", "w.safetensors", "--out", "o.safetensors"],
    "sweep": ["sweep", "{run}/config.yaml", "seed=1,2", "--metric", "train/loss", "--mode", "min"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["outside", "link", "named"])
def test_no_command_imports_what_a_strangers_run_names(command: str, place: str, run: Run, noted: Path) -> None:
    """From outside of the working folder; or from a run in it whose modules are outside, or are installed."""
    there = stranger(noted.parent / "stranger", noted)
    where = there
    if place == "link":
        where = Path("inside")
        where.mkdir()
        text = (there / "config.yaml").read_text().replace("evil/trust_mine.py", str(there / "evil/trust_mine.py"))
        (where / "config.yaml").write_text(text)
    if place == "named":
        (there / "config.yaml").write_text("model: subprocess:run\ntrain_data: os:getcwd\nx-hocket: {run: 1}\n")
    before = [*sys.path]
    code, out, said = run(*(each.format(run=where) for each in COMMANDS[command]))
    assert code == 2 and not out and not noted.exists() and sys.path == before, said
    assert said.count("\n") == 1 and "outside of the working folder" in said and "add --trust" in said
    names = (
        ["subprocess (in the standard library)"] if place == "named" else [f"trust_mine ({there}/evil/trust_mine.py)"]
    )
    assert all(name in said for name in names), said
    if place == "outside":
        assert f"yaml ({there}/evil)" in said and "instead of what is installed" in said


@pytest.mark.parametrize("command", ["plan", "train", "train --from"])
def test_printing_a_configuration_imports_nothing(command: str, run: Run, noted: Path) -> None:
    more = "eval_data: {test: subprocess:run}\ncallbacks: [early-stopping(monitor=x), trust_mine:Missing]\n"
    there = stranger(noted.parent / "stranger", noted, more=more)
    before, modules = [*sys.path], {*sys.modules}
    code, out, said = run(*(each.format(run=there) for each in COMMANDS[command]), "--print-config")
    assert code == 0 and not noted.exists() and sys.path == before, said
    assert not {"trust_mine", "tabnanny"} & ({*sys.modules} - modules)
    printed = yaml.safe_load(out)
    assert printed["model"] == "trust_mine:Net" and printed["eval_data"] == {"test": "subprocess:run"}
    assert printed["callbacks"][0]["early-stopping"]["patience"] == 3, "with the defaults of installed plug-ins"


def test_a_trusted_run_neither_hides_the_standard_library_nor_silently_what_is_installed(run: Run, noted: Path) -> None:
    there = stranger(noted.parent / "stranger", noted)
    code, _, said = run("train", "--from", str(there), "--trust", "run_name=mine")
    assert code == 0, said
    first, second, *_ = said.splitlines()
    assert (
        first
        == f"hocket: trust_mine ({there}/evil/trust_mine.py) is imported from where it was recorded, not from this folder."
    )
    assert "instead of what is installed: _pytest" in second and f"yaml ({there}/evil)" in second
    assert noted.read_text() == "trust_mine "
    import tabnanny  # noqa: F401  # not loaded before

    assert noted.read_text() == "trust_mine ", "sys.path has the standard library first"
    assert sys.path.index(str(there / "evil")) > max(
        i for i, each in enumerate(sys.path) if each.endswith("lib-dynload")
    )


@pytest.mark.parametrize("name", ["json", "code", "tabnanny"])
def test_a_recorded_module_of_the_standard_librarys_name_is_refused(name: str, run: Run, noted: Path) -> None:
    there = stranger(noted.parent / "stranger", noted, name)
    code, _, said = run("train", "--from", str(there), "--trust")
    assert code == 2 and said.count("\n") == 1 and not noted.exists()
    assert f"{there}/evil/{name}.py" in said and f"Type the command in {there}/evil" in said


def test_a_run_within_the_working_folder_is_said_and_not_asked_for(run: Run, noted: Path) -> None:
    there = stranger(Path("copied").absolute(), noted)
    code, _, said = run("train", "--from", "copied", "run_name=mine")
    assert code == 0 and f"trust_mine ({there}/evil/trust_mine.py) is imported from where it was recorded" in said
    assert "_pytest" in said and noted.read_text() == "trust_mine "


@pytest.mark.parametrize(
    "made",
    ["3", "[1]", "text", "{modules: [a]}", "{run: 1, sources: {mine: 3}}", "{run: 1, sources: {../../evil: [a]}}",
     "{run: 1, file: [a]}", '{run: 1, file: "a\\0b"}', '{run: 1, sources: {mine: ["\\0"]}}', "{run: 1, versions: 3}",
     "{run: 1, overrides: 3, environment: {a: b}}", "{run: 1, changed: {a: 1}}", "{run: 1, ranks: [2], modules: {a: [b]}}",
     "{run: 1, file: /dev/zero, sha256: 3}", "{run: 1, modules: {mine: null}}"],
)  # fmt: skip
@pytest.mark.parametrize(
    "command", [["plan", "config.yaml"], ["train", "--from", ".", "run_name=b"]], ids=["plan", "from"]
)
def test_what_no_run_records_is_a_sentence(made: str, command: list[str], run: Run, noted: Path) -> None:
    Path("mine.py").write_text(MODULE.format(noted=str(noted)))
    Path("config.yaml").write_text(f"{CONFIG.format(name='mine')}x-hocket: {made}\n")
    code, _, said = run(*command)
    sys.modules.pop("mine", None)
    assert "Traceback" not in said and code in (0, 2)
    assert code == 0 or said.count("\n") == 1, said
    assert "run: 1" not in made or code == 0, said
    if "run: 1" in made and "/dev" not in made:
        assert "x-hocket is what a run records, and its " in said and "ignored there" in said
