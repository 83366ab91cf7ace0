"""Evaluation: exact, on several sets, and without a trace in training."""

from __future__ import annotations

import random
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from support import sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import hocket


class Accuracy:
    """The protocol, by hand."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self) -> float:
        return self.right / self.seen

    def reset(self) -> None:
        self.right = self.seen = 0


def whole(model: nn.Module, loader: Any) -> tuple[float, float]:
    """Loss and accuracy over everything at once."""
    inputs, targets = loader.dataset.tensors
    model.eval()
    with torch.no_grad():
        outputs = model(inputs)
    return F.cross_entropy(outputs.double(), targets).item(), (outputs.argmax(1) == targets).double().mean().item()


CLASSES = torch.tensor([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("loss", "keywords"),
    [
        ("cross_entropy", {}),
        (nn.CrossEntropyLoss(CLASSES), {"weight": CLASSES}),
        (partial(F.cross_entropy, weight=CLASSES), {"weight": CLASSES}),
        (lambda o, t: (F.cross_entropy(o, t), (t != -100).sum()), {}),
        (
            lambda o, t: (F.cross_entropy(o, t, CLASSES), CLASSES[t.clamp(min=0)].where(t != -100, 0).sum()),
            {"weight": CLASSES},
        ),
    ],
)
@pytest.mark.parametrize("labels", [(0, 1, 2, -100, -100, 1, -100), (-100, 1, 2, 0, 1, 1, 2)])
def test_the_loss_of_a_set_with_ignored_labels_is_that_of_one_batch(model, loss, keywords, labels) -> None:
    """Also where the first label is ignored in a later batch only."""
    inputs, targets = torch.randn(7, 8, generator=torch.Generator().manual_seed(0)), torch.tensor(labels)
    net = model()
    trainer = hocket.Trainer(model=net, loss=loss, metrics="accuracy", device="cpu")
    values = trainer.evaluate(DataLoader(TensorDataset(inputs, targets), 2))
    outputs = net.eval()(inputs)
    assert values["eval/loss"] == pytest.approx(F.cross_entropy(outputs, targets, **keywords).item(), rel=1e-6)
    assert values["eval/accuracy"] == (outputs.argmax(1) == targets)[targets != -100].double().mean().item()


def test_a_mean_over_nothing_counts_nothing(model) -> None:
    """Of the batches of two samples each, all targets of the second are ignored: its loss is 0 / 0."""
    inputs, targets = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -1, -1, 2, -1])

    def loss(outputs: Any, targets: Any) -> Any:
        return F.cross_entropy(outputs, targets, ignore_index=-1), (targets != -1).sum()

    net = model()
    trainer = hocket.Trainer(
        model=net, loss=loss, eval_data=DataLoader(TensorDataset(inputs, targets), 2), device="cpu"
    )
    values = trainer.evaluate()
    expected = F.cross_entropy(net.eval()(inputs[[0, 1, 4]]).double(), targets[[0, 1, 4]])
    assert list(values.values()) == [pytest.approx(expected.item(), rel=1e-6)]


def test_sets_are_exact_and_do_not_mix(data, model) -> None:
    """S10: of two sets with one metric, the last won. S25: a short last batch counted as much as the others."""
    net = model()
    sets = {"odd": data(37, 16), "one": data(1, 16), "even": data(64, 16)}
    trainer = hocket.Trainer(
        model=net, loss=F.cross_entropy, eval_data=sets, metrics={"accuracy": Accuracy(), "f1": MulticlassF1Score(3)}
    )
    values = trainer.evaluate()
    for label, loader in sets.items():
        loss, accuracy = whole(net, loader)
        assert values[f"{label}/loss"] == pytest.approx(loss, rel=1e-6)
        assert values[f"{label}/accuracy"] == accuracy
    assert set(values) == {f"{label}/{name}" for label in sets for name in ("loss", "accuracy", "f1")}


def test_evaluate_takes_other_data_and_metrics(data, model) -> None:
    net = model()
    trainer = hocket.Trainer(model=net, loss=F.cross_entropy)
    values = trainer.evaluate(data(37, 16), metrics={"accuracy": Accuracy()})
    assert (values["eval/loss"], values["eval/accuracy"]) == pytest.approx(whole(net, data(37, 16)), rel=1e-6)


def test_metrics_with_several_values(data, model) -> None:
    metrics = {
        "both": MetricCollection({"a": MulticlassAccuracy(3), "b": MulticlassF1Score(3)}),
        "each": MulticlassAccuracy(3, average="none"),
    }
    values = hocket.Trainer(model=model(), loss=F.cross_entropy).evaluate(data(30), metrics=metrics)
    assert {name for name in values if name != "eval/loss"} == {
        "eval/both/a", "eval/both/b", "eval/each/0", "eval/each/1", "eval/each/2",
    }  # fmt: skip


def test_intervals_of_their_own(data, model) -> None:
    evaluated: list[tuple[str, int]] = []

    class Watch(hocket.Callback):
        def eval_end(self, state: hocket.State) -> None:
            evaluated.append((state.eval_label, state.timestamp.batch))

    sets = {
        "often": hocket.EvalSet(data(4), every="2ba"),
        "never": hocket.EvalSet(data(4), every="0ba"),
        "share": hocket.EvalSet(data(4), every="0.5dur"),
        "usual": data(4),
    }
    hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(96), eval_data=sets, optimizer=sgd, duration="2ep",
        callbacks=[Watch()],
    ).fit()  # fmt: skip
    assert [batch for label, batch in evaluated if label == "often"] == [2, 4, 6]
    assert [batch for label, batch in evaluated if label == "usual"] == [3, 6]
    assert [batch for label, batch in evaluated if label == "share"] == [3, 6]
    assert not [batch for label, batch in evaluated if label == "never"]


def test_the_end_of_a_fit_evaluates_each_set_that_was_not_evaluated_there(data, model) -> None:
    evaluated: list[tuple[str, int]] = []

    class Watch(hocket.Callback):
        def eval_end(self, state: hocket.State) -> None:
            evaluated.append((state.eval_label, state.timestamp.batch))

    sets = {
        "usual": data(4),
        "rare": hocket.EvalSet(data(4), every="2ba"),
        "never": hocket.EvalSet(data(4), every="0ba"),
    }
    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(96), eval_data=sets, optimizer=sgd, duration="1ep",
        callbacks=[Watch()],
    )  # fmt: skip
    metrics = {name: value for name, value in trainer.fit().metrics.items() if not name.startswith("train/")}
    assert evaluated == [("rare", 2), ("usual", 3), ("rare", 3)]
    assert metrics == pytest.approx(trainer.evaluate({label: sets[label] for label in ("usual", "rare")}), rel=1e-6)


def test_every_submodule_keeps_its_mode(data) -> None:
    """S11: a BatchNorm that was frozen in eval mode was in training mode after one evaluation."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net.train()
    net[1].eval()
    seen: list[list[bool]] = []

    class Watch(hocket.Callback):
        def eval_before_forward(self, state: hocket.State) -> None:
            seen.append([module.training for module in state.model.modules()])

        def before_forward(self, state: hocket.State) -> None:
            seen.append([module.training for module in state.model])

    trainer = hocket.Trainer(
        model=net, loss=F.cross_entropy, train_data=data(32), eval_data=data(32), optimizer=sgd, eval_every="1ba",
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.fit("2ba")
    training, evaluation = seen[0], seen[1]
    assert training == seen[2] == [True, False, True, True]
    assert not any(evaluation)
    assert [module.training for module in net] == training


def test_an_exception_in_evaluation_leaves_nothing_behind(data, model) -> None:
    """composer.md 3.2: the temporary set stayed registered and the loader's label was 'eval'."""
    net = model(dropout=0.5)
    trainer = hocket.Trainer(
        model=net, loss=F.cross_entropy, train_data=data(), eval_data=data(8), optimizer=sgd, algorithms=["ema"], seed=1
    )
    trainer.fit("2ba")
    before = [p.clone() for p in net.parameters()]

    def broken() -> Any:
        yield from data(8)
        raise OSError("disk")

    class Broken:
        def __iter__(self) -> Any:
            return broken()

    with pytest.raises(OSError, match="disk"):
        trainer.evaluate(Broken())
    assert all(module.training for module in net.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)), "EMA gave the weights back"
    assert trainer.state.eval_label is None and set(trainer.state.eval_sets) == {"eval"}
    assert trainer.fit("1ba").timestamp.batch == 3


def test_the_sanity_evaluation_leaves_no_trace(data, model) -> None:
    def run(batches: int) -> tuple[list[torch.Tensor], dict[str, float], list[Any]]:
        net, logger = model(dropout=0.3), hocket.plugins.get("loggers", "memory")()
        result = hocket.Trainer(
            model=net, loss=F.cross_entropy, train_data=data(), eval_data=data(40, 8), metrics={"accuracy": Accuracy()},
            optimizer=sgd, duration="1ep", sanity_eval=batches, seed=4, loggers=[logger],
        ).fit()  # fmt: skip
        return list(net.parameters()), dict(result.metrics), sorted(logger.metrics.items())

    (a, first, logged), (b, second, also) = run(0), run(2)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert (first, logged) == (second, also)


def test_the_sanity_evaluation_finds_what_is_broken_before_training(data, model) -> None:
    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(), eval_data=[(torch.zeros(2, 9), torch.zeros(2))],
        optimizer=sgd, duration="1ep", sanity_eval=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0


def test_train_metrics_are_those_of_the_epoch(data, model) -> None:
    """S9: train metrics at the end of an epoch were the last batch's."""
    shown: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorded(Accuracy):
        def update(self, outputs: Any, targets: Any) -> None:
            shown.append((outputs, targets))
            super().update(outputs, targets)

    logger = hocket.plugins.get("loggers", "memory")()
    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(), train_metrics=lambda: {"accuracy": Recorded()},
        optimizer=sgd, duration="2ep", microbatch=7, loggers=[logger], algorithms=["sam", "label-smoothing"],
    )  # fmt: skip
    trainer.fit()
    expected = []
    for epoch in range(2):
        seen = shown[epoch * len(shown) // 2 : (epoch + 1) * len(shown) // 2]
        outputs, targets = torch.cat([o for o, _ in seen]), torch.cat([t for _, t in seen])
        assert len(targets) == 84, "each sample once, although SAM computes gradients twice"
        expected.append(float((outputs.argmax(1) == targets).float().mean()))
    assert [value for _, value in logger.metrics["train/accuracy"]][:2] == pytest.approx(expected)


def test_names_of_metrics_are_exact(data, model) -> None:
    """S23: 'Accuracy' selected every metric with that in its name."""
    metrics = {"accuracy": Accuracy(), "accuracy-2": Accuracy(), "Accuracy": Accuracy()}
    values = hocket.Trainer(model=model(), loss=F.cross_entropy).evaluate(data(8), metrics=metrics)
    assert set(values) == {"eval/loss", "eval/accuracy", "eval/accuracy-2", "eval/Accuracy"}


@pytest.mark.parametrize("argument", ["metrics", "train_metrics"])
def test_a_metric_does_not_take_the_name_of_the_loss(data, model, argument) -> None:
    with pytest.raises(ValueError, match=r"(train|eval)/loss is the loss of the task. .* 'mean_loss'"):
        hocket.Trainer(
            model=model(), loss=F.cross_entropy, train_data=data(8), eval_data=data(8), optimizer=sgd, duration="1ep",
            **{argument: {"loss": Accuracy()}},
        ).fit()  # fmt: skip


def test_outputs_without_a_loss(data, model) -> None:
    """A model that evaluates otherwise than it trains reports metrics only; so does one without a loss."""

    class Classes(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return F.cross_entropy(outputs, batch[1])

        def eval_forward(self, batch: Any) -> torch.Tensor:
            return F.one_hot(self(batch).argmax(1), 3)

    for trainer in (hocket.Trainer(model=Classes()), hocket.Trainer(model=model())):
        assert set(trainer.evaluate(data(8), metrics={"accuracy": Accuracy()})) == {"eval/accuracy"}


def test_predict(data, model) -> None:
    net = model(dropout=0.5)
    trainer = hocket.Trainer(model=net, loss=F.cross_entropy)
    loader = data(37, 16, shuffle=False)
    outputs = torch.cat(trainer.predict(loader))
    net.eval()
    torch.testing.assert_close(outputs, net(loader.dataset.tensors[0]).detach())
    assert len(hocket.Trainer(model=net, limit_predict=2).predict(loader)) == 2
    with pytest.warns(UserWarning, match=r"in random order, and outputs are in that order\. .* shuffle=False\."):
        trainer.predict(data(37, 16, shuffle=True))


def test_predictions_that_are_not_kept_reach_callbacks(data, model) -> None:
    seen = []

    class Sees(hocket.Callback):
        def predict_batch_end(self, state: hocket.State) -> None:
            seen.append(state.outputs.clone())

    trainer, loader = hocket.Trainer(model=model(), callbacks=[Sees()]), data(37, 16, shuffle=False)
    assert trainer.predict(loader, keep=False) == []
    taken = list(seen)
    torch.testing.assert_close(taken, trainer.predict(loader))


class EvaluationMetadata(hocket.Algorithm):
    """Draws, logs and asks for things on evaluation events; writes down what it hears."""

    events = {hocket.Event.EVAL_BEFORE_ALL, hocket.Event.EVAL_START, hocket.Event.EVAL_END, hocket.Event.EVAL_AFTER_ALL}

    def __init__(self) -> None:
        self.heard: list[tuple[str, str | None]] = []

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        self.heard.append((event.value, state.eval_label))
        torch.rand(1, generator=state.generator(self))
        state.log({"draws": 1.0})
        state.request(hocket.Decision.EVALUATE)


@pytest.mark.filterwarnings("ignore:algorithm 'evaluation-metadata'.heard changed in training")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sanity_evaluation_is_heard_by_algorithms_and_leaves_no_trace(model, tmp_path, workers) -> None:
    def run(batches: int) -> tuple[Any, ...]:
        order = torch.Generator().manual_seed(5)
        samples = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)
        loader = DataLoader(
            samples, 8, shuffle=True, generator=order, num_workers=workers, persistent_workers=workers > 0
        )
        shown: list[Any] = []
        heard: list[str] = []

        class Watch(hocket.Callback):
            def eval_start(self, state: hocket.State) -> None:
                heard.append("eval_start")

            def eval_batch_end(self, state: hocket.State) -> None:
                shown.append(state.batch[1].tolist())

        drawing, logger = EvaluationMetadata(), hocket.plugins.get("loggers", "memory")()
        trainer = hocket.Trainer(
            model=model(dropout=0.3), loss=F.cross_entropy, train_data=[samples[:8]], eval_data=loader, duration="2ba",
            metrics={"accuracy": Accuracy()}, optimizer=sgd, sanity_eval=batches, seed=4, loggers=[logger],
            algorithms=[drawing, "ema"], limit_eval=3, log_every="1ba",
            callbacks=[{"early-stopping": {"monitor": "eval/accuracy", "patience": 9}}, Watch()],
            checkpoints=hocket.Checkpoints(tmp_path / str(batches), best=("eval/loss", "min", 1)),
        )  # fmt: skip
        metrics = dict(trainer.fit().metrics)
        state = trainer.state
        draws = torch.rand(1, generator=state.generator(drawing)).item()
        names = trainer.settings.checkpoints.store.names()
        trainer.close()
        weights = [parameter.tolist() for parameter in state.model.parameters()]
        logged = sorted((name, values) for name, values in logger.metrics.items())
        return drawing.heard, weights, metrics, draws, shown, heard, logged, names, order.get_state().tolist()

    (without, *rest), (with_it, *others) = run(0), run(2)
    block = [("eval_before_all", None), ("eval_start", "eval"), ("eval_end", "eval"), ("eval_after_all", "eval")]
    assert with_it == block + without
    assert rest == others


def test_the_sanity_evaluation_refuses_what_it_would_use_up(data, model) -> None:
    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(), eval_data={"once": iter(list(data()))}, optimizer=sgd,
        duration="1ep", sanity_eval=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"use up the first batches of the evaluation set 'once'.*omit sanity_eval"):
        trainer.fit()


def test_evaluation_leaves_the_global_random_numbers_alone(model) -> None:
    """Also those of models, data and metrics that draw in evaluation."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs) + torch.rand(1) + random.random()

    batch = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    trainer = hocket.Trainer(model=Drawing(), loss=F.cross_entropy, eval_data=[batch])
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1).item(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    trainer.evaluate()
    trainer.predict([batch])
    assert (torch.rand(1).item(), random.random()) == expected


# --- modes


def modes_in_training(net: nn.Module, **changes: Any) -> list[bool]:
    """Which modules of a model were in train mode in the forward pass of a batch."""
    seen: list[bool] = []

    class Watch(hocket.Callback):
        def before_forward(self, state: hocket.State) -> None:
            seen[:] = [module.training for module in net.modules()]

    batch = (torch.randn(4, 8), torch.arange(4) % 3)
    hocket.Trainer(
        model=net, loss=F.cross_entropy, train_data=[batch], eval_data=[batch], optimizer=sgd, callbacks=[Watch()],
        **changes,
    ).fit("1ba")  # fmt: skip
    return seen


def norm_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )  # fmt: skip


def test_a_model_in_eval_mode_is_trained_in_train_mode_and_that_is_said() -> None:
    net = norm_net().eval()
    before = net[1].running_mean.clone()
    with pytest.warns(UserWarning, match=r"Sequential was in eval mode.*put into train mode"):
        assert all(modes_in_training(net))
    assert not torch.equal(before, net[1].running_mean)


def test_a_part_in_eval_mode_stays_and_a_block_that_is_trained_is_named() -> None:
    net = norm_net()
    net[1].eval()
    assert modes_in_training(net) == [True, True, True, True, False, True]
    net[0].eval()
    with pytest.warns(
        UserWarning, match=r"parameters to train are in eval mode.*do not train: 0\. .*Call model\.train\(\)"
    ):
        assert modes_in_training(net) == [True, False, False, False, False, True]
    net[0].requires_grad_(False)
    assert modes_in_training(net) == [True, False, False, False, False, True], "frozen on purpose"
    net.eval()
    net[2].train()
    with pytest.warns(UserWarning, match=r"in eval mode and parts of it in train mode \(2\)\. These modes are kept"):
        assert modes_in_training(net) == [False] * 5 + [True]


def test_a_models_own_train_decides_which_parts_are_in_train_mode() -> None:
    """A frozen teacher, for instance; a plain loop calls `model.train()` first."""

    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[0].eval()
            return self

    net = Frozen(*norm_net())
    net[0].requires_grad_(False)
    net[1].eval()  # by the user, which its train() would undo
    assert modes_in_training(net) == [True, False, False, False, False, True]
    outer = nn.Sequential(Frozen(*norm_net()))
    outer[0][0].requires_grad_(False)
    assert modes_in_training(outer) == [True, True, False, False, False, True, True]


def test_evaluation_calls_a_models_own_train_on_the_way_back() -> None:
    """LoRA's layers merge weights in eval mode and take them apart in train mode."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Any:
            if mode is self.merged:
                self.merged = not mode
                self.weight.data += 1.0 if self.merged else -1.0
            return super().train(mode)

    net = nn.Sequential(Merging(8, 3), Merging(3, 3))
    net[1].eval()
    trainer = hocket.Trainer(model=net, loss=F.cross_entropy)
    trainer.evaluate([(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))])
    assert [net[0].merged, net[1].merged] == [False, True] == [not net[0].training, not net[1].training]


def test_an_evaluation_keeps_the_outputs_of_one_batch(data, model) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Watch(hocket.Callback):
        def eval_batch_start(self, state: hocket.State) -> None:
            alive.append(sum(output() is not None for output in outputs))

        def eval_batch_end(self, state: hocket.State) -> None:
            outputs.append(weakref.ref(state.outputs))

    trainer = hocket.Trainer(model=model(), loss=F.cross_entropy, metrics=["accuracy"], callbacks=[Watch()])
    trainer.evaluate(data(64, 16))
    assert len(outputs) == 4 and max(alive) <= 1
