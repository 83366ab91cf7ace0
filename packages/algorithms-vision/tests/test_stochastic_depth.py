"""Stochastic depth against its equations written out, torchvision's operator, and runs on several ranks."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_testkit.reference import CLASSES, labelled_images
from hocket_vision import StochasticDepth, small_resnet
from hocket_vision.branch_drop import BranchDrop
from hocket_vision.functional import stochastic_depth
from hocket_vision.models import ResidualBlock


class Block(nn.Module):
    """A pre-activation block without batch norm, so that microbatches compute the same."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.conv(F.relu(self.norm(x))))


def network(blocks: int = 4, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        *(Block(16, dropout) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


class TestStochasticDepth(AlgorithmConformance):
    training = "12ep"

    def make(self):
        return StochasticDepth(drop_rate=0.3, blocks="Block", warmup="0.25dur")

    def model(self):
        return network()

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.003)


@pytest.mark.long
class TestStochasticDepthBySample(TestStochasticDepth):
    def make(self):
        return StochasticDepth(drop_rate=0.2, blocks="Block", method="sample", rescale=True)


def loader() -> DataLoader:
    images, labels = (torch.cat(each) for each in zip(*labelled_images(32), strict=True))
    return DataLoader(TensorDataset(images, labels), 8)


def trainer(model: nn.Module, algorithm: StochasticDepth | None, **changes) -> hocket.Trainer:
    arguments = {
        "model": model,
        "loss": "cross_entropy",
        "train_data": loader(),
        "optimizer": "sgd(lr=0.05)",
        "duration": "2ep",
        "algorithms": [] if algorithm is None else [algorithm],
        "seed": 3,
        "device": "cpu",
        **changes,
    }
    return hocket.Trainer(**arguments)


def seeded_network(**settings) -> nn.Sequential:
    torch.manual_seed(0)
    return network(**settings)


def decide(changed, decisions) -> None:
    for replacement, decision in zip(changed, decisions, strict=True):
        replacement.new.stochastic_depth.decision = decision


# --- rates


def test_sixteen_blocks_of_a_resnet50_drop_linearly():
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        _, changed = stochastic_depth(torchvision.models.resnet50(), drop_rate=0.2)
    rates = [replacement.new.stochastic_depth.rate for replacement in changed]
    assert rates == pytest.approx([0.0125 * (i + 1) for i in range(16)], abs=1e-12)
    assert rates[0] == pytest.approx(0.0125) and rates[-1] == 0.2
    with torch.device("meta"):
        _, changed = stochastic_depth(torchvision.models.resnet18(), distribution="uniform")
    assert [replacement.new.stochastic_depth.rate for replacement in changed] == [0.2] * 8


@pytest.mark.parametrize("duration", ["1ep", "2ep", "8ba"])
def test_warm_up_advances_by_batch_and_reaches_its_target(duration):
    """The trap: rates that stay at the last value of the warm-up while the log says the target."""
    seen, logged, evaluated = [], [], []

    class Watch(hocket.Callback):
        def after_train_batch(self, state):
            seen.append([drop.rate for drop, _ in algorithm._drops])
            logged.append(state.logged["stochastic-depth/drop_rate"])

        def eval_start(self, state):
            evaluated.append([drop.rate for drop, _ in algorithm._drops])

    algorithm = StochasticDepth(drop_rate=0.4, blocks="Block", warmup="0.5dur")
    run = trainer(
        seeded_network(blocks=2), algorithm, duration=duration, callbacks=[Watch()], eval_data=labelled_images(8)
    )
    run.fit()
    batches = len(seen)
    fractions = [min(1, 2 * batch / batches) for batch in range(batches)]
    assert seen == [pytest.approx([0.2 * fraction, 0.4 * fraction]) for fraction in fractions]
    assert seen[-1] == [0.2, 0.4] == evaluated[-1] and logged == [rates[-1] for rates in seen]
    assert [drop.rate for drop, _ in algorithm._drops] == [0.2, 0.4]


def test_a_resumed_run_evaluates_with_the_rates_of_its_position():
    def run() -> tuple[hocket.Trainer, StochasticDepth]:
        algorithm = StochasticDepth(drop_rate=0.4, blocks="Block", warmup="1dur")
        return trainer(seeded_network(), algorithm, eval_data=labelled_images(8)), algorithm

    first, before = run()
    first.fit("3ba")
    second, after = run()
    second.load_state_dict(first.state_dict())
    assert second.evaluate() == first.evaluate()
    assert [drop.rate for drop, _ in after._drops] == [drop.rate for drop, _ in before._drops]
    assert after._drops[-1][0].rate == pytest.approx(0.4 * 3 / 8)


# --- what a block computes


def residual_blocks() -> list[nn.Module]:
    resnet = pytest.importorskip("torchvision").models.resnet

    def downsample(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, channels, 1, 2, bias=False), nn.BatchNorm2d(channels))

    return [
        resnet.BasicBlock(8, 8),
        resnet.BasicBlock(8, 16, 2, downsample(16)),
        resnet.Bottleneck(8, 2),
        resnet.Bottleneck(8, 4, 2, downsample(16)),
        ResidualBlock(8, 8),
        ResidualBlock(8, 16, 2),
    ]


def parts(block: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the branch and the shortcut, written out."""
    if isinstance(block, ResidualBlock):
        return block.norm2(block.conv2(F.relu(block.norm1(block.conv1(x))))), block.shortcut(x)
    out = F.relu(block.bn1(block.conv1(x)))
    out = block.bn2(block.conv2(out))
    if hasattr(block, "conv3"):
        out = block.bn3(block.conv3(F.relu(out)))
    return out, x if block.downsample is None else block.downsample(x)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("rescale", [False, True])
def test_residual_blocks_compute_the_papers_equations(index, rescale):
    torch.manual_seed(0)
    plain = residual_blocks()[index]
    x, rate = torch.randn(5, 8, 6, 6), 0.3
    branch, shortcut = parts(copy.deepcopy(plain), x)

    def made(method: str):
        model = nn.Sequential(copy.deepcopy(plain))
        return stochastic_depth(model, drop_rate=rate, method=method, rescale=rescale)

    kept = branch / (1 - rate) if rescale else branch
    model, changed = made("block")
    assert list(model.state_dict()) == [f"0.{name}" for name in plain.state_dict()]
    decide(changed, [False])
    torch.testing.assert_close(model(x), F.relu(shortcut))
    assert x.equal(x.clone())
    decide(changed, [True])
    torch.testing.assert_close(model(x), F.relu(kept + shortcut))
    if not rescale:
        assert made("block")[0].eval()(x).shape == model(x).shape
        other = copy.deepcopy(plain)
        model, changed = made("block")
        decide(changed, [True])
        assert model(x).equal(other(x))  # bitwise

    model, changed = made("sample")
    keep = torch.tensor([True, False, True, False, False])
    decide(changed, [keep])
    torch.testing.assert_close(model(x), F.relu(torch.where(keep[:, None, None, None], kept, 0) + shortcut))

    reference = copy.deepcopy(plain).eval()
    branch, shortcut = parts(reference, x)
    model = made("sample")[0].eval()
    torch.testing.assert_close(model(x), F.relu(branch * (1 if rescale else 1 - rate) + shortcut))


def test_other_blocks_interpolate_between_input_and_output():
    torch.manual_seed(0)
    block, x = Block(8), torch.randn(4, 8, 5, 5)
    model, changed = stochastic_depth(nn.Sequential(block), drop_rate=0.25, method="sample", blocks="Block")
    keep = torch.tensor([True, False, False, True])
    decide(changed, [keep])
    assert model(x).equal(torch.where(keep[:, None, None, None], block(x), x))
    torch.testing.assert_close(model.eval()(x), x + 0.75 * (block(x) - x))


def test_by_sample_with_rescale_is_torchvisions_operator():
    ops = pytest.importorskip("torchvision").ops
    branch = torch.randn(64, 8, 2, 2)
    torch.manual_seed(5)
    expected = ops.stochastic_depth(branch, 0.3, "row")
    _, changed = stochastic_depth(nn.Sequential(ResidualBlock(8, 8)), drop_rate=0.3, method="sample", rescale=True)
    drop = changed[0].new.stochastic_depth
    drop.decision = expected.flatten(1).any(1)
    torch.testing.assert_close(branch * drop.factor(branch), expected)
    assert 10 < int((~drop.decision).sum()) < 30


@pytest.mark.parametrize("method", ["block", "sample"])
def test_without_decisions_blocks_draw_themselves_at_their_rate(method):
    torch.manual_seed(0)
    model, _ = stochastic_depth(
        nn.Sequential(Block(4)), drop_rate=0.3, method=method, distribution="uniform", blocks="Block"
    )
    x = torch.ones(100, 4, 1, 1)
    with torch.no_grad():
        dropped = torch.cat([(model(x) == x).flatten(1).all(1) for _ in range(400 if method == "block" else 20)])
    assert dropped.float().mean() == pytest.approx(0.3, abs=0.08)


def test_a_skipped_block_is_not_computed_and_has_zero_gradients():
    torch.manual_seed(0)
    plain = small_resnet()
    model, changed = stochastic_depth(plain)
    decide(changed, [False, True, False])
    before = copy.deepcopy(model.state_dict())
    model(torch.rand(4, 1, 8, 8)).square().sum().backward()
    for index, skipped in enumerate((True, False, True), 1):
        block = model.get_submodule(f"stage{index}.0")
        assert bool(block.conv2.weight.grad.any()) is not skipped
        assert block.norm1.running_mean.equal(before[f"stage{index}.0.norm1.running_mean"]) is skipped
    assert model.get_parameter("stage3.0.shortcut.conv.weight").grad.any()  # the shortcut of a skipped block trains


def test_the_module_after_a_skipped_block_may_act_in_place():
    torch.manual_seed(0)
    model, changed = stochastic_depth(nn.Sequential(Block(4), nn.ReLU(inplace=True)), blocks="Block")
    decide(changed, [False])
    x = torch.randn(2, 4, 3, 3)
    given = x.clone()
    out = model(x)
    out.sum().backward()
    assert out.equal(given.relu()) and x.equal(given) and not model[0].conv.weight.grad.any()


# --- which blocks


def test_patterns_name_classes_or_modules_and_take_outer_blocks():
    def names(*patterns: str) -> list[str]:
        return [replacement.name for replacement in stochastic_depth(small_resnet(), blocks=patterns)[1]]

    every = [f"stage{i}.0" for i in (1, 2, 3)]
    assert names("ResidualBlock") == names("stage?.0") == names("Residual*", "stage1.0.conv*") == every
    assert names("stage1.0.conv?") == ["stage1.0.conv1", "stage1.0.conv2"]
    assert stochastic_depth(small_resnet(), blocks="stage2.*")[1][0].name == "stage2.0"


def test_a_subclass_with_its_own_forward_is_not_taken_for_its_base():
    class PreActivation(ResidualBlock):
        def forward(self, x):
            return x + self.conv2(F.relu(self.norm2(x)))

    class Renamed(ResidualBlock):
        pass

    _, changed = stochastic_depth(nn.Sequential(PreActivation(8, 8), Renamed(8, 8)))
    assert [replacement.name for replacement in changed] == ["1"]


def test_nothing_to_change_is_said():
    for settings in ({}, {"blocks": "Bloc"}):
        with pytest.warns(hocket.NoEffectWarning, match=r"blocks='\*Block'"):
            assert stochastic_depth(network(), **settings)[1] == []


@pytest.mark.parametrize("blocks", [None, "ResidualBlock", "stage*.0"])
def test_blocks_with_stochastic_depth_get_the_settings_of_a_second_call(blocks):
    """The same as a plain model that gets only those: outputs, gradients and draws."""
    plain = small_resnet()
    once, twice = copy.deepcopy(plain), copy.deepcopy(plain)
    settings = {"drop_rate": 0.4, "method": "sample", "rescale": True, "blocks": blocks}
    _, first = stochastic_depth(once, **settings)
    stochastic_depth(twice, drop_rate=0.9, distribution="uniform")
    parts = list(twice.modules())
    _, second = stochastic_depth(twice, **settings)
    assert [each.name for each in first] == [each.name for each in second]
    assert all(a is b for a, b in zip(twice.modules(), parts, strict=True))
    images, results = torch.randn(6, 1, 8, 8), []
    for model in (once, twice):
        torch.manual_seed(3)
        out = model.train()(images)
        out.square().sum().backward()
        results.append([out, model.eval()(images), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_second_trainer_drives_the_blocks_of_the_first_with_its_settings():
    model = small_resnet()
    hocket.Trainer(model=model, algorithms=[StochasticDepth(0.5)], device="cpu")
    second = StochasticDepth(0.1, warmup="2ba")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = hocket.Trainer(
            model=model, loss=nn.CrossEntropyLoss(), train_data=[(torch.randn(4, 1, 8, 8), torch.arange(4))] * 4,
            optimizer="sgd(lr=0.01)", duration="1ep", algorithms=[second], device="cpu", loggers=[],
        )  # fmt: skip
        drops = [module for module in model.modules() if isinstance(module, BranchDrop)]
        assert len(drops) == 3 and [drop.rate for drop in drops] == [0, 0, 0]
        assert len(second.touches(model)) == 3
        assert "stage3.0: ResidualBlock drops" in second.touches(model)[-1]
        trainer.fit()
    assert [drop.rate for drop in drops] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])


class Wider(nn.Conv2d):
    pass


class Pair(nn.Module):
    def forward(self, x):
        return x, None


@pytest.mark.parametrize(("block", "found"), [(Wider(4, 8, 1), r"shape \(2, 8, 3, 3\)"), (Pair(), "tuple")])
def test_blocks_that_are_not_residual_are_refused_by_name(block, found):
    model, changed = stochastic_depth(nn.Sequential(block), blocks="0")
    decide(changed, [True])
    with pytest.raises(ValueError, match=f"0 returned {found}.*blocks="):
        model(torch.zeros(2, 4, 3, 3))


def test_dimension_0_that_is_not_the_samples_is_refused():
    model, changed = stochastic_depth(nn.Sequential(Block(4)), blocks="Block", method="sample")
    decide(changed, [torch.tensor([True, False])])
    with pytest.raises(ValueError, match=r"2 samples, but 0 was given 6 .*method='block'"):
        model(torch.zeros(6, 4, 2, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop_rate": 1.0}, r"drop_rate is 1\.0"),
        ({"drop_rate": -0.1}, "drop_rate"),
        ({"method": "batch"}, "'block' or 'sample'"),
        ({"distribution": "cosine"}, "'linear' or 'uniform'"),
        ({"warmup": "10sec"}, "seconds"),
    ],
)
def test_wrong_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StochasticDepth(**settings)


def test_plan_says_which_blocks_and_where_their_branch_ends():
    assert StochasticDepth(drop_rate=0.3).touches(small_resnet())[-1] == (
        "stage3.0: ResidualBlock drops the branch up to norm2 with probability 0.3"
    )
    assert StochasticDepth(blocks="Block").touches(network(2)) == [
        "1: Block drops the block with probability 0.1",
        "2: Block drops the block with probability 0.2",
    ]


def test_transformer_encoder_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plain = copy.deepcopy(encoder).eval()
    x, padding = torch.randn(3, 5, 8), torch.tensor([[False] * 4 + [True]] * 3)
    encoder, changed = stochastic_depth(encoder, drop_rate=0.5)
    assert [replacement.name for replacement in changed] == ["layers.0", "layers.1"]
    decide(changed, [False, False])
    assert encoder(x).equal(x)
    encoder.eval()
    with torch.no_grad():
        first = x + 0.75 * (plain.layers[0](x, src_key_padding_mask=padding) - x)
        expected = first + 0.5 * (plain.layers[1](first, src_key_padding_mask=padding) - first)
        out = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[:, :4], expected[:, :4], atol=1e-5, rtol=1e-5)


def test_layers_that_normalise_their_output_are_not_the_input_plus_branches():
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.warns(hocket.NoEffectWarning):
        assert stochastic_depth(encoder)[1] == []


# --- what surgery keeps


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_have_state_and_hooks_of_their_own(copied):
    torch.manual_seed(0)
    model, _ = stochastic_depth(small_resnet(), drop_rate=0.5)
    other, x = copied(model), torch.rand(4, 1, 8, 8)
    assert isinstance(other[1][0], ResidualBlock) and other.eval()(x).equal(model.eval()(x))
    for block in other.modules():
        if isinstance(block, ResidualBlock):
            block.stochastic_depth.rate = 0.0
    plain = small_resnet()
    plain.load_state_dict(model.state_dict())
    assert other(x).equal(plain.eval()(x)) and not model(x).equal(other(x))


@pytest.mark.long
@pytest.mark.parametrize("method", ["block", "sample"])
def test_compiles_to_one_graph(method):
    model, changed = stochastic_depth(small_resnet(), method=method)
    decide(changed, [False, True, False] if method == "block" else [torch.tensor([True, False])] * 3)
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# --- runs


@pytest.mark.parametrize("method", ["block", "sample"])
def test_dropout_draws_the_same_numbers_with_and_without_it(method):
    plain = trainer(seeded_network(dropout=0.5), None)
    never = trainer(seeded_network(dropout=0.5), StochasticDepth(0.0, method, blocks="Block"))
    for run in (plain, never):
        run.fit()
    for name, weight in never.model_state_dict().items():
        assert weight.equal(plain.model_state_dict()[name]), name


def test_by_sample_microbatches_drop_what_the_full_batch_does():
    def weights(**changes) -> dict:
        run = trainer(seeded_network(), StochasticDepth(0.5, "sample", blocks="Block"), **changes)
        run.fit()
        return run.model_state_dict()

    full, split = weights(), weights(microbatch=3)
    for name, weight in split.items():
        torch.testing.assert_close(weight, full[name], atol=1e-5, rtol=1e-4)


class InParts(hocket.Algorithm):
    """Train on each batch in several steps."""

    events = {hocket.Event.BATCH_START}

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def apply(self, event, state):
        state.request_steps(self.parts)


def by_sample(*others: hocket.Algorithm, **changes) -> list[list[bool]]:
    """Return the decisions of two batches of 8 samples, by block, in the order in which samples are trained on."""
    watch = Watch()
    watch.algorithm = StochasticDepth(0.5, "sample", "uniform", blocks="Block")
    changes = {"algorithms": [watch.algorithm, *others], "callbacks": [watch], "duration": "2ba", **changes}
    trainer(seeded_network(), None, **changes).fit()
    return [[each for forward in watch.decisions for each in forward[block]] for block in range(2)]


def test_by_sample_draws_do_not_depend_on_how_a_batch_is_divided():
    whole = by_sample()
    assert len(whole[0]) == 16 and whole[0][:8] != whole[0][8:]
    assert by_sample(microbatch=3) == by_sample(InParts(2)) == by_sample(InParts(3), microbatch=2) == whole
    halves = [(images[at : at + 4], labels[at : at + 4]) for images, labels in labelled_images(16) for at in (0, 4)]
    assert by_sample(train_data=halves, accumulate="2ba") == whole
    sam = by_sample(InParts(2), pytest.importorskip("hocket_general").SAM())
    for block, expected in zip(sam, whole, strict=True):
        quarters = [expected[at : at + 4] for at in range(0, 16, 4)]
        assert block == [each for quarter in quarters for each in quarter * 2]


def test_by_sample_the_search_for_a_microbatch_size_uses_up_no_draws(tmp_path):
    pytest.importorskip("hocket_general")
    whole, searched = by_sample(), by_sample(microbatch="auto", folder=tmp_path)  # where nothing has been found before
    for block, expected in zip(searched, whole, strict=True):
        assert block[-16:] == expected and len(block) > 16  # the search computes forward passes of its own


class Watch(hocket.Callback):
    """Note the decisions of every forward pass."""

    algorithm: StochasticDepth

    def __init__(self) -> None:
        self.decisions: list[list[bool | list[bool]]] = []

    def after_forward(self, state):
        rows = [drop.decision for drop, _ in self.algorithm._drops]
        self.decisions.append([row if isinstance(row, bool) else row.tolist() for row in rows])


@pytest.mark.parametrize("method", ["block", "sample"])
def test_sams_second_pass_drops_what_the_first_one_did(method):
    def decisions(*others: hocket.Algorithm) -> list:
        watch = Watch()
        watch.algorithm = StochasticDepth(0.5, method, blocks="Block")
        changes = {"algorithms": [watch.algorithm, *others], "callbacks": [watch], "duration": "2ba", "microbatch": 3}
        trainer(seeded_network(), None, **changes).fit()
        return watch.decisions

    once, twice = decisions(), decisions(pytest.importorskip("hocket_general").SAM())
    first, second = once[:3], once[3:]  # three microbatches of a batch of 8
    assert twice == [*first, *first, *second, *second] and first != second


def _train(rank: int, strategy: object, method: str) -> tuple[list, dict]:
    watch = Watch()
    watch.algorithm = algorithm = StochasticDepth(0.6, method, "uniform", blocks="Block")
    run = trainer(seeded_network(), algorithm, strategy=strategy, global_batch=8, callbacks=[watch])
    run.fit()
    return watch.decisions, run.model_state_dict()


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param({"fsdp": {"wrap": 100}}, marks=pytest.mark.long)], ids=["ddp", "fsdp"]
)
def test_all_ranks_skip_the_same_blocks_and_none_waits(strategy):
    """Skipped blocks have no gradient of their own, and DDP would wait for it; the result is that of one process."""
    pytest.importorskip("hocket_strategies")
    (first, weights), (second, same) = run_ranks(partial(_train, strategy=strategy, method="block"), 2)
    assert first == second and any(not keep for row in first for keep in row)
    alone, expected = _train(0, "single", "block")
    assert alone == first
    for name, weight in weights.items():
        assert weight.equal(same[name])
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4)


def test_by_sample_ranks_drop_samples_of_their_own():
    pytest.importorskip("hocket_strategies")
    (first, weights), (second, same) = run_ranks(partial(_train, strategy="ddp", method="sample"), 2)
    assert first != second and all(weight.equal(same[name]) for name, weight in weights.items())
