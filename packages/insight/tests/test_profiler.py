"""Profiles of real runs: each names the culprit that was put there, and changes nothing else."""

from __future__ import annotations

import gzip
import inspect
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer, same, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket import hookspecs
from hocket.basics.plugin_errors import PluginConfigError
from hocket.basics.time import Time, TimeError, Unit
from hocket.loggers.console import ConsoleLogger
from hocket.loggers.memory import MemoryLogger
from hocket_insight.callbacks.lr_monitor import LRMonitor
from hocket_insight.profiling import phases
from hocket_insight.profiling.causes import causes_of
from hocket_insight.profiling.phases import PHASES
from hocket_insight.profiling.profiler import Profiler, parse
from hocket_insight.profiling.trace import Trace
from hocket_insight.profiling.waits import Waits

#: Seconds that a culprit sleeps in each batch; all else takes a millisecond or two.
SLOW = 0.04


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Other tests of this process may have compiled code, under which lines that wait are not searched for."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()


class Wide(hocket.Task):
    """Matrices so large that computing them takes most of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))

    def forward(self, batch: Any) -> Any:
        return self.layers(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


class Reads(Wide):
    """Reads its loss in each step."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = super().loss(outputs, batch)
        self.last = loss.item()  # the culprit
        return loss


class Decides(hocket.Callback):
    """Reads the loss in each step, without calling a method of it."""

    def batch_end(self, state: Any) -> None:
        if state.loss > 1000:  # the culprit
            raise AssertionError


class Sleeps(hocket.Callback):
    def batch_end(self, state: Any) -> None:
        time.sleep(SLOW)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(SLOW)
        return super().step(closure)


class SlowData(Dataset[Any]):
    def __init__(self) -> None:
        self.data = make_data(8 * 40).dataset

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW / 8)
        return self.data[index]


def profiled(folder: Path, window: Any = "6ba after 2ba", **arguments: Any) -> dict[str, Any]:
    """Run and return the summary."""
    # A list takes no time to load, so that another process of this machine does not make data a cause.
    data = [(torch.randn(256, 8), torch.zeros(256).long())] * 12
    given = {"model": Wide(), "train_data": data, "loss": None, "duration": "9ba", "device": "cpu"}
    return summary_of(make_trainer(**{**given, **arguments}, folder=folder, profile=window).fit().run_folder)


def small() -> dict[str, Any]:
    """A model that takes no time to compute, for culprits that sleep."""
    return {"model": make_model(), "loss": F.cross_entropy}


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "profile/summary.json").read_text())
    return found


def line_of(function: Any) -> str:
    """The place of the line with the culprit, as the summary writes it."""
    lines, first = inspect.getsourcelines(function)
    return f"{first + next(n for n, line in enumerate(lines) if '# the culprit' in line)}"


# --- culprits


def test_slow_loader_is_named_first(tmp_path: Path) -> None:
    cause = profiled(tmp_path, **small(), train_data=DataLoader(SlowData(), batch_size=8))["causes"][0]
    assert cause["name"] == "data" and cause["share"] > 0.5
    assert "num_workers=4" in cause["advice"][0]


def test_wait_in_the_loss_is_named_first(tmp_path: Path) -> None:
    cause = profiled(tmp_path, model=Reads())["causes"][0]
    assert cause["name"] == "synchronisation"
    assert cause["subject"].endswith(f"test_profiler.py:{line_of(Reads)}") and "Reads.loss" in cause["what"]
    assert ".item()" in cause["advice"][0]


def test_wait_in_a_callback_is_named_first(tmp_path: Path) -> None:
    found = profiled(tmp_path, callbacks=[Decides()])
    assert found["causes"][0]["subject"].endswith(f"test_profiler.py:{line_of(Decides)}")
    assert found["waits"] == [
        {
            "where": found["causes"][0]["subject"],
            "function": "Decides.batch_end",
            "call": "bool() or an `if`",
            "per_batch": 1.0,
        }
    ]


@pytest.mark.parametrize(
    ("call", "try_"),
    [
        (lambda x: x.sum().item(), "keep the value in a tensor"),
        (lambda x: x.tolist(), "keep the value in a tensor"),
        (lambda x: 1 if x.sum() > 0 else 2, "torch.where(condition, a, b)"),
        (lambda x: 1 if (x > 0).any() else 2, "torch.where(condition, a, b)"),
        (lambda x: torch.allclose(x, x), "torch.where(condition, a, b)"),
        (lambda x: 1.0 in x, "torch.where(condition, a, b)"),
        (lambda x: x[x > 0], "a mask that is multiplied"),
        (lambda x: x.masked_select(x > 0), "a mask that is multiplied"),
        (lambda x: (x > 0).nonzero(), "a mask that is multiplied"),
        (lambda x: torch.where(x > 0), "a mask that is multiplied"),
        (lambda x: x.unique(), "in the data set or collate_fn"),
        (lambda x: (x > 0).flatten().long().bincount(), "scatter_add_"),
        (lambda x: [1] * 9 + [*range(int(x.sum() * 0))], "x.index_select(0, i) as an index"),
    ],
)
def test_advice_against_a_wait_is_that_of_its_call(call: Any, try_: str) -> None:
    """What is read may be kept and logged, and less often; what training is made of is computed otherwise."""
    waits = Waits(simulate=True)
    x = torch.randn(4, 3)
    waits.begin()
    call(x)
    waits.end()
    (found,) = waits.found
    shares = dict.fromkeys(PHASES, 0.0)
    summary = {
        "shares": shares, "python": {}, "plugins": {}, "ranks": [{"shares": shares}], "seconds_per_batch": 0.1,
        "device_time": None,
        "waits": [{"where": "a.py:1", "function": "f", "call": found.call, "per_batch": 1.0}],
    }  # fmt: skip
    advice = causes_of(summary, {"device": "cuda"})[0].advice
    assert try_ in advice[0]
    assert any("every n batches" in each for each in advice) is try_.startswith("keep")


def test_slow_plugin_is_named_first(tmp_path: Path) -> None:
    found = profiled(tmp_path, **small(), callbacks=[Sleeps()])
    assert (found["causes"][0]["name"], found["causes"][0]["subject"]) == ("plugin", "sleeps")
    assert list(found["plugins"]) == ["sleeps"] and list(found["plugins"]["sleeps"]["hooks"]) == ["batch_end"]
    assert found["plugins"]["sleeps"]["share"] * found["seconds_per_batch"] >= SLOW


def test_what_training_needs_is_not_advised_to_be_omitted(tmp_path: Path) -> None:
    def transform(batch: Any) -> Any:
        time.sleep(SLOW)
        return batch

    class Slow(Wide):
        def batch_end(self, state: Any) -> None:
            time.sleep(SLOW)

    class Acts(hocket.Callback):
        @hocket.hookimpl(wrapper=True)
        def backward(self, state: Any, loss: Any) -> Any:
            time.sleep(SLOW)
            return (yield)

    cause = profiled(tmp_path, **small(), batch_transform=transform)["causes"][0]
    assert cause["subject"] == "batch-transform" and cause["advice"][0] == "fewer operations in batch_transform="
    assert "num_workers" in cause["advice"][1] and len(cause["advice"]) == 2
    for subject, arguments in (("Slow", {"model": Slow()}), ("acts", {**small(), "callbacks": [Acts()]})):
        cause = profiled(tmp_path / subject, **arguments)["causes"][0]
        assert cause["subject"] == subject and cause["advice"][0].startswith("fewer operations in ")
        assert not any("every n batches" in each or "not at all" in each for each in cause["advice"])


def test_slow_optimizer_is_named_first(tmp_path: Path) -> None:
    causes = profiled(tmp_path, **small(), optimizer=lambda p: SlowSGD(p, lr=0.1))["causes"]
    assert causes[0]["name"] == "optimizer" and causes[0]["share"] > 0.4


@pytest.mark.parametrize("phase", ["forward", "loss"])
@pytest.mark.parametrize("pure", [False, True])
def test_python_in_forward_and_loss_is_named(tmp_path: Path, phase: str, pure: bool) -> None:
    class Slow(Wide):
        def work(self) -> None:
            until = time.perf_counter() + SLOW
            while pure and time.perf_counter() < until:
                sum(range(100))
            time.sleep(0 if pure else SLOW)

        def forward(self, batch: Any) -> Any:
            if phase == "forward":
                self.work()
            return super().forward(batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            if phase == "loss":
                self.work()
            return super().loss(outputs, batch)

    found = profiled(tmp_path, model=Slow())
    cause = found["causes"][0]
    assert cause["name"] == phase and f"Most of {phase} is Python, not tensor operations" in cause["what"]
    assert found["python"][phase] * found["seconds_per_batch"] >= 0.9 * SLOW
    assert [each["name"] for each in found["causes"]].count(phase) == 1
    assert found["verdict"] == cause["what"] and found["advice"] == []


def test_many_tensor_operations_in_forward_are_not_called_python(tmp_path: Path) -> None:
    class Computes(Wide):
        def forward(self, batch: Any) -> Any:
            for _ in range(30):
                x = self.layers(batch[0])
            return x

    found = profiled(tmp_path, model=Computes())
    assert found["shares"]["forward"] > 0.5 > 2 * found["python"]["forward"]
    assert "forward" not in {cause["name"] for cause in found["causes"]}


def test_healthy_run_has_no_culprit(tmp_path: Path) -> None:
    found = profiled(
        tmp_path, "8ba after 2ba", duration="10ba", train_data=[(torch.randn(512, 8), torch.zeros(512).long())] * 12
    )
    assert found["causes"] == [] and found["verdict"].startswith("Compute-bound: forward ")
    assert found["waits"] == []


# --- what a summary is


def test_shares_add_up(tmp_path: Path) -> None:
    found = profiled(tmp_path, callbacks=[LRMonitor()], loggers=[MemoryLogger()], log_every="1ba")
    assert list(found["shares"]) == list(PHASES)
    assert sum(found["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert min(found["shares"].values()) >= 0
    assert found["shares"]["plugins"] == pytest.approx(found["plugins"]["lr-monitor"]["share"])
    assert found["shares"]["loggers"] == pytest.approx(found["plugins"]["memory"]["share"])
    assert found["version"] == 1 and found["complete"] and (found["first_batch"], found["batches"]) == (3, 6)


def test_trace_has_the_batches_and_the_phases(tmp_path: Path) -> None:
    arguments = {"device": "cpu", "duration": "5ba", "train_data": make_data(32 * 8), "profile": "3ba after 2ba"}
    run = make_trainer(**arguments, callbacks=[Sleeps()], folder=tmp_path).fit().run_folder
    assert sorted(each.name for each in (run / "profile").iterdir()) == ["rank0.json.gz", "summary.json", "summary.txt"]
    events = json.loads(gzip.decompress((run / "profile/rank0.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 3
    for name in ("data", "forward", "loss", "backward", "optimizer_step", "sleeps.batch_end"):
        assert names.count(name) == 3, name


def test_every_microbatch_and_every_pass_of_sam_counts(tmp_path: Path) -> None:
    class Counts(hocket.Callback):
        forwards = 0

        @hocket.hookimpl(wrapper=True)
        def forward(self, state: Any, batch: Any) -> Any:
            time.sleep(0.002)
            return (yield)

    found = profiled(tmp_path, callbacks=[Counts()], microbatch=128)
    assert found["plugins"]["counts"]["hooks"]["forward"] * found["seconds_per_batch"] >= 2 * 0.002
    assert sum(found["shares"].values()) == pytest.approx(1)


def test_evaluation_is_its_own_share(tmp_path: Path) -> None:
    class Slow(Reads):
        def eval_forward(self, batch: Any) -> Any:
            time.sleep(3 * SLOW)
            return self(batch)

        def has_eval_loss(self, outputs: Any) -> bool:
            return True

    found = profiled(tmp_path, model=Slow(), eval_data=make_data(32), eval_every="1ba")
    assert found["shares"]["evaluation"] * found["seconds_per_batch"] >= SLOW
    assert {cause["name"] for cause in found["causes"]} == {"evaluation", "synchronisation"}
    assert [wait["function"] for wait in found["waits"]] == ["Reads.loss"], "those of the evaluation do not count"


def test_summary_is_logged_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = MemoryLogger()
    trainer = make_trainer(device="cpu", folder=tmp_path, profile="2ba after 0ba", loggers=[logger, ConsoleLogger()])
    run = trainer.fit().run_folder
    text = (run / "profile/summary.txt").read_text()
    assert text.startswith("Profile of batches 3 to 4: ")
    shown = capsys.readouterr().err
    assert (
        f"hocket: profile: {summary_of(run)['verdict']}\n" in shown and f"the profile is in {run / 'profile'}" in shown
    )


# --- when it ends


def test_nothing_remains_after_the_window(tmp_path: Path) -> None:
    trainer = make_trainer(device="cpu", folder=tmp_path, duration="9ba", profile="1ba after 2ba")
    before = {name: getattr(trainer.state.bus, name) for name in ("before_dataloader", "forward", "batch_end")}
    trainer.fit()
    bus = trainer.state.bus
    assert [each.name for each in bus.attachments if each.kind == "callbacks"] == ["profiler"]
    for name, function in before.items():
        assert getattr(bus, name).__code__ is function.__code__, f"{name} is compiled as before the window"
    assert not bus.listeners("before_dataloader")
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_window_ends_with_the_run(tmp_path: Path) -> None:
    found = profiled(tmp_path, "50ba after 3ba")
    assert (found["batches"], found["complete"]) == (6, False)


@pytest.mark.parametrize("after", [9, 8, 7])
def test_window_that_does_not_begin_waits_for_the_next_fit(
    tmp_path: Path, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first fit ends after 6 batches: before the window, and when one and two batches of it have warmed up."""
    trainer = make_trainer(device="cpu", folder=tmp_path, profile=f"1ba after {after}ba")
    run = trainer.fit().run_folder
    assert (
        f"profile='1ba after {after}ba' has measured nothing: training ended after 6 batches" in capsys.readouterr().err
    )
    assert not run.exists()
    trainer.fit("2ep")
    assert summary_of(run)["first_batch"] == (10 if after == 9 else 9)
    written = (run / "profile/summary.json").stat().st_mtime_ns
    trainer.fit("2ep")
    assert (run / "profile/summary.json").stat().st_mtime_ns == written, "one profile for a Trainer"


def test_resumed_run_is_profiled_from_its_own_beginning(tmp_path: Path) -> None:
    arguments = {"device": "cpu", "folder": tmp_path, "checkpoints": tmp_path / "stored", "run_name": "r"}
    make_trainer(**arguments, duration="4ba").fit()
    run = make_trainer(**arguments, duration="9ba", resume="auto", profile="1ba after 3ba").fit().run_folder
    assert summary_of(run)["first_batch"] == 8


def test_fast_dev_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for window in ("1ba after 0ba", "5ba after 10ba"):
        make_trainer(device="cpu", fast_dev_run=3, profile=window).fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("batch", [1, 3])
def test_exception_stops_it(tmp_path: Path, batch: int) -> None:
    """In a batch that warms up, and in one that is measured."""

    class Fails(hocket.Callback):
        def batch_start(self, state: Any) -> None:
            if state.timestamp.batch == batch:
                raise OSError("a disk")

    trainer = make_trainer(device="cpu", folder=tmp_path, callbacks=[Fails()], profile="3ba after 2ba")
    with pytest.raises(OSError, match="a disk"):
        trainer.fit()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert not torch.overrides._get_current_function_mode_stack()
    assert [each.name for each in trainer.state.bus.attachments if each.kind == "callbacks"] == ["fails", "profiler"]
    assert not list(tmp_path.rglob("profile"))


def test_too_large_a_trace_is_cut(tmp_path: Path) -> None:
    run = make_trainer(device="cpu", folder=tmp_path, duration="9ba", profile="6ba after 2ba").fit().run_folder
    size = (run / "profile/rank0.json.gz").stat().st_size
    arguments = {"window": "6ba after 2ba", "megabytes": size * 0.6 / 1e6}
    run = make_trainer(device="cpu", folder=tmp_path, duration="9ba", profile=arguments, run_name="b").fit().run_folder
    assert (run / "profile/rank0.json.gz").stat().st_size <= size * 0.6
    assert any("has the first" in note and "of 6 batches" in note for note in summary_of(run)["notes"])
    arguments["megabytes"] = 0.0001
    run = make_trainer(device="cpu", folder=tmp_path, duration="9ba", profile=arguments, run_name="c").fit().run_folder
    assert not (run / "profile/rank0.json.gz").exists()
    assert any("is not written" in note for note in summary_of(run)["notes"])


# --- it changes nothing


def test_results_are_bitwise_the_same(tmp_path: Path) -> None:
    arguments = {"device": "cpu", "seed": 3, "optimizer": "adamw(lr=1e-2)", "microbatch": 8}
    plain = make_trainer(**arguments, model=make_model(0.3), eval_data=make_data(), folder=tmp_path / "a")
    profiled = make_trainer(
        **arguments, model=make_model(0.3), eval_data=make_data(), folder=tmp_path / "b", profile="2ba after 1ba"
    )
    one, other = plain.fit(), profiled.fit()
    assert same(weights(plain), weights(profiled)) and one.metrics == other.metrics


def test_code_is_not_compiled_while_waits_are_searched_for() -> None:
    """Under a mode for functions, dynamo of torch 2.15 omits the sum from the code that it compiles."""

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().sum()

    x = torch.ones(3)
    expected = (x * 2).sin().sum()
    waits = Waits(simulate=True)
    for _ in range(2):  # before it is compiled, and after
        waits.begin()
        watched = compiled(x)
        value = watched.item()
        waits.end()
        assert same(watched, expected) and value == expected.item() and same(compiled(x), expected)
    assert sum(waits.found.values()) == 2


# --- several ranks


def test_each_rank_has_a_trace_and_the_slowest_is_named(tmp_path: Path) -> None:
    pytest.importorskip("hocket_strategies")

    class SlowRank(hocket.Callback):
        def batch_start(self, state: Any) -> None:
            time.sleep(3 * SLOW * state.strategy.rank)

    def train(rank: int) -> str:
        trainer = make_trainer(
            strategy="ddp", device="cpu", folder=tmp_path, run_name="r", duration="8ba", callbacks=[SlowRank()],
            train_data=make_data(32 * 20), profile="3ba after 2ba",
        )  # fmt: skip
        return str(trainer.fit().run_folder)

    run = Path(hocket.testkit.run_ranks(train, 2)[0])
    assert sorted(each.name for each in (run / "profile").iterdir()) == [
        "rank0.json.gz", "rank1.json.gz", "summary.json", "summary.txt",
    ]  # fmt: skip
    found = summary_of(run)
    assert found["world_size"] == 2 and found["slowest_rank"] == 1
    assert (found["causes"][0]["name"], found["causes"][0]["subject"]) == ("straggler", "rank 1")
    waiting, slow = (each["shares"]["communication"] for each in found["ranks"])
    assert waiting > 0.5 > slow, "rank 0 waits for rank 1 in collectives"
    assert sum(found["shares"].values()) == pytest.approx(1)


# --- traces of a GPU, which the machine of the tests may not have


def event(name: str, category: str, begin: float, end: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "tid": thread}


def traced(*events: dict[str, Any]) -> Trace:
    return Trace({"traceEvents": [*events]})


def test_device_and_waits_are_read_from_a_trace() -> None:
    """By hand: a step of 100 µs with a wait of 30 in the loss, and a device that is busy for 50, communicates alone for 10."""
    trace = traced(
        event("ProfilerStep#2", "user_annotation", 0, 100),
        event("loss", "user_annotation", 20, 60),
        event("sleeps.batch_end", "user_annotation", 80, 100),
        event("cudaStreamSynchronize", "cuda_runtime", 25, 55),
        event("cudaDeviceSynchronize", "cuda_runtime", 81, 86),
        event("gemm", "kernel", 10, 40, 7),
        event("gemm", "kernel", 30, 60, 8),
        event("ncclDevKernel_AllReduce", "kernel", 55, 70, 9),
        event("gemm", "kernel", 200, 300, 7),
    )
    assert trace.device() == pytest.approx({"busy": 0.5, "communication": 0.1, "idle": 0.4})
    assert trace.synchronisation() == pytest.approx({("loss", ""): 30e-6, ("", "sleeps"): 5e-6})


def test_python_is_no_cause_where_the_device_is_busy_or_code_is_compiled() -> None:
    shares = {**dict.fromkeys(PHASES, 0.0), "forward": 0.8, "backward": 0.2}
    summary = {
        "shares": shares, "python": {"forward": 0.7}, "plugins": {}, "waits": [], "ranks": [{"shares": shares}],
        "seconds_per_batch": 0.1, "device_time": {"busy": 0.5, "communication": 0.0, "idle": 0.5},
    }  # fmt: skip
    assert [cause.name for cause in causes_of(summary, {"device": "cuda"})] == ["forward"]
    assert "forward" not in [cause.name for cause in causes_of(summary, {"device": "cuda", "compiled": True})]
    summary["device_time"] = {"busy": 0.9, "communication": 0.0, "idle": 0.1}
    assert causes_of(summary, {"device": "cuda"}) == []


def test_python_is_read_from_a_trace() -> None:
    """By hand: a forward of 60 µs with operations of torch for 15, a launch of 5, and the operation of another thread."""
    trace = traced(
        event("ProfilerStep#2", "user_annotation", 0, 100),
        event("forward", "user_annotation", 0, 60),
        event("call_prepared", "user_annotation", 5, 60),
        event("aten::linear", "cpu_op", 10, 20),
        event("aten::addmm", "cpu_op", 12, 18),
        event("a::custom", "cpu_op", 55, 60),
        event("cudaLaunchKernel", "cuda_runtime", 30, 35),
        event("aten::mul", "cpu_op", 0, 60, 2),
        event("loss", "user_annotation", 60, 80),
        event("aten::mul", "cpu_op", 60, 80),
    )
    assert trace.outside_torch() == pytest.approx({"forward": 40e-6, "loss": 0.0})


def test_idle_device_is_a_cause_only_if_nothing_else_is() -> None:
    shares = {**dict.fromkeys(PHASES, 0.0), "forward": 0.4, "backward": 0.4, "data": 0.2}
    summary = {
        "shares": shares, "python": {}, "plugins": {}, "waits": [], "ranks": [{"shares": shares}], "seconds_per_batch": 0.1,
        "device_time": {"busy": 0.3, "communication": 0.0, "idle": 0.7},
    }  # fmt: skip
    facts = {"device": "cuda", "num_workers": 0}
    assert [cause.name for cause in causes_of(summary, facts)] == ["idle"]
    shares |= {"data": 0.6, "forward": 0.2, "backward": 0.2}
    assert [cause.name for cause in causes_of(summary, facts)] == ["data"]


# --- arguments


def test_windows_are_read() -> None:
    assert parse("5ba after 1ep") == (5, Time(1, Unit.EPOCH))
    assert parse("5ba") == (5, Time(10, Unit.BATCH))
    assert parse(" 2ba  after 0.5dur ") == (2, Time(0.5, Unit.DURATION))


@pytest.mark.parametrize(
    "window", [" ", "5", "5ba before 10ba", "1ep after 2ba", "0ba after 2ba", "5ba after", "often", "5ba after 10"]
)
def test_other_windows_are_refused_with_an_example(window: str) -> None:
    with pytest.raises(TimeError, match="such as '5ba after 10ba'"):
        make_trainer(profile=window)


@pytest.mark.parametrize(
    "given", [True, "2ba after 1ba", {"window": "2ba after 1ba"}, {"profiler": {"trace": False}}, Profiler]
)
def test_forms_of_the_argument(given: Any) -> None:
    trainer = make_trainer(device="cpu", profile=given)
    assert [each.name for each in trainer.state.bus.attachments if each.kind == "callbacks"] == ["profiler"]


def test_what_is_no_profiler_is_refused() -> None:
    assert not [each for each in make_trainer(profile=False).state.bus.attachments if each.kind == "callbacks"]
    with pytest.raises(PluginConfigError, match="profiler"):
        make_trainer(profile={"windows": "2ba"})
    with pytest.raises(TypeError, match="Write profile='5ba after 10ba'"):
        make_trainer(profile=5)
    with pytest.raises(ValueError, match="megabytes=0"):
        Profiler(megabytes=0)


def test_without_a_trace(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = profiled(tmp_path, {"window": "3ba after 1ba", "trace": False})
    assert found["ranks"][0]["trace"] is None and not list(tmp_path.rglob("*.gz"))


class TestProfiler(hocket.testkit.CallbackConformance):
    def make(self) -> Profiler:
        return Profiler("2ba after 1ba", trace=False)


def test_every_hook_that_does_work_has_a_phase() -> None:
    specs = (hookspecs.Actions, hookspecs.StrategyHooks, hookspecs.PrecisionHooks)
    hooks = {name for spec in specs for name in vars(spec) if not name.startswith("_")}
    assert hooks == set(phases._OF_HOOK) | phases._OF_CHECKPOINTS
    assert set(phases._OF_HOOK.values()) <= set(PHASES)
