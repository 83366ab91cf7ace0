"""Squeeze-and-excitation against its equations, and what surgery must keep."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hocket
from hocket_testkit import AlgorithmConformance
from hocket_vision import BlurConv2d, BlurPool, SqueezeExcite, SqueezeExcite2d, small_resnet
from hocket_vision.functional import squeeze_excite


class TestSqueezeExcite(AlgorithmConformance):
    def make(self):
        return SqueezeExcite(latent_channels=4, min_channels=16)


def convs(*shapes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(i, o, 3, 2, 1) for i, o in shapes))


def test_gate_is_the_papers_equations():
    gate = SqueezeExcite2d(6, 3)
    x = torch.randn(2, 6, 5, 4)
    for sample in range(2):
        z = torch.stack([x[sample, c].sum() / 20 for c in range(6)])  # equation 2
        s = 1 / (1 + torch.exp(-(gate.excite @ (gate.squeeze @ z).clamp(min=0))))  # equation 3
        expected = torch.stack([s[c] * x[sample, c] for c in range(6)])  # equation 4
        torch.testing.assert_close(gate(x)[sample], expected)
    torch.testing.assert_close(gate(x[0]), gate(x)[0])  # unbatched


def test_wide_convolutions_get_a_gate_behind_them():
    torch.manual_seed(0)
    model = convs((3, 128), (128, 128), (128, 127), (127, 128), (128, 256))
    plain = copy.deepcopy(model)
    model, changed = squeeze_excite(model)
    assert [replacement.name for replacement in changed] == ["1", "4"]
    assert [tuple(model[i].squeeze_excite.squeeze.shape) for i in (1, 4)] == [(64, 128), (64, 256)]
    x = torch.randn(2, 128, 6, 6)
    assert model[1](x).equal(model[1].squeeze_excite(plain[1](x)))
    assert isinstance(model[1], nn.Conv2d)


@pytest.mark.parametrize(("given", "width"), [(64, 64), (1, 1), (1 / 16, 2), (0.01, 1), (0.99, 31)])
def test_latent_channels_are_a_number_or_a_fraction_of_the_outputs(given, width):
    gate = squeeze_excite(convs((16, 32)), latent_channels=given, min_channels=16)[0][0].squeeze_excite
    assert gate.squeeze.shape == (width, 32) and gate.excite.shape == (32, width)


@pytest.mark.parametrize("given", [0, -1, 1.5, float("nan")])
def test_other_latent_channels_are_refused(given):
    with pytest.raises(ValueError, match=r"latent_channels is .*0\.0625"):
        SqueezeExcite(latent_channels=given)


def test_identity_start_keeps_a_pretrained_function_and_learns():
    torch.manual_seed(0)
    plain = small_resnet().eval()
    model, changed = squeeze_excite(copy.deepcopy(plain), min_channels=16, start_as_identity=True)
    x = torch.rand(4, 1, 8, 8)
    assert len(changed) == 8 and model(x).equal(plain(x))  # bitwise: 2 * sigmoid(0) is 1
    assert not squeeze_excite(copy.deepcopy(plain), min_channels=16)[0](x).equal(plain(x))
    model.train()(x).square().sum().backward()
    assert all(replacement.new.squeeze_excite.excite.grad.any() for replacement in changed)


def test_keys_of_convolutions_stay_and_only_the_gates_are_new():
    plain = small_resnet()
    before, parameters = plain.state_dict(), dict(plain.named_parameters())
    model, _ = squeeze_excite(plain, min_channels=64)
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    missing, unexpected = model.load_state_dict(before, strict=False)
    assert not unexpected
    assert missing == [f"stage3.0.conv2.squeeze_excite.{name}" for name in ("squeeze", "excite")]
    assert set(before) == set(model.state_dict()) - set(missing)


def test_copies_and_pickles_are_the_same_module():
    model, _ = squeeze_excite(convs((16, 16)), min_channels=16)
    x = torch.randn(1, 16, 4, 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is type(model[0]) and other(x).equal(model(x))
        assert other[0].weight is not model[0].weight
        other[0].weight.data.zero_()
        assert model[0].weight.any()


def test_surgery_twice_changes_nothing_more_and_says_so():
    model, _ = squeeze_excite(convs((16, 16)), min_channels=16)
    with pytest.warns(
        hocket.NoEffectWarning,
        match=r"already applied .* 0\.squeeze_excite is .*\(16, latent_channels=64\)",
    ):
        assert squeeze_excite(model, min_channels=16)[1] == []
    with pytest.warns(hocket.NoEffectWarning, match="at least 32 input and output channels"):
        squeeze_excite(convs((16, 16)), min_channels=32)


def test_shared_modules_hooks_and_mode_stay():
    shared = nn.Conv2d(16, 16, 3, padding=1).eval()
    seen = []
    shared.register_forward_hook(lambda module, args, output: seen.append(output))
    model, changed = squeeze_excite(nn.Sequential(shared, nn.Sequential(shared)), min_channels=16)
    assert len(changed) == 1 and model[0] is model[1][0] and not model[0].squeeze_excite.training
    out = model(torch.randn(1, 16, 4, 4))
    assert len(seen) == 2 and seen[1].equal(out)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_format_and_autocast_are_kept(layout):
    model = squeeze_excite(convs((16, 16)), min_channels=16)[0].to(memory_format=layout)
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=layout)
    assert model(x).is_contiguous(memory_format=layout)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), model(x), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("order", [("squeeze-excite", "blurpool"), ("blurpool", "squeeze-excite")])
def test_a_blurred_convolution_gets_a_gate_whatever_the_users_order(order):
    made = {"blurpool": BlurPool(), "squeeze-excite": SqueezeExcite(4, 16)}
    model = small_resnet()
    hocket.Trainer(model=model, algorithms=[made[name] for name in order], device="cpu", seed=1)
    conv = model.get_submodule("stage2.0.conv1")
    assert isinstance(conv, BlurConv2d) and isinstance(conv.squeeze_excite, SqueezeExcite2d)


def test_an_optimizer_made_before_trains_the_gates_and_the_seed_decides_their_weights():
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = small_resnet()
        trainer = hocket.Trainer(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss="cross_entropy",
            train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))],
            algorithms=[SqueezeExcite(1 / 16, 64)],
            duration="1ba",
            seed=seed,
            device="cpu",
        )
        excite = model.get_parameter("stage3.0.conv2.squeeze_excite.excite")
        before = excite.detach().clone()
        trainer.fit()
        assert not excite.equal(before)
        return before

    first, again, other = weights(1), weights(1), weights(2)
    assert first.equal(again) and not first.equal(other)


def test_plan_names_the_convolutions():
    assert SqueezeExcite(min_channels=64).touches(small_resnet()) == [
        "stage3.0.conv2: Conv2d with a squeeze-excite gate"
    ]


def test_compiles_to_one_graph():
    model = squeeze_excite(convs((16, 16)), min_channels=16)[0]
    x = torch.randn(2, 16, 5, 5)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
