"""What a newcomer is told before it matters: where a warning points, modes, half a state, weights without a seed."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import hocket
from hocket.help import ours, warn
from hocket.schedules import Plateau
from hocket_cli.sweeps.description import Sweep, check
from hocket_cli.sweeps.space import Choices
from hocket_insight import fit_arguments
from hocket_insight.callbacks.early_stopping import EarlyStopping

ROOT = Path(__file__).parents[1]
INPUTS, LABELS = torch.randn(16, 4), torch.randint(3, (16,))


def trainer(**changes: Any) -> hocket.Trainer:
    given = {"train_data": [(INPUTS, LABELS)], "loss": "cross_entropy", "optimizer": "sgd(lr=0.1)", "duration": "1ep"}
    return hocket.Trainer(nn.Linear(4, 3), **{**given, "device": "cpu", **changes})


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def construct() -> int:
    EarlyStopping("a/loss", mode="max")
    return here() - 1


def fit() -> int:
    made = trainer(metrics="accuracy")
    made.fit()
    return here() - 1


def dtype() -> int:
    hocket.Trainer(nn.Linear(4, 3), loss="mse", precision=torch.bfloat16)
    return here() - 1


def evaluate() -> int:
    made = trainer(callbacks=[{"early-stopping": {"monitor": "eval/loss"}}], eval_every=None)
    made.fit(eval_data=[(INPUTS, LABELS)])
    return here() - 1


def surgery() -> int:
    hocket.Trainer(nn.Linear(4, 3), loss="mse", algorithms=["blurpool"])
    return here() - 1


@pytest.mark.parametrize("program", [construct, fit, dtype, evaluate, surgery], ids=lambda each: each.__name__)
def test_a_warning_points_at_the_users_line(program: Any, in_an_empty_folder: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = program()
    assert {(each.filename, each.lineno) for each in caught} == {(__file__, line)}


def test_filters_know_a_warning_by_hockets_module() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module="hocket")
        EarlyStopping("a/loss", mode="max")
    assert not caught


def test_a_warning_in_a_thread_of_hockets_own_points_at_hocket() -> None:
    """There is no line of the user."""
    namespace: dict[str, Any] = {"__name__": "hocket.invented", "warn": warn}
    exec(compile("def run(): warn('said')", "invented.py", "exec"), namespace)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=namespace["run"])
        thread.start()
        thread.join()
    assert [each.filename for each in caught] == ["invented.py"]


@pytest.mark.parametrize("name", [None, 3])
def test_code_executed_without_a_modules_name_is_warned_at_its_line(name: Any) -> None:
    namespace: dict[str, Any] = {"__name__": name, "EarlyStopping": EarlyStopping}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("EarlyStopping('a/loss', mode='max')", "cell.py", "exec"), namespace)
    assert [each.filename for each in caught] == ["cell.py"]


def test_every_package_is_known_as_hockets_and_no_other() -> None:
    folders = ROOT.glob("packages/*/src/*")
    own = {each.name for each in folders if each.is_dir() and not each.name.startswith((".", "__"))}
    assert own == ours.PACKAGES.keys() and all(ours.is_ours(f"{name}.module") for name in own)
    assert not any(map(ours.is_ours, ("hocket_project", "hockets", "torchvision.models", "__main__", None)))


def test_no_module_of_hockets_counts_stack_levels() -> None:
    sources = [each for folder in ROOT.glob("packages/*/src") for each in folder.rglob("*.py")]
    assert len(sources) > 300
    counting = [each for each in sources if re.search(r"warnings\.warn\(|stacklevel", each.read_text(encoding="utf-8"))]
    assert not counting


# --- modes


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: EarlyStopping("test/accuracy", mode="min"), "EarlyStopping('test/accuracy', mode='max')"),
        (lambda: EarlyStopping("eval/wer", "max"), "EarlyStopping('eval/wer', mode='min')"),
        (lambda: Plateau("eval/loss", mode="max"), "plateau(on='eval/loss', mode='min')"),
        (lambda: trainer(schedule="plateau(on=eval/f1, mode=min)"), "plateau(on='eval/f1', mode='max')"),
        (lambda: hocket.Checkpoints("runs/a", best=("eval/rmse", "max", 2)), "best=('eval/rmse', 'min', 2)"),
    ],
)
def test_a_mode_that_contradicts_the_metrics_name_is_said(make: Any, write: str) -> None:
    with pytest.warns(UserWarning, match="values of .* as better, and by its name") as caught:
        make()
    assert f"Write {write}" in str(caught[0].message)


@pytest.mark.parametrize(
    ("metric", "mode", "known"), [("test/accuracy", "min", "max"), ("test/l{o}ss_error", "max", "min")]
)
def test_a_sweep_says_so_too(metric: str, mode: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep("a.yaml", "a", [], {"seed": Choices((1, 2))}, metric, mode)
    check(sweep)
    assert f"Write --metric {metric} --mode {known}, or" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_name_that_says_nothing_takes_any_mode(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EarlyStopping("test/quality", mode=mode)
        EarlyStopping("test/accuracy", mode="max")
        EarlyStopping("test/loss")


# --- half a state


class HalfSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))

    def __len__(self) -> int:
        return 16

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}


class HalfData(TensorDataset):
    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            DataLoader(TensorDataset(INPUTS, LABELS), 8, sampler=HalfSampler()),
            "HalfSampler defines state_dict\\(\\) and no",
        ),
        (DataLoader(HalfData(INPUTS, LABELS), 8), "HalfData defines load_state_dict\\(\\) and no state_dict\\(\\)"),
    ],
)
def test_data_with_half_a_state_trains_and_says_so(data: Any, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        trainer(train_data=data).fit()


def test_plug_ins_with_half_a_state_train_without_checkpoints() -> None:
    class Counts(hocket.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def batch_end(self, state: hocket.State) -> None: ...

    trainer(callbacks=[Counts()]).fit()


def test_no_plug_in_of_hockets_own_has_half_a_state() -> None:
    from hocket.data.stateful import one_sided

    checked = 0
    for kind in ("algorithms", "callbacks", "loggers", "precisions"):
        for entry in hocket.plugins.entries(kind):
            try:
                made = entry.load()
            except hocket.plugins.PluginError:
                continue
            if isinstance(made, type):
                assert not one_sided(object.__new__(made)), entry
                checked += 1
    assert checked > 60


# --- weights without a seed


@pytest.fixture
def random_numbers() -> Iterator[None]:
    """Torch's generator as in a new process, which nobody has seeded; restored afterwards."""
    fit_arguments._say_unseeded.cache_clear()
    with torch.random.fork_rng(devices=[]):
        torch.seed()
        yield


@pytest.mark.parametrize(
    ("before", "seed", "said"),
    [(None, 17, 1), (17, 17, 0), (None, None, 0)],
    ids=["no seed of torch's", "the documented pattern", "no seed at all"],
)
def test_initial_weights_that_no_seed_determines_are_said_once(
    before: int | None, seed: int | None, said: int, random_numbers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = []
    for _ in range(2):
        if before is not None:
            torch.manual_seed(before)
        made = trainer(seed=seed)
        made.fit()
        made.fit("1ep")
        weights.append(made.state.model.weight.detach().clone())
    assert capsys.readouterr().err.count("call torch.manual_seed(17) before the model is made") == said
    assert torch.equal(*weights) is (before is not None)


def test_a_test_of_a_batch_says_nothing_of_seeds(random_numbers: None, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(seed=17, fast_dev_run=1).fit()
    assert "manual_seed" not in capsys.readouterr().err


# --- the best weights


class Rises(hocket.Callback):
    """Let the monitored loss be best after the second of four epochs, by setting the weights."""

    def batch_end(self, state: hocket.State) -> None:
        with torch.no_grad():
            bias = state.model.bias
            bias.copy_(torch.tensor([0.0, 0.0, {1: 2.0, 2: 0.0}.get(state.timestamp.batch, 9.0)]))


@pytest.mark.parametrize(
    ("duration", "restored"),
    [("4ep", "after epoch 2, batch 2, where eval/loss was"), ("2ep", "")],
    ids=["before", "latest"],
)
def test_restored_weights_are_said_and_the_results_evaluation_is_theirs(
    duration: str, restored: str, in_an_empty_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = [(torch.zeros(16, 4), torch.arange(16) % 3)]
    stopping = {"early-stopping": {"monitor": "eval/loss", "patience": 9}}
    made = trainer(
        callbacks=[Rises(), stopping],
        eval_data=held_out,
        duration=duration,
        checkpoints="runs/a",
        train_metrics="accuracy",
    )
    result = made.fit()
    said = capsys.readouterr().err
    assert restored in said and ("early-stopping restored" in said) is bool(restored)
    loss = nn.functional.cross_entropy(made.state.model(held_out[0][0]), held_out[0][1])
    assert result.metrics["eval/loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name in ("train/loss", "train/accuracy"):
        assert result.metrics[name] == result.history.series(name)[1][-1], name


# --- README from nothing


@pytest.mark.long
def test_readmes_program_runs_after_readmes_install_line(tmp_path: Path) -> None:
    """In an environment that has nothing else, with the versions that the other tests run with."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^```\n(pip install -r requirements\.txt .*)\n```$", page, re.MULTILINE)
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    versions = [
        f"torch=={importlib.metadata.version('torch').partition('+')[0]}",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    uv = shutil.which("uv")
    pip = [uv, "pip", "--quiet"] if uv else [str(python), "-m", "pip", "--quiet"]
    target = ["--python", str(python)] if uv else []
    subprocess.run([*pip, "install", *target, *shlex.split(line)[2:], *versions], cwd=ROOT, check=True, timeout=1200)
    there = subprocess.run([*pip, "list", *target], capture_output=True, text=True, check=True).stdout
    assert "hocket-algorithms-general" in there and "pytest" not in there
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    run = subprocess.run([str(python), "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and float(run.stdout.split()[-1]) > 0.9, run.stdout + run.stderr
