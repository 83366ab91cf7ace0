"""A stranger's distribution, installed from wheels into an environment of its own: it is found, planned, trained with, and
passes the kit; and others that are broken, in conflict or of another time harm nobody."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket.testkit
from hocket.loggers.memory import MemoryLogger

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third_party" / "hocket-gradient-noise"
#: Packages of hocket that a stranger's author has: those of the kit and of the command line.
OURS = ("core", "checkpoints", "cli", "strategies", "testkit", "algorithms-general")


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
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOCKET_", "PYTHON", "PYTEST"))}
        done = subprocess.run(
            [self._program(program), *arguments],
            cwd=self.folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == expected, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, code: str) -> str:
        return self.run("python", "-c", textwrap.dedent(code))

    def listed(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What `hocket plugins list` says about algorithms, by distribution and name."""
        rows = json.loads(self.run("hocket", "plugins", "list", "--kind", "algorithms", "--json"))
        return {(row["distribution"], row["name"]): row for row in rows}


def build(project: Path, folder: Path) -> Path:
    """The wheel of a project."""
    out = folder / project.name
    uv("build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", out, project)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return [build(ROOT / "packages" / name, folder) for name in OURS]


# --- a good neighbour


@pytest.fixture(scope="module")
def stranger(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger")
    return Environment(folder, [*ours, build(EXAMPLE, folder)])


@pytest.mark.long
def test_it_is_listed(stranger):
    row = stranger.listed()["hocket-gradient-noise", "gradient-noise"]
    assert row["status"] == "usable" and row["version"] == "0.1.0"
    assert row["summary"].startswith("Adds annealed Gaussian noise to the gradients")


@pytest.mark.long
def test_it_is_planned_and_trained_with(stranger):
    out = stranger.python(
        """
        import torch, hocket
        batch = torch.rand(8, 4), torch.randint(3, (8,))

        def trained(*algorithms):
            torch.manual_seed(0)
            trainer = hocket.Trainer(
                model=torch.nn.Linear(4, 3), loss=torch.nn.functional.cross_entropy, train_data=[batch] * 3, seed=1,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), duration="3ba", algorithms=algorithms,
                clip_gradients=1.0,
            )
            trainer.fit()
            return trainer, trainer.state.model.weight.detach()

        trainer, noisy = trained("label-smoothing", {"gradient-noise": {"eta": 0.3}})
        print(trainer.plan())
        _, smooth = trained("label-smoothing")
        assert not torch.equal(noisy, smooth)
        print(hocket.__file__)
        """
    )
    assert "after_train_batch  gradient-noise" in out
    assert "gradient-noise  (hocket-gradient-noise 0.1.0; eta=0.3)" in out
    assert Path(out.splitlines()[-1]).is_relative_to(stranger.site)  # the wheel, and not the sources


@pytest.mark.long
def test_it_passes_its_own_tests(stranger):
    """The conformance suite among them, as its author would run it."""
    out = stranger.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", EXAMPLE)
    assert " passed" in out and "failed" not in out and "skipped" not in out


def test_the_examples_of_the_guide(tmp_path):
    """docs/plugins.md: its Python runs, what it defines trains, and its lie is found out."""
    guide = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    file = tmp_path / "guide.py"
    file.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)), encoding="utf-8")
    found = runpy.run_path(str(file))
    memory = MemoryLogger()
    trainer = hocket.Trainer(
        model=torch.nn.Linear(4, 3),
        loss=torch.nn.functional.cross_entropy,
        train_data=[(torch.rand(8, 4), torch.randint(3, (8,)))] * 3,
        optimizer=found["SignSGD"],
        duration="1ep",
        log_every="1ba",
        algorithms=[found["GradientNoise"](eta=0.3), found["TwoSteps"](), found["RandomGain"]()],
        callbacks=[found["LargestGradient"](), found["Queue"]()],
        loggers=[memory, found["Lines"]()],
        folder=tmp_path,
        run_name="run",
        device="cpu",
    )
    trainer.fit()
    logged = [f"{batch} {name} {value}" for name, values in memory.metrics.items() for batch, value in values]
    assert sorted((tmp_path / "run" / "values.txt").read_text().splitlines()) == sorted(logged)
    assert len(memory.metrics["gradient/largest"]) == 3
    assert trainer.state_dict()["ranks"][0]["components"] == {"acme-queue": {"items": []}}

    class Suite(hocket.testkit.PrecisionConformance):
        def make(self):
            return found["BFloat16Weights"]()

    noise = found["TestGradientNoise"]()
    noise.folder = tmp_path
    noise.test_does_not_wait_for_the_device()
    suite = Suite()
    suite.folder = tmp_path
    with pytest.raises(AssertionError, match=r"BatchNorm2d\.weight is torch\.bfloat16"):
        suite.test_normalisation_layers_keep_their_bits()


# --- bad neighbours

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0"
dependencies = ["hocket>=0.1,<0.2"]
[project.entry-points."{group}"]
{entry} = "{module}:Method"
[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]
"""
METHOD = '''
import hocket
class Method(hocket.Algorithm):
    """Does nothing much."""
    events = {hocket.Event.BATCH_END}
    def apply(self, event, state):
        pass
'''
NEIGHBOURS = {
    "acme-broken": ("hocket.v1.algorithms", "broken", "import a_library_that_is_not_there\n"),
    "acme-rival": ("hocket.v1.algorithms", "ema", METHOD),
    "acme-future": ("hocket.v2.algorithms", "future", "raise SystemExit('nobody should import me')\n"),
}


@pytest.fixture(scope="module")
def crowd(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("crowd")
    wheels = []
    for name, (group, entry, source) in NEIGHBOURS.items():
        project, module = folder / name, name.replace("-", "_")
        project.mkdir()
        (project / "pyproject.toml").write_text(PYPROJECT.format(name=name, group=group, entry=entry, module=module))
        (project / f"{module}.py").write_text(source)
        wheels.append(build(project, folder / "wheels"))
    return Environment(folder, [*ours, *wheels])


@pytest.mark.long
def test_the_list_shows_them_all(crowd):
    listed = crowd.listed()
    assert listed["acme-future", "future"]["status"] == "plug-in API v2"
    assert {("acme-broken", "broken"), ("acme-rival", "ema"), ("hocket-algorithms-general", "ema")} <= listed.keys()
    assert listed["hocket-algorithms-general", "sam"]["status"] == "usable"


@pytest.mark.long
def test_others_train_and_they_are_errors_only_where_they_are_named(crowd):
    out = crowd.python(
        """
        import torch, hocket

        def train(*algorithms):
            hocket.Trainer(
                model=torch.nn.Linear(4, 3), loss=torch.nn.functional.cross_entropy, duration="1ba",
                train_data=[(torch.rand(8, 4), torch.randint(3, (8,)))], optimizer="sgd(lr=0.1)", algorithms=algorithms,
            ).fit()

        train("label-smoothing", "sam", "hocket-algorithms-general/ema")
        train("acme-rival/ema")
        for name in ("broken", "ema", "future"):
            try:
                train(name)
            except hocket.plugins.PluginError as error:
                print(type(error).__name__, error)
        """
    )
    broken, rival, future = out.splitlines()
    assert broken.startswith("BrokenPluginError")
    assert "acme-broken 1.0" in broken and "No module named 'a_library_that_is_not_there'" in broken
    assert rival.startswith("AmbiguousPluginError")
    assert "'acme-rival/ema'" in rival and "'hocket-algorithms-general/ema'" in rival
    assert future.startswith("UnknownPluginError") and "acme-future 1.0 has plug-in API v2" in future


@pytest.mark.long
def test_the_doctor_names_them_and_nobody_else(crowd):
    report = json.loads(crowd.run("hocket", "plugins", "doctor", "--kind", "algorithms", "--json", expected=1))
    problems = {(line["distribution"], line["name"]): " ".join(line["problems"]) for line in report if line["problems"]}
    assert problems.keys() == {
        ("acme-broken", "broken"),
        ("acme-future", "future"),
        ("acme-rival", "ema"),
        ("hocket-algorithms-general", "ema"),
    }
    assert "a_library_that_is_not_there" in problems["acme-broken", "broken"]
    assert "plug-in API v2" in problems["acme-future", "future"]
    assert "also provided by hocket-algorithms-general" in problems["acme-rival", "ema"]
