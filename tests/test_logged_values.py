"""Values that are logged with a reduction: exact over microbatches, padding, ranks, retries and a resumed run."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import warnings
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import make_data, make_trainer, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.state.accumulators import ACCUMULATORS, Total
from hocket.state.scalars import to_floats
from hocket_testkit import no_sync, run_ranks

CPU = torch.device("cpu")
SAMPLES = 84  # of make_data: batches of 32, 32 and 20


class Net(hocket.Task):
    """A classifier that calls ``how(self, outputs, batch)`` in its loss."""

    def __init__(self, how: Any = lambda task, outputs, batch: None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 3)
        self.how = how
        self.accuracy: Any = None

    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.how(self, outputs, batch)
        return F.cross_entropy(outputs, batch[1])


def feature(batch: Any) -> Tensor:
    """A number of each sample that does not depend on the weights, in double precision."""
    return batch[0][:, 0].double()


def log_features(task: Net, outputs: Tensor, batch: Any) -> None:
    """Log the feature in every way."""
    x = feature(batch)
    task.log("mean", x.mean(), over=("interval", "epoch"))
    task.log("sum", x.sum(), reduce="sum", over="epoch")
    task.log("min", x.min(), reduce="min", over="epoch")
    task.log("max", x.max().item(), reduce="max", over="epoch")
    positive = x > 0
    task.log("positive", x[positive].mean(), over="epoch", weight=positive.sum())
    task.log({"calls": 1}, reduce="sum", over="epoch")


def expected(x: Tensor) -> dict[str, float]:
    """The same of all samples at once, in exact arithmetic."""
    numbers = [Fraction(each) for each in x.tolist()]
    positive = [each for each in numbers if each > 0]
    return {
        "mean/epoch": float(sum(numbers) / len(numbers)), "sum": float(sum(numbers)),
        "min": float(min(numbers)), "max": float(max(numbers)), "positive": float(sum(positive) / len(positive)),
    }  # fmt: skip


def all_features() -> Tensor:
    return torch.cat([feature(batch) for batch in make_data(shuffle=False)])


def near(got: dict[str, float], wanted: dict[str, float], prefix: str, rel: float = 1e-12) -> None:
    for name, value in wanted.items():
        assert got[prefix + name] == pytest.approx(value, rel=rel, abs=1e-13), name


def task_trainer(task: hocket.Task, **changes: Any) -> hocket.Trainer:
    return make_trainer(**{"model": task, "loss": None, "device": "cpu", "log_every": "1ba", **changes})


# --- on one rank


@pytest.mark.parametrize("microbatch", [None, 7, 1])
def test_epochs_and_sets_are_those_of_all_samples(microbatch: int | None) -> None:
    task = Net(log_features)
    trainer = task_trainer(task, microbatch=microbatch, eval_data={"test": make_data(50, 16)})
    result = trainer.fit()
    near(result.metrics, expected(all_features()), "train/")
    tested = torch.cat([feature(batch) for batch in make_data(50, 16)])
    wanted = expected(tested)
    wanted["mean"] = mean = wanted.pop("mean/epoch")
    near(result.metrics, wanted, "test/")
    assert result.metrics["train/calls"] == sum(math.ceil(n / (microbatch or n)) for n in (32, 32, 20))
    near(trainer.evaluate({"again": make_data(50, 16)}), {"mean": mean}, "again/")


def test_intervals_end_with_log_every() -> None:
    seen: list[float] = []

    def how(task: Net, outputs: Tensor, batch: Any) -> None:
        seen.append(feature(batch).sum().item())
        task.log("total", feature(batch).sum(), reduce="sum")

    result = task_trainer(Net(how), log_every="2ba", duration="5ba").fit()
    at, totals = result.history.series("train/total")
    assert at == [2, 3, 4, 5]  # an epoch of three batches ends an interval, too, and so does the fit
    assert totals == pytest.approx([seen[0] + seen[1], seen[2], seen[3], seen[4]], rel=1e-12)


def test_a_callback_logs_under_its_own_name_and_everything_else_finds_it(tmp_path: Any) -> None:
    class Logs(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            value = float(state.timestamp.batch_in_epoch)  # after the batch
            state.log({"mine/value": value}, reduce="mean", weight=1)
            state.log({"mine/epoch": value + 10 * state.timestamp.epoch}, reduce="max", over="epoch")
            state.log({"mine/plain": value})

        def eval_batch_end(self, state: hocket.State) -> None:
            state.log({"batches": 1}, reduce="sum")

        def eval_end(self, state: hocket.State) -> None:
            assert state.metrics["test/batches"] == 2
            state.log({"late": 7.0}, reduce="max")

        def epoch_end(self, state: hocket.State) -> None:
            assert "train/mine/epoch" in state.metrics
            state.log({"ended": 1.0}, reduce="sum", over="epoch")

    checkpoints = hocket.Checkpoints(tmp_path / "run", best=("train/mine/epoch", "max", 1))
    stopping = {"early-stopping": {"monitor": "train/mine/epoch", "mode": "min", "patience": 2}}
    trainer = make_trainer(
        callbacks=[Logs(), stopping], eval_data={"test": make_data(20, 16)}, checkpoints=checkpoints, device="cpu",
        duration="9ep", log_every="3ba", folder=tmp_path, schedule="plateau(on='mine/value', mode='min', patience=1)",
    )  # fmt: skip
    result = trainer.fit()
    history = result.history
    assert history["mine/value"][:1] == [2.0] and history["mine/plain"][:1] == [3.0]
    assert history.series("train/mine/epoch", "epoch") == ([1, 2, 3], [3.0, 13.0, 23.0])
    assert result.metrics["train/ended"] == 1.0 and result.metrics["test/late"] == 7.0
    assert result.timestamp.epoch == 3 and "train/mine/epoch" in result.stop_reason
    assert result.best is not None and result.best.value == 23.0
    assert trainer.state.optimizers[0].param_groups[0]["lr"] < 0.1  # the plateau saw a constant value


def test_methods_of_a_task_of_several_steps() -> None:
    class Two(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(log_features), nn.Linear(8, 3)

        def configure_optimizers(self) -> Any:
            return {"first": sgd(self.first.parameters()), "second": sgd(self.second.parameters())}

        def train_batch(self, batch: Any, step: Any) -> None:
            self.log("batch_mean", feature(batch).mean(), over="epoch")
            step(self.loss_of_first, batch, "first")
            step(self.loss_of_second, batch, "second")

        def loss_of_first(self, batch: Any) -> Any:
            return self.first.loss_of(batch)

        def loss_of_second(self, batch: Any) -> Any:
            self.log("again", feature(batch).mean(), over="epoch")
            return F.cross_entropy(self.second(batch[0]), batch[1])

        def batch_end(self, state: hocket.State) -> None:
            self.log("ends", 1, reduce="sum", over="epoch")

        def eval_forward(self, batch: Any) -> Any:
            self.log("seen", len(batch[0]), reduce="sum")
            return self.second(batch[0])

    result = task_trainer(Two(), optimizer=None, microbatch=9, eval_data={"test": make_data(50, 16)}).fit()
    wanted = expected(all_features())
    near(result.metrics, {**wanted, "batch_mean": wanted["mean/epoch"], "again": wanted["mean/epoch"]}, "train/")
    assert result.metrics["train/ends"] == 3 and result.metrics["test/seen"] == 50


def test_what_computes_a_batch_again_counts_once() -> None:
    pytest.importorskip("hocket_general")
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "sam": {"algorithms": [{"sam": {"interval": 1}}]},
        "lbfgs": {"optimizer": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3)},
    }
    for name in changes:
        task = Net(log_features)
        near(task_trainer(task, **changes[name]).fit().metrics, expected(all_features()), "train/")


def test_activation_checkpointing_counts_once() -> None:
    class Recomputes(Net):
        calls = 0

        def block(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            self.log("blocks", 1, reduce="sum", over="epoch")
            return self.layer(inputs).tanh()

        def forward(self, batch: Any) -> Tensor:
            inputs = batch[0].clone().requires_grad_()
            return checkpoint(self.block, inputs, use_reentrant=False)

    task = Recomputes()
    assert task_trainer(task, duration="1ep").fit().metrics["train/blocks"] == 3
    assert task.calls == 6


def test_memory_that_runs_out_counts_once(tmp_path: Any) -> None:
    class Limited(Net):
        limit = 13

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            returned = super().loss(outputs, batch)
            if len(outputs) > self.limit or (self.fails and len(outputs) < 11):
                self.fails = False
                raise torch.OutOfMemoryError("too many")
            return returned

        fails = False

    task = Limited(log_features)
    trainer = task_trainer(task, microbatch="auto", folder=tmp_path)
    trainer.fit("1ep")
    assert trainer.state.microbatch == 11
    near(trainer.state.metrics, expected(all_features()), "train/")
    task.fails = True  # in the last microbatch of the first batch, when two were counted
    with pytest.warns(UserWarning, match="Out of memory with 11 samples"):
        trainer.fit("1ep")
    near(trainer.state.metrics, expected(all_features()), "train/")


def test_nothing_waits_for_the_device() -> None:
    trainer = task_trainer(Net(log_features), log_every="100ba")
    trainer.fit("1ba")
    aggregates = trainer.state.aggregates
    values = [torch.rand(()), torch.rand((), dtype=torch.float64, requires_grad=True), torch.rand(1).bfloat16()]
    with no_sync(simulate=True):
        for value in values:
            for reduce in ("mean", "sum", "min", "max", "last"):
                trainer.state.log({f"{reduce}": value}, reduce=reduce, over="epoch")  # type: ignore[arg-type]
            trainer.state.log({"weighted": value}, reduce="mean", weight=values[0])
    assert aggregates.reduce_epoch(clear=True)["train/last"] == values[2].double().item()


def test_prediction_and_sanity_checks_leave_no_values() -> None:
    how = lambda task, outputs, batch: task.log("calls", 1, reduce="sum", over="epoch")  # noqa: E731
    trainer = task_trainer(Net(how), eval_data={"test": make_data(20, 16)}, sanity_eval=1)
    result = trainer.fit("1ep")
    assert result.metrics["train/calls"] == 3 and result.metrics["test/calls"] == 2
    trainer.predict(make_data(shuffle=False))
    assert trainer.fit("1ep").metrics["train/calls"] == 3


def test_metric_objects() -> None:
    MulticlassAccuracy = pytest.importorskip("torchmetrics.classification").MulticlassAccuracy

    class Own:
        """A metric without state_dict."""

        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.right = self.samples = 0

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.right += int((outputs.argmax(1) == targets).sum())
            self.samples += len(targets)

        def compute(self) -> float:
            return self.right / self.samples

    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.measures = nn.ModuleList(MulticlassAccuracy(3, average="micro") for _ in range(2))
            self.own = Own()

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            metric = self.measures[self.training]
            metric.update(outputs, batch[1])
            self.log("accuracy", metric, over="epoch")
            if self.training:
                self.own.update(outputs, batch[1])
                self.log("own", self.own)
            return F.cross_entropy(outputs, batch[1])

    trainer = task_trainer(
        Measured(), eval_data={"test": make_data(50, 16)}, microbatch=8, duration="1ep",
        optimizer="sgd(lr=0)",
    )  # fmt: skip
    result = trainer.fit()
    right = [(trainer.state.task(batch).argmax(1) == batch[1]).double() for batch in make_data()]
    assert result.metrics["train/accuracy"] == pytest.approx(torch.cat(right).mean().item(), rel=1e-6)
    assert result.history["train/own"] == pytest.approx([part.mean().item() for part in right])
    tested = [(trainer.state.task(batch).argmax(1) == batch[1]).double() for batch in make_data(50, 16)]
    assert result.metrics["test/accuracy"] == pytest.approx(torch.cat(tested).mean().item(), rel=1e-6)
    assert trainer.evaluate()["test/accuracy"] == result.metrics["test/accuracy"]

    class Shared(Net):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            self.own.update(outputs, batch[1])
            self.log("own", self.own)
            return F.cross_entropy(outputs, batch[1])

    task = Shared()
    task.own = Own()
    with pytest.raises(ValueError, match=r"logged in training and in evaluation.*self\.training"):
        task_trainer(task, eval_data={"test": make_data(50, 16)}).fit()


# --- a Task and its run


def test_a_task_without_a_run_says_so_and_works_in_several() -> None:
    task = Net(log_features)
    batch = next(iter(make_data()))
    with pytest.raises(RuntimeError, match=r"Net\.log\(…\) was called outside of a run.*hocket\.Trainer"):
        task.loss_of(batch)
    for _ in range(2):
        near(task_trainer(task).fit().metrics, expected(all_features()), "train/")
        with pytest.raises(RuntimeError, match="outside of a run"):
            task.loss_of(batch)


def test_copies_within_a_run_are_not_in_it() -> None:
    copies: list[Any] = []

    class Copies(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            copies.extend([copy.deepcopy(state.task), pickle.loads(pickle.dumps(state.task))])
            assert set(state.task.state_dict()) == {"layer.weight", "layer.bias"}

    trainer = task_trainer(Net(log_features), callbacks=[Copies()], duration="1ba")
    trainer.fit()
    for each in copies:
        with pytest.raises(RuntimeError, match="outside of a run"):
            each.loss_of(next(iter(make_data())))
    near(task_trainer(copies[0]).fit("1ep").metrics, expected(all_features()), "train/")


def test_a_task_may_define_a_log_of_its_own() -> None:
    class Mine(Net):
        def log(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
            return outputs * 2

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(self.log(outputs), batch[1])

    assert task_trainer(Mine(), duration="1ba").fit().timestamp.batch == 1


@pytest.mark.parametrize(
    "value", [torch.exp, nn.Linear(3, 3), nn.Parameter(torch.ones(3))], ids=lambda v: type(v).__name__
)
def test_nothing_else_of_a_task_is_called_log(value: Any) -> None:
    with pytest.raises(
        AttributeError, match=r"self.log of Net cannot be assigned.*another name, such as self.log_layer"
    ):
        Net().log = value
    with pytest.raises(KeyError, match="'log' already exists"):
        Net().register_buffer("log", torch.ones(3))


def test_a_compiled_task_logs() -> None:
    task = Net(log_features)
    task.loss = torch.compile(task.loss, backend="eager")  # type: ignore[method-assign]
    near(task_trainer(task).fit("1ep").metrics, expected(all_features()), "train/")


def test_plain_and_reduced_values_of_one_name() -> None:
    class Both(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            state.log({"x": 1.0})
            state.log({"x": 3.0}, reduce="mean")

    with pytest.warns(UserWarning, match=r"'x' was logged both with a reduction and without.*'my_x'"):
        result = make_trainer(callbacks=[Both()], device="cpu", duration="1ba").fit()
    assert result.history["x"] == [3.0]


class Mean:
    """A metric that ranks cannot combine."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)

    def compute(self) -> float:
        return sum(self.values) / len(self.values)


def test_metrics_that_fail_are_named() -> None:
    metric = Mean()
    fails = lambda task, outputs, batch: task.log("mine", metric)  # noqa: E731
    with pytest.raises(ZeroDivisionError) as raised:
        task_trainer(Net(fails)).fit("1ep")
    assert "The metric Mean logged as 'train/mine' was computed." in raised.value.__notes__
    for value in (3.0, torch.ones(())):
        number = lambda task, outputs, batch, value=value: task.log("mine", value, reduce="metric")  # noqa: E731
        with pytest.raises(TypeError, match=r"'mine' was logged as .* with reduce='metric'"):
            task_trainer(Net(number)).fit("1ep")


def test_a_metric_that_ranks_cannot_combine() -> None:
    def each(rank: int) -> str:
        metric = Mean()
        how = lambda task, outputs, batch: (metric.update(1.0), task.log("mine", metric))  # noqa: E731
        with pytest.raises(TypeError) as raised:
            task_trainer(Net(how), strategy="ddp").fit("1ep")
        return str(raised.value)

    assert all("logged as 'mine' cannot be combined over 2 ranks" in said for said in ranks(2, each))


def test_a_metric_of_the_same_name_is_refused() -> None:
    how = lambda task, outputs, batch: task.log("accuracy", 1.0, over="epoch")  # noqa: E731
    with pytest.raises(ValueError, match=r"'test/accuracy' is a metric of 'test'.*'test/my_accuracy'"):
        task_trainer(Net(how), metrics="accuracy", eval_data={"test": make_data()}).evaluate()
    with pytest.raises(ValueError, match=r"'train/accuracy' is a metric of 'train'"):
        task_trainer(Net(how), train_metrics="accuracy").fit()


@pytest.mark.parametrize("reduce", ["last", "max"])
@pytest.mark.parametrize("name", ["train/loss", "train/ce", "train/accuracy", "test/loss", "test/accuracy"])
@pytest.mark.parametrize("event", ["batch_end", "eval_end"])
def test_no_plugin_replaces_what_the_loop_measures(event: str, name: str, reduce: Any) -> None:
    class Logs(hocket.Callback):
        pass

    class Named(Net):
        def loss(self, outputs: Tensor, batch: Any) -> Any:
            loss = super().loss(outputs, batch)
            return {"ce": loss, "half": loss / 2}

    setattr(Logs, event, lambda self, state: state.log({"mine": 1.0, name: 0.001}, reduce=reduce))
    trainer = task_trainer(
        Named(), callbacks=[Logs()], eval_data={"test": make_data()}, metrics="accuracy", train_metrics="accuracy"
    )
    if event == "eval_end" and reduce == "max" and name.startswith("train/"):
        assert f"test/{name}" in trainer.fit("1ep").metrics
        return
    with pytest.raises(ValueError, match=f"'{name}' is (the|a) (loss|metric) of .*'{name.replace('/', '/my_')}'"):
        trainer.fit("1ep")


def test_mistakes_in_state_log() -> None:
    log: Any = task_trainer(Net()).state.log
    with pytest.raises(TypeError, match=r"under the name 3; names are texts.*state\.log\({'accuracy': value}\)"):
        log({3: 1.0})
    for arguments in ({}, {"reduce": "mean"}):
        with pytest.raises(TypeError, match=r"Write state\.log\({'a': 1\.0}\)"):
            log("a", 1.0, **arguments)
        with pytest.raises(TypeError, match=r"Write state\.log\({'a': value}\)"):
            log("a", **arguments)
    for weight in (-1, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"weight= was given (-1|nan|inf); it is 0 or more"):
            log({"a": 1.0}, reduce="mean", weight=weight)


# --- the arithmetic, against exact fractions

_numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32).map(float)
_values = st.tuples(_numbers, st.sampled_from(["number", "float64", "float32"]), st.integers(0, 40))


def _as(kind: str, number: float) -> Any:
    return number if kind == "number" else torch.tensor(number, dtype=getattr(torch, kind))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(_values, max_size=8), min_size=1, max_size=4),
    st.sampled_from(["mean", "sum", "min", "max", "last"]),
)
def test_reductions_over_ranks_are_those_of_all_values(ranks: list[list[Any]], reduce: str) -> None:
    """Numbers that float32 holds, so that every kind of value is exact; weight 0 is padding."""
    kind, held = ACCUMULATORS[reduce], []
    for values in ranks:
        accumulator = kind(CPU)
        for number, form, weight in values:
            if weight:
                accumulator.add(_as(form, number), float(weight))
        held.append(accumulator.held([tensor.item() for tensor in accumulator.tensors()]))
    got = kind.reduced(held)
    real = [[(Fraction(number), weight) for number, _, weight in values if weight] for values in ranks]
    flat = [pair for values in real for pair in values]
    if not flat:
        assert got is None
        return
    assert got is not None
    size = float(sum(abs(x) * w for x, w in flat)) if reduce in ("mean", "sum") else 0.0
    wanted = {
        "mean": lambda: sum(x * w for x, w in flat) / sum(w for _, w in flat),
        "sum": lambda: sum(x for x, _ in flat),
        "min": lambda: min(x for x, _ in flat),
        "max": lambda: max(x for x, _ in flat),
        "last": lambda: next(values[-1][0] for values in real if values),
    }[reduce]()
    assert abs(got - float(wanted)) <= 1e-13 * size


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(_numbers, min_size=1, max_size=200))
def test_sums_in_single_precision_are_compensated(numbers: list[float]) -> None:
    """As on devices without float64."""
    total = Total()
    for number in numbers:
        total.add(torch.tensor(number, dtype=torch.float32))
    got = total.read([tensor.item() for tensor in total.tensors()])
    assert abs(got - math.fsum(numbers)) <= 4e-7 * math.fsum(map(abs, numbers))


def test_long_sums_in_single_precision() -> None:
    total, plain = Total(), torch.zeros(())
    value = torch.tensor(0.1)
    for _ in range(20_000):
        total.add(value)
        plain = plain + value
    exact = 20_000 * value.item()
    assert total.read([tensor.item() for tensor in total.tensors()]) == pytest.approx(exact, rel=1e-7)
    assert plain.item() != pytest.approx(exact, rel=1e-6)  # what the compensation is for


def test_values_that_are_not_finite() -> None:
    for reduce, wanted in (("mean", math.nan), ("sum", math.nan), ("min", math.nan), ("max", math.nan), ("last", 1.0)):
        for make in (float, torch.tensor):
            accumulator = ACCUMULATORS[reduce](CPU)
            for number in (math.nan, math.inf, 1.0):
                accumulator.add(make(number), 1.0)
            got = ACCUMULATORS[reduce].reduced([accumulator.held([t.item() for t in accumulator.tensors()])])
            assert got == wanted or (math.isnan(wanted) and got is not None and math.isnan(got))
    mean = ACCUMULATORS["mean"](CPU)
    mean.add(torch.tensor(math.nan), torch.tensor(0))  # a mean over nothing
    mean.add(torch.tensor(2.0), torch.tensor(3))
    assert ACCUMULATORS["mean"].reduced([mean.held([t.item() for t in mean.tensors()])]) == 2.0
    assert to_floats({"x": 1}) == {"x": 1.0}


# --- resuming


class Take(hocket.Callback):
    def __init__(self, batch: int) -> None:
        self.batch, self.trainer, self.tree = batch, None, None

    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            self.tree = copy.deepcopy(self.trainer.state_dict())


def log_float32(task: Net, outputs: Tensor, batch: Any) -> None:
    """Values whose sums are rounded, so that another order or a restart would show."""
    log_features(task, outputs, batch)
    task.log("probability", outputs.softmax(1).amax(1).mean(), over="epoch")
    task.log("interval", outputs.softmax(1).amax(1).mean())
    if task.accuracy is not None:
        task.accuracy.update(outputs, batch[1])
        task.log("accuracy", task.accuracy, over="epoch")


def measuring() -> Net:
    task = Net(log_float32)
    classification = pytest.importorskip("torchmetrics.classification")
    task.accuracy = classification.MulticlassAccuracy(3)
    return task


def run(task: Net, take: int | None = None, tree: Any = None, beside: Any = (), **changes: Any) -> tuple[Any, Any]:
    callback = Take(take or -1)
    trainer = task_trainer(task, callbacks=[callback, *beside], seed=3, log_every="4ba", **changes)
    callback.trainer = trainer
    if tree is not None:
        trainer.load_state_dict(tree)
    result = trainer.fit()
    return result, callback.tree


def test_a_resumed_epoch_continues_bitwise() -> None:
    whole, tree = run(measuring(), take=5, microbatch=7)
    resumed, _ = run(measuring(), tree=tree, microbatch=7)
    names = [name for name in whole.metrics if name.startswith("train/")]
    assert "train/accuracy" in names and "train/interval" in names and "train/positive" in names
    assert {name: resumed.metrics[name] for name in names} == {name: whole.metrics[name] for name in names}
    del tree["ranks"][0]["aggregates"]  # as in a checkpoint of an earlier version
    older, _ = run(measuring(), tree=tree, microbatch=7)
    assert older.metrics["train/calls"] == math.ceil(20 / 7)


class Held:
    """A user's metric whose sum keeps the autograd graph of all outputs until hocket detaches it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.parts = torch.zeros(()), [torch.zeros(())]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total = self.total + outputs.sum()
        self.parts[0] = self.parts[0] + outputs[:, 0].sum()

    def compute(self) -> Tensor:
        return self.total + self.parts[0]

    def merge_state(self, others: list[Held]) -> None:
        self.total = self.total + sum(each.total for each in others)
        self.parts[0] = self.parts[0] + sum(each.parts[0] for each in others)


class Counted(nn.Module):
    """A metric that accumulates in buffers, which the state dict of its Task contains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("samples", torch.zeros((), dtype=torch.float64))

    def reset(self) -> None:
        self.total.zero_()
        self.samples.zero_()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += outputs.detach().double().sum()
        self.samples += len(targets)

    def compute(self) -> Tensor:
        return self.total / self.samples

    def merge_state(self, others: list[Counted]) -> None:
        for each in others:
            self.total += each.total
            self.samples += each.samples


class Slotted:
    """A metric without ``__dict__``."""

    __slots__ = ("samples", "total")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = self.samples = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += outputs.detach().double().sum().item()
        self.samples += len(targets)

    def compute(self) -> float:
        return self.total / self.samples

    def merge_state(self, others: list[Slotted]) -> None:
        self.total += sum(each.total for each in others)
        self.samples += sum(each.samples for each in others)


class Hooked(hocket.Callback):
    """A hook on every module, which cannot be copied."""

    def fit_start(self, state: hocket.State) -> None:
        lock = threading.Lock()
        for module in state.task.modules():
            module.register_forward_hook(lambda *_, lock=lock: None)


def logging(metric: Any) -> Net:
    task = Net(log_float32)
    task.accuracy = metric()
    return task


@pytest.mark.parametrize("make", [measuring, *(partial(logging, each) for each in (Held, Counted, Slotted))])
def test_a_resumed_epoch_continues_beside_hooks_and_with_metrics_that_hold_graphs(make: Any) -> None:
    def beside() -> list[Any]:
        return [Hooked(), "activation-monitor(every=1)"]

    task = make()
    whole, tree = run(task, take=5, beside=beside(), duration="8ba")
    resumed, _ = run(make(), tree=tree, beside=beside(), duration="8ba")
    for name in ("train/interval", "train/positive", "train/accuracy"):
        assert whole.history[name][-1] == resumed.history[name][-1]
    assert {name for name in whole.history if name.startswith("activation/mean")} == {"activation/mean/layer"}
    if isinstance(task.accuracy, Held):
        assert not any(each.requires_grad for each in (task.accuracy.total, *task.accuracy.parts))


# --- several ranks


@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
def test_a_metric_whose_sums_are_buffers_is_refused_on_several_ranks() -> None:
    def train(rank: int) -> None:
        trainer = task_trainer(logging(Counted), train_data=batches([4, 4]), strategy="ddp", duration="1ep")
        with pytest.raises(ValueError, match=r"Counted logged as 'accuracy' is a module .* \(total, samples\)"):
            trainer.fit()

    ranks(2, train)


@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
@pytest.mark.parametrize("metric", [Held, Slotted])
def test_metrics_of_ones_own_are_combined_over_ranks(metric: Any) -> None:
    def train(rank: int) -> Any:
        task, whole = logging(metric), metric()
        data = batches([4, 4, 3, 5])
        for batch in data:
            whole.update(task(batch), batch[1])
        trainer = task_trainer(task, train_data=data, strategy="ddp", duration="1ep", optimizer="sgd(lr=0)")
        return trainer.fit().metrics["train/accuracy"], float(whole.compute())

    for found, wanted in ranks(2, train):
        assert found == pytest.approx(wanted, rel=1e-5)


def batches(sizes: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def ranks(world: int, function: Any) -> list[Any]:
    pytest.importorskip("hocket_strategies")
    return run_ranks(function, world)


SIZES = [5, 3, 4, 6, 2]  # over two ranks one of them has padding in the last batch, over three ranks too


@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_uneven_data_and_padding(world: int) -> None:
    def train(rank: int) -> Any:
        trainer = task_trainer(
            Net(log_features), train_data=batches(SIZES), eval_data={"test": batches(SIZES[1:])}, strategy="ddp",
            duration="2ep", microbatch=2,
        )  # fmt: skip
        result = trainer.fit()
        return dict(result.metrics), result.history["train/mean"]

    results = ranks(world, train)
    assert all(each == results[0] for each in results)
    metrics, means = results[0]
    near(metrics, expected(torch.cat(list(map(feature, batches(SIZES))))), "train/")
    wanted = expected(torch.cat(list(map(feature, batches(SIZES[1:])))))
    wanted["mean"] = wanted.pop("mean/epoch")
    near(metrics, wanted, "test/")
    steps = [torch.cat(list(map(feature, batches(SIZES)[i : i + world]))).mean().item() for i in range(0, 5, world)]
    assert means[: len(steps) - 1] == pytest.approx(steps[:-1], rel=1e-12)


def test_a_name_on_one_rank_is_named_once_and_nothing_hangs() -> None:
    accuracy = pytest.importorskip("torchmetrics.classification").MulticlassAccuracy

    def train(rank: int) -> Any:
        def how(task: Net, outputs: Tensor, batch: Any) -> None:
            if rank == 1:
                task.log("only", feature(batch).sum(), reduce="sum")
                task.log("later", 2.0, over="epoch")
                task.accuracy.update(outputs, batch[1])
                task.log("accuracy", task.accuracy, over="epoch")
            task.log("ways", float(rank + 1), reduce="sum" if rank else "mean")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            task = Net(how)
            task.accuracy = accuracy(3)
            result = task_trainer(task, train_data=batches([4, 4, 4, 4]), strategy="ddp").fit()
        return dict(result.metrics), [str(each.message) for each in caught if "logged with" in str(each.message)]

    (first, told), (second, silent) = ranks(2, train)
    assert first == second and not silent
    assert first["train/only"] == pytest.approx(feature(batches([4] * 4)[3]).sum().item(), rel=1e-12)
    assert first["train/ways"] == 1.0 and first["train/later"] == 2.0 and 0 <= first["train/accuracy"] <= 1
    assert len(told) == 4, told
    only = next(each for each in told if "train/only" in each)
    assert "with reduce='sum' on rank 1, and not on rank 0, in the same interval" in only
    ways = next(each for each in told if "train/ways" in each)
    assert "with reduce='mean' on rank 0, and with reduce='sum' on rank 1" in ways


def test_a_plain_value_that_rank_0_does_not_log_is_named() -> None:
    class Logs(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            state.log({"everywhere": 1.0})
            if state.strategy.rank:
                state.log({"elsewhere": float(state.strategy.rank)})

    def train(rank: int) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = make_trainer(callbacks=[Logs()], strategy="ddp", log_every="1ba", duration="1ep").fit().history
        return sorted(history), [str(each.message) for each in caught if "was logged on" in str(each.message)]

    (names, told), (_, silent) = ranks(2, train)
    assert "everywhere" in names and "elsewhere" not in names and not silent
    assert len(told) == 1 and told[0].startswith("'elsewhere' was logged on rank 1, and not on rank 0"), told


@pytest.mark.long
def test_another_number_of_ranks_continues_the_epoch() -> None:
    data = batches([4] * 6)

    def part(tree: Any, take: int | None, world: int) -> Any:
        def train(rank: int) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result, taken = run(measuring(), take, tree, train_data=samples(data), global_batch=6,
                                    strategy="ddp" if world > 1 else "single", duration="1ep")  # fmt: skip
            return dict(result.metrics), taken

        return run_ranks(train, world) if world > 1 else [train(0)]

    pytest.importorskip("hocket_strategies")
    whole, _ = part(None, None, 1)[0]
    for before, after in ((3, 2), (2, 3), (2, 1), (1, 2)):
        tree = part(None, 2, before)[0][1]
        resumed, _ = part(tree, None, after)[0]
        wanted = {name: value for name, value in whole.items() if name.startswith("train/") and "calls" not in name}
        near(resumed, wanted | {}, "", rel=1e-6)
        near(resumed, expected(torch.cat(list(map(feature, data)))), "train/")


def samples(data: list[Any]) -> Any:
    inputs, targets = (torch.cat(each) for each in zip(*data, strict=True))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 6)
