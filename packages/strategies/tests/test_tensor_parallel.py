"""Tensor parallelism, alone and on one mesh with sharded data: the weights of one process."""

from __future__ import annotations

import pytest
import torch
from sharded_model import PLAN, adamw, alone, data, held, network, ranks, same, trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import hocket
from hocket import Need
from hocket.basics.dtensors import mesh_of
from hocket_strategies import TensorParallel
from hocket_testkit.ranks import RankError, run_ranks

#: Everything but the norms, which have 32 of 2,144 parameters of a block.
_ALL = PLAN | {"embed": "rowwise", "head": "colwise_gather_output"}


@pytest.mark.parametrize(
    "world_size, options",
    [
        (2, {"plan": PLAN}),
        pytest.param(4, {"plan": PLAN}, marks=pytest.mark.long),
        pytest.param(2, {"plan": _ALL}, marks=pytest.mark.long),
        (2, {"plan": {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}}),
        pytest.param(
            2, {"plan": {"*.up": "colwise_gather_output", "*.down": "rowwise_split_input"}}, marks=pytest.mark.long
        ),
        pytest.param(2, {"plan": PLAN, "checkpoint": True}, marks=pytest.mark.long),
        (2, {"tensor": 1, "shard": 2}),  # an axis of one needs no plan
        pytest.param(4, {"tensor": 2, "shard": 2, "plan": PLAN}, marks=pytest.mark.long),
        pytest.param(4, {"tensor": 2, "shard": None, "plan": _ALL}, marks=pytest.mark.long),
        pytest.param(4, {"tensor": 2, "replicate": 2, "plan": PLAN}, marks=pytest.mark.long),
        pytest.param(8, {"tensor": 2, "shard": 2, "replicate": 2, "plan": _ALL}, marks=pytest.mark.long),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, int) else " ".join(f"{k}={v}" for k, v in value.items() if k != "plan")
    ),
)
def test_trains_as_one_process_does(tmp_path, world_size, options):
    common = {"clip_gradients": 0.1, "duration": "4ba"}
    by_rank = ranks(world_size, lambda: TensorParallel(**options), tmp_path, microbatch=2, **common)
    same(by_rank, alone(tmp_path, **common), 1e-9)


@pytest.mark.parametrize(
    "world_size, options, share",
    [
        (2, {}, 0.55),
        pytest.param(4, {}, 0.3, marks=pytest.mark.long),
        pytest.param(4, {"shard": 2}, 0.3, marks=pytest.mark.long),
    ],
)
def test_single_precision_and_memory(tmp_path, world_size, options, share):
    common = {"precision": "fp32", "clip_gradients": 0.1}
    one = trainer(network(), "single", tmp_path, **common)
    one.fit()
    by_rank = ranks(world_size, lambda: TensorParallel(plan=_ALL, **options), tmp_path, held, microbatch=2, **common)
    same(by_rank, one.model_state_dict(), 1e-4)
    for _, mine in by_rank:
        assert mine <= share * held(one)


def test_parameters_lie_on_two_meshes_and_the_norm_is_over_both(tmp_path):
    class Norms(hocket.Callback):
        def __init__(self):
            self.norms = []

        def batch_end(self, state):
            self.norms.append(state.gradient_norm.item())

    def rank_main(rank):
        norms = Norms()
        strategy = "single" if rank is None else TensorParallel(tensor=2, shard=2, plan=PLAN)
        one = trainer(network(), strategy, tmp_path, clip_gradients=0.1, callbacks=[norms], duration="2ba")
        one.fit()
        meshes = {mesh.mesh_dim_names for p in one.state.task.parameters() if (mesh := mesh_of(p)) is not None}
        return norms.norms, meshes

    expected, none = rank_main(None)
    assert not none
    for norms, meshes in run_ranks(rank_main, 4):
        assert meshes == {("shard",), ("shard", "tensor")}
        assert norms == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adaptive", "SAM", "EMA", "norm", "value"])
def test_algorithms(tmp_path, name):
    hocket_general = pytest.importorskip("hocket_general")

    def algorithms():
        if name == "EMA":
            return [hocket_general.EMA(half_life="4ba")]
        if name == "SAM":
            return [hocket_general.SAM(0.05)]
        return [hocket_general.GradientClipping(name, 0.01)]

    def make():
        return TensorParallel(tensor=2, shard=2, plan=PLAN)

    options = {"eval_data": data(), "eval_every": "3ba"}
    one = trainer(network(), "single", tmp_path, algorithms=algorithms(), **options)
    one.fit()
    by_rank = ranks(4, make, tmp_path, lambda mine: mine.evaluate(), algorithms=algorithms, **options)
    same(by_rank, one.model_state_dict(), 1e-8)
    for _, values in by_rank:
        assert values == pytest.approx(one.evaluate(), rel=1e-8)


# --- ranks that compute one forward pass together


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = network(), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.net(x))


@pytest.mark.parametrize("seed", [None, pytest.param(3, marks=pytest.mark.long)])
def test_they_see_the_same_data_and_random_numbers(tmp_path, seed):
    """A shuffling loader, dropout, and an algorithm's own random numbers, with ranks that were seeded differently."""
    seen = []

    class Draw(hocket.Algorithm):
        events = {hocket.Event.BATCH_START}

        def apply(self, event, state):
            drawn = torch.rand(3, generator=state.generator(self, per_rank=True))
            seen.append((state.batch[0].tolist(), drawn.tolist(), state.timestamp.sample))

    class Outputs(hocket.Callback):
        def after_forward(self, state):
            seen.append(state.outputs.tolist())

    def rank_main(rank):
        model = Dropping()
        torch.manual_seed(rank)
        shuffled = torch.utils.data.DataLoader(data().dataset, 8, shuffle=True)
        strategy = TensorParallel(tensor=2, shard=2, plan={f"net.{k}": v for k, v in PLAN.items()})
        parts = {
            "algorithms": [Draw()],
            "callbacks": [Outputs()],
            "train_data": shuffled,
            "seed": seed,
            "duration": "2ba",
        }
        one = trainer(model, strategy, tmp_path, **parts)
        one.fit()
        state = one.state
        return seen, (state.strategy.data_rank, state.strategy.data_ranks), state.timestamp.sample

    by_rank = run_ranks(rank_main, 4)
    assert [data_rank for _, data_rank, _ in by_rank] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [samples for *_, samples in by_rank] == [16] * 4
    for first, second in (by_rank[:2], by_rank[2:]):
        assert first[0] == second[0]
    if seed is not None:  # otherwise random numbers of ranks are what the process made them
        assert by_rank[0][0][0][1] != by_rank[2][0][0][1]
    assert by_rank[0][0][0][0] != by_rank[2][0][0][0]


@pytest.mark.long
def test_losses_that_are_means_over_something_else(tmp_path):
    def counted(outputs, targets):
        targets = targets.flatten()
        number = (targets > 3).sum()
        per_word = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (per_word * (targets > 3)).sum() / number.clamp(min=1), number

    options = {"loss": counted, "microbatch": 1}
    by_rank = ranks(4, lambda: TensorParallel(tensor=2, shard=2, plan=PLAN), tmp_path, **options)
    same(by_rank, alone(tmp_path, loss=counted), 1e-9)


class Sum:
    total = 0.0

    def update(self, outputs, targets):
        self.total += targets.double().sum().item()

    def compute(self):
        return self.total

    def reset(self):
        self.total = 0.0

    def merge_state(self, others):
        self.total += sum(other.total for other in others)


@pytest.mark.parametrize("world_size, options", [(4, {"shard": 2}), pytest.param(2, {}, marks=pytest.mark.long)])
def test_metrics_count_each_sample_once(tmp_path, world_size, options):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Words(torchmetrics.SumMetric):
        def update(self, outputs, targets):
            super().update(targets.double())

    def rank_main(rank):
        metrics = {"sum": Sum(), "words": Words(), "both": torchmetrics.MetricCollection({"a": Words(), "b": Words()})}
        one = trainer(network(), TensorParallel(plan=PLAN, **options), tmp_path, eval_data=data(), metrics=metrics)
        return one.evaluate()

    total = float(data().dataset.tensors[1].sum())
    for values in run_ranks(rank_main, world_size):
        assert {values[f"eval/{name}"] for name in ("sum", "words", "both/a", "both/b")} == {total}


def test_what_it_offers():
    assert TensorParallel.offers == Need.SECOND_GRADIENT | Need.SEVERAL_STEPS


# --- plans


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"blocks.*.uq": "colwise"}, r"names 'blocks.\*.uq', but the model has no such module. It has embed, blocks"),
        ({"*.up": "columns"}, "the style 'columns': use one of 'colwise', 'colwise_gather_output', 'rowwise'"),
        (
            {"blocks.0.norm": "colwise"},
            "divides blocks.0.norm, a LayerNorm, but 'colwise' and 'rowwise' are for Linear",
        ),
        ({"embed": "rowwise"}, "embed.weight and head.weight are one parameter, .* divides them differently"),
        (None, "has no plan for Network: its layers are not named like those of GPT-2 or Llama"),
    ],
)
def test_plans_that_cannot_be(tmp_path, plan, message):
    def rank_main(rank):
        trainer(network(), TensorParallel(plan=plan), tmp_path)

    with pytest.raises(RankError, match=message):
        run_ranks(rank_main, 2)


def test_dimensions_that_cannot_be_divided_evenly(tmp_path):
    def rank_main(rank):
        trainer(nn.Sequential(nn.Linear(4, 7)), TensorParallel(plan={"0": "colwise"}), tmp_path)

    with pytest.raises(RankError, match=r"0.weight of shape \(7, 4\) along dimension 0, which 2 ranks cannot"):
        run_ranks(rank_main, 2)


def test_the_model_may_bring_its_plan(tmp_path):
    def make(seed=1):
        model = network(seed)
        model.tensor_parallel_plan = PLAN
        return model

    def divided(one):
        return one.state.model.blocks[1].up.weight.to_local().shape

    by_rank = ranks(2, lambda: TensorParallel(), tmp_path, divided, make=make)
    same(by_rank, alone(tmp_path), 1e-9)
    assert [shape for _, shape in by_rank] == [(32, 16)] * 2


def _gpt2(transformers, **changes):
    sizes = {"vocab_size": 64, "n_positions": 9, "n_embd": 32, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | no_dropout | changes))


def _llama(transformers, **changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | changes))


@pytest.mark.long
@pytest.mark.parametrize("build", [_gpt2, _llama])
@pytest.mark.parametrize(
    "world_size, options", [(2, {}), pytest.param(4, {"shard": 2}, marks=pytest.mark.long)], ids=["tensor", "both"]
)
def test_models_of_transformers_need_no_plan(tmp_path, build, world_size, options):
    transformers = pytest.importorskip("transformers")
    # Eight labels a row after the shift: the losses are float32, and weights that are powers of two add no rounding.
    words = torch.randint(64, (16, 9), generator=torch.Generator().manual_seed(0))

    def make():
        torch.manual_seed(1)
        return build(transformers, use_cache=False)

    def rank_main(rank):
        strategy = "single" if rank is None else TensorParallel(**options)
        batches = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in words], 4)
        one = trainer(make(), strategy, tmp_path, loss=None, train_data=batches, duration="2ba", clip_gradients=0.5)
        one.fit()
        return one.model_state_dict(), held(one)

    expected, whole = rank_main(None)
    by_rank = run_ranks(rank_main, world_size, timeout=200)
    same(by_rank, expected, 1e-8)
    for _, mine in by_rank:
        assert mine <= (0.55 if world_size == 2 else 0.3) * whole


def test_models_that_the_built_in_plan_would_train_wrongly(tmp_path):
    transformers = pytest.importorskip("transformers")

    def qwen3():
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes | heads))

    def rank_main(rank, make):
        trainer(make(), TensorParallel(), tmp_path, loss=None, optimizer=adamw)

    with pytest.raises(RankError, match=r"does not know model.layers.0.self_attn.q_norm.weight"):
        run_ranks(rank_main, 2, qwen3)
    with pytest.raises(RankError, match="has num_key_value_heads=1, which 2 ranks cannot divide evenly"):
        run_ranks(rank_main, 2, lambda: _llama(transformers, num_key_value_heads=1))
