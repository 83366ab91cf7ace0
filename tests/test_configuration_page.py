"""Pages about configuration files: programs run, commands print what the pages say, and the keys are those of the Trainer.

Type ``python tests/test_configuration_page.py`` to write its list of keys anew.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hocket
from hocket_cli import main
from hocket_cli.keys import KIND_OF_KEY, keys

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "reference/configuration.md"
PAGES = (DOCS / "how-to/configuration-files.md", PAGE)
HEADING = "## Every key\n\n"


def listed() -> str:
    """The list of keys."""
    lines = []
    for key, about in keys().items():
        default = "required" if about.required else f"default `{yaml.safe_dump(about.default).split(chr(10))[0]}`"
        kind = f" Plug-ins: `hocket plugins list --kind {KIND_OF_KEY[key]}`." if key in KIND_OF_KEY else ""
        lines.append(f"- **`{key}`** ({default}): {about.documentation}{kind}\n")
    return "".join(lines)


def blocks(language: str) -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it printed on stdout and stderr."""
    program, *arguments = command.split()
    assert program == "hocket"
    return main(arguments), *capsys.readouterr()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the pages' files, and a copy of the configuration with a typo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    program, configuration = "".join(blocks("python")), blocks("yaml")[0]
    (tmp_path / "mine.py").write_text(program, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(configuration, encoding="utf-8")
    (tmp_path / "typo.yaml").write_text(configuration.replace("width: 8", "widht: 8"), encoding="utf-8")
    return tmp_path


def test_the_list_of_keys_is_that_of_the_trainer() -> None:
    of_the_trainer = set(inspect.signature(hocket.Trainer.__init__).parameters) - {"self"}
    assert set(keys()) == of_the_trainer | {"data"}
    assert not [key for key, about in keys().items() if not about.documentation], (
        "Add it to the docstring of the Trainer."
    )
    assert PAGE.read_text(encoding="utf-8").partition(HEADING)[2] == listed(), f"if it is meant: python {__file__}"


def test_the_commands_do_what_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those followed by text print it and exit with 2; any other succeeds."""
    tried = 0
    for block in blocks("console"):
        for command, said in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            code, _, printed = run(command, capsys)
            assert (code, printed) == ((2, said) if said else (0, printed)), printed
            tried += 1
    assert tried == 10
    kept = {each.name for each in (folder / "checkpoints").iterdir() if each.is_dir() and not each.is_symlink()}
    assert kept == {"ep5-ba40", "ep6-ba48"}


@pytest.mark.parametrize("block", blocks("yaml")[1:])
def test_the_fragments_fit_the_configuration(block: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {**yaml.safe_load(blocks("yaml")[0]), **yaml.safe_load(block), "device": "cpu"}
    (folder / "fragment.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    code, printed, failed = run("hocket train fragment.yaml duration=1ep", capsys)
    assert code == 0, failed
    assert ("test/largest" if "LargestError" in block else "test/error") in printed


@pytest.mark.long
def test_ranks_find_the_modules_of_the_folder(folder: Path) -> None:
    """The processes of ``devices=2`` are started without the working folder on their path."""
    program = folder / "hocket_command.py"
    program.write_text("import sys\nfrom hocket_cli import main\nsys.exit(main())\n", encoding="utf-8")
    line = [sys.executable, str(program), "train", "config.yaml", "duration=1ep", "devices=2", "device=cpu"]
    line += ["metrics=null"]  # the page's metric does not combine ranks
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "test/loss" in done.stdout, done.stderr


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(before + HEADING + listed(), encoding="utf-8")
