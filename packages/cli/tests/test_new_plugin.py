"""`hocket plugins new`: what it writes for each kind, which names it refuses, and that it writes all or nothing."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket import plugins
from hocket.basics.kinds import misfit
from hocket.errors import WrongValue
from hocket.plugins import KINDS
from hocket_cli import main
from hocket_cli.scaffold import LICENSES
from hocket_cli.scaffold.names import Names, check
from hocket_cli.scaffold.writing import rendered

#: As short and as long as names may be: the code has to be well formatted with each of them.
NAMES = ("a", "quiet-test-of-twenty", "averyverylongnameof-30letters1")


def new(folder: Path, kind: str, name: str, *options: str) -> Path:
    """Run the command, and return the folder of the distribution."""
    assert main(["plugins", "new", kind, name, "--into", str(folder), *options]) == 0
    return folder / f"hocket-{name}"


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_a_plug_in_that_works(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its entry point names a plug-in of that kind, the examples run, and so do its own tests, but for the suites."""
    name = f"new-{kind}"
    folder = new(tmp_path, kind, name)
    assert f"cd {folder}" in capsys.readouterr().out
    for path in folder.rglob("*"):
        assert path.is_dir() or not re.search(r"\$[a-z({]|PACKAGE|MODULE", f"{path.name} {_text(path)}"), path
    ((found, target),) = project(folder)["entry-points"][f"hocket.v1.{kind}"].items()
    assert found == name
    monkeypatch.syspath_prepend(str(folder / "src"))
    module, _, attribute = target.partition(":")
    plugin = getattr(importlib.import_module(module), attribute)
    assert not misfit(kind, plugin)
    monkeypatch.syspath_prepend(str(folder / "tests"))
    plugins.register(kind, name, plugin)
    try:
        examples = doctest.testmod(sys.modules[module])
        assert examples.attempted >= 2 and not examples.failed
        tests = importlib.import_module(f"test_{name.replace('-', '_')}")
        own = [test for each, test in vars(tests).items() if each.startswith("test_")]
        for test in own:
            if not inspect.signature(test).parameters:
                test()
        assert own
    finally:
        plugins.unregister(kind, name)
    suites = [suite for suite in vars(tests).values() if "hocket_testkit" in str(getattr(suite, "__mro__", ""))]
    assert suites


def _text(path: Path) -> str:
    """Return the text of a file without the expressions of workflows."""
    return re.sub(r"\$\{\{ matrix\.\w+ \}\}", "", path.read_text(encoding="utf-8"))


@pytest.mark.long
def test_the_code_is_formatted_whatever_the_name(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for name in NAMES:
        for kind in KINDS:
            new(tmp_path / kind, kind, name)
    for arguments in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_metadata_are_complete(tmp_path: Path) -> None:
    author = 'Ada "the first" Löve <ada@example.org>'
    url = "https://example.org/soft-noise"
    folder = new(tmp_path, "algorithms", "soft-noise", "--author", author, "--license", "BSD-3-Clause", "--url", url)
    about = project(folder)
    assert about["name"] == "hocket-soft-noise"
    assert about["authors"] == [{"name": 'Ada "the first" Löve', "email": "ada@example.org"}]
    assert about["license"] == "BSD-3-Clause" and about["license-files"] == ["LICENSE"]
    assert about["urls"] == {"Source": url} and "hocket-plugin" in about["keywords"]
    assert about["dependencies"] == ["hocket>=0.1,<0.2"]
    assert about["description"] and about["readme"] == "README.md"
    assert 'Ada "the first" Löve' in (folder / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("license", LICENSES)
def test_licences(license: str, tmp_path: Path) -> None:
    texts = rendered(Names("callbacks", "quiet"), license, "Ada")
    assert {"MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause", "Apache-2.0": "Apache License"}[license] in texts[
        "LICENSE"
    ]
    assert ("Ada" in texts["LICENSE"]) == (license != "Apache-2.0")


def test_workflows_are_pinned_and_keep_no_secret() -> None:
    texts = rendered(Names("callbacks", "quiet"), "MIT", "Ada")
    workflows = {path: text for path, text in texts.items() if path.startswith(".github/workflows/")}
    assert len(workflows) == 2
    for text in workflows.values():
        used = re.findall(r"uses: (.*)", text)
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in used)
        assert "secrets." not in text and "password" not in text
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    publish = yaml.safe_load(workflows[".github/workflows/publish.yml"])["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"


@pytest.mark.parametrize(
    "kind, name, reason",
    [
        ("algorithms", "hocket-noise", "Write 'noise'"),
        ("algorithms", "Soft Noise", "such as 'soft-noise'"),
        ("algorithms", "softNoise", "such as 'soft-noise'"),
        ("algorithms", "soft_noise", "such as 'soft-noise'"),
        ("algorithms", "grün", "such as 'gradient-noise'"),
        ("algorithms", "3d", "begins with a letter"),
        ("algorithms", "-", "begins with a letter"),
        ("algorithms", "../noise", "such as 'noise'"),
        ("algorithms", "a" * 31, "at most 30 characters"),
        ("algorithms", "lambda", "a keyword of Python"),
        ("algorithms", "torch", "a library has this name"),
        ("algorithms", "scikit-learn", "a library has this name"),  # whose package is called otherwise
        ("loggers", "deepspeed", "a library has this name"),  # whether it is installed or not
        ("algorithms", "hocket", "such as 'hocket-algorithm'"),
        ("algorithms", "random", "Python has a module of this name"),
        ("schedules", "con", "Windows has no files"),
        ("schedules", "lpt1", "Windows has no files"),
        ("callbacks", "test", "pytest would take its module for tests"),
        ("callbacks", "test-noise", "for tests. Choose another"),
        ("callbacks", "conftest", "such as 'conftest-callback'"),
        ("callbacks", "testkit", "hocket-testkit is a distribution of hocket's own"),
        ("callbacks", "general", "hocket-general reads like hocket-algorithms-general"),
        ("callbacks", "vison", "hocket-vison reads like hocket-algorithms-vision"),
        ("callbacks", "algorithms-audio", "begins with hocket-algorithms-"),
        ("loggers", "console", "hocket 0.1.0 has the logger"),
        ("algorithms", "alibi", "has the algorithm of this name"),  # whether it is installed or not
        ("precisions", "mixed", "look for 'fp16'"),
        ("callbacks", "model-checkpoint", "Checkpoints are an argument of the Trainer"),
    ],
)
def test_names_that_are_refused(kind: str, name: str, reason: str) -> None:
    with pytest.raises(WrongValue, match=re.escape(reason)):
        check(Names(kind, name))


@pytest.mark.parametrize(
    "kind, name", [("algorithms", "algorithm"), ("loggers", "text-i-o"), ("callbacks", "value-error")]
)
def test_classes_that_would_hide_another(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "text-i-o":
        assert Names(kind, name).class_name == "TextIO"
    assert main(["plugins", "new", kind, name, "--into", str(tmp_path)]) == 2
    assert "would hide another one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_registered_plug_in_counts_as_existing() -> None:
    plugins.register("schedules", "quiet-decay", lambda clock: 1.0)
    try:
        with pytest.raises(WrongValue, match="has the schedule of this name"):
            check(Names("schedules", "quiet-decay"))
        check(Names("callbacks", "quiet-decay"))
    finally:
        plugins.unregister("schedules", "quiet-decay")


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hocket-quiet"
    for exists in (folder.mkdir, lambda: (folder.rmdir(), folder.write_text("mine")), lambda: _link(folder)):
        exists()
        before = sorted(tmp_path.iterdir())
        assert main(["plugins", "new", "callbacks", "quiet", "--into", str(tmp_path)]) == 2
        assert "exists already" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before


def _link(folder: Path) -> None:
    """Replace a file by a link that leads nowhere."""
    folder.unlink()
    folder.symlink_to(folder.parent / "nowhere")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = 0, Path.write_text

    def interrupted(path: Path, *arguments: Any, **options: Any) -> int:
        nonlocal written
        written += 1
        if written == 5:
            raise error
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            new(tmp_path, "callbacks", "quiet")
    else:
        assert main(["plugins", "new", "callbacks", "quiet", "--into", str(tmp_path)]) == 2
    assert written == 5 and not list(tmp_path.iterdir())


def test_the_author_is_gits_or_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gitconfig").write_text("[user]\nname = Grace Hopper\nemail = grace@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.chdir(tmp_path)
    assert project(new(tmp_path, "devices", "a"))["authors"] == [{"name": "Grace Hopper", "email": "grace@example.org"}]
    (tmp_path / "gitconfig").write_text("[user]\nname = 7\nemail = none\n")
    assert project(new(tmp_path, "devices", "b"))["authors"] == [{"name": "The hocket-b authors"}]
    monkeypatch.setenv("PATH", "")
    assert project(new(tmp_path, "devices", "c"))["authors"] == [{"name": "The hocket-c authors"}]


@pytest.mark.parametrize(
    "option, value",
    [("--author", each) for each in ("<@>", "", "123", "ada@example.org", "Ada <ada>", "Ada <a@b@c>", "A, B", "A\nB")]
    + [
        ("--url", each)
        for each in ("", "foo", "http://", "ftp://example.org/a", "https://a b", "git@example.org:a/b.git")
    ],
)
def test_options_that_metadata_cannot_have(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", "devices", "a", "--into", str(tmp_path), option, value]) == 2
    assert f"not {value!r}. Write {option}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
