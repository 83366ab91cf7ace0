"""Devices that compute while the host goes on, emulated on the CPU: what the loop may and may not do without looking."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import hocket
from hocket.data.batch_placement import move
from hocket.devices import model_placement
from hocket.devices.cuda import CUDA
from hocket.loop import agreement, determinism, nonfinite
from hocket_checkpoints.storage.snapshot import Snapshot, Staging
from hocket_testkit import no_sync


class Ahead(hocket.Device):
    """The CPU, said to be asynchronous: the guard looks at values only where the loop may wait."""

    def __init__(self, asynchronous: bool = True) -> None:
        self.asynchronous = asynchronous

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")


class Spoilt(nn.Module):
    """A linear model; where the first input is 9, gradients are NaN though the loss is finite, where it is 8 the loss too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        if inputs[0, 0] == 9:
            return outputs + (outputs * 0).sqrt()  # 0, whose derivative is 0 / 0
        return outputs * float("nan") if inputs[0, 0] == 8 else outputs


def _finite(path: Path) -> bool:
    trainer = hocket.Trainer(model=Spoilt(), loss=nn.functional.mse_loss, device="cpu")
    trainer.load_weights(path)
    return all(bool(value.isfinite().all()) for value in trainer.model_state_dict().values())


@pytest.mark.filterwarnings("ignore:Not finite in")
@pytest.mark.parametrize("mark, weights_only", [(8.0, True), (9.0, False)], ids=["loss", "gradient"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_weights_that_are_not_finite_are_never_checkpointed(
    tmp_path: Path, policy: Any, asynchronous: bool, mark: float, weights_only: bool
) -> None:
    """`keep=1` would delete the last good ones."""
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(10)]
    data[5][0][0, 0] = mark  # between two checkpoints, within one logging interval
    trainer = hocket.Trainer(
        model=Spoilt(), loss=nn.functional.mse_loss, train_data=data, duration="10ba", nonfinite=policy, log_every="50ba",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2), device=Ahead(asynchronous), folder=tmp_path / "runs",
        checkpoints=hocket.Checkpoints(tmp_path / "kept", every="2ba", keep=1, weights_only=weights_only),
    )  # fmt: skip
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            trainer.fit()
    else:
        with pytest.warns(RuntimeWarning, match="no checkpoint is written; the earlier ones stay"):
            trainer.fit()
    names = sorted(path.name for path in (tmp_path / "kept").glob("ep*"))
    assert names == ["ep0-ba4"]
    assert _finite(tmp_path / "kept" / "ep0-ba4")


@pytest.mark.filterwarnings("ignore:Not finite in")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_skipped_batch_is_as_if_it_had_not_been_there(asynchronous: bool) -> None:
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    spoilt = (torch.full((4, 3), 8.0), torch.zeros(4, 1))
    weights = []
    for batches in (data, [*data[:2], spoilt, *data[2:]]):
        torch.manual_seed(0)
        trainer = hocket.Trainer(
            model=Spoilt(), loss=nn.functional.mse_loss, train_data=batches, duration="1ep", nonfinite="skip",
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9), device=Ahead(asynchronous),
        )  # fmt: skip
        trainer.fit()
        weights.append([value.tolist() for value in trainer.model_state_dict().values()])
    assert weights[0] == weights[1]


@pytest.mark.parametrize("number", [1, 3])
def test_one_batch_of_a_logging_interval_is_enough(number: int) -> None:
    """Of four; gradients and weights are finite all the while."""
    data = [(torch.randn(4, 3), torch.full((4, 1), float(each))) for each in range(4)]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets) + (float("nan") if targets[0, 0] == number else 0.0)

    trainer = hocket.Trainer(
        model=nn.Linear(3, 1), loss=loss, train_data=data, duration="1ep", nonfinite="warn", log_every="4ba",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2), device=Ahead(),
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="Not finite in a batch before 4, within the last logging interval"):
        trainer.fit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of", ["loss", "gradient_norm"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38, -1e-40, 0.0])
def test_a_step_records_what_is_not_finite_in_one_kernel_each(value: float, of: str, dtype: torch.dtype) -> None:
    class Bus:
        all_reduce = None

        def overflowed(self, reduce: Any) -> bool:
            return False

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += function is not torch.ops.aten.detach.default
            return function(*args, **(kwargs or {}))

    watching = nonfinite.NonFiniteGuard("raise", asynchronous=True)
    reports: list[str] = []
    watching._report = lambda state, where: reports.append(where)  # type: ignore[method-assign]
    for batch in range(6):
        given = {"loss": torch.tensor(1.5, dtype=dtype), "gradient_norm": torch.tensor(2.0)}
        if batch == 2:
            given[of] = torch.tensor(value, dtype=given[of].dtype)
        state: Any = SimpleNamespace(bus=Bus(), timestamp=SimpleNamespace(batch=batch), **given)
        with Count() as count:
            assert watching.allows(state)
        assert count.number == 2
    watching.interval_end(state)
    assert len(reports) == (not math.isfinite(value))
    watching.interval_end(state)  # nothing is reported twice
    assert len(reports) == (not math.isfinite(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_one_element_of_the_weights_decides(dtype: torch.dtype) -> None:
    """Finite weights may be so large that their sum is not."""
    model = nn.Linear(3, 333, dtype=dtype)
    trainer = hocket.Trainer(
        model=model, loss=nn.functional.mse_loss, device="cpu", optimizer=torch.optim.AdamW, nonfinite="warn"
    )
    largest = torch.finfo(dtype).max
    for value in (largest, -largest, float("nan"), float("inf"), -float("inf")):
        nn.init.constant_(model.weight, largest)
        with torch.no_grad():
            model.weight[331, 1] = value
        with nullcontext() if model.weight.isfinite().all() else pytest.warns(RuntimeWarning, match="are not finite"):
            assert trainer.state.content.worth_saving() is bool(model.weight.isfinite().all())


# --- tensors that say they are on a device, without values


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors of any device, without values."""
    # Autograd counts devices at its first backward. With FakeTensorMode there is one, for a thread that no fork survives.
    torch.ones(1, requires_grad=True).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


class Copies(TorchDispatchMode):
    """Notes copies between kinds of devices: from, to, and whether they are non-blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, ahead = func._schema.name, bool(kwargs.get("non_blocking"))
        if name == "aten::_to_copy" and result.device.type != args[0].device.type:
            self.seen.append((args[0].device.type, result.device.type, ahead))
        if name == "aten::copy_" and args[0].device.type != args[1].device.type:
            self.seen.append((args[1].device.type, args[0].device.type, ahead or args[2:] == (True,)))
        return result


@pytest.mark.parametrize("kind, ahead", [("cuda", True), ("mps", False), ("xpu", False)])
def test_copies_are_non_blocking_only_where_torch_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, ahead: bool
) -> None:
    """From pageable memory `.to("mps", non_blocking=True)` gives wrong values: pytorch#139550."""

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    with fake_tensors(), Copies() as copies:
        batch = move([torch.empty(3), {"x": torch.empty(2)}], torch.device(kind, 0))
        assert batch[0].device.type == kind
        snapshot = Snapshot({"a": 1})
        snapshot.stored = [_Stored("a", batch[0])]  # type: ignore[list-item]  # of a tensor without an address
        Staging().copy(snapshot)
    assert copies.seen == [("cpu", kind, ahead), ("cpu", kind, ahead), (kind, "cpu", ahead)]
    assert waited == [True] * ahead


class _Stored:
    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor


class GPU(hocket.Device):
    """`cuda:0`, which is not there."""

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", 0)


class Two(hocket.Strategy):
    """Two ranks with equal data, whose other one is not there."""

    world_size = 2

    def prepare_data(self, loader: Any, train: bool, global_batch: int | None = None) -> Any:
        return loader

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item, item]


class Guarded(hocket.Callback):
    """Nothing of a batch may wait."""

    def __init__(self) -> None:
        self.batches = 0
        self.inside = False
        self._guard = ExitStack()

    def _enter(self, state: hocket.State) -> None:
        self.batches += 1
        self.inside = True
        self._guard.enter_context(no_sync(simulate=False))

    def _leave(self, state: hocket.State) -> None:
        self.inside = False
        self._guard.close()

    batch_start = eval_batch_start = _enter
    batch_end = eval_batch_end = exception = _leave


def _mean_over_seven(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return nn.functional.mse_loss(outputs, targets), 7


@pytest.mark.parametrize(
    "strategy, options",
    [
        (None, {}),
        (None, {"microbatch": 4, "loss": _mean_over_seven}),
        (Two, {}),
        (Two, {"microbatch": 4, "loss": _mean_over_seven}),
    ],
    ids=["one", "weighted", "two ranks", "two ranks, weighted"],
)
@pytest.mark.skipif(torch.__version__ < (2, 10), reason="FakeTensors of cuda ask the driver")
def test_no_batch_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch, strategy: Any, options: dict[str, Any]) -> None:
    """Neither in training nor in evaluation, for copies to the device either: a loop on tensors without values."""
    monkeypatch.setattr(model_placement, "move", lambda task, device: task)
    monkeypatch.setattr(agreement, "total", lambda state, handed_out, mine, skip: (handed_out, mine, skip))
    monkeypatch.setattr(agreement, "decide", lambda state: None)
    guarded = Guarded()

    def read(self: Tensor) -> float:
        assert not (self.is_cuda and guarded.inside), "a value is looked at in a batch"
        return float(self.dtype is not torch.bool)

    monkeypatch.setattr(Tensor, "item", read)
    monkeypatch.setattr(Tensor, "tolist", lambda self: [read(self)] * self.numel())
    monkeypatch.setattr(nonfinite, "_gradients_finite", lambda state: True)
    with fake_tensors():
        data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)]
        with torch.device("cuda"):
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

        def backward(self: Tensor, *arguments: Any, **more: Any) -> None:  # autograd would use streams of the driver
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)

        monkeypatch.setattr(Tensor, "backward", backward)
        arguments = {
            "model": model, "loss": nn.functional.mse_loss, "train_data": data, "duration": "3ba", "log_every": "100ba",
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=True), "clip_gradients": 1.0,
            "device": GPU(), "strategy": strategy() if strategy else "single", "callbacks": [guarded], "eval_data": data,
        }  # fmt: skip
        hocket.Trainer(**{**arguments, **options}).fit()
    assert guarded.batches == 6


# --- deterministic cuBLAS


@pytest.mark.parametrize(
    "version, started, given, becomes",
    [
        ("2.9.0", False, None, ":4096:8"),
        ("2.9.1", True, None, RuntimeError),
        ("2.9.1", True, ":16:8", ":16:8"),
        ("2.9.0", False, ":0:0", RuntimeError),
        ("2.10.0", True, None, None),
    ],
)
def test_deterministic_on_a_gpu_of_torch_2_9(
    monkeypatch: pytest.MonkeyPatch, version: str, started: bool, given: str | None, becomes: Any
) -> None:
    """cuBLAS reads a variable when it starts; torch 2.9 refuses to run deterministically without."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, given or "")  # so that it is put back
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    if becomes is RuntimeError:
        with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 python"):
            determinism.prepare(CUDA())
    else:
        determinism.prepare(CUDA())
        assert os.environ.get(name) == becomes
        determinism.prepare(Ahead())
