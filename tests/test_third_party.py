"""A stranger's distribution, installed from wheels into an environment of its own: it is found, planned, trained with, and
passes the kit; and others that are broken, in conflict or of another time harm nobody."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import KIT, ROOT, Environment, build

import hocket.testkit
from hocket.loggers.memory import MemoryLogger
from hocket_cli import main

EXAMPLE = ROOT / "examples" / "third_party" / "hocket-gradient-noise"


def listed(environment: Environment) -> dict[tuple[str, str], dict[str, Any]]:
    """What `hocket plugins list` says about algorithms, by distribution and name."""
    rows = json.loads(environment.run("hocket", "plugins", "list", "--kind", "algorithms", "--json"))
    return {(row["distribution"], row["name"]): row for row in rows}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return [build(ROOT / "packages" / name, folder) for name in (*KIT, "cli", "algorithms-general")]


# --- a good neighbour


def test_it_is_what_the_command_writes(tmp_path):
    """If a change is meant, remove the folder, and type this command with `--into examples/third_party`."""
    author = ["--author", "The hocket authors", "--license", "Apache-2.0"]
    assert main(["plugins", "new", "algorithms", "gradient-noise", *author, "--into", str(tmp_path)]) == 0
    kept = {path: (EXAMPLE / path).read_bytes() for path in _tracked(EXAMPLE)}
    new = tmp_path / EXAMPLE.name
    assert kept == {str(path.relative_to(new)): path.read_bytes() for path in new.rglob("*") if path.is_file()}


def _tracked(folder):
    """Return the files of a folder without those that tools leave there."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in files if not re.search(r"__pycache__|_cache/", str(path))]


@pytest.fixture(scope="module")
def stranger(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger")
    return Environment(folder, [*ours, build(EXAMPLE, folder)])


@pytest.mark.long
def test_it_is_listed(stranger):
    row = listed(stranger)["hocket-gradient-noise", "gradient-noise"]
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


#: The pages about writing plug-ins.
GUIDES = (
    "plugins", "write-an-algorithm", "write-an-optimizer", "write-a-callback", "save-plugin-state", "write-a-logger",
    "write-a-precision", "write-a-data-adapter", "test-a-plugin", "../reference/algorithm-helpers",
)  # fmt: skip


def test_the_examples_of_the_guides(tmp_path, monkeypatch):
    """Their Python runs, each page by itself, what they define trains together, and the lie of one is found out."""
    monkeypatch.chdir(tmp_path)
    found = {}
    for name in GUIDES:
        guide = (ROOT / f"docs/how-to/{name}.md").read_text(encoding="utf-8")
        file = tmp_path / "guide.py"
        program = "\n".join(re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE))
        file.write_text(program, encoding="utf-8")
        found |= runpy.run_path(str(file))
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
    rows = listed(crowd)
    assert rows["acme-future", "future"]["status"] == "plug-in API v2"
    assert {("acme-broken", "broken"), ("acme-rival", "ema"), ("hocket-algorithms-general", "ema")} <= rows.keys()
    assert rows["hocket-algorithms-general", "sam"]["status"] == "usable"


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
