"""What messages say to type for a missing package: it works where hocket came from, and asks no registry for hocket."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import importlib_metadata
import pytest
import torch

import hocket
from hocket.help import installing, optional_packages
from hocket.help.optional_packages import NotInstalled
from hocket.plugins import registry

REQUIRES = [
    "torch>=2.9",
    "hocket-loggers[wandb]~=0.1.0; extra == 'wandb'",
    "hocket-loggers~=0.1.0; extra == 'loggers'",
    "hocket-algorithms-vision~=0.1.0; extra == 'vision'",
    "hocket-checkpoints~=0.1.0; extra == 'cli'",
    "hocket-cli~=0.1.0; extra == 'cli'",
    "hocket-loggers~=0.1.0; extra == 'cli'",
    "psutil>=5.9.5; extra == 'monitors'",
    "nvidia-ml-py>=12; extra == 'monitors'",
]
LOGGERS = ["hocket<0.2,>=0.1", "wandb>=0.19.10; extra == 'wandb'"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the distributions that are installed: core with this origin, and perhaps hocket-loggers."""

    def install(origin: dict[str, Any] | None, loggers: bool = False) -> None:
        there = {"hocket": SimpleNamespace(requires=REQUIRES, read_text=lambda name: origin and json.dumps(origin))}
        if loggers:
            there["hocket-loggers"] = SimpleNamespace(requires=LOGGERS, read_text=lambda name: None)

        def distribution(name: str) -> Any:
            if name not in there:
                raise importlib_metadata.PackageNotFoundError(name)
            return there[name]

        monkeypatch.setattr(importlib_metadata, "distribution", distribution)

    return install


def checkout(folder: Path, *packages: str) -> Path:
    for name in packages:
        (folder / name).mkdir(parents=True)
        (folder / name / "pyproject.toml").touch()
    return folder


@pytest.mark.parametrize("origin", [None, {"url": "file:///nowhere/packages/core", "dir_info": {}}])
def test_libraries_of_others_are_named_wherever_hocket_comes_from(installed: Any, origin: Any) -> None:
    installed(origin, loggers=True)
    assert installing.command("monitors") == "pip install 'psutil>=5.9.5' 'nvidia-ml-py>=12'"
    assert installing.command("wandb") == "pip install 'wandb>=0.19.10'"
    assert installing.command("wandb", "hocket-loggers") == "pip install 'wandb>=0.19.10'"
    assert installing.library("acme_tools") == "pip install acme_tools"
    assert installing.library("acme", ">=2.1") == "pip install 'acme>=2.1'"


def test_what_a_package_needs_of_hocket_is_installed_with_it(installed: Any, tmp_path: Path) -> None:
    """A registry would be asked for it otherwise."""
    packages = checkout(tmp_path / "hocket", "core", "checkpoints", "cli", "loggers")
    installed({"url": (packages / "core").as_uri(), "dir_info": {"editable": True}}, loggers=True)
    words = ["pip", "install", "-e", str(packages / "checkpoints"), "-e", str(packages / "cli")]
    assert shlex.split(installing.command("cli")) == shlex.split(installing.library("hocket_cli")) == words


@pytest.mark.parametrize("editable", [True, False])
def test_from_a_checkout(installed: Any, tmp_path: Path, editable: bool) -> None:
    packages = checkout(tmp_path / "my hocket", "core", "algorithms-vision", "loggers")
    installed({"url": (packages / "core").as_uri(), "dir_info": {"editable": True} if editable else {}})
    flag = ["-e"] if editable else []
    assert shlex.split(installing.command("vision")) == ["pip", "install", *flag, str(packages / "algorithms-vision")]
    assert shlex.split(installing.command("wandb"))[2:] == [*flag, f"{packages / 'loggers'}[wandb]"]
    assert installing.library("hocket_loggers") == shlex.join(["pip", "install", *flag, str(packages / "loggers")])
    assert shlex.split(installing.library("hocket", ">=0.2"))[2:] == [*flag, str(packages / "core")]


def test_from_wheels(installed: Any, tmp_path: Path) -> None:
    for name in ("hocket", "hocket_loggers", "hocket_algorithms_vision"):
        (tmp_path / f"{name}-0.1.0-py3-none-any.whl").touch()
    installed({"url": (tmp_path / "hocket-0.1.0-py3-none-any.whl").as_uri(), "archive_info": {}})
    assert installing.command("vision") == f"pip install {tmp_path}/hocket_algorithms_vision-0.1.0-py3-none-any.whl"
    assert installing.command("wandb") == f"pip install '{tmp_path}/hocket_loggers-0.1.0-py3-none-any.whl[wandb]'"


def test_from_a_repository(installed: Any) -> None:
    vcs = {"vcs": "git", "commit_id": "abc"}
    installed({"url": "https://example.org/hocket.git", "vcs_info": vcs, "subdirectory": "packages/core"})
    assert installing.command("wandb") == (
        "pip install 'hocket-loggers[wandb] @ git+https://example.org/hocket.git@abc#subdirectory=packages/loggers'"
    )


@pytest.mark.parametrize("origin", [None, {"url": "file:///nowhere/packages/core", "dir_info": {"editable": True}}])
def test_from_an_unknown_place(installed: Any, origin: Any) -> None:
    installed(origin)
    assert installing.command("vision") == "pip install ./packages/algorithms-vision in a checkout of hocket"
    assert installing.command("wandb") == "pip install './packages/loggers[wandb]' in a checkout of hocket"
    assert (
        installing.command("of a later hocket")
        == "pip install './packages/core[of a later hocket]' in a checkout of hocket"
    )
    for name in ("hocket-vibrato", "Hocket_Vibrato"):  # perhaps of somebody else
        assert (
            installing.library(name, "==1") == "pip install FOLDER, which has the source or a wheel of hocket-vibrato"
        )


def looked_up(text: str) -> list[str]:
    """Return the packages of hocket's that the ``pip install`` commands of a text ask a registry for."""
    found = []
    for match in re.finditer(r"pip\s+install\s+([^`\n;|]*)", re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)):
        words = re.findall(r"""['"]?([^\s'"]+)['"]?""", re.split(r"#| in |\. ", match[1])[0])
        found += [word for word in words if re.match(r"hocket(?:[-_][\w-]+)?(?:$|[\[=<>~.,;:])", word, re.IGNORECASE)]
    return found


def test_what_counts_as_a_lookup() -> None:
    split = 'pip install "\n    "hocket-loggers"'
    for text in (
        "pip install hocket",
        "`pip install 'hocket[x]'`",
        "pip install -U hocket",
        split,
        "pip install 'hocket-a[b]==1'",
    ):
        assert looked_up(text), text
    for text in (
        "pip install ./packages/core",
        "pip install 'wandb>=1' in a checkout of hocket",
        "pip install a # for hocket",
    ):
        assert not looked_up(text), text


def test_no_hint_asks_a_registry_for_hocket() -> None:
    known = tomllib.loads(Path(registry.__file__).with_name("known.toml").read_text())
    extras = {extra for names in known.values() for extra in names.values()}
    extras |= set(importlib_metadata.metadata("hocket").get_all("Provides-Extra") or ())
    assert len(extras) > 15
    for extra in extras - {"all"}:
        assert not looked_up(installing.command(extra)), extra


def test_no_message_and_no_page_asks_a_registry_for_hocket() -> None:
    root = Path(__file__).parents[3]
    if not (root / "noxfile.py").is_file():
        pytest.skip("not in a checkout")
    places = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*", "packages/*/README.md"]
    places += ["packages/*/src/**/*.py", "packages/*/src/**/*.toml", "benchmarks/*.py"]
    files = [file for place in places for file in root.glob(place) if file.suffix in (".md", ".py", ".toml", ".ipynb")]
    assert len(files) > 400
    files = [
        file for file in files if "third_party" not in file.parts
    ]  # a stranger's README names the stranger's distribution
    found = {str(file.relative_to(root)): looked_up(file.read_text(encoding="utf-8")) for file in files}
    assert not {name: words for name, words in found.items() if words}


class Absent:
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Switching(torch.optim.SGD):
    """Has a training and an evaluation mode, as the optimizers of schedulefree."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("changes", "needing"),
    [
        ({"microbatch": "auto"}, "microbatch='auto'"),
        ({"optimizer": "sgd(layer_decay=0.5)"}, "layer_decay="),
        ({"optimizer": Switching}, r"Switching Switching between train\(\) and eval\(\)"),
    ],
)
def test_what_is_in_the_package_of_algorithms(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], needing: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "hocket_general"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent("hocket_general"), *sys.meta_path])
    message = f"{needing} needs hocket-algorithms-general, which is not installed. Type: pip install .*general"
    with pytest.raises(NotInstalled, match=message):
        hocket.Trainer(torch.nn.Linear(4, 1), loss="mse_loss", device="cpu", **changes)


@functools.cache
def _providers() -> Mapping[str, list[str]]:
    return importlib_metadata.packages_distributions()


def _imported() -> list[str]:
    """The modules that the packages of this repository import by `optional_packages.module`."""
    call = re.compile(r"optional_packages\.module\(\s*f?\"([\w.]+)")
    return sorted(
        {name for file in Path(__file__).parents[2].glob("*/src/**/*.py") for name in call.findall(file.read_text())}
    )


@pytest.mark.parametrize("name", _imported())
def test_what_to_type_for_every_module_of_another_package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = name.partition(".")[0]
    for loaded in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Absent(package), *sys.meta_path])
    with pytest.raises(NotInstalled) as raised:
        optional_packages.module(name, "--option")
    distribution, command = re.fullmatch(
        r"--option needs (\S+), which is not installed\. Type: pip install (.+)", str(raised.value)
    ).groups()  # type: ignore[union-attr]
    assert distribution in {each.lower() for each in _providers().get(package, [distribution])}
    assert distribution.removeprefix("hocket-").removeprefix("algorithms-") in command
