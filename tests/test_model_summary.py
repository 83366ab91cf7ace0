"""Summaries beside hand counts; and that they leave no trace."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer
from torch import nn

import hocket


def test_an_mlp_has_the_flops_of_a_hand_count() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    found = hocket.model_summary(model, (torch.ones(32, 64), torch.zeros(32).long()), loss="cross_entropy")
    products = 2 * 32 * 64 * 256, 2 * 32 * 256 * 10
    assert [each.forward_flops for each in found.layers] == [sum(products), products[0], 0, products[1]]
    # The gradient of the input is not needed in the first layer.
    assert [each.backward_flops for each in found.layers] == [
        products[0] + 2 * products[1],
        products[0],
        0,
        2 * products[1],
    ]
    assert found.layers[1].outputs == ((32, 256),)


def test_resnet18_has_the_flops_of_a_hand_count() -> None:
    torchvision = pytest.importorskip("torchvision")
    batch = torch.ones(2, 3, 224, 224), torch.zeros(2).long()
    found = hocket.model_summary(torchvision.models.resnet18(), batch, loss="cross_entropy")
    # 64 channels at 56 x 56; each stage halves the sizes, doubles the channels and has a 1 x 1 shortcut.
    convolutions = 112**2 * 64 * 3 * 49 + 4 * 56**2 * 64 * 64 * 9
    for stage, channels in enumerate((128, 256, 512), 1):
        pixels = (56 // 2**stage) ** 2
        convolutions += pixels * channels * (channels // 2 * 9 + 3 * channels * 9 + channels // 2)
    assert found.total.forward_flops == pytest.approx(2 * 2 * (convolutions + 512 * 1000), rel=0.02)
    assert found.total.parameters == 11_689_512  # as in the documentation of torchvision


def test_a_gpt_has_the_flops_of_a_hand_count_and_tied_weights_count_once() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model, tokens = transformers.GPT2LMHeadModel(config), torch.zeros(4, 64, dtype=torch.long)
    found = hocket.model_summary(model, {"input_ids": tokens, "labels": tokens})
    layers = 2 * 12 * 64**2  # attention 4 d², feed-forward 8 d²
    attention = 2 * 2 * 64 * 64  # queries by keys and weights by values, for each token
    assert found.total.forward_flops == pytest.approx(2 * 4 * 64 * (layers + attention + 64 * 500), rel=0.02)
    assert found.total.parameters == sum(each.numel() for each in model.parameters())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.shared.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.shared(self.drop(self.norm(self.shared(inputs))))


def test_modules_that_are_called_twice_or_never_and_frozen_ones() -> None:
    layers = {each.name: each for each in hocket.model_summary(Twice(), (torch.ones(4, 8), None)).layers}
    assert (layers["shared"].calls, layers["unused"].calls, layers["unused"].outputs) == (2, 0, ())
    assert layers["shared"].forward_flops == 2 * 2 * 4 * 64
    assert (layers["shared"].parameters, layers["shared"].trainable) == (72, 8)


def test_it_leaves_no_trace() -> None:
    model, calls = Twice().eval(), []
    model.shared.train()
    model.register_forward_hook(lambda *_: calls.append(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, random = [each.training for each in model.modules()], torch.get_rng_state()
    hocket.model_summary(model, (torch.ones(4, 8), torch.ones(4, 8)), loss="mse_loss")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert modes == [each.training for each in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert not calls and all(each.grad is None for each in model.parameters())


def test_a_model_on_the_meta_device_is_summarized_too() -> None:
    with torch.device("meta"):
        model = nn.Linear(100_000, 100_000)  # 40 GB
    assert hocket.model_summary(model, (torch.ones(1, 100_000), None)).total.parameters == 10**10 + 10**5


def test_lazy_modules_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="Call the model once before"):
        hocket.model_summary(nn.LazyLinear(3), (torch.ones(1, 2), None))


def test_the_trainer_shows_it_once_and_trains_bitwise_as_without(capsys: Any) -> None:
    results = []
    for shown in (False, True):
        trainer = make_trainer(model=make_model(0.5), train_data=make_data(), seed=3, summary=shown)
        trainer.fit("1ep")
        results.append(trainer.model_state_dict())
    assert all(torch.equal(one, other) for one, other in zip(*(each.values() for each in results), strict=True))
    assert capsys.readouterr().out.count("forward") == 1


@pytest.mark.parametrize("whole", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_has_the_flops_of_a_hand_count(whole: type[nn.RNNBase]) -> None:
    """The CPU computes a layer of an LSTM as one operation, which torch's counter does not know; the others step by step."""
    batch, steps, width, hidden, gates = 4, 5, 8, 12, {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[whole]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = whole(width, hidden, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, inputs: Any) -> Any:
            return self.layers(inputs)[0]

    data = (torch.ones(batch, steps, width), torch.ones(batch, steps, 2 * hidden))
    found = hocket.model_summary(Net(), data, loss="mse").layers[-1]
    inputs, state = 2 * batch * gates * hidden * (width + 2 * hidden), 2 * batch * gates * hidden * 2 * hidden
    assert found.forward_flops == 2 * steps * (inputs + state)
    # The inputs of the first layer have no gradient, and neither has the state before the first step.
    inner = 2 * batch * gates * hidden * 2 * hidden
    assert found.backward_flops == found.forward_flops + 2 * (steps * inner + (steps - 1) * state)


def test_levels_that_are_no_number_are_refused() -> None:
    batch = (torch.ones(4, 8), torch.zeros(4, 1))
    assert [each.name for each in hocket.model_summary(nn.Sequential(nn.Linear(8, 1)), batch, depth=0).layers] == [""]
    with pytest.raises(ValueError, match="depth=-1 is not a number of levels"):
        hocket.model_summary(nn.Linear(8, 1), batch, depth=-1)
    with pytest.raises(ValueError, match="depth='x' is not a number of levels"):
        hocket.model_summary(nn.Linear(8, 1), batch, depth="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [None, (), {}])
def test_a_batch_without_anything_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=f"batch={re.escape(repr(batch))} has no tensors"):
        hocket.model_summary(nn.Linear(8, 1), batch)


def test_a_layer_that_does_not_take_the_batch_is_named_and_nothing_is_logged(caplog: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(9, 1))

        def forward(self, inputs: Any) -> Any:
            return self.head(inputs)

    logging.getLogger("torch").addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match=r"^Net\.head\.1 \(Linear\) raised .*\(4, 8\), \(4, 1\)"):
            hocket.model_summary(Net(), (torch.ones(4, 8), torch.zeros(4, 1)))
        assert not caplog.records
        with pytest.raises(ValueError, match=r"^The loss raised .*\(4, 9\), \(4, 3, 5\)"):
            hocket.model_summary(Net(), (torch.ones(4, 9), torch.zeros(4, 3, 5)), loss=lambda one, other: one @ other)
    finally:
        logging.getLogger("torch").removeHandler(caplog.handler)


def test_a_bilinear_layer_has_the_flops_of_a_hand_count() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.both = nn.Linear(3, 10), nn.Bilinear(10, 12, 7)

        def forward(self, inputs: Any) -> Any:
            return self.both(self.first(inputs[..., :3]), inputs)

    found = hocket.model_summary(Net(), (torch.ones(5, 2, 12), torch.ones(5, 2, 7)), loss="mse").layers[-1]
    products = 2 * 10 * 7 * 12 * 10 + 2 * 10 * 7 * 12  # of ten samples, for each of 7 outputs
    assert found.kind == "Bilinear"
    assert found.forward_flops == products
    assert found.backward_flops == 2 * products  # for the weight and the first input; the second has no gradient
