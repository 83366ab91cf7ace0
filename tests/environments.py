"""Virtual environments with wheels of this checkout and nothing of its sources, as users have them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Packages of hocket that the tests of a plug-in need: core, and the kit with what it depends on.
KIT = ("core", "checkpoints", "strategies", "testkit")


def uv(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv") or "uv"]
    # Nothing is looked up anywhere: our names may belong to others there.
    done = subprocess.run(
        [*command, *map(str, arguments), "--quiet", "--offline", "--no-config", "--no-cache"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Environment:
    """A virtual environment with these wheels, and the libraries of the one that runs the tests."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        self.folder = folder
        uv("venv", "--python", sys.executable, folder / "venv")
        self.site = folder / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        for item in Path(sysconfig.get_path("purelib")).iterdir():
            # Not what leads to hocket's sources, nor hocket itself: those come as wheels.
            if "hocket" in item.name or item.suffix == ".pth" or (self.site / item.name).exists():
                continue
            if item.suffix == ".dist-info":
                shutil.copytree(item, self.site / item.name)  # uv does not see those that are links
            else:
                (self.site / item.name).symlink_to(item)
        uv("pip", "install", "--python", self._program("python"), "--no-index", *wheels)

    def _program(self, name: str) -> Path:
        return self.folder / "venv" / "bin" / name

    def run(self, program: str, *arguments: str | Path, expected: int = 0) -> str:
        """What it prints. Fails unless it ends with the expected exit code."""
        return self._run(self._program(program), *arguments, expected=expected)

    def shell(self, commands: str, folder: Path) -> str:
        """What commands print that somebody types in a folder, with this environment activated and no registry to ask."""
        activated = {
            "VIRTUAL_ENV": str(self.folder / "venv"),
            "PATH": f"{self._program('')}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "UV_OFFLINE": "1",
            "UV_NO_BUILD_ISOLATION": "1",  # the libraries here have what builds
        }
        return self._run("bash", "-euc", f"cd {shlex.quote(str(folder))}\n{commands}", **activated)

    def _run(self, *command: str | Path, expected: int = 0, **variables: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOCKET_", "PYTHON", "PYTEST", "UV_"))}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment | {"OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == expected, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, code: str) -> str:
        return self.run("python", "-c", textwrap.dedent(code))


def build(project: Path, folder: Path) -> Path:
    """The wheel of a project."""
    out = folder / project.name
    uv("build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", out, project)
    (wheel,) = out.glob("*.whl")
    return wheel
