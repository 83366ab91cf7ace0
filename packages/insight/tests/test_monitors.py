"""The monitors log what an independent computation finds: by plain torch, by psutil, from files of the kernel's layout."""

from __future__ import annotations

import importlib.machinery
import json
import math
import os
import socket
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import make_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.basics.dtensors import norms
from hocket.basics.plugin_errors import PlanError
from hocket.hookspecs.ticking import Ticking
from hocket.loggers.memory import MemoryLogger
from hocket_insight.callbacks.activation_monitor import ActivationMonitor
from hocket_insight.callbacks.energy_monitor import EnergyMonitor, PowerIntegral, zones
from hocket_insight.callbacks.gradient_monitor import GradientMonitor
from hocket_insight.callbacks.heartbeat import Heartbeat
from hocket_insight.callbacks.histograms import EDGES, histogram
from hocket_insight.callbacks.memory_report import MemoryReport, held
from hocket_insight.callbacks.optimizer_monitor import OptimizerMonitor
from hocket_insight.callbacks.sample_visualizer import SampleVisualizer
from hocket_insight.callbacks.system_monitor import SystemMonitor
from hocket_insight.callbacks.threshold_stopper import ThresholdStopper
from hocket_insight.callbacks.time_monitor import TimeMonitor


def batches(sizes: tuple[int, ...] = (4, 4, 2)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 5, generator=generator), torch.randn(size, 2, generator=generator)) for size in sizes]


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


def fit(*callbacks: Any, **changes: Any) -> MemoryLogger:
    logger = MemoryLogger()
    arguments = {
        "model": network(), "loss": F.mse_loss, "train_data": batches(), "duration": "2ep", "log_every": "1ba",
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01), "device": "cpu",
    }  # fmt: skip
    with make_trainer(**{**arguments, **changes}, callbacks=list(callbacks), loggers=[logger]) as trainer:
        trainer.fit()
    return logger


def values(logger: MemoryLogger, name: str) -> list[float]:
    return [value for _, value in logger.metrics[name]]


class Keeps(hocket.Logger):
    """The counts of histograms by name."""

    def __init__(self) -> None:
        self.histograms: dict[str, Any] = {}

    def log_histogram(self, state: hocket.State, name: str, counts: Any) -> None:
        self.histograms[name] = counts


class TwoNets(hocket.Task):
    """Two models with an optimizer and a step each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()

    def configure_optimizers(self) -> Any:
        return {
            "a": torch.optim.SGD(self.first.parameters(), lr=0.1),
            "b": torch.optim.Adam(self.second.parameters(), lr=0.1),
        }

    def train_batch(self, batch: Any, step: Any) -> None:
        step(lambda batch: F.mse_loss(self.first(batch[0]), batch[1]), batch, "a")
        step(lambda batch: F.mse_loss(self.second(batch[0]), batch[1]), batch, "b")


# --- gradients


def test_totals_are_over_the_steps_of_a_batch() -> None:
    logger = fit(OptimizerMonitor(every=1), model=TwoNets(), loss=None, optimizer=None, duration="1ba")
    task, (inputs, targets) = TwoNets(), batches()[0]
    optimizers = task.configure_optimizers()
    before = [p.detach().clone() for p in task.parameters()]
    for model, optimizer in ((task.first, optimizers["a"]), (task.second, optimizers["b"])):
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    parameters = [p.detach() for p in task.parameters()]
    expected = {
        "gradient_norm": [p.grad for p in task.parameters()],
        "weight_norm": parameters,
        "update_norm": [new - old for new, old in zip(parameters, before, strict=True)],
    }
    for name, tensors in expected.items():
        total = torch.cat([tensor.flatten() for tensor in tensors]).norm().item()
        assert values(logger, f"optimizer/{name}") == pytest.approx([total], rel=1e-6), name


def test_norms_of_layers_are_those_of_a_plain_loop() -> None:
    logger = fit(GradientMonitor(every=1), clip_gradients=0.01)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected: dict[str, list[float]] = {}

    def norm(tensors: list[Tensor]) -> float:
        return math.sqrt(sum(float((tensor.detach().double() ** 2).sum()) for tensor in tensors))

    for inputs, targets in batches() * 2:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        layers = {"0": list(model[0].parameters()), "2": list(model[2].parameters())}
        before = {name: [p.detach().clone() for p in layer] for name, layer in layers.items()}
        for name, layer in layers.items():
            expected.setdefault(f"norm/{name}", []).append(norm([p.grad for p in layer if p.grad is not None]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        for name, layer in layers.items():
            changes = [new.detach() - old for new, old in zip(layer, before[name], strict=True)]
            expected.setdefault(f"weight_norm/{name}", []).append(norm(layer))
            expected.setdefault(f"update_ratio/{name}", []).append(norm(changes) / norm(layer))
    assert {name for name in logger.metrics if name.startswith("gradient/")} == {
        f"gradient/{name}" for name in expected
    }
    for name, series in expected.items():
        assert values(logger, f"gradient/{name}") == pytest.approx(series, rel=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize("layers", ["*", "2"])
def test_monitors_of_one_trainer_share_what_they_measure(
    sizes: tuple[int, ...], layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each logs what it logs alone, also where the others measure in other batches, or other layers."""

    def made() -> list[Any]:
        first, second, third = sizes
        return [GradientMonitor(first, layers), OptimizerMonitor(second), GradientMonitor(third, by="parameter")]

    copies = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self, **how: copies.append(self) or clone(self, **how))
    together = fit(*made())
    count = len(copies)
    alone = [fit(monitor) for monitor in made()]
    for logger in alone:
        names = [name for name in logger.metrics if name.split("/")[0] in ("gradient", "optimizer")]
        assert names
        for name in names:
            assert together.metrics[name] == logger.metrics[name], name
    if sizes == (1, 1, 1) and layers == "*":
        assert (count, len(copies)) == (24, 96)  # 4 tensors in each of 6 batches, once and then for each alone


def test_parameters_and_patterns() -> None:
    logger = fit(GradientMonitor(every=2, layers=["2.*"], by="parameter"))
    assert [batch for batch, _ in logger.metrics["gradient/norm/2.bias"]] == [2, 4, 6]
    assert not any("/0." in name for name in logger.metrics)
    with pytest.raises(ValueError, match=r"layers='encodr\.\*', which matches none of the 2 layers; there are '0'"):
        fit(GradientMonitor(layers="encodr.*"))
    with pytest.raises(ValueError, match="neither 'module' nor 'parameter'"):
        GradientMonitor(by="layer")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layers=3 is no pattern"):
        GradientMonitor(layers=3)  # type: ignore[arg-type]


def test_norms_of_any_dtype() -> None:
    half, double, empty = (
        torch.full((300,), 40.0, dtype=torch.float16),
        torch.ones(4, dtype=torch.float64),
        torch.ones(0),
    )
    sparse = torch.sparse_coo_tensor([[0, 0, 1]], [3.0, 0.0, 4.0], (3,), check_invariants=True)
    found = norms([half, double, empty, sparse, torch.tensor([3.0, 4.0]), torch.tensor(4.0)])
    assert found.dtype is torch.float32
    assert found.tolist() == pytest.approx([math.sqrt(300 * 1600), 2, 0, 5, 5, 4], rel=1e-6)


def test_histograms_count_like_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(5000, generator=generator) * torch.logspace(-9, 5, 5000)
    tensor[:4] = torch.tensor([0.0, 1.0, 0.5, 2.0**-24])
    expected = numpy.histogram(tensor.double().clamp(-(2.0**16) + 1, 2.0**16 - 1).numpy(), numpy.array(EDGES))[0]
    assert histogram(tensor).tolist() == expected.tolist()
    extremes = histogram(torch.tensor([math.inf, -math.inf, math.nan, 1e30, -0.0]))
    assert (extremes[0], extremes[-1], extremes[len(extremes) // 2]) == (1, 2, 1)
    assert histogram(tensor.bfloat16()).sum() == 5000


def test_histograms_of_sparse_gradients() -> None:
    """The stored elements are counted: those of the rows that the batch has."""
    model, logger = nn.EmbeddingBag(10, 3, sparse=True), Keeps()
    make_trainer(
        model=model, loss=lambda outputs, targets: (outputs * targets).sum(), optimizer="sgd(lr=0.1)", device="cpu",
        train_data=[(torch.tensor([[1, 2], [2, 3]]), torch.ones(2, 3))], log_every="1ba",
        callbacks=[GradientMonitor(every=1, histograms=True)], loggers=[logger],
    ).fit("1ep")  # fmt: skip
    assert sum(logger.histograms["gradient/histogram/model"]) == 3 * 3


def test_histograms_reach_the_loggers_in_the_logging_interval_only() -> None:
    logger = fit(
        GradientMonitor(every=1, histograms=True), ActivationMonitor(every=1, histograms=True), log_every="3ba"
    )
    assert len(logger.histograms["gradient/histogram/0"]) == 2
    counts, edges = logger.histograms["activation/histogram/1"][0]
    assert sum(counts) == 2 * 4, "the last batch of the interval has 2 samples"
    assert len(edges) == len(counts) + 1
    assert edges == sorted(edges)


# --- activations


class Twice(nn.Module):
    """Calls one layer twice, once in a checkpointed part, and returns large means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.shared = nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x))
        hidden = checkpoint(self.shared, hidden, use_reentrant=False)
        return self.last(self.shared(hidden) + 1000)


def outputs_of(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """All outputs of each leaf module, in one forward pass without microbatches."""
    found: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda m, i, output, name=name: found.setdefault(name, []).append(output.detach()))
        for name, module in model.named_modules() if not list(module.children())
    ]  # fmt: skip
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat([each.reshape(-1) for each in outputs]).double() for name, outputs in found.items()}


@pytest.mark.parametrize("microbatch", [None, 1, 3], ids=["full batch", "of 1", "of 3"])
@pytest.mark.parametrize("algorithms", [[], ["sam"]], ids=["", "two gradients"])
def test_activations_are_those_of_one_forward_pass(microbatch: int | None, algorithms: list[str]) -> None:
    if algorithms:
        pytest.importorskip("hocket_general")
    model, seen = Twice(), []

    class Recompute(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            seen.append(outputs_of(state.model, state.batch[0]))

    logger = fit(
        ActivationMonitor(every=1), Recompute(), model=model, microbatch=microbatch, eval_data=batches(), eval_every="1ba",
        algorithms=algorithms,
    )  # fmt: skip
    assert len(seen) == 6
    for name in ("first", "act", "shared", "last"):
        outputs = [each[name] for each in seen]
        assert values(logger, f"activation/mean/{name}") == pytest.approx([float(o.mean()) for o in outputs], rel=1e-4)
        assert values(logger, f"activation/std/{name}") == pytest.approx(
            [float(o.std(correction=0)) for o in outputs], rel=2e-3
        )
        assert values(logger, f"activation/max/{name}") == pytest.approx(
            [float(o.abs().max()) for o in outputs], rel=1e-5
        )
        zeros = [float((o == 0).double().mean()) for o in outputs]
        assert values(logger, f"activation/zeros/{name}") == pytest.approx(zeros)
    assert not any(module._forward_hooks for module in model.modules())


def test_types_and_measured_batches_of_activations() -> None:
    hooks: list[int] = []

    class Hooks(hocket.Callback):
        def after_forward(self, state: hocket.State) -> None:
            hooks.append(sum(len(module._forward_hooks) for module in state.model.modules()))

    logger = fit(ActivationMonitor(every=3, types=["ReLU", "Sequential"]), Hooks())
    assert {name for name in logger.metrics if name.startswith("activation/mean")} == {
        f"activation/mean/{n}" for n in ("model", "1")
    }
    assert hooks == [0, 0, 2, 0, 0, 2]
    with pytest.raises(ValueError, match=r"types=\['Conv2d'\], and the model has no such module. It has: Linear, ReLU"):
        fit(ActivationMonitor(types="Conv2d"))


def on_train(every: int = 500) -> SampleVisualizer:
    return SampleVisualizer("train", every)


MEASURING: list[Any] = [ActivationMonitor, GradientMonitor, OptimizerMonitor, on_train]


@pytest.mark.parametrize("monitor", MEASURING)
def test_a_run_without_a_measured_batch_warns_once(monitor: Any, recwarn: pytest.WarningsRecorder) -> None:
    fit(monitor(every=6))  # 6 batches
    fit(monitor(every=7), fast_dev_run=3)
    assert not recwarn.list
    with pytest.warns(
        UserWarning, match=r"has measured nothing: .* every=7, and the run has had 6\. Give it every=1\."
    ):
        fit(monitor(every=7))
    with make_trainer(
        model=network(), loss=F.mse_loss, train_data=batches(), optimizer="adam", callbacks=[monitor()], device="cpu",
    ) as trainer:  # fmt: skip
        with pytest.warns(UserWarning, match=r"every=500, and the run has had 12\. Give it every=10\."):
            trainer.fit("4ep")
        recwarn.clear()
        trainer.fit("1ep")
        assert not recwarn.list


def test_measured_batches_of_a_resumed_run_count(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    arguments = {
        "model": network(), "loss": F.mse_loss, "train_data": batches(), "optimizer": "adam", "device": "cpu",
        "checkpoints": str(tmp_path), "resume": "auto",
    }  # fmt: skip
    for duration in ("5ba", "7ba"):
        callbacks = [each(every=5) for each in MEASURING]
        with make_trainer(**arguments, callbacks=callbacks, duration=duration) as trainer:
            trainer.fit()
    assert not recwarn.list


def test_monitors_beside_microbatches_that_are_found(recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("hocket_general")
    logger = fit(*(each(every=3) for each in MEASURING), microbatch="auto")
    assert {"gradient/norm/0", "activation/mean/0", "optimizer/weight_norm"} <= logger.metrics.keys()


class HeadInLoss(hocket.Task):
    """The head runs in the loss, which is tried on a few samples where a batch is split."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, batch: Any) -> Tensor:
        return self.net[1](self.net[0](batch[0]))  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(self.net[2](outputs), batch[1])


def test_a_loss_on_trial_is_not_measured() -> None:
    logger = fit(ActivationMonitor(every=1), model=HeadInLoss(), loss=None, microbatch=3, duration="1ba")
    with torch.no_grad():
        outputs = network()(batches()[0][0])
    assert values(logger, "activation/mean/net.2") == pytest.approx([float(outputs.mean())])
    assert values(logger, "activation/std/net.2") == pytest.approx([float(outputs.std(correction=0))])


def test_a_compiled_model_is_refused_and_its_root_is_not() -> None:
    with pytest.raises(PlanError, match="cannot read the output of '0', because it is inside a compiled module"):
        fit(ActivationMonitor(), compile={"backend": "eager"})
    part = network()
    part[0].compile(backend="eager")
    logger = fit(ActivationMonitor(every=1, layers="1"), model=part)
    assert "activation/mean/1" in logger.metrics
    # Gradients have no such limit.
    assert "gradient/norm/0" in fit(GradientMonitor(every=1), compile={"backend": "eager"}).metrics


def test_an_exception_leaves_no_hooks() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("no loss today")

    model = network()
    with pytest.raises(RuntimeError, match="no loss today"):
        fit(ActivationMonitor(every=1), model=model, loss=loss)
    assert not any(module._forward_hooks for module in model.modules())


# --- memory


class RunsOut(nn.Linear):
    """Allocates far too much in its second forward pass."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            torch.empty(2**60)
        return super().forward(x)


@pytest.mark.parametrize("evaluating", [False, True], ids=["training", "evaluation"])
def test_a_report_of_what_held_memory(tmp_path: Path, evaluating: bool) -> None:
    """Torch's allocator of the CPU really fails here."""
    changes = {"eval_data": batches(), "eval_every": "1ba"} if evaluating else {}
    with pytest.raises(RuntimeError) as raised:
        fit(MemoryReport(), model=RunsOut(5, 2), folder=str(tmp_path), run_name="a", **changes)
    path = tmp_path / "a" / "out-of-memory-rank0.txt"
    assert str(path) in "".join(raised.value.__notes__)
    lines = path.read_text().splitlines()
    assert ("evaluation of 'eval' after batch 1" if evaluating else "batch 1 of epoch 0") in lines[0]
    table = {line[:17].strip(): line[17:] for line in lines[2:8]}
    assert list(table) == ["parameters", "buffers", "gradients", "optimizer states", "batch", "outputs"]
    assert "48 B       2 tensors  largest: 40 B network.weight (2 × 5, float32)" in table["parameters"]
    assert "4 tensors" not in table["gradients"]
    assert "104 B       6 tensors" in table["optimizer states"]  # two averages and a step for each of two parameters
    assert "can't allocate memory" in path.read_text()
    assert "1. Trainer(microbatch='auto')" in path.read_text()
    assert ("activation-checkpointing" in path.read_text()) is not evaluating


def test_other_errors_write_no_report_and_a_report_on_request(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fit(MemoryReport(), loss=loss, folder=str(tmp_path), run_name="a")
    assert not list(tmp_path.glob("**/*memory*"))
    logger = fit(MemoryReport(at=4), folder=str(tmp_path), run_name="b")
    assert "batch 4 of epoch 1" in (tmp_path / "b" / "memory-rank0.txt").read_text()
    assert "optimizer states" in logger.texts["memory/memory"][0]
    with pytest.raises(ValueError, match="at=0 is not a number of batches"):
        MemoryReport(at=0)

    class InTheWay(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            (state.run_folder / "memory-rank0.txt").mkdir(exist_ok=True)

    with pytest.warns(UserWarning, match="memory-report could not write its report: .*it is a folder"):
        assert fit(InTheWay(), MemoryReport(at=4), folder=str(tmp_path), run_name="c").metrics


def test_shared_storages_count_once() -> None:
    found = {}

    class Look(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            found.update(held(state))

    model = network()
    flat = torch.zeros(100)
    model.register_buffer("whole", flat)
    model.register_buffer("part", flat[:10])
    fit(Look(), model=model)
    assert [name for name in found["buffers"] if name.endswith(("whole", "part"))] == ["network.whole"]
    assert sum(each.untyped_storage().nbytes() for each in found["parameters"].values()) == 4 * (24 + 10)


# --- the system


def test_the_system_is_what_psutil_says() -> None:
    block: list[Tensor] = []

    class Allocate(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            block.append(torch.ones(20_000_000))  # 80 MB
            time.sleep(0.15)

    logger = fit(SystemMonitor(every="3ba", seconds=0.02), Allocate(), duration="6ba")
    resident = values(logger, "system/process_memory")
    assert values(logger, "system/process_memory_max")[-1] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert resident[1] - resident[0] > 150e6, "three blocks of 80 MB"
    assert values(logger, "system/memory_percent")[-1] == pytest.approx(psutil.virtual_memory().percent, abs=10)
    assert values(logger, "system/disk_free")[-1] == pytest.approx(psutil.disk_usage(".").free, rel=0.05)
    assert 0 <= values(logger, "system/cpu_percent")[-1] <= values(logger, "system/cpu_percent_max")[-1] <= 100
    assert not [thread for thread in threading.enumerate() if "system-monitor" in thread.name]


def test_memory_of_workers() -> None:
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(12, 5), torch.randn(12, 2)),
        4,
        num_workers=1,
        persistent_workers=True,
    )
    logger = fit(SystemMonitor(every="1ba", seconds=0.01), SlowBatches(0.1), train_data=data)
    assert values(logger, "system/workers_memory_max")[-1] > 10e6


class SlowBatches(hocket.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def batch_end(self, state: hocket.State) -> None:
        time.sleep(self.seconds)


def test_a_thread_ends_and_a_forked_process_starts_its_own() -> None:
    calls: list[int] = []
    ticking = Ticking(0.01, lambda: calls.append(os.getpid()), "test")
    ticking.start()
    ticking.start()
    assert sum("hocket test" in thread.name for thread in threading.enumerate()) == 1
    pid = os.fork()
    if pid == 0:  # the child
        calls.clear()
        ticking.stop()  # of the parent's thread, which is not here
        ticking.start()
        time.sleep(0.2)
        os._exit(0 if len(calls) > 2 and set(calls) == {os.getpid()} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ticking.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "hocket test"]

    def fails() -> None:
        raise OSError("disk full")

    with pytest.warns(UserWarning, match="test stopped: OSError: disk full"):
        Ticking(0.01, fails, "test").start()
    with pytest.raises(ValueError, match="given 0 as its seconds"):
        Ticking(0, fails, "test")


# --- energy


def powercap(folder: Path, counters: dict[str, tuple[str, int]]) -> None:
    for zone, (name, energy) in counters.items():
        (folder / zone).mkdir(exist_ok=True)
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "new").write_text(f"{energy}\n")
        (folder / zone / "new").replace(folder / zone / "energy_uj")  # the monitor's thread never reads half a file
        (folder / zone / "max_energy_range_uj").write_text("262143328850\n")


def test_energy_of_processors(tmp_path: Path) -> None:
    """Two packages and memory; cores are parts of a package, and psys contains them. One counter wraps around."""
    powercap(tmp_path, {
        "intel-rapl:0": ("package-0", 262143328850 - 1_000_000), "intel-rapl:0:0": ("core", 7), "intel-rapl:0:2": ("dram", 0),
        "intel-rapl:1": ("package-1", 5_000_000), "intel-rapl:2": ("psys", 0), "intel-rapl-mmio:0": ("package-0", 0),
    })  # fmt: skip

    class Work(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                powercap(tmp_path, {
                    "intel-rapl:0": ("package-0", 2_000_000), "intel-rapl:0:0": ("core", 900_000_000),
                    "intel-rapl:0:2": ("dram", 500_000), "intel-rapl:1": ("package-1", 9_000_000),
                    "intel-rapl:2": ("psys", 900_000_000), "intel-rapl-mmio:0": ("package-0", 900_000_000),
                })  # fmt: skip
            time.sleep(0.1)

    logger = fit(Work(), EnergyMonitor(every="3ba", seconds=0.02, powercap=tmp_path))
    joules = (1.0 + 2.0) + 0.5 + 4.0
    assert values(logger, "energy/cpu_joules") == pytest.approx([joules, joules])
    each = values(logger, "energy/joules_per_sample")
    # The last sample that the thread took knows of 8 or 10 of the first 10 samples.
    assert joules / 10 * (1 - 1e-9) <= each[0] <= joules / 8 * (1 + 1e-9)
    assert each[1] == 0
    assert values(logger, "energy/watts")[0] == pytest.approx(joules / 0.3, rel=0.7)


def test_no_counter_of_energy_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="energy-monitor logs nothing: this process uses no NVIDIA GPU") as warned:
        logger = fit(EnergyMonitor(powercap=tmp_path))
    assert len(warned) == 1
    assert not [name for name in logger.metrics if name.startswith("energy")]
    powercap(tmp_path, {"intel-rapl:0": ("package-0", 1)})
    assert len(zones(tmp_path)) == 1
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # as for a user who may not read it
    assert zones(tmp_path) == []


@pytest.mark.parametrize(
    "ranks, computing, samples",
    [
        ([("here", ["u0"])], 1, 100),  # one process that sees eight GPUs
        ([("here", [f"u{i}"]) for i in range(8)], 8, 800),  # each rank sees one
        ([("here", ["u0", "u1"])], 2, 100),  # a model over two
        ([("here", ["u0"]), ("here", ["u0"])], 1, 100),  # two ranks share one
        ([("here", ["u0"]), ("there", ["v0"]), ("here", ["u1"]), ("there", ["v1"])], 2, 400),  # two hosts
        ([("here", []), ("here", [])], 0, 100),  # on processors
    ],
    ids=["one of eight", "eight ranks", "two of one process", "shared", "two hosts", "none"],
)
def test_energy_is_of_the_gpus_of_the_ranks_each_once(
    ranks: list[Any], computing: int, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that compute use 1000 J, the other ones of the host 100 J, which do not count."""
    used = {f"GPU-u{i}": 0.0 for i in range(8)}
    nvml = types.ModuleType("pynvml")
    nvml.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    vars(nvml).update(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: used[handle] * 1e3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", "13")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: types.SimpleNamespace(uuid=f"u{at.index}"))
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    own = ranks[0][1]
    devices = [torch.device("cuda", int(uuid[1:])) for uuid in own] or [torch.device("cpu")]
    sent, logged = [], {}

    def all_gather_object(item: Any) -> list[Any]:
        sent.append(item)
        return ranks

    stamp = types.SimpleNamespace(sample=0, batch=1)
    state: Any = types.SimpleNamespace(
        strategy=types.SimpleNamespace(rank=0), device=devices[0], timestamp=stamp, log=logged.update,
        model=types.SimpleNamespace(parameters=lambda: [types.SimpleNamespace(device=each) for each in devices]),
        bus=types.SimpleNamespace(all_gather_object=all_gather_object),
    )  # fmt: skip
    monitor = EnergyMonitor(powercap=tmp_path, seconds=100)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "energy-monitor logs nothing")
        monitor.fit_start(state)
    assert sent == [ranks[0]]
    for number, gpu in enumerate(used):
        used[gpu] += 1000.0 if number < computing else 100.0
    stamp.sample = samples
    if computing:
        monitor._sample()
    monitor._report(state)
    monitor.close(state)
    here = sum(host == "here" for host, _ in ranks) / len(ranks)
    expected = {"gpu_joules": 1000.0 * computing, "joules_per_sample": 1000.0 * computing / (samples * here)}
    assert {name: logged.get(f"energy/{name}") for name in expected} == (
        expected if computing else dict.fromkeys(expected)
    )


def test_the_integral_of_power() -> None:
    clock, power = [0.0], [100.0]
    meter = PowerIntegral(lambda: power[0], lambda: clock[0])
    clock[0], power[0] = 2.0, 200.0
    assert meter.joules() == 300
    clock[0], power[0] = 3.0, None  # type: ignore[call-overload]
    assert meter.joules() == 500


# --- time


class SlowData(list[Any]):
    def __iter__(self) -> Any:
        for each in super().__iter__():
            time.sleep(0.05)
            yield each


def test_where_the_time_goes(tmp_path: Path) -> None:
    """A loader of 50 ms a batch; an evaluation of 3 × 50 ms; and a checkpoint with 100 ms of a plug-in that saves slowly."""

    class SlowToSave(hocket.Callback):
        def state_dict(self) -> dict[str, Any]:
            time.sleep(0.1)
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    logger = fit(
        TimeMonitor(every="1ba"), SlowToSave(), train_data=SlowData(batches()), eval_data=SlowData(batches()), eval_every="2ba",
        checkpoints=hocket.Checkpoints(tmp_path / "c", every="4ba"), duration="6ba",
    )  # fmt: skip
    at = {
        name.removeprefix("time/"): dict(series) for name, series in logger.metrics.items() if name.startswith("time/")
    }
    assert all(seconds >= 0.05 for seconds in at["data_seconds"].values())
    # The report of a batch is followed by what is due after it, which is in the next one.
    assert [batch for batch, seconds in at["evaluation_seconds"].items() if seconds] == [3, 5]
    assert at["evaluation_seconds"][3] >= 0.15
    assert [batch for batch, seconds in at["checkpoint_seconds"].items() if seconds > 0.09] == [5]
    for batch in at["data_share"]:
        assert 0 < at["data_share"][batch] <= 1
        assert at["data_share"][batch] + at["evaluation_share"][batch] + at["checkpoint_share"][batch] <= 1
    assert at["checkpoint_share"][5] > 0


# --- is it alive


def test_the_end_of_a_fit_reports_what_remains() -> None:
    """A fit that is shorter than the interval, and the batches since the last report; nothing twice."""
    monitors = ["memory-monitor", "time-monitor", "speed-monitor"]

    def reported(duration: str) -> dict[str, list[float]]:
        history = make_trainer(callbacks=monitors, duration=duration, log_every="1ba").fit().history
        return {name: history.series(name)[0] for name in history if name.split("/")[0] in ("memory", "time", "speed")}

    for name, batches in reported("3ba").items():
        assert batches == [3], name
    longer = reported("53ba")
    assert longer["speed/batches_per_second"] == [50, 53]
    assert reported("50ba")["speed/batches_per_second"] == [50]


def test_a_heartbeat_ages_while_training_hangs(tmp_path: Path) -> None:
    file = tmp_path / "beat.json"
    beats: list[dict[str, Any]] = []

    class Watch(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 3:  # a hang
                time.sleep(0.1)  # the thread notes the batches before
                first = file.read_text()
                time.sleep(0.3)
                assert file.read_text() == first, "nothing advances, so the file ages"
            else:
                time.sleep(0.1)
            beats.append(json.loads(file.read_text()))

    fit(Watch(), Heartbeat(seconds=0.02, path=file))
    assert all(beat["status"] == "running" and beat["error"] is None for beat in beats)
    assert [beat["batch"] for beat in beats][-1] >= 5
    last = json.loads(file.read_text())
    assert (last["status"], last["batch"], last["epoch"], last["sample"], last["pid"]) == (
        "finished",
        6,
        2,
        20,
        os.getpid(),
    )
    assert last["advanced"] <= last["time"] <= time.time()
    assert list(tmp_path.iterdir()) == [file]


def test_a_heartbeat_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="heartbeat stopped: .*Training continues without it"):
        fit(Heartbeat(path=tmp_path / "file" / "beat.json"))


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("broken"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(3), "interrupted")],
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, status: str) -> None:
    class Ends(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                raise error

    with pytest.raises(type(error)):
        fit(Ends(), Heartbeat(), folder=str(tmp_path), run_name="a")
    beat = json.loads((tmp_path / "a" / "heartbeat.json").read_text())
    assert (beat["status"], beat["batch"]) == (status, 2)
    assert beat["error"].startswith(type(error).__name__)
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]


# --- thresholds


class Logs(hocket.Callback):
    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def batch_end(self, state: hocket.State) -> None:
        state.log({"my/value": self.numbers[state.timestamp.batch - 1]})


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"above": 3.0}, 4), ({"above": 3.0, "times": 2}, 8), ({"below": -1.0}, 6), ({"above": 1e9}, 9),
        ({"above": 5.0, "below": -1.0}, 6), ({"above": math.inf}, 9),
    ],
)  # fmt: skip
def test_a_threshold_is_crossed(options: dict[str, Any], stops: int) -> None:
    """The loop acts after the batch that follows the value."""
    numbers = [3.0, 1.0, 4.0, math.nan, -2.0, 4.0, 5.0, 5.0, 0.0]
    logger = MemoryLogger()
    trainer = make_trainer(
        model=network(), loss=F.mse_loss, train_data=batches((2,) * 9), duration="1ep", log_every="1ba", device="cpu",
        callbacks=[Logs(numbers), ThresholdStopper("my/value", **options)], loggers=[logger],
    )  # fmt: skip
    result = trainer.fit()
    assert result.timestamp.batch == stops


def test_a_threshold_for_metrics_checkpoints_and_resuming(tmp_path: Path) -> None:
    stopper = ThresholdStopper("eval/loss", below=1e6, times=2, checkpoint=True)
    trainer = make_trainer(
        model=network(), loss=F.mse_loss, train_data=batches(), eval_data=batches(), eval_every="1ep", duration="9ep",
        device="cpu", callbacks=[stopper], checkpoints=hocket.Checkpoints(tmp_path, every=None),
    )  # fmt: skip
    trainer.evaluate()  # does not count
    result = trainer.fit()
    assert result.timestamp.batch == 7
    assert "ep2-ba7" in result.checkpoints
    other = ThresholdStopper("eval/loss", below=1e6, times=2)
    other.load_state_dict({"crossed": 1})
    trainer = make_trainer(
        model=network(),
        loss=F.mse_loss,
        train_data=batches(),
        eval_data=batches(),
        duration="9ep",
        device="cpu",
        callbacks=[other],
    )
    assert trainer.fit().timestamp.batch == 4


def test_thresholds_that_cannot_be_crossed_are_said() -> None:
    for options in ({}, {"above": "3"}, {"above": 1.0, "times": 0}, {"below": math.nan}):
        with pytest.raises(ValueError, match="Give above= or below= a number"):
            ThresholdStopper("train/loss", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no evaluation set of that name"):
        fit(ThresholdStopper("test/loss", above=1.0))
    with pytest.raises(ValueError, match="above=1 and below=5, between which every value"):
        ThresholdStopper("train/loss", above=1, below=5)
    for duration in ("1ep", "2ep"):
        with pytest.warns(UserWarning, match="threshold-stopper monitors 'train/los'.*Write 'train/loss'"):
            fit(ThresholdStopper("train/los", above=1.0), duration=duration)


def test_a_metric_that_is_not_measured_yet_is_not_missing(recwarn: pytest.WarningsRecorder) -> None:
    fit(ThresholdStopper("eval/loss", above=1e9), eval_data=batches(), eval_every="3ep")
    assert not recwarn.list


# --- samples


def test_samples_of_an_evaluation_set() -> None:
    images = torch.linspace(-1, 1, 6 * 3 * 4 * 4).reshape(6, 3, 4, 4)
    targets = torch.tensor([0, 1, 1, 0, 1, 0])
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    data = [(images[:3], targets[:3]), (images[3:], targets[3:])]
    logger = fit(
        SampleVisualizer(samples=4, decode=lambda image: f"{image.mean():.2f}"), model=model, loss="cross_entropy",
        train_data=data, eval_data=data, microbatch=2, duration="1ep", optimizer="sgd(lr=0.1)",
    )  # fmt: skip
    columns, rows = logger.tables["samples/eval/predictions"][0]
    assert columns == ["sample", "text", "prediction", "target"]
    predicted = model(images).argmax(1).tolist()
    assert rows == [[i, f"{images[i].mean():.2f}", predicted[i], int(targets[i])] for i in range(4)]
    shown = logger.images["samples/eval"][0]
    assert len(shown) == 4
    for image, original in zip(shown[:3], images, strict=False):  # with negative values
        assert torch.allclose(image, (original - original.min()) / (original.max() - original.min()), atol=1e-6)
    assert torch.equal(shown[3], images[3]), "in [0, 1]"


def test_samples_of_training_and_of_other_batches() -> None:
    data = [{"x": inputs, "y": targets} for inputs, targets in batches()]
    logger = fit(
        SampleVisualizer(on="train", every=2, samples=3, predict=lambda outputs, batch: outputs.sum(1)), train_data=data,
        inputs="x", targets=lambda batch: batch["y"], log_every="2ba", optimizer="sgd(lr=0.0)", microbatch=2,
    )  # fmt: skip
    columns, rows = logger.tables["samples/train/predictions"][0]
    assert columns == ["sample", "prediction", "target"]
    expected = network()(data[1]["x"][:3]).sum(1)
    assert [row[1] for row in rows] == pytest.approx(expected.tolist(), abs=1e-4)
    assert rows[0][2] == str([round(value, 4) for value in data[1]["y"][0].double().tolist()])
    assert len(logger.tables["samples/train/predictions"]) == 3
    assert not logger.images
    with pytest.raises(ValueError, match=r"on='tset', and there is no such set. There are: 'eval', 'train'"):
        fit(SampleVisualizer(on="tset"), eval_data=batches())
    with pytest.raises(TypeError, match="Pass predict="):
        fit(
            SampleVisualizer(on="train", every=1),
            loss=lambda outputs, targets: outputs["deep"]["y"].mean(),
            model=Deep(),
        )
    with pytest.raises(ValueError, match="returned 2 predictions for"):
        fit(SampleVisualizer(on="train", every=1, predict=lambda outputs, batch: outputs[:2].sum(1)))
    with pytest.raises(ValueError, match="samples=0 is not a number of samples"):
        SampleVisualizer(samples=0)


class Deep(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, x: Tensor) -> Any:
        return {"deep": {"y": super().forward(x)}}
