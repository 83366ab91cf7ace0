"""Z-loss against its formula on the whole batch, alone and in training."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from language import LABELS, TOKENS, tiny
from torch import Tensor, nn

import hocket
from hocket_nlp import ZLoss
from hocket_nlp.functional import z_loss
from hocket_testkit import run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def formula(logits: Tensor, labels: Tensor | None, ignored: int = -100, weights: Tensor | None = None) -> Tensor:
    """Position by position, with the classes last: the weighted mean of ``log(sum(exp))`` squared."""
    rows = logits.double().flatten(0, -2)
    labels = torch.zeros(len(rows), dtype=torch.long) if labels is None else labels.flatten()
    total: Any = 0.0
    over = 0.0
    for row, label in zip(rows, labels.tolist(), strict=True):
        if label != ignored:
            weight = 1.0 if weights is None else float(weights[label])
            total = total + weight * row.exp().sum().log() ** 2
            over += weight
    return total / over


# --- the function


def test_values_by_hand() -> None:
    assert z_loss(torch.zeros(3, 8), coefficient=1.0).item() == pytest.approx(math.log(8) ** 2)
    normalized = torch.randn(5, 4).log_softmax(-1)
    assert z_loss(normalized, coefficient=1.0).item() == pytest.approx(0, abs=1e-10)
    assert z_loss(torch.zeros(3, 8)).item() == pytest.approx(1e-4 * math.log(8) ** 2)  # the coefficient of PaLM


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_formula(ignored, weighted) -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.double, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 1:3] = ignored
    weights = torch.linspace(0.1, 3, 7) if weighted else None
    want = 0.3 * formula(logits, labels, ignored, weights)
    for given, dim in ((logits, -1), (logits.movedim(-1, 1), 1)):
        got = z_loss(given, labels, 0.3, class_dim=dim, ignore_index=ignored, class_weights=weights)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            torch.autograd.grad(got, logits)[0], torch.autograd.grad(want, logits, retain_graph=True)[0]
        )


def test_no_label_ignored_infinities_and_half_precision() -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    value = z_loss(logits, torch.tensor([-100, -100]))
    value.backward()
    assert value.isnan() and logits.grad is not None and not logits.grad.any()
    assert z_loss(torch.tensor([[math.inf, 0], [0, 0]]), torch.tensor([-100, 1])).isfinite()
    low = z_loss(torch.full((1, 1000), 60.0, dtype=torch.float16), coefficient=1.0)  # 4468, of float32
    assert low.dtype == torch.float32 and low.item() == pytest.approx((60 + math.log(1000)) ** 2, rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert z_loss(torch.zeros(1, 3), coefficient=1.0).item() == pytest.approx(math.log(3) ** 2, rel=1e-6)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"shape \(2,\) do not fit logits of shape \(2, 3, 4\).*give labels of shape \(2, 3\)"
    ):
        z_loss(torch.zeros(2, 3, 4), torch.zeros(2))
    with pytest.raises(ValueError, match=r"give labels of shape \(2, 4\)"):
        z_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3), class_dim=1)


# --- in training: a step of SGD, of which the weights are the start less the gradient


def step(model: nn.Module, batches: list[Any], **changes: Any) -> hocket.Trainer:
    arguments: dict[str, Any] = {
        "model": model, "train_data": batches, "optimizer": "sgd(lr=1.0)", "duration": "1ep", "device": "cpu", "seed": 0,
        "algorithms": [ZLoss(0.2)],
    }  # fmt: skip
    trainer = hocket.Trainer(**{**arguments, **changes})
    trainer.fit()
    trainer.close()
    return trainer


def assert_step_is(trainer: hocket.Trainer, model: nn.Module, loss: Tensor, z: Tensor) -> None:
    """``model`` is the model before the step, and the loss and z-loss were computed from it."""
    total = loss + 0.2 * z
    total.backward()
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        moved, rounding = parameter.detach() - gradient, 4e-6 + 3e-5 * float(gradient.abs().max())
        torch.testing.assert_close(trainer.model_state_dict()[name], moved, rtol=1e-6, atol=rounding, msg=name)
    torch.testing.assert_close(trainer.state.loss, total.detach().to(trainer.state.loss.dtype), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        trainer.state.loss_parts["z-loss"].double(), 0.2 * z.detach().double(), rtol=1e-5, atol=1e-7
    )


def decoder_labels() -> Tensor:
    labels = LABELS[:, :6].clone()
    labels[1, 1:] = -100
    return labels


#: The family, its batch, and whether labels are shifted.
OWN: dict[str, tuple[dict[str, Tensor], bool]] = {
    "gpt2": ({"input_ids": TOKENS, "labels": LABELS}, True),
    "llama": ({"input_ids": TOKENS, "labels": LABELS}, True),
    "bert": ({"input_ids": TOKENS, "labels": LABELS}, False),
    "t5": ({"input_ids": TOKENS, "labels": decoder_labels()}, False),
    "classifier": ({"input_ids": TOKENS, "labels": torch.tensor([0, 2, 1])}, False),
}


@pytest.mark.parametrize("microbatch", [None, 1, 2])
@pytest.mark.parametrize("family", OWN)
def test_losses_that_models_compute(family, microbatch) -> None:
    batch, shifted = OWN[family]
    trainer = step(tiny(family).train(), [batch], microbatch=microbatch)
    model = tiny(family).train()
    outputs = model(**batch)
    logits, labels = outputs.logits, batch["labels"]
    z = formula(logits[:, :-1], labels[:, 1:]) if shifted else formula(logits, labels)
    assert_step_is(trainer, model, outputs.loss, z)


@pytest.mark.parametrize("microbatch", [None, 1])
def test_fused_cross_entropy_computes_it_in_its_chunks(microbatch) -> None:
    batch, _ = OWN["llama"]
    trainer = step(
        tiny("llama").train(),
        [batch],
        microbatch=microbatch,
        algorithms=[ZLoss(0.2), "fused-cross-entropy"],
        eval_data=[batch],
    )
    model = tiny("llama").train()
    outputs = model(**batch)
    assert_step_is(trainer, model, outputs.loss, formula(outputs.logits[:, :-1], LABELS[:, 1:]))
    model.load_state_dict(trainer.model_state_dict())
    assert trainer.state.metrics["eval/loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert trainer.state.model.lm_head.z_loss == 0


CLASSES = torch.tensor([1.0, 5.0, 2.0])


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("kind", ["plain", "ignored", "weights", "partial", "maps", "probabilities", "sum"])
def test_torchs_cross_entropy(kind, microbatch) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(7, 4, generator=generator), torch.tensor([0, 1, 2, 2, 1, 0, 2])
    options: dict[str, Any] = {
        "ignored": {"ignore_index": 0}, "weights": {"weight": CLASSES}, "partial": {"weight": CLASSES, "ignore_index": 1},
        "sum": {"reduction": "sum"},
    }.get(kind, {})  # fmt: skip
    layer: Any = nn.Linear
    if kind == "maps":
        inputs, labels, layer = torch.randn(7, 4, 3, generator=generator), labels[:, None].repeat(1, 3), _convolution
        labels[0], labels[4, 1] = -100, -100
    given = torch.eye(3)[labels] * 0.8 + 0.1 if kind == "probabilities" else labels
    if kind == "probabilities":
        given = given / given.sum(1, keepdim=True)
    loss: Any = nn.CrossEntropyLoss(**options) if kind != "partial" else functools.partial(F.cross_entropy, **options)

    def model() -> nn.Module:
        torch.manual_seed(3)
        return layer(4, 3)

    trainer = step(model(), [(inputs, given)], loss=loss, microbatch=microbatch)
    plain = model()
    logits = plain(inputs)
    z = formula(
        logits.movedim(1, -1) if kind == "maps" else logits,
        None if kind == "probabilities" else labels,
        options.get("ignore_index", -100),
        options.get("weight"),
    )
    assert_step_is(trainer, plain, loss(logits, given), z * (7 if kind == "sum" else 1))


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv1d(inputs, outputs, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_tasks_and_functions(reduction) -> None:
    batch, _ = OWN["llama"]

    def loss(outputs: Any, batch: Any) -> Any:
        value = F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction
        )
        return hocket.Loss(value, weight=(batch["labels"][:, 1:] != -100).sum(), reduction=reduction)

    trainer = step(tiny("llama").train(), [batch], loss=loss, microbatch=1)
    model = tiny("llama").train()
    outputs = model(**batch)
    z, number = formula(outputs.logits[:, :-1], LABELS[:, 1:]), (LABELS[:, 1:] != -100).sum()
    factor = number if reduction == "sum" else 1
    assert_step_is(trainer, model, outputs.loss * factor, z * factor)


def test_two_ranks_are_one() -> None:
    pytest.importorskip("hocket_strategies")
    batch = {name: torch.cat([value, value[:1]]) for name, value in OWN["llama"][0].items()}
    plain = step(tiny("llama").train(), [batch]).model_state_dict()

    def rank_main(rank: int) -> Any:
        warnings.filterwarnings("ignore", "Every rank reads all")
        span = {"algorithms": [ZLoss(0.2, stop="1ba")]}  # the part is there afterwards too, as ranks need it
        return step(
            tiny("llama").train(), [batch], strategy="ddp", global_batch=4, microbatch=1, **span
        ).model_state_dict()

    for found in run_ranks(rank_main, 2):
        for name, value in plain.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("more", [[], ["fused-cross-entropy"]])
def test_it_acts_between_start_and_stop_and_not_in_evaluation(more) -> None:
    batch, _ = OWN["llama"]
    parts: list[float] = []

    class Parts(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            parts.append(float(state.loss_parts["z-loss"]))

    trainer = step(
        tiny("llama").train(), [batch] * 4, algorithms=[ZLoss(0.2, start="1ba", stop="3ba"), *more], callbacks=[Parts()],
        eval_data=[batch], optimizer="sgd(lr=0.01)",
    )  # fmt: skip
    assert [value > 0 for value in parts] == [False, True, True, False]
    with torch.no_grad():
        expected = trainer.state.model.eval()(**batch).loss.item()
    assert trainer.state.metrics["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert "train/z-loss" in trainer.state.history.names()


def test_evaluation_does_not_compute_it(monkeypatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "hocket_nlp.z_loss.z_loss", lambda *args, **options: calls.append(args) or z_loss(*args, **options)
    )
    batch, _ = OWN["llama"]
    step(tiny("llama").train(), [batch] * 2, eval_data=[batch] * 3)
    assert len(calls) == 2


def test_batches_whose_labels_are_all_ignored_wait_for_the_next() -> None:
    batch, _ = OWN["bert"]
    first = {**batch, "labels": batch["labels"].clone()}
    first["labels"][0] = -100
    trainer = step(tiny("bert").train(), [first], microbatch=1)
    model = tiny("bert").train()
    outputs = model(**first)
    assert_step_is(trainer, model, outputs.loss, formula(outputs.logits, first["labels"]))


def test_an_untrained_model_of_equal_probabilities_is_read_by_its_class() -> None:
    """Shifted and plain cross entropy are equal then."""
    labels = TOKENS.clone()
    labels[0, 0] = -100
    for family, shifted in (("llama", True), ("bert", False)):
        model = tiny(family).train()
        with torch.no_grad():
            head = model.get_output_embeddings()
            head.weight.zero_()
            if head.bias is not None:
                head.bias.zero_()
        algorithm = ZLoss(0.2)
        step(model, [{"input_ids": TOKENS, "labels": labels}], algorithms=[algorithm])
        assert algorithm._reading is not None
        _, found = algorithm._reading.find(model(TOKENS, labels=labels), {"labels": labels})
        assert found is not None and found.shape == (3, 8 if shifted else 9)


# --- what is refused


def test_losses_that_are_no_cross_entropy_are_named() -> None:
    data = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))]
    with pytest.raises(
        ValueError, match=r"ZLoss compared the loss of SupervisedTask.*Add hocket_nlp\.functional\.z_loss"
    ):
        step(nn.Linear(4, 3), data, loss=lambda outputs, targets: F.multi_margin_loss(outputs, targets))
    with pytest.raises(ValueError, match=r"nll_loss.*of which the z-loss is 0.*remove z-loss"):
        step(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), data, loss=F.nll_loss)
    with pytest.raises(ValueError, match="found no match"):
        step(nn.Linear(4, 1), [(data[0][0], torch.randn(4, 1))], loss=nn.MSELoss())


class Own(hocket.Task):
    """Takes its own steps, with separate outputs and loss, or in one function."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.one = nn.Linear(4, 3), one

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])

    def train_batch(self, batch: Any, step: Any) -> None:
        step((lambda batch: self.loss(self(batch), batch)) if self.one else self.loss_of, batch)


def test_tasks_with_their_own_steps() -> None:
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    trainer = step(Own(False), [batch], microbatch=2)
    plain = Own(False)
    logits = plain(batch)
    (F.cross_entropy(logits, batch[1]) + 0.2 * formula(logits, None)).backward()
    assert plain.layer.weight.grad is not None
    moved = plain.layer.weight.detach() - plain.layer.weight.grad
    torch.testing.assert_close(trainer.model_state_dict()["layer.weight"], moved, rtol=1e-5, atol=1e-6)
    with pytest.raises(hocket.plugins.PluginError, match="'z-loss' acts on before_loss"):
        step(Own(True), [batch], microbatch=2)
