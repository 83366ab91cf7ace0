"""``hocket sweep``: the values that it tries, what it records, and what continues after an end of any kind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from hocket.plugins import PluginError
from hocket_checkpoints.storage.locks import FileLock
from hocket_cli import main
from hocket_cli.document import ConfigError, parse
from hocket_cli.sweeps.record import Entry, Record
from hocket_cli.sweeps.space import Choices, Range, drawn, grid, of_node, of_text

MINE = """
import os, signal, time, torch

class Net(torch.nn.Linear):
    def __init__(self, width: int = 3):
        if width < 3:
            raise ValueError(f"width={width} is too small")
        super().__init__(3, 1)

class Ends(Net):
    def __init__(self, how: str):
        super().__init__()
        self.how = how
    def forward(self, inputs):
        if self.how == "raise":
            raise ValueError("the end of this model")
        if self.how == "silent":
            os._exit(7)
        print("left with words", flush=True)
        os._exit(3) if self.how == "leave" else os.kill(os.getpid(), signal.SIGKILL)

def loader(count: int = 8, seconds: float = 0.0):
    numbers = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 3, generator=numbers)
    return Slow([(inputs[i : i + 4], inputs[i : i + 4].sum(1, keepdim=True)) for i in range(0, count, 4)], seconds)

class Slow(list):
    def __init__(self, batches, seconds):
        super().__init__(batches)
        self.seconds = seconds
    def __iter__(self):
        for each in super().__iter__():
            time.sleep(self.seconds)
            yield each
"""
CONFIG = """\
model: sweep_mine:Net
loss: torch.nn:MSELoss
train_data: sweep_mine:loader
eval_data: {test: sweep_mine:loader}
optimizer: sgd(lr=0.1)
duration: 2ep
device: cpu
seed: 7
"""
METRIC = ("--metric", "test/loss", "--mode", "min")
ONE = ("--sampler", "random", "--trials", "1")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "sweep_mine", raising=False)
    Path("sweep_mine.py").write_text(MINE)
    Path("c.yaml").write_text(CONFIG)

    def call(*arguments: str) -> tuple[int, str, str]:
        return main([*arguments]), *capsys.readouterr()

    return call


def record(name: str) -> dict[str, Any]:
    return json.loads(Path(f"runs/{name}/sweep.json").read_text())


# --- values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2", Choices((1, 2))),
        ("[1, 2],null", Choices(([1, 2], None))),
        ("sgd(lr=0.1, momentum=0.9),adam", Choices(("sgd(lr=0.1, momentum=0.9)", "adam"))),
        ("{a: 1, b: 2},'x,y'", Choices(({"a": 1, "b": 2}, "x,y"))),
        ("int(1, 8)", Range("int", 1, 8)),
        ("loguniform(1e-4,1e-1)", Range("loguniform", 1e-4, 1e-1)),
        ("choices(a,b)", Choices(("a", "b"))),
        ("choices(sgd(lr=0.1, momentum=0.9), adam)", Choices(("sgd(lr=0.1, momentum=0.9)", "adam"))),
        (
            "{mine:Net: {width: 4}},{mine:Net: {width: 8}}",
            Choices(({"mine:Net": {"width": 4}}, {"mine:Net": {"width": 8}})),
        ),
        ("don't,'it''s, yes'", Choices(("don't", "it's, yes"))),
        ("{torch.utils.data:DataLoader: {dataset: {mine:Squares: {count: 64}}, batch_size: 8}}", None),
        ("[1, 2]", None),
        ("cosine(warmup=0.1dur, t_max=2ep)", None),
    ],
)
def test_values_on_the_command_line(text: str, expected: object) -> None:
    assert of_text("key", text) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab ,:'\"\\\\()[]{}=", max_size=6),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text("ab'{,", max_size=3), inside, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, min_size=2, max_size=4))
def test_every_json_value_is_one_choice(values: list[Any]) -> None:
    assert of_text("key", ",".join(map(json.dumps, values))) == Choices(tuple(values))
    assert of_text("key", json.dumps(values)) is None
    assert of_text("key", f"choices({', '.join(map(json.dumps, values))})") == Choices(tuple(values))


@given(st.lists(JSON.filter(lambda each: isinstance(each, list | dict)), min_size=2, max_size=4), st.data())
def test_unmatched_brackets_are_refused(values: list[Any], data: st.DataObject) -> None:
    text = ",".join(map(json.dumps, values))
    start = sum(len(json.dumps(each)) + 1 for each in values[: data.draw(st.integers(0, len(values) - 1))])
    with pytest.raises(ConfigError, match="do not match"):
        of_text("key", text[:start] + text[start + 1 :])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{unifrom: [0, 1]}", "Did you mean 'uniform'"),
        ("{uniform: [1, 0]}", "the smaller first"),
        ("{loguniform: [0, 1]}", "positive"),
        ("{int: [0.5, 1]}", "two integers"),
        ("[]", "needs a list"),
        ("{uniform: 1}", "needs a list"),
        ("{width: [8, 16]}", "Write `key.width: [8, 16]`."),
        ("{m:Net: {width: [8, 16], depth: {int: [1, 3]}}}", "Write `key.width: [8, 16]`; `key.depth: {int: [1, 3]}`."),
        ("{a: {b: {c: [1]}}, d: 2}", "Write `key.a.b.c: [1]`."),
        ("{loguniform: [1, 2], step: 3}", "gives no values to try"),
    ],
)
def test_wrong_values_in_a_file(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"s\.yaml:1: ") as raised:
        of_node(parse(f"key: {value}", "s.yaml").value["key"], "key")
    assert words in str(raised.value)


def test_a_grid_has_every_combination_once() -> None:
    found = list(grid({"a": Choices((1, 2)), "b": Range("int", 0, 2)}))
    assert [(each["a"], each["b"]) for each in found] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_random_values_have_their_distribution_and_are_reproducible() -> None:
    space = {
        "u": Range("uniform", 2, 4),
        "l": Range("loguniform", 1e-4, 1),
        "i": Range("int", 1, 3),
        "c": Choices("ab"),
    }
    draws = [drawn(space, 0, number) for number in range(4000)]
    assert draws[:5] == [drawn(space, 0, number) for number in range(5)] and draws[0] != drawn(space, 1, 0)
    mean = {key: sum(each[key] for each in draws) / 4000 for key in "ui"}
    # Five standard errors of the exact means: (b - a) / sqrt(12 n) for uniform numbers.
    assert abs(mean["u"] - 3) < 5 * 2 / math.sqrt(12 * 4000) and abs(mean["i"] - 2) < 5 * math.sqrt(2 / 3 / 4000)
    logs = [math.log10(each["l"]) for each in draws]
    assert abs(sum(logs) / 4000 + 2) < 5 * 4 / math.sqrt(12 * 4000) and min(logs) >= -4 and max(logs) <= 0
    assert {each["i"] for each in draws} == {1, 2, 3} and {each["c"] for each in draws} == {"a", "b"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer.sgd.lrr=1,2"], "Did you mean 'lr'?"),
        (["optimizer.sgd.lr=0.1,fast"], "it should be a number"),
        (["model.width=3,wide"], "it should be an integer"),
        (["duration=1ep"], "nothing to try"),
        (["run_name=a,b"], "is set by the sweep"),
        (["seed=1,2", "--metric", "test/loss"], ""),
        (["optimizer.sgd.lr=loguniform(0.1,1)", "--sampler", "grid"], "A grid has no end"),
        (["seed=1,2", "--sampler", "random"], "needs --trials"),
        (["seed=1,2", "--jobs", "0"], "less than 1"),
        (["model.width=4},8"], "'model.width=4},8': Brackets or quotes do not match."),
        (["model.width=(4,8]"], "Brackets or quotes do not match."),
        (["run_tag='a,b"], "Brackets or quotes do not match."),
        (["model.width=4,,8"], "no value between two commas"),
        (["seed=uniformm(1,2)"], "Did you mean 'uniform'?"),
        (["seed=1,2", "--nmae", "x"], "--name"),
    ],
)
def test_errors_before_any_trial(arguments: list[str], words: str, run: Run) -> None:
    needed = () if "--metric" in arguments else METRIC
    code, _, said = run("sweep", "c.yaml", *arguments, *needed)
    assert code == 2 and said.strip().count("\n") == 0 and (words or "needs --mode") in said, said
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written_is_named(run: Run) -> None:
    name = "n" * 300  # longer than names may be
    code, _, said = run("sweep", "c.yaml", "seed=1,2", f"folder={name}", *METRIC)
    assert code == 2 and said.count("\n") == 1, said
    assert f"Nothing can be written to {name}/c-sweep: " in said and said.endswith("such as folder=runs.\n")


@pytest.mark.parametrize(
    ("sampler", "lacks", "words"),
    [
        ("cmaes", "cmaes", "--sampler cmaes needs cmaes, which is not installed. Type: pip install cmaes."),
        ("gp", "scipy", "--sampler gp needs scipy, which is not installed. Type: pip install scipy."),
        ("qmc", "scipy", "--sampler qmc needs scipy, which is not installed. Type: pip install scipy."),
        ("tpe", "optuna", "Type: pip install 'optuna>=4.0'."),
    ],
)
def test_what_a_sampler_needs_is_checked_before_the_first_trial(
    sampler: str, lacks: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks != "optuna":
        pytest.importorskip("optuna")
    monkeypatch.setitem(sys.modules, lacks, None)
    code, _, said = run("sweep", "c.yaml", "seed=int(1,9)", "--sampler", sampler, "--trials", "2", *METRIC)
    assert code == 2 and said.count("\n") == 1 and words in said, said
    assert not Path("runs").exists()


@pytest.mark.parametrize("sampler", ["gp", "qmc", "cmaes"])
def test_samplers_need_what_optuna_imports(sampler: str, run: Run) -> None:
    """Ask twice, with nothing but the packages that are checked."""
    pytest.importorskip("optuna")
    from hocket_cli.sweeps.optuna import _NEEDS, Study

    for name in _NEEDS[sampler]:
        pytest.importorskip(name)
    study, space = Study(Path("optuna.journal"), "min", None), {"a": Range("uniform", 0, 1), "b": Range("int", 1, 9)}
    for _ in range(12):
        number, values = study.ask(space, sampler, 0, None)
        assert 0 <= values["a"] <= 1 and 1 <= values["b"] <= 9
        study.tell(number, values["a"], False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trails: 3", "s.yaml:1: 'trails' is not a key of a sweep. Did you mean 'trials'?"),
        ("mode: best", "not one of min, max"),
        ("trials: three", "should be an integer"),
        ("parameters: [a]", "parameters is a mapping"),
        ("parameters: {model.widht: [3, 4]}", "Did you mean 'width'?"),
        ("overrides: {durration: 1ep}", "durration"),
    ],
)
def test_errors_of_a_file(line: str, words: str, run: Run) -> None:
    given = {"config": "c.yaml", "metric": "test/loss", "mode": "min", "parameters": {"seed": [1, 2]}}
    given.pop(line.partition(":")[0], None)
    Path("s.yaml").write_text(f"{line}\n{yaml.safe_dump(given)}")
    code, _, said = run("sweep", "s.yaml")
    assert code == 2 and said.count("\n") == 1 and words in said, said
    assert not Path("runs").exists()


# --- trials


@pytest.mark.long
def test_trials_without_a_logger_are_listed_as_the_sweep_recorded_them(run: Run) -> None:
    assert run("sweep", "c.yaml", "seed=int(1,9)", *ONE, "duration=1ep", "loggers=[]", *METRIC)[0] == 0
    assert run("train", "c.yaml", "duration=1ep", "loggers=[]", "run_name=alone")[0] == 0
    assert run("train", "--from", "runs/c-sweep/trial-000")[0] == 0
    code, printed, _ = run("runs", "--json")
    found = {each["name"]: each for each in json.loads(printed)}
    (trial,) = record("c-sweep")["trials"]
    assert code == 0 and {name: each["status"] for name, each in found.items()} == {
        "trial-000": "finished", "trial-000-2": "unknown", "alone": "unknown",
    }  # fmt: skip
    values = {name: each["latest"] for name, each in found["trial-000"]["values"].items()}
    assert values == trial["metrics"] and values["test/loss"] > 0
    _, printed, _ = run("runs")
    assert f"{values['test/loss']:.6g}" in printed and printed.count("\nunknown: ") == 1


@pytest.mark.long
def test_a_sweep_that_leaves_no_runs_does_not_say_to_repeat_one(run: Run) -> None:
    code, printed, _ = run("sweep", "c.yaml", "seed=int(1,9)", *ONE, "fast_dev_run=1", *METRIC)
    assert code == 0 and "best: trial-00" in printed and "it tried seed=" in printed and "--from" not in printed


@pytest.mark.long
def test_a_failed_trial_does_not_end_the_sweep_and_finished_ones_are_not_repeated(run: Run) -> None:
    command = ["sweep", "c.yaml", "model.width=2,3", "duration=1ep", *METRIC]
    code, printed, said = run(*command)
    assert code == 0, said
    one, two = record("c-sweep")["trials"]
    assert (one["status"], two["status"]) == ("failed", "finished")
    assert "width=2 is too small" in one["error"] and "width=2 is too small" in printed
    assert two["value"] == two["metrics"]["test/loss"] > 0
    assert "best: trial-001; to run it again: hocket train --from runs/c-sweep/trial-001" in printed
    assert yaml.safe_load(Path("runs/c-sweep/trial-001/config.yaml").read_text())["model"] == {
        "sweep_mine:Net": {"width": 3}
    }
    before = Path("runs/c-sweep/trial-001/weights.safetensors").stat()
    assert run(*command)[0] == 0
    assert Path("runs/c-sweep/trial-001/weights.safetensors").stat() == before
    code, _, said = run("sweep", "c.yaml", "model.width=3,4", *command[3:])
    assert code == 2 and "another sweep: parameters.model.width was [2, 3], is [3, 4]. To" in said and "--name" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("raise", "ValueError: the end of this model"),
        pytest.param("kill", "signal SIGKILL", marks=pytest.mark.long),
        pytest.param("leave", "exit code 3: left with words", marks=pytest.mark.long),
        pytest.param("silent", "exit code 7", marks=pytest.mark.long),
    ],
)
def test_the_error_of_a_failed_trial_is_its_exception_and_not_the_last_line_of_its_output(
    mode: str, error: str, run: Run
) -> None:
    model = f"model={{sweep_mine:Ends: {{how: {mode}}}}}"
    code, printed, _ = run("sweep", "c.yaml", model, "seed=int(1,9)", *ONE, *METRIC)
    assert code == 1
    assert [each["error"] for each in record("c-sweep")["trials"]] == [error]
    assert f"trial-000 by {error}; all it printed" in printed


def test_what_differs_from_the_sweep_of_a_folder_is_named(tmp_path: Path) -> None:
    long = {f"key{number}": "x" * 40 for number in range(9)}
    before = {"configuration": long | {"model": {"m:A": {}}, "seed": 1, "gone": 2}, "mode": "min"}
    Record(tmp_path, before).save()
    assert Record.open(tmp_path, before).definition == before
    now = {"configuration": long | {"model": {"m:B": {"x": 3}}, "seed": 1, "key7": "y"}, "mode": "min"}
    with pytest.raises(PluginError) as raised:
        Record.open(tmp_path, now)
    differ = str(raised.value).partition("another sweep: ")[2].partition(". To continue")[0].split("; ")
    assert differ == [
        f"configuration.key7 was {'x' * 40}, is y",
        "configuration.model was {m:A: {}}, is {m:B: {x: 3}}",
        "configuration.gone was 2, is not given",
    ]


def test_a_sweep_that_runs_is_not_started_again(run: Run) -> None:
    Path("runs/c-sweep").mkdir(parents=True)
    with contextlib.ExitStack() as held:
        held.callback(FileLock(Path("runs/c-sweep/.sweep"), "c-sweep").release)
        code, _, said = run("sweep", "c.yaml", "seed=1,2", *METRIC)
    assert code == 2 and "is in use" in said and "write --name with another name than c-sweep." in said
    assert "hocket.Checkpoints" not in said


def test_another_folder_is_never_overwritten(run: Run) -> None:
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/thesis.txt").write_text("precious")
    code, _, said = run("sweep", "c.yaml", "seed=1,2", *METRIC, "--name", "mine")
    assert code == 2 and "not the folder of a sweep" in said
    assert [each.name for each in Path("runs/mine").iterdir()] == ["thesis.txt"]


@pytest.mark.long
def test_a_file_and_its_best_trial_again(run: Run) -> None:
    Path("s.yaml").write_text(
        "config: c.yaml\nmetric: test/loss\nmode: min\nsampler: random\ntrials: 3\nseed: 4\njobs: 2\n"
        "parameters:\n  optimizer.sgd.lr: {loguniform: [0.01, 0.3]}\n  seed: {int: [1, 9]}\noverrides: {duration: 1ep}\n"
    )
    code, printed, said = run("sweep", "s.yaml")
    assert code == 0, said
    space = {"optimizer.sgd.lr": Range("loguniform", 0.01, 0.3), "seed": Range("int", 1, 9)}
    trials = record("s")["trials"]
    assert [each["parameters"] for each in sorted(trials, key=lambda each: each["number"])] == [
        drawn(space, 4, number) for number in range(3)
    ]
    best = min(trials, key=lambda each: each["value"])["name"]
    assert f"best: {best};" in printed
    values = [float(line.split()[2]) for line in printed.splitlines() if line.startswith("trial-") and "(" not in line]
    assert values == sorted(values) and len(values) == 3
    assert run("train", "--from", f"runs/s/{best}", "run_name=again")[0] == 0
    one, two = (load_file(f"runs/s/{name}/weights.safetensors") for name in (best, "again"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command as from a shell, in a session of its own."""
    command = [sys.executable, "-m", "hocket", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_resumes_its_trial_and_ends_as_if_it_had_not_been(number: int, run: Run) -> None:
    Path("c.yaml").write_text(CONFIG + "checkpoints: {folder: elsewhere, every: 1ba, keep: 2}\n")
    slow = ("duration=6ep", "train_data.seconds=0.2", *METRIC)
    command = ("sweep", "c.yaml", "optimizer.sgd.lr=0.05,0.1", *slow)
    process = start(*command)
    wait_for(lambda: Path("runs/c-sweep/trial-001/checkpoints/latest").exists(), process)
    os.kill(process.pid, number)  # after SIGKILL the trial finds out by itself, and the sweep is continued at once
    process.wait(timeout=200)
    statuses = [each["status"] for each in record("c-sweep")["trials"]]
    assert statuses == ["finished", "interrupted" if number == signal.SIGTERM else "running"]
    first = Path("runs/c-sweep/trial-000/weights.safetensors").stat()
    code, _, said = run(*command)
    assert code == 0, said
    assert ("trial-001 of the killed sweep is still ending" in said) == (number == signal.SIGKILL)
    assert [each["status"] for each in record("c-sweep")["trials"]] == ["finished", "finished"]
    assert Path("runs/c-sweep/trial-000/weights.safetensors").stat() == first
    assert "resumed" in Path("runs/c-sweep/.sweep/trial-001.txt").read_text()
    whole = ["train", "c.yaml", *slow[:1], "optimizer.sgd.lr=0.1", "run_name=whole", "checkpoints=null"]
    assert run(*whole)[0] == 0
    one, two = (load_file(f"runs/{name}/weights.safetensors") for name in ("c-sweep/trial-001", "whole"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not Path("elsewhere").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("metric", "says", "trained", "right"),
    [
        ("test/los", "monitor 'test/loss'", False, "test/loss"),
        ("train/los", "Did you mean 'train/loss'?", True, "train/loss"),
    ],
)
def test_a_metric_that_does_not_exist_ends_the_sweep_in_the_first_trial_and_the_right_one_continues_it(
    run: Run, metric: str, says: str, trained: bool, right: str
) -> None:
    command = ("sweep", "c.yaml", "seed=1,2", "duration=1ep", "--mode", "min", "--metric")
    code, _, said = run(*command, metric)
    assert code == 2 and says in said
    (trial,) = record("c-sweep")["trials"]
    assert bool(trial["metrics"]) == trained and trial["status"] == "interrupted"
    assert run(*command, right)[0] == 0
    assert [each["status"] for each in record("c-sweep")["trials"]] == ["finished"] * 2
    assert all(each["value"] == each["metrics"][right] for each in record("c-sweep")["trials"])
    other = "train/loss" if right == "test/loss" else "test/loss"
    code, _, said = run(*command, other)
    assert code == 2 and f"metric was {right}, is {other}" in said  # values were compared


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model.width=4,8", "model.width=16"], "'model.width' is given twice"),
        (["model.width=4,8", "model.width=16,32"], "'model.width' is given twice"),
        (["model.width=uniform(4,8)", "--trials", "2"], "model.width"),  # an integer, which both bounds are
    ],
)
def test_parameters_that_cannot_be_meant_are_refused_before_the_first_trial(
    run: Run, arguments: list[str], says: str
) -> None:
    code, _, said = run("sweep", "c.yaml", *arguments, *METRIC)
    assert code == 2 and says in said and not Path("runs").exists()


def test_a_key_twice_in_a_file_and_a_file_without_parameters_are_refused(run: Run) -> None:
    head = "config: c.yaml\nmetric: test/loss\nmode: min\n"
    Path("s.yaml").write_text(head + "parameters: {duration: [1ep, 2ep]}\noverrides: {duration: 1ep}\n")
    code, _, said = run("sweep", "s.yaml")
    assert code == 2 and "'duration' is given twice" in said
    Path("s.yaml").write_text(head + "parametrs: {seed: [1, 2]}\n")
    code, _, said = run("sweep", "s.yaml")
    assert code == 2 and "'parametrs' is not a key of a sweep" in said and "parameters" in said


def test_a_trial_that_the_study_prunes_stops_and_says_so(run: Run) -> None:
    """The median pruner waits for five trials; a sixth that is worse than their median ends at its first evaluation."""
    pytest.importorskip("optuna")
    from hocket_cli.sweeps.optuna import Study

    journal, space = Path("optuna.journal"), {"optimizer.sgd.lr": Choices((0.1, 0.2))}
    study = Study(journal, "min", "median")
    for _ in range(5):
        number, values = study.ask(space, "grid", 0, {"optimizer.sgd.lr": 0.2})
        assert values == {"optimizer.sgd.lr": 0.2}
        assert not any(study.report(number, 1e-6, step) for step in (2, 4, 6, 8))
        study.tell(number, 1e-6, pruned=False)
    number, _ = study.ask(space, "grid", 0, {"optimizer.sgd.lr": 0.1})
    prune = {"journal": str(journal), "mode": "min", "pruner": "median", "trial": number}
    Path("t.json").write_text(json.dumps({"metric": "test/loss", "result": "result.json", "prune": prune, "sweep": 0}))
    for name, logger in (("trial-005", "[jsonl]"), ("trial-006", "[]")):
        in_sweep = ("folder=runs/s", f"run_name={name}", f"loggers={logger}")
        code, _, said = run("train", "c.yaml", "duration=4ep", *in_sweep, "--trial", "t.json")
        assert code == 0 and "done at ep 1 ba 2" in said
        result = json.loads(Path("result.json").read_text())
        assert result["pruned"] and result["metrics"]["test/loss"] > 1e-6
    assert [each["status"] for each in json.loads(run("runs", "--json")[1])] == ["finished", "unknown"]
    trials = [
        Entry(number, f"trial-00{number}", {}, "pruned", metrics=result["metrics"], asked=number) for number in (5, 6)
    ]
    Record(Path("runs/s"), {}, trials).save()
    listed = json.loads(run("runs", "--filter", "pruned", "--json")[1])
    assert [each["name"] for each in listed] == ["trial-005", "trial-006"]
    assert listed[0]["reason"].startswith("the sweep prunes it at test/loss")


@pytest.mark.long
def test_a_study_of_optuna_is_read_by_optuna(run: Run) -> None:
    optuna = pytest.importorskip("optuna")
    values = "optimizer.sgd.lr=loguniform(1e-3,1)"
    code, _, said = run(
        "sweep",
        "c.yaml",
        values,
        "duration=1ep",
        *METRIC,
        "--sampler",
        "tpe",
        "--trials",
        "2",
        "--prune",
        "--name",
        "tpe",
    )
    assert code == 0, said
    backend = optuna.storages.journal.JournalFileBackend("runs/tpe/.sweep/optuna.journal")
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    assert [each.value for each in study.trials] == [each["value"] for each in record("tpe")["trials"]]
    assert all(each.intermediate_values for each in study.trials)
    reference = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0)).ask()
    first = record("tpe")["trials"][0]["parameters"]["optimizer.sgd.lr"]
    assert first == reference.suggest_float("optimizer.sgd.lr", 1e-3, 1, log=True)


@pytest.mark.long
def test_a_prefix_runs_each_trial(run: Run, tmp_path: Path) -> None:
    """The shell gets the trial's command as its arguments."""
    assert (
        run("sweep", "c.yaml", "seed=int(1,9)", *ONE, *METRIC, "--prefix", "sh -c 'echo through; exec \"$@\"' sh")[0]
        == 0
    )
    assert [each["status"] for each in record("c-sweep")["trials"]] == ["finished"]
    assert "through" in Path("runs/c-sweep/.sweep/trial-000.txt").read_text().splitlines()


@pytest.mark.parametrize("prefix", ["srum --gpus 1", "sh -c 'a"])
def test_a_prefix_that_is_no_command(run: Run, prefix: str) -> None:
    code, _, error = run("sweep", "c.yaml", "seed=1,2", *METRIC, "--prefix", prefix)
    assert code == 2 and f"--prefix {prefix!r}" in error and not Path("runs").exists()
