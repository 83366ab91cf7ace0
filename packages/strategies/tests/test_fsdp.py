"""FSDP: the weights of one process, in a share of its memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from sharded_model import Block, Network, adamw, alone, data, held, loss, network, ranks, same, trainer
from torch import Tensor, nn

import hocket
from hocket import Need
from hocket.basics.dtensors import full, mesh_of, total_norm
from hocket.basics.plugin_errors import PluginError
from hocket_strategies import FSDP
from hocket_testkit.ranks import RankError, run_ranks


@pytest.mark.parametrize(
    "world_size, options",
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.long),
        pytest.param(4, {"replicate": 2}, marks=pytest.mark.long),
        pytest.param(2, {"replicate": 2}, marks=pytest.mark.long),  # an axis of one
        pytest.param(2, {"wrap": None}, marks=pytest.mark.long),
        (2, {"wrap": 500}),
        (2, {"reshard_after_forward": False}),
        (2, {"cpu_offload": True}),
        pytest.param(2, {"checkpoint": True}, marks=pytest.mark.long),
        (2, {"checkpoint": ["Block"], "wrap": None}),
    ],
    ids=str,
)
def test_trains_as_one_process_does(tmp_path, world_size, options):
    clipped = {"clip_gradients": 0.1, "microbatch": 1}
    by_rank = ranks(world_size, lambda: FSDP(**options), tmp_path, **clipped)
    same(by_rank, alone(tmp_path, clip_gradients=0.1), 1e-9)


@pytest.mark.parametrize("world_size, share", [(2, 0.55), pytest.param(4, 0.3, marks=pytest.mark.long)])
def test_single_precision_and_memory(tmp_path, world_size, share):
    options = {"precision": "fp32", "clip_gradients": 0.1}
    one = trainer(network(), "single", tmp_path, **options)
    one.fit()
    by_rank = ranks(world_size, lambda: FSDP(), tmp_path, held, microbatch=2, **options)
    same(by_rank, one.model_state_dict(), 1e-4)
    whole_model = held(one)
    assert sum(parameter.nbytes for parameter in network().parameters()) * 3 <= whole_model
    for _, mine in by_rank:
        assert mine <= share * whole_model


@pytest.mark.parametrize(
    "kind, threshold", [pytest.param("norm", 0.1, marks=pytest.mark.long), ("value", 0.001), ("adaptive", 0.01)]
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_clipping(tmp_path, kind, threshold, world_size):
    by_rank = ranks(world_size, lambda: FSDP(), tmp_path, clip_gradients=(kind, threshold))
    expected = alone(tmp_path, clip_gradients=(kind, threshold))
    same(by_rank, expected, 1e-9)
    other = alone(tmp_path)
    assert (other["embed.weight"] - expected["embed.weight"]).abs().max() > 1e-3  # it clips


def test_norms_of_shards(tmp_path):
    """More ranks than rows, an infinity and a NaN on one rank only, and gradients that are partial sums."""

    def rank_main(rank):
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        torch.manual_seed(0)
        plain = [torch.randn(3, 5), torch.randn(1), torch.randn(6, 4), torch.randn(7)]
        layouts = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Shard(0)]]
        shards = [distribute_tensor(t, mesh, layout) for t, layout in zip(plain, layouts, strict=False)] + plain[3:]
        shards.append(DTensor.from_local(torch.ones(3) * (rank // 2), mesh["a"], [Partial()]))
        plain.append(torch.ones(3))
        found = [(total_norm(shards, order), total_norm(plain, order)) for order in (2.0, float("inf"))]
        bad = []
        for value in (float("inf"), float("nan")):
            spoilt = torch.zeros(4)
            spoilt[-1] = value
            bad.append(total_norm([distribute_tensor(spoilt, mesh["a"], [Shard(0)])], float("inf")).isfinite().item())
        return found, bad

    for found, bad in run_ranks(rank_main, 4):
        for got, expected in found:
            assert mesh_of(got) is None
            torch.testing.assert_close(got, expected)
        assert bad == [False, False]


@pytest.mark.filterwarnings("ignore:Not finite in batch 3")
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(tmp_path):
    class Spoil(hocket.Callback):
        def after_train_batch(self, state):
            if state.timestamp.batch == 3 and state.strategy.rank == 1:
                next(state.model.parameters()).grad.to_local()[-1] = float("nan")

    def skipped(one):
        return one._loop._guard.skipped

    by_rank = ranks(2, lambda: FSDP(), tmp_path, skipped, nonfinite="skip", callbacks=[Spoil()])
    assert [number for _, number in by_rank] == [1, 1]
    assert all(value.isfinite().all() for value in by_rank[0][0].values())


def test_gradients_are_sent_with_the_last_microbatch_only(tmp_path, monkeypatch):
    sent = []

    def count(*args, **kwargs):
        sent.append(1)
        return real(*args, **kwargs)

    def number(one):
        return len(sent)

    # Under its newer name, where torch has it.
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    real = getattr(dist, name)
    monkeypatch.setattr(dist, name, count)
    whole_batch = ranks(2, lambda: FSDP(), tmp_path, number, duration="2ba")
    pieces = ranks(2, lambda: FSDP(), tmp_path, number, duration="2ba", microbatch=1)
    assert whole_batch[0][1] == pieces[0][1] == 2 * 4  # three blocks and the rest


def test_batch_norm_in_half_precision_says_what_to_write():
    """Its running statistics stay in float32, and torch's message names neither them nor the layer."""

    def rank_main(rank):
        def fit(**options):
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            data = torch.utils.data.DataLoader([(torch.randn(4), torch.randn(8))] * 8, 4)
            trainer = hocket.Trainer(
                model=model, loss=nn.functional.mse_loss, optimizer="sgd", train_data=data, precision="bf16",
                strategy={"fsdp": options}, device="cpu", duration="1ep",
            )  # fmt: skip
            return trainer.fit().timestamp.batch

        with pytest.raises(RuntimeError, match="expected scalar type") as caught:
            fit()
        return caught.value.__notes__, fit(param_dtype="fp32")

    for notes, trained in run_ranks(rank_main, 2):
        assert "batch norm '1' has weights in bfloat16 and running statistics in float32" in notes[0]
        assert "strategy={'fsdp': {'param_dtype': 'fp32'}}" in notes[0] and trained == 1


@pytest.mark.long
def test_weights_are_gathered_in_the_precision_that_computes(tmp_path):
    seen = []

    def look(module, inputs):
        seen.append((module.weight.dtype, inputs[0].dtype))

    def rank_main(rank, precision, options):
        model = network()
        model.blocks[0].up.register_forward_pre_hook(look)
        one = trainer(model, FSDP(**options), tmp_path, precision=precision, duration="2ba")
        one.fit()
        kinds = {p.dtype for p in one.state.task.parameters()} | {p.grad.dtype for p in one.state.task.parameters()}
        return seen[-1], kinds, one.model_state_dict()

    half, full = (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    exact = alone(tmp_path, precision="fp32", duration="2ba")
    for precision, options, expected in (
        ("bf16", {}, half),
        ("bf16", {"param_dtype": "fp32"}, (torch.float32, torch.float32)),
        ("fp32", {}, full),
        ("fp32", {"param_dtype": "bf16", "reduce_dtype": "bf16"}, half),
    ):
        for computed, kinds, weights in run_ranks(rank_main, 2, precision, options):
            assert computed == expected and kinds == {torch.float32}
            # Two steps of AdamW, each of at most the learning rate.
            torch.testing.assert_close(weights, exact, rtol=0, atol=0.04)


def test_weights_that_are_stored_in_16_bits_but_for_norms(tmp_path):
    """One step of SGD, which amplifies no rounding: what differs is rounded to the 8 bits of bfloat16."""
    options = {"precision": "bf16-true", "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1), "duration": "1ba"}
    expected = alone(tmp_path, **options)
    before = network().state_dict()
    for weights, _ in ranks(2, lambda: FSDP(), tmp_path, **options):
        assert {name: value.dtype for name, value in weights.items()} == {n: v.dtype for n, v in expected.items()}
        assert {value.dtype for value in weights.values()} == {torch.bfloat16, torch.float32}
        assert any((weights[name].float() - before[name]).abs().max() > 0.02 for name in weights)
        torch.testing.assert_close(weights, expected, rtol=2**-7, atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("param_dtype", ["auto", pytest.param(None, marks=pytest.mark.long)])
def test_loss_scaling(tmp_path, param_dtype):
    """Ranks skip the same steps and keep the same bits; where nothing overflows, gradients are those of one process."""

    def then(one):
        return one.state.precision.state_dict()

    options = {"precision": "fp16", "clip_gradients": 1.0, "duration": "8ba"}
    by_rank = ranks(2, lambda: FSDP(param_dtype=param_dtype), tmp_path, then, **options)
    torch.testing.assert_close(by_rank[0], by_rank[1], rtol=0, atol=0)
    assert 0 < by_rank[0][1]["skipped_steps"] < 8  # the first scale is too large for this network

    small = {"precision": {"fp16": {"init_scale": 64.0}}, "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    options |= small | {"duration": "2ba"}
    for weights, scale in ranks(2, lambda: FSDP(param_dtype=param_dtype), tmp_path, then, **options):
        assert scale["skipped_steps"] == 0
        torch.testing.assert_close(weights, alone(tmp_path, **options), rtol=0, atol=2e-3)


def test_dtypes_and_meshes_that_are_none():
    with pytest.raises(ValueError, match=r"param_dtype='half' is not a dtype .* 'bf16', 'fp16', 'fp32', None"):
        FSDP(param_dtype="half")
    with pytest.raises(RankError, match=r"replicate=3 × shard=.* a multiple of 3, but 2 ranks"):
        run_ranks(lambda rank: FSDP(replicate=3).setup_environment(hocket.devices.cpu.CPU()), 2)


# --- starting


def test_a_model_that_only_rank_0_holds(tmp_path):
    def make(seed):
        with torch.device("meta" if seed > 1 else "cpu"):
            return network(seed, tied=False)

    by_rank = ranks(2, lambda: FSDP(), tmp_path, lambda one: one.state.model.scale.item(), make=make)
    same(by_rank, alone(tmp_path, make=lambda: network(tied=False)), 1e-9)
    assert len({scale for _, scale in by_rank}) == 1  # no state dict has it


def test_ranks_on_the_meta_device_compute_in_half_precision(tmp_path):
    """Autocast is for where the run computes, not for where the model came from."""

    def make(seed):
        with torch.device("meta" if seed > 1 else "cpu"):
            return network(seed, tied=False)

    by_rank = ranks(2, lambda: FSDP(), tmp_path, make=make, precision="bf16")
    same(by_rank, alone(tmp_path, make=lambda: network(tied=False), precision="bf16"), 0.05)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="fully_shard moves parameters elsewhere")
def test_setting_up_holds_one_unit_at_a_time(tmp_path, monkeypatch):
    """The device's memory is emulated: what is moved there is copied, and what is alive of the copies is counted."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from torch.multiprocessing.reductions import StorageWeakRef

    on_device, peak = [], [0]

    def move(tensors):
        for tensor in tensors:
            if not isinstance(tensor.data, Tensor) or mesh_of(tensor) is not None:
                continue
            here = StorageWeakRef(tensor.untyped_storage())
            if any(here == each for each, _ in on_device):
                continue
            tensor.data = tensor.detach().clone()
            on_device.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        peak[0] = max(peak[0], sum(size for each, size in on_device if not each.expired()))

    def move_all(task, device):
        move(task.parameters())
        return task

    monkeypatch.setattr("hocket.devices.model_placement.move", move_all)
    monkeypatch.setattr(_fsdp_init, "_move_states_to_device", lambda parameters, *others: move(parameters))

    def rank_main(rank):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
        given = {name: value.clone() for name, value in model.state_dict().items()}
        made = hocket.Trainer(
            model=model, loss=nn.functional.mse_loss, strategy=FSDP(wrap=["Linear"]), device="cpu",
            optimizer=lambda parameters: torch.optim.AdamW(parameters), folder=tmp_path,
        )  # fmt: skip
        after = made.model_state_dict()
        return peak[0], all(torch.equal(after[name], value) for name, value in given.items())

    assert run_ranks(rank_main, 1) == [(64 * 64 * 4, True)]


def test_meta_models_that_cannot_be():
    def rank_main(rank, tied, everywhere):
        with torch.device("meta" if rank or everywhere else "cpu"):
            model = network(tied=tied)
        trainer(model, FSDP(), "runs")

    with pytest.raises(RankError, match=r"embed.weight is on the meta device on rank 0"):
        run_ranks(rank_main, 2, False, True)
    with pytest.raises(RankError, match=r"head.weight is tied to another parameter"):
        run_ranks(rank_main, 2, True, False)


@pytest.mark.long
def test_state_that_an_optimizer_has_from_the_beginning(tmp_path):
    """Adagrad's, LBFGS's list of parameters, and an instance over groups, made before the Trainer."""

    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)

    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    for optimizer, tolerance in ((adagrad, 1e-9), (lbfgs, 1e-7)):
        by_rank = ranks(2, lambda: FSDP(), tmp_path, optimizer=optimizer, duration="4ba")
        same(by_rank, alone(tmp_path, optimizer=optimizer, duration="4ba"), tolerance)

    def instance(rank):
        model = network()
        groups = [{"params": model.embed.parameters(), "lr": 0.1}, {"params": model.blocks.parameters()}]
        one = trainer(
            model, FSDP() if rank is not None else "single", tmp_path, optimizer=torch.optim.SGD(groups, lr=0.01)
        )
        one.fit()
        return (one.model_state_dict(),)

    same(run_ranks(instance, 2), instance(None)[0], 1e-9)


def test_frozen_parameters(tmp_path):
    def make(seed=1):
        model = network(seed)
        model.embed.requires_grad_(False)
        return model

    by_rank = ranks(2, lambda: FSDP(), tmp_path, make=make, clip_gradients=0.1)
    same(by_rank, alone(tmp_path, make=make, clip_gradients=0.1), 1e-9)
    torch.testing.assert_close(by_rank[0][0]["embed.weight"], network().embed.weight.double().detach())


# --- state


def test_optimizer_state_is_that_of_one_process_and_goes_between_strategies(tmp_path):
    one = trainer(network(), "single", tmp_path, duration="1ep")
    one.fit()
    saved = copy.deepcopy(one.state.bus.optimizer_state(one.state.prepared, one.state.optimizers[0]))
    start = copy.deepcopy(one.model_state_dict())
    one.fit("1ep")

    def rank_main(rank):
        mine = trainer(network(), FSDP(), tmp_path, duration="1ep")
        state, bus = mine.state, mine.state.bus
        bus.load_model_state(state.prepared, {f"network.{name}": value for name, value in start.items()})
        bus.load_optimizer_state(state.prepared, state.optimizers[0], saved)
        again = bus.optimizer_state(state.prepared, state.optimizers[0])
        sharded = all(mesh_of(values["exp_avg"]) is not None for values in state.optimizers[0].state.values())
        mine.fit("1ep")
        return mine.model_state_dict(), again, sharded

    for weights, again, sharded in run_ranks(rank_main, 2):
        torch.testing.assert_close(again, saved, rtol=0, atol=0)
        assert sharded
        torch.testing.assert_close(weights, one.model_state_dict(), rtol=1e-9, atol=1e-9)


def test_wrong_states_are_refused_in_words(tmp_path):
    def rank_main(rank):
        one = trainer(network(), FSDP(), tmp_path)
        state, bus = one.state, one.state.bus
        good, said = bus.model_state(state.prepared), []
        for bad in (
            {name: value for name, value in good.items() if "up" not in name},
            good | {"network.embed.weight": torch.zeros(2, 2)},
        ):
            try:
                bus.load_model_state(state.prepared, bad)
            except RuntimeError as error:
                said.append(str(error))
        return said

    for missing, shape in run_ranks(rank_main, 2):
        assert "Missing key" in missing and "network.blocks.0.up.weight" in missing
        assert "size mismatch" in shape and "[12, 16]" in shape


# --- evaluation, algorithms, other parts


def test_weights_that_an_evaluation_borrowed_are_not_trained_with(tmp_path):
    """EMA puts averages into the model while it evaluates. Weights gathered meanwhile must not stay."""
    hocket_general = pytest.importorskip("hocket_general")

    def algorithms():
        return [hocket_general.EMA(half_life="4ba")]

    options = {"eval_data": data(), "eval_every": "3ba"}
    one = trainer(network(), "single", tmp_path, algorithms=algorithms(), **options)
    one.fit()

    def then(mine):
        averages = mine.state.bus.attachments[3].obj.state_dict()["averages"]
        sharded = all(mesh_of(average) is not None for name, average in averages.items() if name != "scale")
        return mine.evaluate(), mine.model_state_dict(evaluated=True), sharded

    by_rank = ranks(2, lambda: FSDP(), tmp_path, then, algorithms=algorithms, **options)
    same(by_rank, one.model_state_dict(), 1e-9)
    for _, (values, averages, sharded) in by_rank:
        assert sharded
        assert values == pytest.approx(one.evaluate(), rel=1e-9)
        torch.testing.assert_close(averages, one.model_state_dict(evaluated=True), rtol=1e-9, atol=1e-9)


class Counting(Network):
    """Has a buffer in its state dict, which is no shard among shards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(2))

    def forward(self, x):
        self.batches += self.training
        return super().forward(x)


def counting(seed=1):
    torch.manual_seed(seed)
    return Counting()


def test_averages_of_shards_and_of_buffers(tmp_path):
    hocket_general = pytest.importorskip("hocket_general")

    def algorithms():
        return [hocket_general.EMA(half_life="4ba")]

    def averaged(mine):
        return mine.model_state_dict(evaluated=True)

    one = trainer(counting(), "single", tmp_path, algorithms=algorithms())
    one.fit()
    for _, averages in ranks(2, lambda: FSDP(), tmp_path, averaged, make=counting, algorithms=algorithms):
        assert 1 < averages["batches"].min() < 5
        torch.testing.assert_close(averages, averaged(one), rtol=1e-9, atol=1e-9)


def test_averages_of_one_process_go_on_as_shards(tmp_path):
    hocket_general = pytest.importorskip("hocket_general")
    one_ema = hocket_general.EMA(half_life="4ba")
    one = trainer(network(), "single", tmp_path, algorithms=[one_ema], duration="8ba")
    one.fit()
    weights, averages = one.model_state_dict(), one_ema.state_dict()
    averages = {"averages": {k: v.clone() for k, v in averages["averages"].items()}, "updated": 0}

    def rank_main(rank):
        ema = hocket_general.EMA(half_life="4ba")
        mine = trainer(network(), FSDP(), tmp_path, algorithms=[ema], optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0))
        mine.state.bus.load_model_state(mine.state.prepared, {f"network.{k}": v for k, v in weights.items()})
        ema.load_state_dict(averages)
        mine.fit("1ba")
        return {name: full(value) for name, value in ema.state_dict()["averages"].items()}

    keep = 2 ** (-1 / 4)
    for found in run_ranks(rank_main, 2):
        for name, value in averages["averages"].items():
            torch.testing.assert_close(found[name], keep * value + (1 - keep) * weights[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["SAM", *(pytest.param(name, marks=pytest.mark.long) for name in ("adaptive", "norm", "value"))]
)
def test_algorithms(tmp_path, name):
    hocket_general = pytest.importorskip("hocket_general")

    def algorithms():
        if name == "SAM":
            return [hocket_general.SAM(0.05)]
        return [hocket_general.GradientClipping(name, 0.01)]

    by_rank = ranks(2, lambda: FSDP(), tmp_path, algorithms=algorithms, microbatch=2)
    same(by_rank, alone(tmp_path, algorithms=algorithms()), 1e-8)


def test_an_algorithm_that_needs_whole_parameters_is_refused_before_anything_starts(tmp_path):
    class Whole(hocket.Algorithm):
        needs = Need.FULL_PARAMETERS

    with pytest.raises(PluginError, match="needs full parameters, which strategy 'fsdp' does not offer"):
        trainer(network(), "fsdp", tmp_path, algorithms=[Whole()])


def test_a_task_that_evaluates_otherwise_than_it_trains(tmp_path):
    class Words(hocket.Task):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, batch):
            return self.net(batch[0])

        def loss(self, outputs, batch):
            return loss(outputs, batch[1])

        def eval_forward(self, batch):
            return self.net(batch[0]).argmax(-1) + self.net.embed.weight.sum() * 0

        def configure_optimizers(self):
            return adamw(self.parameters())

    def rank_main(rank):
        one = trainer(Words(), FSDP() if rank is not None else "single", tmp_path, loss=None, optimizer=None)
        predicted = []
        for _ in range(2):
            one.fit("4ba")
            predicted += one.predict(data())
        return torch.cat(predicted), one.model_state_dict()

    expected, weights = rank_main(None)
    first, second = run_ranks(rank_main, 2)
    torch.testing.assert_close(first[1], weights, rtol=1e-9, atol=1e-9)
    # Twice four batches, of which each rank has every other.
    halves = expected.view(4, 2, -1)
    torch.testing.assert_close(first[0], halves[:, 0].flatten(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(second[0], halves[:, 1].flatten(), rtol=1e-9, atol=1e-9)


def test_monitors_and_batch_norm(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm = Network(), nn.BatchNorm1d(12)

        def forward(self, x):
            return self.norm(self.net(x))

    def make(seed=1):
        torch.manual_seed(seed)
        return Normed()

    def rank_main(rank):
        logged = {}

        class Keep(hocket.Logger):
            all_ranks = True

            def log_metrics(self, state, metrics):
                logged.update(metrics)

            def log_histogram(self, state, name, counts, edges):
                logged[name] = sum(counts)

        layers = {"every": 2, "by": "parameter", "histograms": True}
        monitors = [{"nan-monitor": {"every": 1}}, {"optimizer-monitor": {"every": 2}}, {"gradient-monitor": layers}]
        one = trainer(
            make(1 + rank), FSDP(), tmp_path, callbacks=monitors, loggers=[Keep()], log_every="2ba", duration="1ep"
        )
        one.fit()
        norm = torch.linalg.vector_norm(torch.cat([p.flatten() for p in one.model_state_dict().values() if p.dim()]))
        return one.model_state_dict(), logged, norm.item(), one.state.model.net.embed.weight.shape

    first, second = run_ranks(rank_main, 2)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    assert first[1]["optimizer/gradient_norm"] == pytest.approx(second[1]["optimizer/gradient_norm"])
    own = [v for n, v in first[0].items() if "running" not in n and v.dim() and n != "net.head.weight"]
    norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in own])).item()
    assert first[1]["optimizer/weight_norm"] == pytest.approx(norm, rel=1e-6)
    for name in ("net.embed.weight", "norm.weight"):
        expected = torch.linalg.vector_norm(first[0][name]).item()
        assert first[1][f"gradient/weight_norm/{name}"] == second[1][f"gradient/weight_norm/{name}"]
        assert first[1][f"gradient/weight_norm/{name}"] == pytest.approx(expected, rel=1e-6)
        assert (
            first[1][f"gradient/histogram/{name}"] == second[1][f"gradient/histogram/{name}"] == first[0][name].numel()
        )
    parts = [value**2 for name, value in first[1].items() if name.startswith("gradient/norm/")]
    assert sum(parts) ** 0.5 == pytest.approx(first[1]["optimizer/gradient_norm"], rel=1e-6)


@pytest.mark.long
def test_compiled(tmp_path):
    by_rank = ranks(2, lambda: FSDP(), tmp_path, compile={"backend": "eager"}, duration="4ba")
    same(by_rank, alone(tmp_path, duration="4ba"), 1e-9)


def test_recomputing_keeps_names_and_frees_activations(tmp_path):
    """What autograd keeps for backward, in bytes, with and without."""

    def rank_main(rank, options):
        one = trainer(network(), FSDP(**options), tmp_path)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            one.state.prepared(next(iter(data())))
        assert any(isinstance(module, Block) for module in one.state.model.modules())
        return sum(kept), [name for name, _ in one.state.model.named_parameters()]

    for less, more in zip(run_ranks(rank_main, 2, {"checkpoint": True}), run_ranks(rank_main, 2, {}), strict=True):
        assert less[0] < 0.5 * more[0] and less[1] == more[1] == [name for name, _ in network().named_parameters()]
