"""Quantized models against the formulas of rounding, and training with rounding against the quantized model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit import run_ranks
from hocket_tools import ChannelPruning, Pruning, QuantizationAwareTraining, compare_compressed, fake_quantize, quantize
from hocket_tools.compression.comparison import ORIGINAL, bytes_on_disk, table
from hocket_tools.compression.quantization_aware_training import FakeQuantized

EMA = pytest.importorskip("hocket_general").EMA
Distillation = pytest.importorskip("hocket_general").Distillation

pytest.importorskip("torchao", minversion="0.18")
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def linear_network(features=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 96), nn.ReLU(), nn.Linear(96, 16))


class Residual(nn.Module):
    """Convolutions with batch norm and a residual connection."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        return self.head((x + self.norm2(self.conv2(x))).relu().mean((2, 3)))


def images(batches=6, size=8):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(batches * 16, 1, size, size, generator=generator)
    return given, given.flatten(1)[:, :5].argmax(1)


def data():
    return DataLoader(TensorDataset(*images()), batch_size=16)


def trainer(*algorithms, model=None, **changes):
    torch.manual_seed(0)
    arguments = {
        "loss": F.cross_entropy, "train_data": data(), "duration": "2ep", "device": "cpu", "seed": 3,
        "optimizer": "adamw(lr=0.01)", "eval_data": {"test": data()}, "metrics": ["accuracy"], "eval_every": None,
    }  # fmt: skip
    return hocket.Trainer(model=model or Residual(), **{**arguments, **changes}, algorithms=algorithms)


def by_row(tensor):
    """Rounded to int8 with the scale of the largest magnitude of each row, by the formula."""
    scale = tensor.abs().amax(1, keepdim=True) / 127.5
    return (tensor / scale).round().clamp(-128, 127) * scale


def test_int8_is_the_rounding_of_rows_and_tokens():
    linear, x = nn.Linear(64, 32), torch.randn(20, 64)
    small = quantize(nn.Sequential(linear), "int8")
    error = small(x) - F.linear(by_row(x), by_row(linear.weight), linear.bias)
    assert error.abs().mean() < 0.1 * (small(x) - linear(x)).abs().mean()  # some values lie between two steps
    assert isinstance(linear.weight, nn.Parameter) and not small.training
    assert bytes_on_disk(small) < 0.3 * bytes_on_disk(nn.Sequential(linear)) + 500  # and what safetensors says of them


def test_int4_is_the_rounding_of_groups():
    model, x = linear_network(), torch.randn(20, 64)
    small = quantize(model, "int4")

    def rounded(weight):  # 16 steps from the least to the largest of each group of 32
        groups = weight.unflatten(1, (-1, 32))
        low, high = groups.aminmax(dim=2, keepdim=True)
        scale = (high - low) / 15
        return (((groups - low) / scale).round() * scale + low).flatten(1)

    hidden = F.linear(x, rounded(model[0].weight), model[0].bias).relu()
    torch.testing.assert_close(
        small(x), F.linear(hidden, rounded(model[2].weight), model[2].bias), rtol=1e-3, atol=1e-3
    )
    # Half a byte for each weight and 8 bytes for each group of 32, instead of 128.
    assert bytes_on_disk(small) < 0.25 * bytes_on_disk(model)


def test_int8_static_takes_any_batch_size_and_is_a_quarter():
    run = trainer()
    run.fit()
    model, (given, _) = run.state.model.eval(), images()
    small = quantize(model, "int8-static", [given[:16], given[16:32]])
    expected = model(given).detach()
    for size in (1, 7, 40):
        found = small(given[:size])
        assert found.shape == (size, 5) and (found - expected[:size]).abs().max() < 0.05 * expected.abs().max()
    weights = [each for each in small.state_dict().values() if each.dtype is torch.int8]
    assert sorted(tuple(each.shape) for each in weights) == [(5, 16), (16, 1, 3, 3), (16, 16, 3, 3)]
    assert not any(each.is_floating_point() and each.dim() > 1 for each in small.state_dict().values())
    # Batch norm is folded: the weight by hand.
    scale = model.norm1.weight / (model.norm1.running_var + model.norm1.eps).sqrt()
    folded = (model.conv1.weight * scale[:, None, None, None]).flatten(1).detach()
    (first,) = (each for each in weights if each.shape == (16, 1, 3, 3))
    exact = (folded / (folded.abs().amax(1, keepdim=True) / 127.5)).clamp(-128, 127)
    assert (first.flatten(1) - exact).abs().max() <= 0.501
    with pytest.raises(ValueError, match="cannot be trained"):
        small.train()


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_training_sees_what_the_quantized_model_computes(to):
    model, x = linear_network(), torch.randn(20, 64)
    fake, _ = fake_quantize(copy.deepcopy(model), to)
    torch.testing.assert_close(fake.eval()(x), quantize(model, to)(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(quantize(fake, to)(x), quantize(model, to)(x), rtol=0, atol=0)  # and back
    assert type(fake[0]) is not nn.Linear and [name for name, _ in fake.named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


def test_gradients_pass_the_rounding():
    fake, _ = fake_quantize(nn.Sequential(nn.Linear(8, 4)))
    plain = copy.deepcopy(fake[0].weight)
    x = torch.randn(6, 8)
    fake(x).sum().backward()
    quantizer = fake[0].input_quantizer
    rounded = (
        (x / quantizer.scale + quantizer.zero_point).round().clamp(0, 255) - quantizer.zero_point
    ) * quantizer.scale
    expected = rounded.sum(0).expand(4, 8)
    inside = plain.abs() < plain.abs().amax(1, keepdim=True)  # the largest may round beyond the range
    torch.testing.assert_close(fake[0].weight.grad[inside], expected[inside], rtol=1e-4, atol=1e-4)


def test_ranges_follow_training_only():
    torch.manual_seed(1)  # no weight lies between two steps
    fake, _ = fake_quantize(nn.Sequential(nn.Linear(8, 4)))
    x = torch.randn(6, 8)
    untrained = fake.eval()(x)
    torch.testing.assert_close(untrained, F.linear(x, by_row(fake[0].weight), fake[0].bias), rtol=1e-4, atol=1e-5)
    fake.train()(x)
    before = copy.deepcopy(fake.state_dict())
    fake.eval()(100 * x)
    assert all(torch.equal(each, before[name]) for name, each in fake.state_dict().items())


def run_to(duration, folder, resume=None, **changes):
    algorithms = (QuantizationAwareTraining(), EMA(half_life="3ba"), Distillation(Residual()))
    run = trainer(*algorithms, checkpoints=hocket.Checkpoints(folder, every="1ep"), resume=resume, **changes)
    run.fit(*([] if duration == "2ep" else [duration]))
    return run


def test_a_run_is_resumed_bitwise_and_quantized():
    whole = run_to("2ep", "runs/whole")
    run_to("1ep", "runs/half")
    resumed = run_to("2ep", "runs/half", "auto")
    for evaluated in (True, False):
        mine, theirs = (each.model_state_dict(evaluated=evaluated) for each in (whole, resumed))
        assert "conv1.input_quantizer.scale" in mine and all(torch.equal(mine[name], theirs[name]) for name in mine)
    model, (given, _) = whole.state.model.eval(), images()
    small = quantize(model, "int8-static", [given])
    assert isinstance(model.conv1, FakeQuantized)  # the trained model is not changed
    expected = model(given)
    assert (small(given) - expected).abs().mean() < 0.02 * expected.abs().mean()


@pytest.mark.long
def test_two_ranks_train_one_quantized_model():
    def train(rank):
        run = run_to("2ep", "runs/ranks", strategy="ddp")
        return {name: value.numpy() for name, value in run.model_state_dict(evaluated=False).items()}

    first, second = run_ranks(train, 2)
    parameters = [name for name, _ in Residual().named_parameters()]
    assert all((first[name] == second[name]).all() for name in parameters)


def test_pruned_trained_with_rounding_and_a_teacher_then_quantized():
    run = trainer(
        ChannelPruning(example=[2, 1, 8, 8]), QuantizationAwareTraining(), Pruning(stop="0.5dur", interval="1ba"),
        Distillation(Residual()),
    )  # fmt: skip
    run.fit()
    assert run.state.model.conv2.weight.shape == (8, 8, 3, 3)
    small = quantize(run.state.model, "int8-static", [images()[0][:16]])
    (weight,) = (each for each in small.state_dict().values() if each.shape == (8, 8, 3, 3))
    assert weight.dtype is torch.int8 and (weight == 0).float().mean() >= 0.5  # zeros stay zeros


def test_the_table_against_the_trainers_own_evaluation():
    run = trainer(EMA(half_life="3ba"))
    run.fit()
    model = copy.deepcopy(run.state.model).eval()
    small = quantize(model, "int8-static", [images()[0][:16]])
    original, same, int8 = compare_compressed(run, {"same": model, "int8": small}, repeats=3, resamples=200)
    assert original.quality == pytest.approx(run.evaluate()["test/accuracy"]) and original.change == 0
    with torch.no_grad():
        correct = (model(images()[0]).argmax(1) == images()[1]).double()
    assert same.quality == pytest.approx(correct.mean().item())  # without the averages
    error = (correct.mean() * (1 - correct.mean()) / len(correct)).sqrt().item()  # of a binomial proportion
    low, high = same.quality_interval
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.25, abs=1e-3)
    assert int8.bytes < original.bytes and int8.latency_ms > 0 and int8.batch == 16
    assert run.state.model is run.state.task.model and not isinstance(run.state.model, type(small))
    text = table([original, same, int8])
    assert ORIGINAL in text and "batch of 16" in text and len(text.splitlines()) == 5


@pytest.mark.parametrize(("to", "error"), [("int8", 0.02), ("int4", 0.15)])
def test_the_transposed_layers_of_gpt2_are_quantized(to, error):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2Model(config).eval()  # without a head it has no torch.nn.Linear
    small, tokens = quantize(model, to), torch.randint(32, (2, 16))
    with torch.no_grad():
        expected, found = (each(tokens).last_hidden_state for each in (model, small))
    assert 0 < (found - expected).abs().mean() < error * expected.abs().mean()
    blocks = {
        name: each.numel() * 4 for name, each in model.named_parameters() if name.startswith("h.") and each.dim() > 1
    }
    saved = bytes_on_disk(model) - bytes_on_disk(small)
    assert saved > {"int8": 0.7, "int4": 0.6}[to] * sum(blocks.values())
    assert type(model.h[0].mlp.c_fc).__name__ == "Conv1D"  # the model itself is not changed


def conditional():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    return Conditional()


def nan_network():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].bias.data[1] = torch.nan
    return model


@pytest.mark.parametrize(
    ("model", "to", "calibration", "said"),
    [
        (linear_network, "int2", None, "'int8', 'int8-static' or 'int4'"),
        (linear_network, "int8-static", None, "«?calibration="),
        (linear_network, "int8-static", [], "none has two samples"),
        (lambda: nn.Conv2d(1, 4, 3), "int8", None, "int8-static"),
        (lambda: nn.Linear(40, 16), "int4", None, "no multiple of group_size=32"),
        (nan_network, "int8", None, "NaN or infinity, in 0.bias"),
        (linear_network, "int8-static", [torch.full((4, 64), torch.nan)], "Batch 0 of «?calibration=»? has non-finite"),
        (linear_network, "int8-static", [(torch.randn(4, 64), torch.ones(4))], r"cannot compute .*\[inputs for inputs, _"),
        (conditional, "int8-static", [torch.randn(4, 4)], "torch.export fails on it"),
        (lambda: nn.Linear(64, 64, device="meta"), "int4", None, "is on meta"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused(model, to, calibration, said):
    with pytest.raises(ValueError, match=said):
        quantize(model(), to, calibration)


def test_it_says_what_stays():
    with pytest.warns(UserWarning, match="stay as they are, in Conv2d.*int8-static"):
        quantize(nn.Sequential(nn.Conv2d(1, 64, 3), nn.Flatten(), nn.Linear(64, 4)), "int8")
    with pytest.warns(hocket.NoEffectWarning, match="it has no Linear"):
        fake_quantize(nn.Sequential(nn.ReLU()))
    with pytest.warns(
        hocket.NoEffectWarning, match="of its Linear, 64 input features are no multiple of group_size=128"
    ):
        fake_quantize(nn.Sequential(nn.Linear(64, 64)), "int4", group_size=128)
    for make in (fake_quantize, lambda model, *arguments, **more: QuantizationAwareTraining(*arguments, **more)):
        with pytest.raises(
            ValueError, match=r"group_size=7, which is int; it should be 32, 64 or 128\. Write group_size=32"
        ):
            make(nn.Linear(64, 64), "int4", group_size=7)
    # The kernels of int4 do not take 4 outputs.
    model, changed = fake_quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), "int4")
    assert len(changed) == 1 and type(model[1]) is nn.Linear


@pytest.mark.parametrize("to", ["int8", "int8-static"])
def test_a_model_is_quantized_once(to):
    calibration = [torch.randn(4, 64)] if to == "int8-static" else None
    model = quantize(linear_network(), to, calibration)
    with pytest.raises(ValueError, match=r"quantized already\. Give the model that it was made of"):
        quantize(model, to, calibration)


def test_a_comparison_says_broken_outputs_and_refuses_what_it_cannot_measure():
    inputs = torch.eye(4)
    model, broken = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    broken.weight.data[:, 1] = float("nan")  # 0 * NaN is NaN: of all four samples

    def compare(models, data):
        run = hocket.Trainer(
            model=model, loss="cross_entropy", eval_data={"test": data}, metrics=["accuracy"], device="cpu"
        )
        return compare_compressed(run, models, repeats=1, resamples=0)

    batches = [(inputs, torch.arange(4))]
    with pytest.warns(UserWarning, match=r"broken \(4\)"):
        original, row = compare({"broken": broken}, batches)
    assert (original.nonfinite, row.nonfinite) == (0, 4)
    with pytest.raises(TypeError, match=r"a mapping\. Write models={"):
        compare([model], batches)
    with pytest.raises(TypeError, match=r"models\['x'\]='runs/a', which is str"):
        compare({"x": "runs/a"}, batches)
    with pytest.raises(ValueError, match="yielded no sample"):
        compare({"x": model}, [])
    with pytest.raises(ValueError, match=r"named 'original'.*another name, such as 'int8'"):
        compare({"original": model}, batches)
