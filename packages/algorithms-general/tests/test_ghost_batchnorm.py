"""Ghost batch norm against batch norm on each part of a batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hocket import NoEffectWarning
from hocket_general import GhostBatchNorm
from hocket_general.functional import ghost_batchnorm
from hocket_testkit import AlgorithmConformance
from hocket_testkit.reference import batch_norm_network


class TestGhostBatchNorm(AlgorithmConformance):
    exempt = {"test_works_with_microbatches": "each microbatch is normalised by itself, as by plain batch norm"}

    def make(self):
        return GhostBatchNorm(ghost_batch_size=4)

    def model(self):
        return batch_norm_network()


def pair(kind=nn.BatchNorm2d, size=4, channels=3, **options):
    torch.manual_seed(0)
    plain = kind(channels, **options)
    if plain.affine:
        nn.init.normal_(plain.weight)
    model, _ = ghost_batchnorm(nn.Sequential(copy.deepcopy(plain)), ghost_batch_size=size)
    return plain, model


SHAPES = [
    (nn.BatchNorm1d, (12, 3)),
    (nn.BatchNorm1d, (12, 3, 5)),
    (nn.BatchNorm2d, (12, 3, 4, 4)),
    (nn.BatchNorm3d, (12, 3, 2, 2, 2)),
]


@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str
)
def test_each_part_is_normalised_by_itself(kind, shape, options):
    plain, model = pair(kind, **options)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    out = model(x)
    # The plain layer on each part.
    torch.testing.assert_close(out, torch.cat([plain(part) for part in x.split(4)]))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(getattr(model[0], name), buffer)
    # The formula, for each part.
    dims = [0, *range(2, x.ndim)]
    for part, normalised in zip(x.split(4), out.split(4), strict=True):
        variance, mean = torch.var_mean(part, dims, correction=0, keepdim=True)
        expected = (part - mean) / (variance + plain.eps).sqrt()
        if plain.affine:
            scale = (1, -1, *[1] * (x.ndim - 2))
            expected = expected * plain.weight.view(scale) + plain.bias.view(scale)
        torch.testing.assert_close(normalised, expected)


def test_each_part_moves_the_running_statistics():
    x = torch.randn(64, 3, 4, 4) + 5
    plain, model = pair(size=8)
    plain(x), model(x)
    # One step of 0.1 against eight of them: 1 - (1 - 0.1)^8 = 0.5695.
    torch.testing.assert_close(model[0].running_mean, plain.running_mean * 5.695, rtol=2e-2, atol=0)


@settings(max_examples=40)
@given(samples=st.integers(2, 40), size=st.integers(1, 12), positions=st.integers(1, 3))
def test_any_batch_works_in_parts_of_about_the_size(samples, size, positions):
    """Composer refuses batches below the size; a part of one value would have no variance."""
    _, model = pair(nn.BatchNorm1d, size=size)
    model[0]._has_trained = True  # without a warning
    seen = []
    x = torch.randn(samples, 3, positions)
    forward = nn.BatchNorm1d.forward

    def watch(self, part):
        seen.append(len(part))
        return forward(self, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.BatchNorm1d, "forward", watch)
        assert model(x).shape == x.shape
    assert sum(seen) == samples and max(seen) - min(seen) <= 1 and min(seen) * positions > 1
    assert max(seen) <= max(size, 3 if positions == 1 else 1)


def test_evaluation_is_that_of_batch_norm_for_any_batch():
    plain, model = pair(size=32)
    plain.eval(), model.eval()
    for samples in (1, 3, 31, 33, 64):
        x = torch.randn(samples, 3, 2, 2)
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("samples", [5, 32])
def test_a_batch_below_the_size_is_plain_batch_norm_and_the_first_one_says_so(samples):
    plain, model = pair(size=32)
    x = torch.randn(samples, 3, 2, 2)
    with pytest.warns(NoEffectWarning, match=f"batches of {samples} samples.*ghost_batch_size=32"):
        out = model(x)
    assert torch.equal(out, plain(x)) and torch.equal(model[0].running_var, plain.running_var)
    model(x)  # not again; warnings are errors here


def test_a_small_last_batch_of_an_epoch_is_no_reason_to_warn():
    _, model = pair(size=4)
    model.eval()(torch.randn(2, 3, 2, 2))
    model.train()(torch.randn(8, 3, 2, 2))
    model(torch.randn(2, 3, 2, 2))


def test_microbatches_of_whole_ghost_batches_change_nothing():
    """What the card says: only the running statistics depend on microbatches then."""
    _, whole = pair(size=4)
    split = copy.deepcopy(whole)
    x = torch.randn(16, 3, 2, 2)
    torch.testing.assert_close(whole(x), torch.cat([split(part) for part in x.split(8)]))
    torch.testing.assert_close(whole[0].running_mean, split[0].running_mean)


def test_parameters_buffers_keys_and_format_stay():
    plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
    before, tensors = plain.state_dict(keep_vars=True), list(plain.state_dict(keep_vars=True).values())
    model, _ = ghost_batchnorm(plain, ghost_batch_size=2)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(a is b for a, b in zip(after.values(), tensors, strict=True))
    x = torch.randn(6, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    again = pickle.loads(pickle.dumps(model))
    assert again[1].ghost_batch_size == 2 and "ghost_batch_size=2" in repr(again)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).isfinite().all()


def test_sync_batch_norm_and_subclasses_are_left_alone():
    class Mine(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.SyncBatchNorm(3), Mine(3), nn.LazyBatchNorm2d(), nn.BatchNorm2d(3), nn.InstanceNorm2d(3))
    with pytest.warns(UserWarning, match=r"0 \(SyncBatchNorm.*1 \(Mine.*2 \(Lazy"):
        assert [each.name for each in ghost_batchnorm(model)[1]] == ["3"]
    with pytest.warns(NoEffectWarning, match="found nothing to change in Sequential: it has no BatchNorm1d"):
        ghost_batchnorm(nn.Sequential(nn.Linear(2, 2)))
    twice, _ = ghost_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), ghost_batch_size=4)
    with pytest.warns(NoEffectWarning, match="already applied .* 0 is GhostBatchNorm1d.*ghost_batch_size=4"):
        ghost_batchnorm(twice, ghost_batch_size=8)
    with pytest.raises(ValueError, match="ghost_batch_size=0"):
        ghost_batchnorm(model, ghost_batch_size=0)


def test_gradients_and_compilation():
    _, model = pair(nn.BatchNorm1d, size=3)
    assert torch.autograd.gradcheck(model.double(), torch.randn(7, 3, dtype=torch.double, requires_grad=True))
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    x = torch.randn(7, 3, dtype=torch.double)
    torch.testing.assert_close(compiled(x), model(x))
