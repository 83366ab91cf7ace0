"""Channel pruning against models whose removed channels are zero, and hand-made slices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit import run_ranks
from hocket_tools import ChannelPruning, prune_channels

EMA = pytest.importorskip("hocket_general").EMA
Distillation = pytest.importorskip("hocket_general").Distillation
small_resnet = pytest.importorskip("hocket_vision.models").small_resnet

pytest.importorskip("torch_pruning")
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def resnet():
    torch.manual_seed(0)
    return small_resnet(widths=(8, 16), num_classes=5)


def data(batches=4):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batches * 8, 1, 8, 8, generator=generator)
    labels = images.flatten(1).argmax(1).remainder(5)
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def trainer(*algorithms, model=None, **changes):
    arguments = {
        "loss": F.cross_entropy, "train_data": data(), "duration": "2ep", "device": "cpu", "seed": 3,
        "optimizer": "adamw(lr=0.01)",
    }  # fmt: skip
    return hocket.Trainer(model=model or resnet(), **{**arguments, **changes}, algorithms=algorithms)


def test_channels_that_are_zero_are_removed_and_nothing_changes():
    """Half of the channels of every group, residual ones too, are silenced by hand; the outputs stay."""
    model = resnet().eval()
    generator = torch.Generator().manual_seed(5)
    silent = {8: torch.randperm(8, generator=generator)[:4], 16: torch.randperm(16, generator=generator)[:8]}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(generator=generator)
                module.bias.normal_(generator=generator)
                off = silent[module.num_features]
                for tensor in (module.weight, module.bias):
                    tensor[off] = 0
            elif isinstance(module, nn.Conv2d):
                module.weight[silent[module.out_channels]] = 0
    images, _ = next(iter(data()))
    expected = model(images).detach()
    model, changed = prune_channels(model, images)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-6)
    assert [str(each) for each in changed][:2] == [
        "stem.0: (8, 1, 3, 3) -> (4, 1, 3, 3)", "stage1.0.conv1: (8, 8, 3, 3) -> (4, 4, 3, 3)",
    ]  # fmt: skip
    assert model.classifier.in_features == 8 and model.classifier.out_features == 5
    assert model.stage2[0].shortcut.norm.num_features == 8


def test_the_optimizer_continues_with_the_state_of_the_remaining_weights():
    """The layers and the channels of least norm by hand, and Adam on tensors that were sliced by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(16, 6), torch.randn(16, 3)

    def step(model, optimizer):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    # Of the outputs of the first layer and the inputs of the second together, as DepGraph has it.
    size = model[0].weight.pow(2).sum(1) + model[2].weight.pow(2).sum(0)
    kept = size.topk(4).indices.sort().values
    by_hand = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    parts = [
        (model[0].weight, kept),
        (model[0].bias, kept),
        (model[2].weight, (slice(None), kept)),
        (model[2].bias, slice(None)),
    ]
    hand_optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.1)
    for mine, (old, part) in zip(by_hand.parameters(), parts, strict=True):
        mine.data = old.data[part].clone()
        held = optimizer.state[old]
        hand_optimizer.state[mine] = {
            "step": held["step"].clone(),
            "exp_avg": held["exp_avg"][part].clone(), "exp_avg_sq": held["exp_avg_sq"][part].clone(),
        }  # fmt: skip
    with pytest.raises(RuntimeError, match="del loss"):
        prune_channels(model, (2, 6), optimizer=optimizer)
    del size
    before = list(model.parameters())
    prune_channels(model, (2, 6), optimizer=optimizer)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    for _ in range(3):
        step(model, optimizer)
        step(by_hand, hand_optimizer)
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_pruned_run_is_resumed_bitwise_with_averages_and_a_teacher():
    def run(duration, folder, resume=None):
        pruning, ema = ChannelPruning(example=[2, 1, 8, 8]), EMA(half_life="2ba")
        made = trainer(
            pruning, ema, Distillation(resnet()), duration="2ep", resume=resume,
            checkpoints=hocket.Checkpoints(folder, every="1ep"),
        )  # fmt: skip
        made.fit(*([duration] if duration != "2ep" else []))
        return made

    whole = run("2ep", "runs/whole")
    run("1ep", "runs/half")
    resumed = run("2ep", "runs/half", "auto")
    assert whole.state.model.stage2[0].conv2.weight.shape == (8, 8, 3, 3)
    for evaluated in (True, False):
        mine, theirs = (each.model_state_dict(evaluated=evaluated) for each in (whole, resumed))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.long
def test_two_ranks():
    def train(rank):
        run = trainer(ChannelPruning(example=[2, 1, 8, 8]), strategy="ddp")
        run.fit()
        return {name: value.numpy() for name, value in run.model_state_dict().items()}

    first, second = run_ranks(train, 2)
    assert first["classifier.weight"].shape == (5, 8)
    assert all((first[name] == second[name]).all() for name in first)


class Reshapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 2)

    def forward(self, x):
        return self.last(self.first(x).reshape(len(x), 8 * 36))


def test_a_model_that_cannot_be_pruned_is_not_changed():
    model = Reshapes()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="keep="):
        prune_channels(model, (2, 1, 8, 8))
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    with pytest.warns(hocket.NoEffectWarning, match="nothing to remove"):
        prune_channels(model, (2, 1, 8, 8), keep=["first"])


def test_layers_that_keep_their_channels_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.frozen, self.narrow = (
                nn.Linear(4, 8),
                nn.Linear(8, 8).requires_grad_(False),
                nn.Linear(8, 1),
            )
            self.kept, self.last, self.unused = nn.Linear(1, 4), nn.Linear(4, 2), nn.Linear(3, 3)

        def forward(self, x):
            return self.last(self.kept(self.narrow(self.frozen(self.wide(x)))))

    said = r"of narrow \(fewer than 2 channels\), unused \(not called with the example\)\."
    with pytest.warns(hocket.NoEffectWarning, match=said):
        _, changed = prune_channels(Net(), (2, 4), keep=["kept"])
    assert [each.name for each in changed] == ["wide", "frozen", "narrow"]


def test_kept_layers_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"'firts' matches none of the 2 layers.*'first'"):
        prune_channels(Reshapes(), (2, 1, 8, 8), keep=["last", "firts"])


@pytest.mark.parametrize(("amount", "round_to", "width"), [(0.9, 1, 11), (0.1, 8, 9), (0.5, 8, 16)])
def test_it_says_how_many_channels_it_needs(amount, round_to, width):
    narrow, wide = (nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2)) for n in (width - 1, width))
    with pytest.warns(hocket.NoEffectWarning, match=f"has {width} channels or more.*Lower"):
        prune_channels(narrow, (2, 4), amount, round_to=round_to)
    assert prune_channels(wide, (2, 4), amount, round_to=round_to)[0][0].out_features == round_to


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"amount": 1}, "is not a fraction between 0 and 1"),
        ({"round_to": 0}, r"round_to=0 is too small\. Give 1 or more: round_to=8"),
        ({"keep": "stem"}, "keep=\\['stem'\\]"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises((ValueError, TypeError), match=said):
        ChannelPruning(example=[2, 1, 8, 8], **arguments)


def test_multiples_and_the_plan():
    model = resnet()
    lines = ChannelPruning(example=[2, 1, 8, 8], amount=0.4, round_to=4, keep=["stage1.0.conv1"]).touches(model)
    assert "stage2.0.conv2: (16, 16, 3, 3) -> (8, 8, 3, 3)" in lines
    assert "stage1.0.conv1: (8, 8, 3, 3) -> (8, 4, 3, 3)" in lines and model.stem[0].out_channels == 8


def test_an_optimizer_of_another_model_is_refused():
    model, other = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"SGD of optimizer= has no parameter of this Sequential.*made of model\.parameters"
    ):
        prune_channels(model, (2, 4), optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert model[0].out_features == 8
