"""Factorize against torch's singular value decomposition, and against the layers that it replaces."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hocket import NoEffectWarning
from hocket_general import Factorize
from hocket_general.factorize import FactorizedConv, FactorizedLinear
from hocket_general.functional import factorize, largest_useful_rank, low_rank_factors
from hocket_testkit import AlgorithmConformance


class TestFactorize(AlgorithmConformance):
    def make(self):
        return Factorize(min_channels=16, min_features=4, latent_channels=4, latent_features=2)


@settings(max_examples=30)
@given(m=st.integers(1, 8), n=st.integers(1, 8), data=st.data())
def test_factors_are_the_best_approximation_of_their_rank(m, n, data):
    """Eckart and Young: the squared error is the sum of the squared singular values that are dropped."""
    rank = data.draw(st.integers(1, min(m, n)))
    weight = torch.randn(
        m, n, dtype=torch.double, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    up, down = low_rank_factors(weight, rank)
    dropped = torch.linalg.svdvals(weight)[rank:]
    torch.testing.assert_close((weight - up @ down).pow(2).sum(), dropped.pow(2).sum())
    torch.testing.assert_close(up.T @ up, down @ down.T)  # balanced
    left, values, right = torch.linalg.svd(weight)
    truncated = left[:, :rank] @ torch.diag(values[:rank]) @ right[:rank]
    torch.testing.assert_close(up @ down, truncated)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_rank_that_a_weight_cannot_have(rank):
    with pytest.raises(ValueError, match=rf"rank={rank} is not between 1 and 3"):
        low_rank_factors(torch.ones(3, 5), rank)


@given(fan_in=st.integers(1, 200), out=st.integers(1, 200))
def test_largest_useful_rank_saves_weights_and_the_next_one_does_not(fan_in, out):
    rank = largest_useful_rank(fan_in, out)
    assert rank * (fan_in + out) < fan_in * out or rank == 0
    assert (rank + 1) * (fan_in + out) >= fan_in * out


def test_the_ranks_of_composers_rule():
    assert [largest_useful_rank(*sides) for sides in ((512, 512), (64 * 9, 64), (4, 4))] == [255, 57, 1]


def test_a_layer_is_replaced_only_where_that_makes_it_smaller():
    def replaced(latent):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3, groups=2))
        return len(factorize(model, min_channels=64, latent_channels=latent)[1])

    assert replaced(57) == 1  # not the grouped one
    with pytest.warns(NoEffectWarning):
        assert replaced(58) == 0


def test_pretrained_weights_survive():
    """Composer's layers begin anew, with an error of 1.15 of the product; the best rank-k product has less than 1."""
    torch.manual_seed(0)
    weight = torch.randn(32, 4) @ torch.randn(4, 48) + 0.01 * torch.randn(32, 48)
    linear = nn.Linear(48, 32)
    linear.weight = nn.Parameter(weight.clone())
    x = torch.randn(5, 48)
    expected = linear(x)
    model, _ = factorize(nn.Sequential(linear), min_features=32, latent_features=4)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0.5)
    assert (model[0].weight - weight).norm() / weight.norm() < 0.01
    assert model[0].bias is linear.bias and model[0].rank == 4


CONVS = [
    (nn.Conv1d, dict(kernel_size=5, stride=2, padding=2)),
    (nn.Conv2d, dict(kernel_size=3, padding=1, padding_mode="reflect")),
    (nn.Conv2d, dict(kernel_size=(3, 1), stride=(2, 1), dilation=(2, 1), padding="valid", bias=False)),
    (nn.Conv2d, dict(kernel_size=3, padding="same")),
    (nn.Conv3d, dict(kernel_size=2)),
]


@pytest.mark.parametrize(("kind", "geometry"), CONVS, ids=str)
def test_a_convolution_of_low_rank_is_exact_with_all_its_settings(kind, geometry):
    torch.manual_seed(0)
    conv = kind(16, 12, **geometry)
    with torch.no_grad():
        flat = conv.weight.flatten(1)
        conv.weight.copy_((torch.randn(12, 3) @ torch.randn(3, flat.shape[1])).view_as(conv.weight))
    x = torch.randn(2, 16, *[8] * (conv.weight.ndim - 2))
    expected = conv(x)
    model, (replacement,) = factorize(nn.Sequential(conv), min_channels=12, latent_channels=3)
    assert isinstance(replacement.new, FactorizedConv) and model[0].down.out_channels == 3
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model[0].weight, conv.weight, rtol=1e-4, atol=1e-4)


def test_fractions_and_numbers_choose_the_rank():
    def ranks(**arguments):
        model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64))
        return [each.new.rank for each in factorize(model, min_features=32, **arguments)[1]]

    assert ranks() == [10, 10]  # a quarter of the smaller side
    assert ranks(latent_features=7) == [7, 7]
    assert ranks(latent_features=0.001) == [1, 1]
    for wrong in ({"latent_features": 0}, {"latent_features": 1.5}, {"latent_channels": -1}):
        with pytest.raises(ValueError, match="fraction"):
            factorize(nn.Linear(4, 4), **wrong)
    with pytest.raises(ValueError, match="both False"):
        factorize(nn.Linear(4, 4), factorize_convs=False, factorize_linears=False)


def test_what_would_not_be_sound_is_left_alone():
    """Ties, subclasses such as the projection of attention, and computed weights."""
    embedding, head = nn.Embedding(40, 32), nn.Linear(32, 40)
    head.weight = embedding.weight
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    model = nn.ModuleDict(
        {"e": embedding, "h": head, "c": computed, "a": nn.MultiheadAttention(32, 2), "l": nn.Linear(32, 32)}
    )
    with pytest.warns(UserWarning, match=r"h \(its weight is shared.*c \(its weight is computed.*a.out_proj \(NonDyn"):
        _, (replacement,) = factorize(model, min_features=32)
    assert replacement.name == "l" and model["h"].weight is embedding.weight


def test_torchs_transformer_layer_still_works_in_eval_mode():
    """Its fast path reads linear1.weight."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    with pytest.warns(UserWarning, match="out_proj"):
        factorize(layer, min_features=32)
    assert isinstance(layer.linear1, FactorizedLinear)
    x = torch.randn(2, 5, 32)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected, rtol=1e-4, atol=1e-4)


def test_optimizer_flags_dtype_and_format_are_kept_and_surgery_twice_changes_nothing():
    from hocket.surgery import update_optimizer

    model = nn.Sequential(nn.Linear(32, 32), nn.Conv2d(32, 32, 3)).to(torch.bfloat16, memory_format=torch.channels_last)
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, changed = factorize(model, min_features=32, min_channels=32)
    update_optimizer(optimizer, changed)
    assert {*optimizer.param_groups[0]["params"]} >= {p for p in model.parameters() if p.requires_grad}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert not model[1].down.weight.requires_grad and model[1].bias.requires_grad
    assert model[1].down.weight.is_contiguous(memory_format=torch.channels_last)
    before = list(pickle.loads(pickle.dumps(copy.deepcopy(model))).state_dict())
    with pytest.warns(NoEffectWarning, match=r"already applied .* FactorizedLinear\(rank=8\)"):
        factorize(model, min_features=1, min_channels=1)
    assert list(model.state_dict()) == before


def test_weights_on_the_meta_device_become_factors_there():
    model, changed = factorize(nn.Sequential(nn.Linear(32, 32, device="meta")), min_features=32)
    assert len(changed) == 1 and all(p.is_meta for p in model.parameters())
