"""Weights stored in 16 bits: what is stored, what is computed in which dtype, against plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket_strategies import BF16True, FP16True
from hocket_strategies.precisions import true_half

BOTH = pytest.mark.parametrize("precision, dtype", [(BF16True, torch.bfloat16), (FP16True, torch.float16)])


class Everything(nn.Module):
    """Each kind of normalisation, a recurrent layer, an embedding, and a tensor that the model makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 16)
        self.first = nn.Linear(4, 16)
        self.batch = nn.BatchNorm1d(16)
        self.group = nn.GroupNorm(4, 16)
        self.layer = nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.last = nn.Linear(16, 3)
        self.register_buffer("table", torch.rand(16))
        self.register_buffer("numbers", torch.arange(3))

    def forward(self, ids: Tensor, floats: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids) + self.first(floats) + self.table
        x = self.layer(self.group(self.batch(x)))
        start = torch.zeros(1, len(x), 16)  # in torch's default dtype
        hidden, _ = self.recurrent(self.rms(x).unsqueeze(1), start)
        self.seen = {"floats": floats.dtype, "hidden": hidden.dtype, "normalised": x.dtype}
        return {"logits": self.last(hidden.squeeze(1)), "hidden": hidden}


class Ours(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = Everything()

    def forward(self, batch):
        return self.net(batch["ids"], batch["floats"])

    def loss(self, outputs, batch):
        self.seen = (outputs["logits"].dtype, batch["targets"].dtype, batch["floats"].dtype)
        return F.mse_loss(outputs["logits"], batch["targets"])


def data(number=4):
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "ids": torch.randint(5, (6,), generator=generator),
            "floats": torch.randn(6, 4, generator=generator),
            "targets": torch.randn(6, 3, generator=generator),
        }
        for _ in range(number)
    ]


def trainer(folder, model, precision, **changes):
    return hocket.Trainer(
        **{
            "model": model,
            "train_data": data(),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            "precision": precision,
            "strategy": "single",
            "device": "cpu",
            "duration": "1ep",
            "folder": folder,
            **changes,
        }
    )


@BOTH
def test_what_is_stored(precision, dtype):
    module = Everything()
    parameters = list(module.parameters())
    assert precision().convert_module(module) is module
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    wide = ("batch.", "group.", "layer.", "rms.")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point():
            assert tensor.dtype is (torch.float32 if name.startswith(wide) else dtype), name
        else:
            assert tensor.dtype is torch.int64, name


@BOTH
def test_a_model_that_came_in_low_precision_gets_wide_normalisation_layers(precision, dtype):
    module = precision().convert_module(Everything().to(torch.bfloat16))
    assert module.layer.weight.dtype is module.batch.running_mean.dtype is torch.float32
    assert module.last.weight.dtype is dtype


@BOTH
def test_layers_see_their_dtype_and_the_loss_float32(tmp_path, precision, dtype):
    task = Ours()
    run = trainer(tmp_path, task, precision(), eval_data=data())
    run.fit()
    assert task.seen == (torch.float32, torch.float32, torch.float32)
    assert task.net.seen == {"floats": dtype, "hidden": dtype, "normalised": dtype}
    assert task.net.first.weight.dtype is dtype
    momenta = {p.dtype: s["momentum_buffer"].dtype for p, s in run.state.optimizers[0].state.items()}
    assert momenta == {dtype: dtype, torch.float32: torch.float32}
    assert {out["logits"].dtype for out in run.predict(data())} == {torch.float32}


@BOTH
@pytest.mark.parametrize("microbatch", [None, 2])
def test_training_equals_a_plain_loop(tmp_path, precision, dtype, microbatch):
    """Casts written out by hand: weights, gradients and momentum are the same bits."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(2, 8, 3), nn.GroupNorm(2, 8)
            self.linear, self.last = nn.Linear(8, 8), nn.LayerNorm(8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.last(self.linear(self.norm(self.conv(x)).relu().mean(-1))))

    class ByHand(Plain):
        def forward(self, x):
            x = self.conv(x.to(dtype))
            x = self.norm(x.float()).to(dtype).relu().mean(-1)
            x = self.last(self.linear(x).float()).to(dtype)
            return self.head(x).float()

    torch.manual_seed(0)
    model, expected = Plain(), ByHand()
    expected.load_state_dict(model.state_dict())
    for part in (expected.conv, expected.linear, expected.head):
        part.to(dtype)
    batches = [(torch.randn(8, 2, 6), torch.randn(8, 3)) for _ in range(5)]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        size = microbatch or 8
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            loss = F.mse_loss(expected(x), y)
            (loss * (size / 8) if microbatch else loss).backward()
        optimizer.step()
    trainer(
        tmp_path, model, precision(), loss=F.mse_loss, train_data=batches, microbatch=microbatch, clip_gradients=None
    ).fit()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@BOTH
def test_transformers_with_padding_are_evaluated(tmp_path, precision, dtype):
    """torch's fast path for evaluation reads weights past the layers; it must not be taken with two dtypes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

        def forward(self, x, padding, targets):
            return self.head(self.encoder(x, src_key_padding_mask=padding))[:, 0]

    torch.manual_seed(0)
    model = Model()
    exact = copy.deepcopy(model).double().train()
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[1:, 3:] = True
    batch = {"x": torch.randn(4, 5, 16), "padding": padding, "targets": torch.randint(3, (4,))}

    def loss(outputs, batch):
        return F.cross_entropy(outputs, batch["targets"])

    run = trainer(tmp_path, model, precision(), loss=loss, train_data=[batch], eval_data=[batch])
    found = run.evaluate()["eval/loss"]
    with torch.no_grad():
        expected = F.cross_entropy(exact(**{**batch, "x": batch["x"].double()}), batch["targets"]).item()
    assert found == pytest.approx(expected, rel=0.02)
    run.fit()


def test_an_epsilon_that_is_zero_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"AdamW has eps=1e-08, which is 0 in float16.*eps=1e-4"):
        trainer(tmp_path, Ours(), FP16True(), optimizer=torch.optim.AdamW)
    run = trainer(tmp_path, Ours(), FP16True(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4))
    run.fit()
    assert all(parameter.isfinite().all() for parameter in run.state.model.parameters())
    trainer(tmp_path, Ours(), BF16True(), optimizer=torch.optim.AdamW).fit()


def test_inputs_that_need_no_cast_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second and third layer; a layer that gets float32 within the model still casts it."""
    walked = []
    real = true_half.map_tensors
    monkeypatch.setattr(true_half, "map_tensors", lambda function, tree: (walked.append(tree), real(function, tree))[1])

    class Widens(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.float()

    precision = BF16True()
    precision.device = torch.device("cpu")
    layers = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), Widens(), nn.Linear(3, 3)
    outputs = precision.convert_module(nn.Sequential(*layers))(torch.ones(2, 3))
    assert outputs.dtype is torch.bfloat16
    assert len(walked) == 4  # arguments and keywords of the model, and of its last layer
