"""Activation checkpointing against the same model without it: bitwise, in less memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import hocket
from hocket import NoEffectWarning
from hocket_general import ActivationCheckpointing
from hocket_general.functional import checkpoint_activations
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_testkit.reference import TwoSteps


class Block(nn.Module):
    """A residual block with what makes recomputation differ: batch norm, dropout, spectral norm, a generator of its own."""

    def __init__(self, channels=4, norm=nn.BatchNorm2d, spectral=True, draws=True):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = norm(channels) if norm is nn.BatchNorm2d else norm(2, channels)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Conv2d(channels, channels, 1)
        if spectral:
            nn.utils.parametrizations.spectral_norm(self.last)
        self.generator = torch.Generator().manual_seed(5) if draws else None

    def forward(self, x, scale=1.0):
        kept = 1.0 if self.generator is None else torch.rand((), generator=self.generator)
        return x + kept * scale * self.dropout(self.last(F.relu(self.norm(self.conv(x)))))


def network(blocks=3, **options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), *(Block(**options) for _ in range(blocks)), nn.Flatten(), nn.Linear(4 * 36, 4)
    )


def train(model, steps=3, forward=None):
    """Return everything that a recomputation could change."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy((forward or model)(torch.randn(5, 3, 6, 6)), torch.arange(5) % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    drawn = [part.generator.get_state() for part in model.modules() if getattr(part, "generator", None)]
    return [*losses, *gradients, *model.state_dict().values(), *drawn, torch.get_rng_state()]


def bitwise(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


class TestActivationCheckpointing(AlgorithmConformance):
    exempt = {"test_has_an_effect": "it trains bitwise as without it"}

    def make(self):
        return ActivationCheckpointing()

    def model(self):
        blocks = (nn.Sequential(nn.Conv2d(c, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU()) for c in (3, 8))
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(72, 4))


KINDS = [{}, {"every": 2}, {"save": "matmuls"}, {"save": ["convolution"], "every": 2}, {"blocks": ["[13]", Block]}]


@pytest.mark.parametrize("arguments", KINDS, ids=str)
def test_training_is_bitwise_that_without_it(arguments):
    """Also batch norm's statistics, which a recomputation in training mode updates a second time, and all generators."""
    model, changed = checkpoint_activations(network(), **arguments)
    assert len(changed) == (2 if "every" in arguments else 3)
    assert bitwise(train(model), train(network()))


def test_torch_alone_updates_the_statistics_twice():
    """The trap: if torch avoids it one day, this module gets shorter."""
    block = nn.Sequential(nn.BatchNorm1d(3))
    torch.utils.checkpoint.checkpoint(block, torch.randn(4, 3), use_reentrant=False).sum().backward()
    assert block[0].num_batches_tracked == 2


def test_several_backward_passes_and_forward_passes_repeat_the_right_one():
    """As for two losses, and for a discriminator that sees two batches before the backward pass."""

    def gradients(model):
        torch.manual_seed(3)
        x, y = torch.randn(2, 5, 3, 6, 6)
        first, second = model(x), model(y)
        first.sum().backward(retain_graph=True)
        second.pow(2).sum().backward()
        first.pow(2).sum().backward()
        return [*(parameter.grad for parameter in model.parameters()), *model.state_dict().values()]

    assert bitwise(gradients(checkpoint_activations(network())[0]), gradients(network()))


def test_evaluation_and_frozen_batch_norm_are_exact():
    def outputs(model):
        train(model, 1)
        model.eval()
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            plain = model(x)
        other = model(x)
        other.sum().backward()
        return [plain, other, *model.state_dict().values(), *(p.grad for p in model.parameters())]

    assert bitwise(outputs(checkpoint_activations(network())[0]), outputs(network()))


def saved_bytes(model, *args):
    """What is kept for the backward pass between forward and backward, without parameters."""
    held, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args)
    return sum(held.values())


def test_fewer_activations_are_kept():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 128, batch_first=True)
    plain = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    x = torch.randn(4, 16, 32)

    def kept(**arguments):
        return saved_bytes(checkpoint_activations(copy.deepcopy(plain), **arguments)[0], x)

    full, half = kept(), kept(every=2)
    everything = saved_bytes(plain, x)
    assert full < 0.1 * everything and 0.4 * everything < half < 0.6 * everything


def test_selected_operations_are_not_computed_again():
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    def seen(**arguments):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
        checkpoint_activations(model, **arguments)
        out = model(torch.randn(3, 4))
        counting = Counting()
        counting.seen = []
        with counting:
            out.sum().backward()
        return counting.seen.count("addmm"), counting.seen.count("tanh")

    assert seen() == (2, 2)  # the last product of a block is not needed again
    assert seen(save="matmuls") == seen(save=["addmm"]) == (0, 2)
    assert seen(save="tanh") == (2, 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"save": ["matrix_product"]}, "no operation of torch.ops.aten"),
        ({"save": ["linear"]}, "'addmm' and 'mm'"),
        ({"every": 0}, "every=0"),
        ({"blocks": ["Blok"]}, "'Blok'.*Block"),
    ],
)
def test_mistakes_are_answered(wrong, words):
    with pytest.raises(ValueError, match=words):
        checkpoint_activations(network(), **wrong)
    if "blocks" not in wrong:
        with pytest.raises(ValueError, match=words):
            ActivationCheckpointing(**wrong)


def names(model, **arguments):
    return [each.name for each in checkpoint_activations(model, **arguments)[1]]


def test_blocks_are_chosen_by_class_name_pattern_and_number():
    assert names(network(4)) == ["1", "2", "3", "4"]
    assert names(network(4), blocks=Block) == names(network(4), blocks="Block") == ["1", "2", "3", "4"]
    assert names(network(4), every=3) == ["1", "4"]
    assert names(network(4), blocks=["2", "4"]) == ["2", "4"]
    assert names(network(2), blocks=["Block", "*.conv"]) == ["1", "2"]  # blocks within blocks are part of them
    stages = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(nn.Conv2d(4, 4, 1), Block())])
    assert names(stages) == ["0", "1"]
    declared = network(2, spectral=False)
    declared._no_split_modules = ["Conv2d"]
    assert names(declared, every=2) == ["0", "1.last", "2.last"]
    with pytest.warns(NoEffectWarning, match="no modules of one class"):
        assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_names_classes_and_hooks_stay_and_copies_are_independent():
    plain = network(norm=nn.GroupNorm, spectral=False)
    parameters, keys = list(plain.parameters()), list(plain.state_dict())
    seen = []
    plain[1].register_forward_hook(lambda module, args, output: seen.append(module))
    model, _ = checkpoint_activations(plain)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys and type(model[1]) is Block
    train(model, 1)
    assert seen == [model[1]]
    fresh, _ = checkpoint_activations(network(norm=nn.GroupNorm, spectral=False))
    again = copy.deepcopy(fresh)
    assert again[1].forward.block is again[1]
    expected = train(network(norm=nn.GroupNorm, spectral=False))
    assert bitwise(train(again), expected) and bitwise(train(fresh), expected)
    with pytest.warns(NoEffectWarning, match="already applied to this .* module"):
        assert names(model) == []  # a second time changes nothing


def test_a_block_without_own_generator_pickles():
    model, _ = checkpoint_activations(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))))
    again = pickle.loads(pickle.dumps(model))
    assert again[0].forward.block is again[0]
    x = torch.randn(2, 4)
    assert torch.equal(again(x), model(x))


def test_a_forward_that_was_replaced_on_the_instance_is_kept():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    model[0].forward = lambda x: x * 3
    checkpoint_activations(model)
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(model[0](x), x * 3)


def test_arguments_and_nested_outputs_pass():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, *, mask=None, **rest):
            return {"out": self.linear(x) * mask, "rest": (rest["debugging"], x)}

    torch.manual_seed(0)
    model = nn.ModuleList([Two(), Two()])
    x, mask = torch.randn(2, 3), torch.tensor([1.0, 0.0, 2.0])
    expected = model[0](x, mask=mask, debugging=4)
    checkpoint_activations(model)
    out = model[0](x, mask=mask, debugging=4)
    assert torch.equal(out["out"], expected["out"]) and out["rest"][0] == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_of_the_trainer_is_bitwise_that_without_it(precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, 3, 6, 6, generator=generator), torch.arange(6) % 4) for _ in range(4)]

    def run(*algorithms):
        trainer = hocket.Trainer(
            model=network(), loss=F.cross_entropy, optimizer="adamw(lr=0.01)", train_data=data, duration="2ep",
            device="cpu", precision=precision, seed=3, algorithms=[*algorithms, {"ghost-batchnorm": {"ghost_batch_size": 3}}],
        )  # fmt: skip
        trainer.fit()
        return [*trainer.model_state_dict().values()]

    assert bitwise(run("activation-checkpointing"), run())


def test_it_is_the_last_to_change_the_model_whatever_the_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    algorithms = ["activation-checkpointing", "low-precision-layernorm", "weight-standardization", "factorize"]
    layers = [nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.LayerNorm(6)) for _ in range(2)]
    for given in (algorithms, algorithms[::-1]):
        made = hocket.Trainer(
            model=nn.Sequential(*copy.deepcopy(layers)), algorithms=given, precision="bf16", device="cpu"
        )
        assert [*made.plan().events["init"]] == [
            "factorize", "weight-standardization", "low-precision-layernorm", "activation-checkpointing",
        ]  # fmt: skip
        x = torch.randn(1, 256, 6, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert made.state.model(x).dtype == torch.bfloat16
        assert type(made.state.model[0][0].down).__name__ == "StandardizedConv2d"


@pytest.mark.long
@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize("save", [None, "matmuls"])
def test_compiled_it_trains_as_compiled_without_it(save, spectral):
    """With spectral norm, which the compiler cannot put into a checkpoint, blocks are recomputed outside of its graphs."""

    # In a fork, because compiling leaves threads of autograd behind, with which this process could not be forked any more.
    def rank_main(rank):
        plain = network(2, spectral=spectral, draws=False)
        expected = train(plain, forward=torch.compile(plain, backend="aot_eager"))
        torch._dynamo.reset()
        model, _ = checkpoint_activations(network(2, spectral=spectral, draws=False), save=save)
        return bitwise(train(model, forward=torch.compile(model, backend="aot_eager")), expected)

    assert run_ranks(rank_main, 1) == [True]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_bitwise_as_two_ranks_without_it(strategy, tmp_path, monkeypatch):
    pytest.importorskip("hocket_strategies")
    from hocket_strategies import FSDP

    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 6, 6, generator=generator), torch.arange(16) % 4)

    def rank(rank, algorithms):
        trainer = hocket.Trainer(
            model=network(spectral=False), loss=F.cross_entropy, optimizer="sgd(lr=0.1)", duration="2ep", device="cpu",
            seed=2, strategy=FSDP(wrap=["Block"]) if strategy == "fsdp" else strategy, algorithms=algorithms,
            train_data=torch.utils.data.DataLoader(data, 4),
        )  # fmt: skip
        trainer.fit()
        return [value.clone() for value in trainer.model_state_dict().values()]

    plain = run_ranks(rank, 2, [])
    for algorithm in ("activation-checkpointing", {"activation-checkpointing": {"save": "matmuls"}}):
        for one, other in zip(run_ranks(rank, 2, [algorithm]), plain, strict=True):
            assert bitwise(one, other)


@pytest.mark.long
def test_fsdp_recomputes_blocks_of_a_task_that_takes_its_own_steps(tmp_path, monkeypatch):
    pytest.importorskip("hocket_strategies")
    from hocket_strategies import FSDP

    monkeypatch.chdir(tmp_path)
    data = [(torch.randn(4, 4), torch.arange(4)) for _ in range(3)]

    def rank(rank, algorithms):
        torch.manual_seed(0)
        models = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))) for _ in range(2)]
        task = TwoSteps(tuple(models), F.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        trainer = hocket.Trainer(
            model=task, train_data=data, duration="1ep", device="cpu", algorithms=algorithms,
            strategy=FSDP(wrap=["Linear"], split_data=False),
        )  # fmt: skip
        trainer.fit()
        return [value.clone() for value in trainer.model_state_dict().values()]

    for one, other in zip(run_ranks(rank, 2, ["activation-checkpointing"]), run_ranks(rank, 2, []), strict=True):
        assert bitwise(one, other)
