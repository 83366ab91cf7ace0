"""Weights in int8 while evaluating and predicting, against the formula; training does not notice."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket_strategies import INT8

pytest.importorskip("torchao.quantization")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))


def data():
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 2, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(4)]


def trainer(folder, precision="int8", **changes):
    return hocket.Trainer(
        **{
            "model": network(),
            "loss": F.cross_entropy,
            "train_data": data(),
            "eval_data": data(),
            "eval_every": "2ba",
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "precision": precision,
            "strategy": "single",
            "device": "cpu",
            "duration": "2ep",
            "folder": folder,
            **changes,
        }
    )


def rounded(model: nn.Module) -> nn.Module:
    """A copy in double precision whose linear weights are multiples, from -128 to 127, of a scale for each output.

    The largest is 127.5 times the scale, so on which side it falls depends on float32.
    """
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                scale = layer.weight.abs().amax(1, keepdim=True) / 127.5
                layer.weight.copy_((layer.weight * (1 / scale)).round().clamp(-128, 127) * scale)
    return model.double()


def test_evaluation_and_prediction_use_rounded_weights(tmp_path):
    run = trainer(tmp_path)
    expected = rounded(run.state.model)
    with torch.no_grad():
        outputs = [expected(inputs.double()) for inputs, _ in data()]
        losses = [F.cross_entropy(o, targets).item() for o, (_, targets) in zip(outputs, data(), strict=True)]
    exact = copy.deepcopy(run.state.model).double()
    for found, wanted, (inputs, _) in zip(run.predict(data()), outputs, data(), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert (found.double() - exact(inputs.double())).abs().max() > 1e-3
    assert run.evaluate()["eval/loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_training_is_that_of_fp32(tmp_path):
    """Bit for bit, with evaluations in between."""
    one, other = trainer(tmp_path), trainer(tmp_path, "fp32")
    one.fit()
    other.fit()
    torch.testing.assert_close(one.model_state_dict(), other.model_state_dict(), rtol=0, atol=0)
    assert one.state.metrics["eval/loss"] != other.state.metrics["eval/loss"]


@pytest.mark.parametrize("hook", ["eval_after_forward", "eval_batch_end", "predict_batch_end"])
def test_the_weights_are_back_after_an_error(tmp_path, hook):
    callback = type("Failing", (hocket.Callback,), {hook: lambda self, state: 1 / 0})()
    run = trainer(tmp_path, callbacks=[callback])
    before = list(run.state.model.parameters())
    with pytest.raises(ZeroDivisionError):
        run.predict(data()) if "predict" in hook else run.evaluate()
    assert all(one is other for one, other in zip(before, run.state.model.parameters(), strict=True))


def test_averages_are_rounded_after_they_are_lent(tmp_path):
    ema = pytest.importorskip("hocket_general").EMA(smoothing=0.9)
    run = trainer(tmp_path, algorithms=[ema])
    run.fit()
    average = copy.deepcopy(run.state.model)
    average.load_state_dict(ema.averaged(run.state.model))
    before = copy.deepcopy(run.model_state_dict())
    expected = rounded(average)(data()[0][0].double())
    torch.testing.assert_close(run.predict(data())[0].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.model_state_dict(), before, rtol=0, atol=0)


# --- what is refused


def test_a_model_without_linear_layers(tmp_path):
    with pytest.raises(ValueError, match=r"the model has none.*precision='fp32'"):
        trainer(tmp_path, model=nn.Sequential(nn.Conv1d(2, 3, 6), nn.Flatten()))


def test_weights_in_parts(tmp_path):
    class Sharded(hocket.Strategy):
        offers = hocket.Need(0)

    with pytest.raises(ValueError, match=r"the strategy Sharded shards them.*strategy='single'"):
        trainer(tmp_path, INT8(), strategy=Sharded())


def test_without_torchao(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"pip install 'torchao>="):
        trainer(tmp_path)
