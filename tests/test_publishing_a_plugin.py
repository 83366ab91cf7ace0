"""What `hocket plugins new` writes, as its author and its users have it: installed from wheels, with the kit alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import KIT, ROOT, Environment, build
from pages import blocks

from hocket.plugins import KINDS
from hocket_cli import main

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return [build(ROOT / "packages" / name, folder) for name in KIT]


#: Kinds that are left to a run that names this file: they take about 20 s each.
_PATIENT = ("actions", "callbacks", "commands", "datasets", "devices", "optimizers", "precisions", "schedules")


@pytest.fixture(scope="module")
def chosen(pytestconfig: pytest.Config) -> list[str]:
    named = any("publishing" in argument for argument in pytestconfig.args)
    return [kind for kind in KINDS if named or kind not in _PATIENT]


def published(kinds: list[str], folder: Path, wheels: list[Path]) -> Environment:
    """Write a plug-in of each kind into the folder, and return an environment with all of them."""
    for kind in kinds:
        assert main(["plugins", "new", kind, f"new-{kind}", "--into", str(folder)]) == 0
    return Environment(folder, [*wheels, *(build(folder / f"hocket-new-{kind}", folder / "dist") for kind in kinds)])


@pytest.fixture(scope="module")
def environment(chosen: list[str], kit: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return published([kind for kind in chosen if kind != "shards"], tmp_path_factory.mktemp("published"), kit)


@pytest.fixture(scope="module")
def with_streaming(kit: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("shards")
    return published(["shards"], folder, [*kit, build(ROOT / "packages/streaming", folder)])  # where their base is


@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_its_tests_and_checks_with_core_and_the_kit_alone(
    kind: str, chosen: list[str], request: pytest.FixtureRequest
) -> None:
    if kind not in chosen:
        pytest.skip("takes minutes: nox -s long -- tests/test_publishing_a_plugin.py")
    environment: Environment = request.getfixturevalue("with_streaming" if kind == "shards" else "environment")
    name, folder = f"new-{kind}", environment.folder / f"hocket-new-{kind}"
    out = environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder)
    assert " passed" in out and "failed" not in out
    checked = json.loads(
        environment.python(
            f"import json, hocket_testkit.check as c; print(json.dumps(c.check({kind!r}, {name!r}).as_json()))"
        )
    )
    assert [check for check in checked["checks"] if check["outcome"] == "failed"] == []
    assert checked["tier"] == "gold"


def test_types_are_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for kind in KINDS:
        assert main(["plugins", "new", kind, f"new-{kind}", "--into", str(tmp_path)]) == 0
    folders = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path / 'cache'}", *folders],
        cwd=folders[0],  # with its settings
        env=os.environ | {"MYPYPATH": os.pathsep.join(str(folder / "src") for folder in folders)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no issues found in {3 * len(KINDS)} source files" in done.stdout


def test_the_commands_of_the_guide(kit: list[Path], tmp_path: Path) -> None:
    """From an empty folder to an installed wheel, exactly as docs/tutorials/publishing-a-plugin.md types them."""
    pytest.importorskip("editables")  # which builds ask for in an environment of their own
    (block,) = (each for each in blocks(ROOT / "docs/tutorials/publishing-a-plugin.md") if each.language == "console")
    commands = [line.removeprefix("$ ") for line in block.text.splitlines()]
    assert len(commands) <= 10
    environment = Environment(tmp_path, [*kit, build(ROOT / "packages" / "cli", tmp_path)])
    (folder := tmp_path / "empty").mkdir()
    out = environment.shell("\n".join(commands), folder)
    assert " passed" in out and "algorithm soft-noise\nfrom hocket-soft-noise 0.1.0" in out and "  gold: " in out
    distribution = folder / "hocket-soft-noise"
    assert {path.suffix for path in (distribution / "dist").iterdir() if path.suffix != ".gitignore"} >= {".whl", ".gz"}
    where = environment.python("import hocket_soft_noise; print(hocket_soft_noise.__file__)")
    assert Path(where.strip()).is_relative_to(environment.site)  # the wheel, and not the sources
