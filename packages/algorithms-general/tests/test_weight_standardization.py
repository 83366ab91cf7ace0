"""Weight standardization against convolutions with weights that are standardized by hand."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket import NoEffectWarning
from hocket_general import WeightStandardization
from hocket_general.functional import standardize_weight, weight_standardization
from hocket_testkit import AlgorithmConformance, run_ranks


class TestWeightStandardization(AlgorithmConformance):
    def make(self):
        return WeightStandardization()


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3, 3, 3), (2, 1, 2, 2, 2)])
def test_each_filter_has_mean_0_and_variance_1(shape):
    weight = torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(0)) * 3 + 1
    out = standardize_weight(weight)
    dims = tuple(range(1, weight.ndim))
    mean, variance = weight.mean(dims, keepdim=True), weight.var(dims, correction=0, keepdim=True)
    torch.testing.assert_close(out, (weight - mean) / (variance + 1e-10).sqrt())
    torch.testing.assert_close(out.var(dims, correction=0), torch.ones(shape[0], dtype=torch.double))


def test_constant_filters_and_half_precision_stay_finite():
    assert standardize_weight(torch.full((2, 3, 3), 7.0)).abs().max() == 0
    weight = torch.randn(4, 3, 3, 3) * 1e-3
    low = standardize_weight(weight.half())  # 1e-10 is 0 in float16
    assert low.dtype == torch.float16
    torch.testing.assert_close(low.float(), standardize_weight(weight), rtol=0.02, atol=0.02)


CONVS = [
    (nn.Conv1d, dict(kernel_size=3, stride=2)),
    (nn.Conv2d, dict(kernel_size=3, padding=1, padding_mode="circular", groups=2)),
    (nn.Conv2d, dict(kernel_size=(3, 1), padding="same", bias=False)),
    (nn.Conv3d, dict(kernel_size=2, dilation=2)),
]


@pytest.mark.parametrize(("kind", "settings"), CONVS, ids=str)
def test_a_layer_convolves_with_the_standardized_weight_and_trains_the_weight(kind, settings):
    torch.manual_seed(0)
    plain = kind(4, 6, **settings)
    model, (replacement,) = weight_standardization(nn.Sequential(copy.deepcopy(plain)))
    x = torch.randn(2, 4, *[7] * (plain.weight.ndim - 2))
    by_hand = copy.deepcopy(plain)
    by_hand.weight = nn.Parameter(standardize_weight(plain.weight.detach()))
    torch.testing.assert_close(model(x), by_hand(x))
    model(x).pow(2).sum().backward()
    by_hand(x).pow(2).sum().backward()
    # The chain rule through the standardization.
    (expected,) = torch.autograd.grad(standardize_weight(plain.weight), plain.weight, by_hand.weight.grad)
    torch.testing.assert_close(model[0].weight.grad, expected)
    assert replacement.name == "0"


def test_checkpoints_load_with_and_without_it():
    """Composer's checkpoints have other keys, and fail to load without the method with a bare KeyError."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    parameters = list(plain.parameters())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, changed = weight_standardization(copy.deepcopy(plain))
    assert list(model.state_dict()) == list(plain.state_dict()) and len(changed) == 2
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model, _ = weight_standardization(plain)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    before = model[0].weight.detach().clone()
    model(torch.randn(1, 3, 6, 6)).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_the_last_layers_are_ignored_and_surgery_twice_changes_nothing():
    model = nn.Sequential(*(nn.Conv1d(2, 2, 3) for _ in range(4)))
    _, changed = weight_standardization(model, n_last_layers_ignore=1)
    assert [each.name for each in changed] == ["0", "1", "2"]
    with pytest.warns(NoEffectWarning, match=r"already applied .* in 3 modules.* 0 is StandardizedConv1d\(2, 2"):
        weight_standardization(model, n_last_layers_ignore=1)
    with pytest.warns(NoEffectWarning, match="before the last 9"):
        weight_standardization(nn.Sequential(nn.Conv2d(2, 2, 3)), n_last_layers_ignore=9)
    with pytest.warns(NoEffectWarning):
        weight_standardization(nn.Sequential(nn.Linear(2, 2), nn.ConvTranspose2d(2, 2, 3)))
    with pytest.raises(ValueError, match="n_last_layers_ignore=-1"):
        weight_standardization(model, n_last_layers_ignore=-1)


class Scaled(nn.Conv2d):
    """Its forward ends in torch's, as BlurPool's does."""

    def __init__(self, *args, scale=2.0):
        super().__init__(*args)
        self.scale = scale

    def forward(self, input):
        return super().forward(input * self.scale)


class Direct(nn.Conv2d):
    """Its forward would ignore the method."""

    def forward(self, input):
        return F.conv2d(input, self.weight)


def test_subclasses_are_standardized_where_that_has_an_effect():
    torch.manual_seed(0)
    computed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3))
    model = nn.Sequential(Scaled(2, 2, 3, scale=3.0), Direct(2, 2, 3), nn.LazyConv2d(2, 3), computed)
    model.append(nn.Conv2d(4, 4, 1, groups=4))  # standardized, its filters would be 0
    model.append(nn.Conv2d(3, 4, 1))
    x = torch.randn(1, 2, 5, 5)
    weight = model[0].weight
    with pytest.warns(UserWarning, match=r"1 \(Direct.*2 \(Lazy.*3 \(its weight is computed.*4 \(its filters have one"):
        assert [each.name for each in weight_standardization(model)[1]] == ["0", "5"]
    expected = F.conv2d(x * 3, standardize_weight(weight), model[0].bias)
    for each in (model[0], copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert isinstance(each, Scaled) and each.scale == 3.0
        torch.testing.assert_close(each(x), expected)


def test_blurred_convolutions_are_standardized_in_either_order():
    pytest.importorskip("hocket_vision")

    def weights_of(*algorithms):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 8, 3, stride=2, padding=1), nn.Flatten())
        hocket.Trainer(model=model, algorithms=list(algorithms), device="cpu")
        return model(torch.ones(1, 16, 8, 8))

    both = weights_of("blurpool", "weight-standardization")
    assert torch.equal(both, weights_of("weight-standardization", "blurpool"))
    assert not torch.allclose(both, weights_of("blurpool"))
    assert not torch.allclose(both, weights_of("weight-standardization"))


def test_autocast_and_compilation():
    torch.manual_seed(0)
    model, _ = weight_standardization(nn.Sequential(nn.Conv2d(3, 4, 3)))
    x = torch.randn(1, 3, 5, 5)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected, rtol=0.05, atol=0.1)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(strategy, tmp_path, monkeypatch):
    pytest.importorskip("hocket_strategies")
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 3, 6, 6, generator=generator), torch.randint(4, (16,), generator=generator)
    )

    def train(rank=0, strategy="single", batch=8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
        trainer = hocket.Trainer(
            model=model, loss=F.cross_entropy, optimizer="sgd(lr=0.1)", duration="2ep", device="cpu", strategy=strategy,
            train_data=torch.utils.data.DataLoader(data, batch), algorithms=["weight-standardization"],
        )  # fmt: skip
        trainer.fit()
        return trainer.model_state_dict()

    alone = train()
    for state in run_ranks(train, 2, strategy, 4):  # each has every second sample of the same batches
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True)])
def test_a_run_with_it_continues_without_it_and_the_other_way_round(saved, loaded, tmp_path):
    """Said, and then exact. Composer's renamed weights end in a bare KeyError of the optimizer's state."""

    def trainer(standardized):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
        return hocket.Trainer(
            model=model, loss=F.cross_entropy, optimizer="sgd(lr=0.1, momentum=0.9)", duration="2ep", device="cpu",
            train_data=[(torch.rand(4, 3, 6, 6), torch.arange(4))], folder=tmp_path,
            algorithms=["weight-standardization"] if standardized else [],
        )  # fmt: skip

    first, second = trainer(saved), trainer(loaded)
    first.fit("1ep")
    with pytest.raises(ValueError, match=r"algorithm 'weight-standardization'.*strict=False"):
        second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="algorithm 'weight-standardization'"):
        second.load_state_dict(copy.deepcopy(first.state_dict()), strict=False)
    for name, value in first.model_state_dict().items():
        assert torch.equal(second.model_state_dict()[name], value)
    (mine,), (theirs,) = second.state.optimizers, first.state.optimizers
    for one, other in zip(second.state.model.parameters(), first.state.model.parameters(), strict=True):
        assert torch.equal(mine.state[one]["momentum_buffer"], theirs.state[other]["momentum_buffer"])
    second.fit("1ep")
