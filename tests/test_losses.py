"""A loss is what its author meant, or an error: means over what they are means over, sums, several, a model's own."""

from __future__ import annotations

import functools
import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket

INPUTS, TARGETS = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10.0)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def gradient(loss: Any, model: nn.Module) -> Tensor:
    """Plain PyTorch's."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


class Gradient(hocket.Callback):
    """Notes the gradient and the loss of every batch."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []

    def after_train_batch(self, state: hocket.State) -> None:
        self.gradients.append(torch.cat([parameter.grad.flatten() for parameter in state.trained_parameters()]))
        self.losses.append(float(state.loss))


def train(model: Any, loss: Any, batches: Any, **arguments: Any) -> Gradient:
    noted = Gradient()
    settings = {"optimizer": "sgd(lr=0.01)", "duration": "1ep", "device": "cpu", "callbacks": [noted], **arguments}
    hocket.Trainer(model=model, loss=loss, train_data=batches, **settings).fit()
    return noted


# --- sums


def squares(outputs: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    return F.mse_loss(outputs.squeeze(1), targets, reduction=reduction)


class Squares(hocket.Task):
    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.network = network()
        self.returned = returned

    def forward(self, batch: Any) -> Any:
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.returned(squares(outputs, batch[1]), len(batch[1]))


SUMS: dict[str, Any] = {
    "argument": lambda: {"model": network(), "loss": squares, "loss_reduction": "sum"},
    "a torch loss": lambda: {"model": nn.Sequential(network(), nn.Flatten(0)), "loss": nn.MSELoss(reduction="sum")},
    "partial": lambda: {"model": network(), "loss": functools.partial(squares, reduction="sum")},
    "Loss": lambda: {"model": Squares(lambda value, n: hocket.Loss(value, n, reduction="sum")), "loss": None},
    "Loss without weight": lambda: {"model": Squares(lambda value, n: hocket.Loss(value, reduction="sum")), "loss": None},
    "pair": lambda: {"model": Squares(lambda value, n: (value, n)), "loss": None, "loss_reduction": "sum"},
    "names": lambda: {
        "model": Squares(lambda value, n: {"a": value * 0.25, "b": value * 0.75}), "loss": None, "loss_reduction": "sum"
    },
}  # fmt: skip


@pytest.mark.parametrize("microbatch", [None, 4, 1])
@pytest.mark.parametrize("said", SUMS.values(), ids=SUMS)
def test_a_sum_is_the_sum_over_the_batch(said, microbatch) -> None:
    model = network()
    total = squares(model(INPUTS), TARGETS)
    arguments = said()
    noted = train(batches=[(INPUTS, TARGETS)], microbatch=microbatch, **arguments)
    torch.testing.assert_close(noted.gradients[0], gradient(total, model))
    assert noted.losses[0] == pytest.approx(total.item())
    trainer = hocket.Trainer(**said(), eval_data=[(INPUTS[:7], TARGETS[:7]), (INPUTS[7:], TARGETS[7:])], device="cpu")
    assert trainer.evaluate()["eval/loss"] == pytest.approx(total.item() / 10)


def test_a_sum_under_sam_is_the_sum_at_the_worst_point_nearby() -> None:
    """Foret et al. 2021, by hand: the second gradient at rho * g / |g|."""
    sam = pytest.importorskip("hocket_general").SAM
    model = network()
    first = gradient(squares(model(INPUTS), TARGETS), model)
    step = 0.05 * first / first.norm()
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + step, model.parameters())
    second = gradient(squares(model(INPUTS), TARGETS), model)
    noted = train(
        network(), squares, [(INPUTS, TARGETS)], loss_reduction="sum", microbatch=4, algorithms=[sam(rho=0.05)]
    )
    torch.testing.assert_close(noted.gradients, [first, second])


def test_a_loss_that_grows_with_the_batch_is_noticed() -> None:
    batches = [(INPUTS, TARGETS)]
    with pytest.raises(ValueError, match=r"twice its loss.*loss_reduction='sum'"):
        train(network(), squares, batches, microbatch=4)
    with pytest.raises(ValueError, match="twice its loss"):
        train(Squares(lambda value, n: value), None, batches, microbatch=1)
    train(network(), squares, batches, microbatch=4, loss_reduction="mean")
    train(network(), squares, batches)  # in one piece there is no difference
    means = {
        "mean": functools.partial(squares, reduction="mean"),
        "with a penalty": lambda outputs, targets: squares(outputs, targets, "mean") + 3.0,
        "nothing": lambda outputs, targets: outputs.sum() * 0.0,
    }
    for loss in means.values():
        train(network(), loss, batches, microbatch=4)


LABELS = torch.tensor([-100, 1, 0, 2, 2, 1, -100, -100, -100, 0])
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def classes() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 3)


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(ignore_index=-100),
        nn.CrossEntropyLoss(CLASS_WEIGHTS),
        functools.partial(F.cross_entropy, ignore_index=1, weight=CLASS_WEIGHTS),
        lambda outputs, targets: (F.cross_entropy(outputs, targets), (targets != -100).sum()),
    ],
    ids=["function", "module", "class weights", "partial", "own weight"],
)
def test_torchs_means_over_labels_are_over_those_that_count(loss, microbatch) -> None:
    """Microbatches of which all labels are ignored among them; also as an image's pixels, and in evaluation."""
    labels = LABELS.clamp(min=0) if isinstance(loss, functools.partial) else LABELS
    for inputs, targets, shape in (
        (INPUTS, labels, nn.Identity()),
        (INPUTS, labels.view(5, 2), nn.Unflatten(0, (5, 2))),
    ):
        pixels = nn.Identity() if targets.dim() == 1 else Last()
        model = nn.Sequential(classes(), pixels)
        batch = (shape(inputs), targets)
        value = loss(model(batch[0]), targets)
        whole = value[0] if isinstance(value, tuple) else value
        noted = train(nn.Sequential(classes(), pixels), loss, [batch], microbatch=microbatch)
        torch.testing.assert_close(noted.gradients[0], gradient(whole, model))
        assert noted.losses[0] == pytest.approx(whole.item())
        halves = [tuple(part[some] for part in batch) for some in (slice(0, 2), slice(2, 10))]
        evaluated = hocket.Trainer(model=model, loss=loss, eval_data=halves, device="cpu").evaluate()
        assert evaluated["eval/loss"] == pytest.approx(whole.item())


@pytest.mark.parametrize("microbatch", [2, 3])
def test_a_sum_of_means_that_is_meant_is_over_samples_whether_labels_are_ignored_or_not(microbatch: int) -> None:
    outputs, labels = torch.randn(6, 3, 4), torch.randint(3, (6, 4))
    labels[4, 1:] = -100

    def both(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) + outputs.square().mean()

    model = nn.Conv1d(3, 3, 1)
    parts = zip(outputs.split(microbatch), labels.split(microbatch), strict=True)
    expected = gradient(sum(both(model(x), y) * len(x) / 6 for x, y in parts), model)
    watch = train(model, both, [(outputs, labels)], microbatch=microbatch, loss_reduction="mean")
    torch.testing.assert_close(watch.gradients[0], expected)


class Last(nn.Module):
    """Moves classes to where cross-entropy wants them."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(-1, 1)


@pytest.mark.parametrize("microbatch", [1, 4])
def test_a_loss_that_compares_samples_is_noticed(microbatch) -> None:
    def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    batch = (INPUTS, LABELS.clamp(min=0))
    with pytest.warns(
        UserWarning, match=r"not the mean of their losses.*\(mean, weight\).*loss_reduction='mean'"
    ) as said:
        train(classes(), contrast, [batch] * 2, microbatch=microbatch)
    assert len(said) == 1
    train(classes(), contrast, [batch], microbatch=microbatch, loss_reduction="mean")
    train(classes(), contrast, [batch])  # one piece on one rank


def test_the_check_leaves_no_trace() -> None:
    """Not in random numbers, and not in a loss function's running values; later batches are not tried at all."""
    seen: list[int] = []

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))
            self.counted = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            self.replaced = self.replaced + 1
            self.counted += 1
            seen.append(len(targets))
            return F.dropout(squares(outputs, targets, "mean"), 0.5) + torch.rand(())

    loss, unchecked = Centred(), Centred()
    batches = [(INPUTS, TARGETS)] * 3
    noted = train(network(), loss, batches, microbatch=5, seed=3)
    assert loss.calls == loss.replaced == loss.counted == 6
    assert seen == [5, 5, *[1] * 5, 5, 5, 5, 5, 5, 5]
    seen.clear()
    # What is said is not checked: the same without.
    expected = train(network(), unchecked, batches, microbatch=5, seed=3, loss_reduction="mean")
    assert seen == [5] * 6
    assert noted.losses == expected.losses


def test_an_evaluation_of_batches_of_several_sizes_warns_of_a_sum_once() -> None:
    short = [(INPUTS[:4], TARGETS[:4]), (INPUTS[4:8], TARGETS[4:8]), (INPUTS[8:], TARGETS[8:])]
    trainer = hocket.Trainer(model=network(), loss=squares, eval_data=short, device="cpu")
    with pytest.warns(UserWarning, match=r"eval/loss is neither.*loss_reduction='sum'"):
        trainer.evaluate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.evaluate()
        for loss, data in ((squares, short[:2]), (functools.partial(squares, reduction="mean"), short)):
            hocket.Trainer(model=network(), loss=loss, eval_data=data, device="cpu").evaluate()


@pytest.mark.parametrize("given", ["summe", 1, "none"])
def test_other_reductions_are_refused(given) -> None:
    with pytest.raises(ValueError, match="neither 'mean' nor 'sum'"):
        hocket.Trainer(model=network(), loss=squares, loss_reduction=given)
    with pytest.raises(ValueError, match="neither 'mean' nor 'sum'"):
        train(Squares(lambda value, n: hocket.Loss(value, reduction=given)), None, [(INPUTS, TARGETS)])


# --- several


def test_two_losses_are_not_a_mean_and_its_weight() -> None:
    for returned in (
        lambda value, n: (value, value * 0.5),
        lambda value, n: hocket.Loss(value, value * 0.5),
        lambda value, n: ({"a": value}, value),
    ):
        with pytest.raises(ValueError, match=r"two tensors with gradients.*a \+ b.*\{'a': a, 'b': b\}"):
            train(Squares(returned), None, [(INPUTS, TARGETS)])


@pytest.mark.parametrize("weight", ["ten", -1, float("nan"), [3], torch.ones(2)])
def test_weights_that_are_none_are_refused(weight) -> None:
    with pytest.raises((TypeError, ValueError), match=r"\(mean, weight\) with"):
        train(Squares(lambda value, n: (value, weight)), None, [(INPUTS, TARGETS)])


@pytest.mark.parametrize("microbatch", [None, 4])
def test_total_is_the_total(microbatch) -> None:
    def named(value: Tensor, n: int) -> dict[str, Tensor]:
        parts = {"near": value / n * 0.25, "far": value / n * 0.75}
        return {**parts, "total": parts["near"] + parts["far"]}

    model = network()
    mean = squares(model(INPUTS), TARGETS, "mean")
    noted = train(Squares(named), None, [(INPUTS, TARGETS)], microbatch=microbatch)
    torch.testing.assert_close(noted.gradients[0], gradient(mean, model))
    assert noted.losses[0] == pytest.approx(mean.item())


def test_named_losses_are_scalar_tensors() -> None:
    for name, wrong in (("accuracy", 0.5), ("logits", torch.zeros(3))):
        with pytest.raises(TypeError, match=f"The loss named '{name}' is"):
            train(
                Squares(lambda value, n, name=name, wrong=wrong: {"total": value, name: wrong}),
                None,
                [(INPUTS, TARGETS)],
            )


def test_a_dict_with_loss_among_others_is_refused() -> None:
    """As other frameworks return it: the one to train on, and what it is made of."""
    with pytest.raises(ValueError, match=r"'loss', 'near', which would be added up.*call it 'total'"):
        train(Squares(lambda value, n: {"loss": value, "near": value / 2}), None, [(INPUTS, TARGETS)])
    train(Squares(lambda value, n: {"loss": value}), None, [(INPUTS, TARGETS)])


@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_value_without_gradient_is_not_added_to_losses(microbatch: int | None) -> None:
    one = torch.ones(())
    with pytest.raises(
        ValueError, match=r"'near', 'accuracy', which would be added up, and 'accuracy' has no gradient"
    ):
        train(
            Squares(lambda value, n: {"near": value / n, "accuracy": one}),
            None,
            [(INPUTS, TARGETS)],
            microbatch=microbatch,
        )
    for returned in (lambda v, n: {"near": v / n, "far": one * 0}, lambda v, n: {"total": v / n + 1, "accuracy": one}):
        noted = train(Squares(returned), None, [(INPUTS, TARGETS)], microbatch=microbatch)
        model = network()
        torch.testing.assert_close(noted.gradients[0], gradient(squares(model(INPUTS), TARGETS, "mean"), model))


def test_one_element_is_a_scalar() -> None:
    model = network()
    for shape in ((1,), (1, 1)):
        noted = train(Squares(lambda value, n, shape=shape: (value / n).view(shape)), None, [(INPUTS, TARGETS)])
        torch.testing.assert_close(noted.gradients[0], gradient(squares(model(INPUTS), TARGETS, "mean"), model))


@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_loss_without_a_gradient_says_so(microbatch) -> None:
    cut = {"tensor": Tensor.detach, "float": Tensor.item, "numpy": lambda value: value.detach().numpy()}
    for name, function in cut.items():
        said = "The loss has no gradient" if name == "tensor" else r"A number has no gradient.*without \.item\(\)"
        with pytest.raises((TypeError, ValueError), match=said):
            train(Squares(lambda value, n, f=function: f(value / n)), None, [(INPUTS, TARGETS)], microbatch=microbatch)


# --- means over nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_losses_of_16_bits_are_counted_in_float32(dtype) -> None:
    """float16 ends at 65,504, and bfloat16 takes 257 for 256: here 40,000 + 40,257 tokens."""
    model = network()
    inputs, targets = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)), torch.zeros(4, 1)
    weights = iter([40_000, 40_257])

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.mse_loss(outputs, targets).to(dtype), torch.tensor(next(weights))

    halves = [F.mse_loss(model(inputs[part]), targets[part]) for part in (slice(0, 2), slice(2, 4))]
    mean = (40_000 * halves[0] + 40_257 * halves[1]) / 80_257
    expected = gradient(mean, model)
    [found] = train(model, loss, [(inputs, targets)], microbatch=2).gradients
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    mask = (targets >= 0).float()
    return ((outputs.squeeze(1) - targets) ** 2 * mask).sum() / mask.sum(), mask.sum()


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("nothing", [slice(0, 5), slice(5, 10)])
def test_a_mean_over_nothing_counts_nothing(nothing, as_number) -> None:
    targets = TARGETS.clone()
    targets[nothing] = -100

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        value, weight = masked(outputs, targets)
        return value, weight.item() if as_number else weight

    model = network()
    whole = masked(model(INPUTS), targets)[0]
    noted = train(network(), loss, [(INPUTS, targets)], microbatch=5)
    torch.testing.assert_close(noted.gradients[0], gradient(whole, model))
    assert noted.losses[0] == pytest.approx(whole.item())


def test_an_error_names_the_batch_in_which_nothing_counts() -> None:
    nothing = torch.full_like(TARGETS, -100)
    for microbatch in (None, 5):
        with pytest.raises(FloatingPointError, match="not finite in batch 1 "):
            train(network(), masked, [(INPUTS, TARGETS), (INPUTS, nothing), (INPUTS, TARGETS)], microbatch=microbatch)


def test_an_error_says_that_an_earlier_batch_spoilt_the_weights() -> None:
    def root(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) * targets).square().sum().sqrt()  # at 0 the gradient is 0 / 0

    with pytest.raises(FloatingPointError, match=r"not finite in the weights before batch 2, .* of an earlier batch"):
        train(network(), root, [(INPUTS, TARGETS), (INPUTS, TARGETS * 0.0), (INPUTS, TARGETS)])


# --- a model's own


class Tagger(nn.Module):
    """Computes its own loss, as models of transformers do."""

    def __init__(self, own: Any, classes: int = 5) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.own = nn.Embedding(7, classes), own

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.layer(input_ids)
        return {"loss": self.own(logits, labels), "logits": logits}


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits[:, :-1], labels[:, 1:])


def regression(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits.mean((1, 2)), labels)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(5, (6, 8), generator=generator)
    for row, length in enumerate((2, 8, 3, 8, 1, 5)):
        labels[row, length:] = -100
    return {"input_ids": torch.randint(7, (6, 8), generator=generator), "labels": labels}


@pytest.mark.parametrize("own", [plain, shifted], ids=["plain", "shifted"])
@pytest.mark.parametrize("microbatch", [None, 4, 1])
def test_a_models_own_mean_over_labels_is_weighted_by_labels(own, microbatch) -> None:
    batch, model = tokens(), Tagger(own)
    whole = own(model.layer(batch["input_ids"]), batch["labels"])
    noted = train(Tagger(own), None, [batch], microbatch=microbatch)
    torch.testing.assert_close(noted.gradients[0], gradient(whole, model))
    assert noted.losses[0] == pytest.approx(whole.item())


@pytest.mark.parametrize("own", [plain, shifted], ids=["plain", "shifted"])
def test_its_evaluation_is_the_mean_over_labels_too(own) -> None:
    batch, model = tokens(), Tagger(own)
    whole = own(model.layer(batch["input_ids"]), batch["labels"])
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 1), slice(1, 6))]
    assert hocket.Trainer(model=model, eval_data=halves).evaluate()["eval/loss"] == pytest.approx(whole.item())


class Slots:
    """Outputs in which no tensors are found."""

    __slots__ = ("logits", "loss")

    def __init__(self, logits: Tensor, loss: Tensor) -> None:
        self.logits, self.loss = logits, loss


@pytest.mark.parametrize("kind", [dict, SimpleNamespace, Slots])
def test_a_task_that_returns_a_models_own_loss_is_weighted_too(kind) -> None:
    class Wrapped(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.network = Tagger(plain)

        def forward(self, batch: Any) -> Any:
            outputs = self.network(**batch)
            return kind(**outputs)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs["loss"] if kind is dict else outputs.loss

        def count(self, batch: Any) -> int:
            return len(batch["labels"])

    batch, model = tokens(), Tagger(plain)
    if kind is Slots:  # no logits are found to compare with
        with pytest.raises(ValueError, match=r"Wrapped computes its loss itself.*outputs\.loss"):
            train(Wrapped(), None, [batch], microbatch=2)
    else:
        noted = train(Wrapped(), None, [batch], microbatch=2)
        torch.testing.assert_close(noted.gradients[0], gradient(model(**batch)["loss"], model))


def test_another_mean_of_a_models_own_is_refused_with_what_to_use() -> None:
    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        return plain(logits, labels) + 0.01 * logits.square().mean()

    batch = tokens()
    with pytest.raises(ValueError, match=r"Tagger computes its loss itself.*loss=lambda outputs, batch"):
        train(Tagger(weighted), None, [batch], microbatch=2)
    with pytest.warns(UserWarning, match="weighted by their samples"):
        hocket.Trainer(model=Tagger(weighted), eval_data=[batch]).evaluate()
    train(Tagger(weighted), None, [batch])  # in one piece
    said = lambda outputs, batch: (outputs["loss"], (batch["labels"] != -100).sum())  # noqa: E731
    train(Tagger(weighted), said, [batch], microbatch=2)


def test_a_models_own_regression_is_a_mean_over_samples() -> None:
    batch = {**tokens(), "labels": torch.randn(6)}

    class Regressor(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.layer(input_ids).mean((1, 2))
            return {"loss": F.mse_loss(logits, labels), "logits": logits}

    model = Regressor(None)
    whole = model(**batch)["loss"]
    noted = train(Regressor(None), None, [batch], microbatch=4)
    torch.testing.assert_close(noted.gradients[0], gradient(whole, model))


@pytest.mark.filterwarnings("ignore:.* was in eval mode")
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForMaskedLM", "BertForSequenceClassification"])
def test_models_of_transformers(kind) -> None:
    """Against the model itself, in one piece."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 12, "n_positions": 8}
    if kind != "GPT2LMHeadModel":
        sizes = {
            "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 12,
            "num_labels": 5,
        }  # fmt: skip
    config = (transformers.GPT2Config if kind == "GPT2LMHeadModel" else transformers.BertConfig)(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    batch = tokens()
    if kind == "BertForSequenceClassification":
        batch["labels"] = torch.arange(6) % 5
    whole = model(**batch).loss
    expected = torch.autograd.grad(whole, list(model.parameters()), allow_unused=True)
    noted: list[Any] = []

    class Watch(hocket.Callback):
        def before_forward(self, state: hocket.State) -> None:
            state.task.eval()  # no dropout, as above

        def after_train_batch(self, state: hocket.State) -> None:
            noted.extend(parameter.grad for parameter in state.trained_parameters())

    hocket.Trainer(
        model=model, train_data=[batch], optimizer="sgd(lr=0.1)", duration="1ba", microbatch=4, callbacks=[Watch()]
    ).fit()
    torch.testing.assert_close([g for g in noted if g is not None], [g for g in expected if g is not None])


def test_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/several-loaders.md: several loaders, also in microbatches, and no warning."""
    page = (Path(__file__).parent.parent / "docs/how-to/several-loaders.md").read_text(encoding="utf-8")
    file = tmp_path / "page.py"
    file.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = runpy.run_path(str(file))
        assert found["trainer"].state.timestamp.sample == 2 * 32 * 8
        loaders = {name: found[name] for name in ("labelled", "unlabelled")}
        result = hocket.Trainer(
            model=found["SemiSupervised"](), train_data=found["Several"](loaders, "cycle"), optimizer="sgd(lr=0.1)",
            duration="1ep", microbatch=3, loggers=[], device="cpu",
        ).fit()  # fmt: skip
    assert result.timestamp.batch == 32
