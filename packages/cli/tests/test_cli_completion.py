"""Completion: the candidates, and what interactive shells make of them; terminals that print ASCII only."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.plugins import names
from hocket_cli import main
from hocket_cli.completion import SCRIPTS, candidates
from hocket_cli.keys import keys

#: What a shell needs to start without files of the user, and to load the script.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(hocket --print-completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -D -u; eval "$(hocket --print-completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "hocket --print-completion fish | source"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("one.yaml", "two.yml", "three.txt", "sub/four.yaml"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hocket tra", ["train"]),
        ("hocket --no-plugins tra", ["train"]),
        ("hocket --print-completion ", ["bash", "fish", "zsh"]),
        ("hocket --v", ["--version"]),
        ("hocket train ", ["one.yaml", "sub/", "two.yml"]),
        ("hocket train sub/", ["sub/four.yaml"]),
        ("hocket train one.yaml see", ["seed="]),
        ("hocket train one.yaml seed=1 deterministic=", ["deterministic=false", "deterministic=true"]),
        ("hocket train one.yaml optimizer=adamw", ["optimizer=adamw"]),
        ("hocket train one.yaml --trace", ["--traceback"]),
        ("hocket evaluate one.yaml --weights t", ["three.txt", "two.yml"]),
        ("hocket plugins do", ["doctor"]),
        ("hocket plugins list --kind sch", ["schedules"]),
        ("hocket plugins info lr-", ["lr-monitor"]),
        ("hocket plugins list --json --kind sch", ["schedules"]),
        ("hocket nothing ", []),
        ("hocket train 'one", ["one.yaml"]),
    ],
)  # fmt: skip
def test_candidates(line: str, expected: list[str]) -> None:
    found = candidates(line.replace("'", "") if line.endswith("'one") else line)
    assert found == expected


def test_all_commands_and_keys_are_candidates() -> None:
    assert set(candidates("hocket ")) == set(names("commands"))
    assert set(candidates("hocket train one.yaml ")) == {f"{key}=" for key in keys()}


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "tcsh"]) == 2
    assert "bash, zsh or fish" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SCRIPTS)
def test_shells_complete(shell: str, folder: Path) -> None:
    """In an interactive shell, with the Tab key."""
    arguments, load = SHELLS[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = folder / "bin" / "hocket"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom hocket_cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(folder)}
    child, terminal = pty.fork()
    if not child:
        os.execvpe(arguments[0], arguments, environment)

    def wait_for(text: str, seconds: float = 60.0) -> str:
        seen, end = "", time.monotonic() + seconds
        while text not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
        assert text in seen, seen
        return seen

    try:
        os.write(terminal, f"{load}; echo load''ed\n".encode())
        wait_for("loaded")
        for typed, completed in [
            ("hocket tra", "hocket train "),
            ("hocket train on", "hocket train one.yaml "),
            ("hocket train one.yaml precision=bf1", "hocket train one.yaml precision=bf16"),
            ("hocket plugins info lr-", "hocket plugins info lr-monitor "),
        ]:
            os.write(terminal, typed.encode() + b"\t")
            wait_for(completed)
            os.write(terminal, b"\x15")  # delete the line
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def test_help_and_candidates_import_no_torch() -> None:
    code = """
import sys
from hocket_cli import main
main(["--help"]), main(["--complete", "hocket train one.yaml precision="]), main(["--print-completion", "bash"])
main(["plugins", "list"]), main(["train", "--print-config"])
print("torch" in sys.modules, "yaml" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "False True"


def test_ascii_terminals(folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    code = "import sys; from hocket_cli import main; sys.exit(main())"
    for arguments in (["--help"], ["train", "--help"], ["train", "--print-config"], ["plugins", "list"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, check=False, env=environment
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
