"""DeepSpeed against plain PyTorch in one process. `nox -s deepspeed` installs it; elsewhere all of this is skipped."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.plugins import PluginError
from hocket_strategies import DeepSpeed
from hocket_testkit import StrategyConformance, run_ranks

pytest.importorskip("deepspeed")  # here and not in each rank: it takes seconds


@pytest.fixture(scope="module", autouse=True)
def _ready_to_fork():
    """Compile DeepSpeed's extension and import what it imports late: each rank is a new fork of this process."""
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()
    for module in ("stage3", "muon.muon_optimizer"):
        with contextlib.suppress(ModuleNotFoundError):  # versions differ
            importlib.import_module(f"deepspeed.runtime.zero.{module}")


class TestStage2(StrategyConformance):
    dtype = torch.float32
    weight_tolerance = 1e-5

    def make(self):
        return DeepSpeed(stage=2)


class TestStage3(StrategyConformance):
    dtype = torch.float32
    weight_tolerance = 1e-5

    def make(self):
        return DeepSpeed(stage=3)


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(number, 4, generator=generator), torch.randint(3, (number,), generator=generator))


def data() -> DataLoader:
    """Eight batches; on two ranks shares of 3 and 2 samples."""
    return DataLoader(samples(40), 5)


def network() -> nn.Module:
    """Without batch norm, whose gradient on a share is not that on the batch."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def trainer(folder, strategy, **options) -> hocket.Trainer:
    return hocket.Trainer(
        **{
            "model": network(),
            "loss": F.cross_entropy,
            "train_data": data(),
            "global_batch": 5,
            "optimizer": adamw,
            "strategy": strategy,
            "device": "cpu",
            "duration": "16ba",
            "folder": folder,
            **options,
        }
    )


def trained(folder, make, world_size=2, **options):
    """By rank: weights after 16 steps, and the norms of the gradients."""

    def rank_main(rank):
        norms = Norms()
        run = trainer(folder, make(), callbacks=[norms], **options)
        run.fit()
        return run.model_state_dict(), norms.norms

    return run_ranks(rank_main, world_size)


class Norms(hocket.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def batch_end(self, state):
        self.norms.append(-1.0 if state.gradient_norm is None else float(state.gradient_norm))


def plain(clip=None, steps=16, dtype=None):
    """The reference: weights after ``steps`` AdamW steps in one process, and the norms of the gradients."""
    model = network()
    optimizer = adamw(model.parameters())
    norms = []
    for _ in range(steps // 8):
        for inputs, targets in data():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
            optimizer.step()
    return dict(model.state_dict()), norms


def close(got, expected, tolerance=1e-4):
    assert list(got) == list(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_sixteen_steps_with_microbatches(tmp_path, stage, clip):
    """Uneven shares in microbatches of one: one rank has three, the other two and one that counts nothing."""
    expected, norms = plain(clip)
    assert max(norms) > 0.5
    for weights, seen in trained(tmp_path, lambda: DeepSpeed(stage), clip_gradients=clip, microbatch=1):
        close(weights, expected)
        if stage or clip:
            assert seen == pytest.approx(norms, rel=1e-3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize(
    "options, tolerance",
    [
        *(({"stage": stage}, 1e-6) for stage in (0, 1, 2, 3)),
        *(({"stage": stage, "offload": True}, 1e-6) for stage in (1, 2, 3)),
        *(({"stage": stage, "config": {"bf16": {"enabled": True}}}, 3e-2) for stage in (1, 3)),
        ({"stage": 1, "config": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}}, 3e-2),
    ],
    ids=str,
)
def test_losses_that_bring_their_weights(tmp_path, options, tolerance, clip):
    """A mean over the labels that count, of which ranks and microbatches have different numbers. SGD, because Adam hides
    a wrong scale of gradients."""

    def masked() -> DataLoader:
        inputs, labels = samples(40).tensors
        labels = labels.masked_fill(torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.4, -100)
        return DataLoader(TensorDataset(inputs, labels), 5)

    def loss(outputs, labels):
        counted = (labels != -100).sum()
        return F.cross_entropy(outputs, labels, reduction="sum") / counted.clamp(min=1), counted

    model = network()
    optimizer = sgd(model.parameters())
    norms = []
    for inputs, labels in masked():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()

    arguments = {"train_data": masked(), "loss": loss, "optimizer": sgd, "duration": "8ba", "clip_gradients": clip}
    for weights, seen in trained(tmp_path, lambda: DeepSpeed(**options), microbatch=1, **arguments):
        close(weights, dict(model.state_dict()), tolerance)
        if options["stage"] or clip:
            assert seen == pytest.approx(norms, rel=max(tolerance, 1e-4))


@pytest.mark.parametrize("stage", [2, 3])
def test_four_ranks(tmp_path, stage):
    """Five samples on four ranks: one has two microbatches, the others one and one that counts nothing."""
    expected, _ = plain(0.5)
    for weights, _ in trained(tmp_path, lambda: DeepSpeed(stage), 4, clip_gradients=0.5, microbatch=1):
        close(weights, expected)


def test_gradients_computed_again_at_stage_0(tmp_path):
    """An algorithm steps a second time, with the gradient at the new weights."""

    class TwoSteps(hocket.Algorithm):
        phase = hocket.Phase.OPTIMIZER
        needs = hocket.Need.SECOND_GRADIENT

        @hocket.hookimpl(wrapper=True)
        def optimizer_step(self, state, closure):
            stepped = yield
            closure()
            state.optimizers[0].step()
            return stepped

    model = network()
    optimizer = adamw(model.parameters())
    for inputs, targets in data():
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    def rank_main(rank):
        run = trainer(tmp_path, DeepSpeed(0), algorithms=[TwoSteps()], duration="8ba")
        run.fit()
        with pytest.raises(PluginError, match="needs second gradient"):
            trainer(tmp_path, DeepSpeed(1), algorithms=[TwoSteps()])
        return run.model_state_dict()

    for weights in run_ranks(rank_main, 2):
        close(weights, dict(model.state_dict()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload(tmp_path, stage):
    expected, _ = plain(0.5)
    for weights, _ in trained(tmp_path, lambda: DeepSpeed(stage, offload=True), clip_gradients=0.5, microbatch=2):
        close(weights, expected)


def test_a_configuration_of_its_own(tmp_path):
    """Stage, clipping and accumulation as DeepSpeed's users write them, from a file."""
    file = tmp_path / "zero.json"
    file.write_text(
        '{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},'
        ' "gradient_clipping": 0.5, "gradient_accumulation_steps": 2}'
    )

    def rank_main(rank):
        run = trainer(tmp_path, {"deepspeed": {"config": str(file)}})
        run.fit()
        return run.model_state_dict(), run.state.strategy.stage, run.state.microbatch

    expected, _ = plain(0.5)
    results = run_ranks(rank_main, 2)
    for weights, stage, _ in results:
        assert stage == 3
        close(weights, expected)
    assert [microbatch for *_, microbatch in results] == [2, 1]  # of 3 and of 2 samples


def test_the_size_of_a_microbatch_as_in_deepspeeds_configuration(tmp_path):
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    expected, _ = plain()
    for weights, _ in trained(tmp_path, lambda: DeepSpeed(1, config=config)):
        close(weights, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast(tmp_path, stage):
    """precision="bf16": products in 16 bits, weights in 32; as far from full precision as plain autocast is, roughly."""

    def rank_main(rank):
        dtypes = set()

        class Watch(hocket.Callback):
            def after_forward(self, state):
                dtypes.add(state.outputs.dtype)

            def eval_after_forward(self, state):
                dtypes.add(state.outputs.dtype)

        run = trainer(tmp_path, DeepSpeed(stage), precision="bf16", callbacks=[Watch()], eval_data=data())
        run.fit()
        return run.model_state_dict(), dtypes

    expected, _ = plain(dtype=torch.bfloat16)
    for weights, dtypes in run_ranks(rank_main, 2):
        assert dtypes == {torch.bfloat16}
        assert {value.dtype for value in weights.values()} == {torch.float32}
        close(weights, expected, 3e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_in_16_bits_and_their_float32_copies(tmp_path, stage):
    """The full weights are the engine's float32 ones, and go through a state into another engine without rounding."""
    config = {"bf16": {"enabled": True}}

    def rank_main(rank):
        first, second = (trainer(tmp_path, DeepSpeed(stage, config=config), eval_data=data()) for _ in range(2))
        first.fit("8ba")
        one, two = first.state, second.state
        two.bus.load_model_state(two.prepared, one.bus.model_state(one.prepared))
        two.bus.load_optimizer_state(
            two.prepared, two.optimizers[0], one.bus.optimizer_state(one.prepared, one.optimizers[0])
        )
        loaded = {name: value.clone() for name, value in second.model_state_dict().items()}
        there = first.evaluate(), second.evaluate()
        before = {name: value.clone() for name, value in first.model_state_dict().items()}
        first.fit("8ba")
        second.fit("8ba")
        return before, loaded, there, first.model_state_dict(), second.model_state_dict()

    expected, _ = plain()
    for before, loaded, (here, there), first, second in run_ranks(rank_main, 2):
        assert all(value.dtype is torch.float32 for value in first.values())
        assert any((value != value.bfloat16().float()).any() for value in before.values())
        close(loaded, before, 0)
        assert here == there
        close(first, second, 0)
        close(first, expected, 6e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_batch_that_is_not_stepped_with_leaves_no_gradient(tmp_path, stage):
    """Its loss is not finite and nonfinite="skip": the run goes on as if the batch had not been there."""

    def with_a_bad_batch():
        inputs, targets = (tensor.clone() for tensor in samples(40).tensors)
        inputs[10] = float("nan")
        return DataLoader(TensorDataset(inputs, targets), 5)

    model = network()
    optimizer = adamw(model.parameters())
    for number, (inputs, targets) in enumerate(data()):
        if number != 2:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    def rank_main(rank):
        run = trainer(
            tmp_path,
            DeepSpeed(stage, offload=stage == 2),
            train_data=with_a_bad_batch(),
            nonfinite="skip",
            microbatch=1,
            duration="8ba",
        )
        with pytest.warns(RuntimeWarning, match="the batch is skipped"):
            run.fit()
        return run.model_state_dict()

    for weights in run_ranks(rank_main, 2):
        close(weights, dict(model.state_dict()))


def test_buffers_and_tied_weights_at_stage_3(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.norm = nn.BatchNorm1d(4)
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(self.norm(x)).tanh())[:, :3]

    def rank_main(rank):
        run = trainer(tmp_path, DeepSpeed(3), model=Tied())
        run.fit("8ba")
        return run.model_state_dict()

    for weights in run_ranks(rank_main, 2):
        assert list(weights) == list(Tied().state_dict())
        assert torch.equal(weights["first.weight"], weights["second.weight"])
        assert weights["norm.num_batches_tracked"] == 8
        assert not torch.equal(weights["first.weight"], Tied().first.weight)


def test_schedules_set_its_learning_rate(tmp_path):
    """Halved after eight of sixteen steps."""
    model = network()
    optimizer = adamw(model.parameters())
    for half in (1.0, 0.5):
        optimizer.param_groups[0]["lr"] = 0.01 * half
        for inputs, targets in data():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 8 else 0.5)

    for weights, _ in trained(tmp_path, lambda: DeepSpeed(3), schedule=schedule):
        close(weights, dict(model.state_dict()))


def test_process_groups_of_its_own_one_after_the_other(tmp_path):
    """DeepSpeed remembers process groups; a Trainer after the last one left its ranks finds new ones."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def rank_main(rank):
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        results = []
        for stage in (2, 3):
            run = trainer(tmp_path, DeepSpeed(stage))
            run.fit()
            results.append({name: value.clone() for name, value in run.model_state_dict().items()})
            run.close()
            run.state.bus.barrier()
            run.state.strategy.shutdown()
            assert not dist.is_initialized()
        return results

    expected, _ = plain()
    for results in run_ranks(rank_main, 2):
        for weights in results:
            close(weights, expected)


def test_what_zero_cannot_do_is_refused(tmp_path):
    class Noise(hocket.Algorithm):
        events = {hocket.Event.AFTER_TRAIN_BATCH}
        phase = hocket.Phase.GRADIENT

        def apply(self, event, state):
            raise AssertionError("is never attached")

    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters)

    def two(parameters):
        return [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.1)]

    class Task(hocket.Task):
        def __init__(self):
            super().__init__()
            self.network = network()

        def configure_optimizers(self):
            return two(list(self.network.parameters()))

    def rank_main(rank):
        clipped = {"gradient_clipping": 0.5}
        cases = [
            ({"algorithms": [Noise()]}, DeepSpeed(1), PluginError, r"'noise' acts on gradient.*'stage': 0"),
            ({"clip_gradients": ("value", 1.0)}, DeepSpeed(1), ValueError, "it clips by norm"),
            ({"clip_gradients": 1.0}, DeepSpeed(1, config=clipped), ValueError, r"gradient_clipping=0.5"),
            ({"microbatch": 2}, DeepSpeed(config={"gradient_accumulation_steps": 2}), ValueError, "contradicts"),
            ({"microbatch": 2}, DeepSpeed(config={"train_micro_batch_size_per_gpu": 1}), ValueError, "contradicts"),
            ({"optimizer": lbfgs}, DeepSpeed(1), ValueError, "once per computation"),
            ({"model": Task(), "loss": None, "optimizer": None}, DeepSpeed(1), ValueError, "steps one optimizer"),
            ({"precision": "fp64"}, DeepSpeed(1), ValueError, "network.0.weight is float64"),
            ({"precision": "bf16"}, DeepSpeed(config={"bf16": {"enabled": True}}), PluginError, "would both convert"),
            ({}, DeepSpeed(0, config={"bf16": {"enabled": True}}), ValueError, "enables bf16 at stage 0"),
        ]
        for options, strategy, error, message in cases:
            with pytest.raises(error, match=message):
                trainer(tmp_path, strategy, **options)
        return True

    assert run_ranks(rank_main, 1) == [True]
