"""Distillation against the paper's formula, and a plain loop."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.state.task import SupervisedTask
from hocket_cli import main
from hocket_general import Distillation, LabelSmoothing
from hocket_general.class_logits import class_dim_of
from hocket_general.functional import distillation_loss
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_testkit.reference import convolutional_network


class TestDistillation(AlgorithmConformance):
    def make(self):
        return Distillation(self.seeded(convolutional_network))


# --- the loss


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_papers_formula(temperature):
    student = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 3, dtype=torch.float64)
    p = (teacher / temperature).softmax(1)
    # Equation 1 and the cross entropy of section 2, times T²; the teacher's entropy makes it a divergence.
    cross_entropy = -(p * (student / temperature).log_softmax(1)).sum(1)
    entropy = -(p * p.log()).sum(1)
    expected = temperature**2 * (cross_entropy - entropy)
    torch.testing.assert_close(distillation_loss(student, teacher, temperature, "none"), expected)
    torch.testing.assert_close(distillation_loss(student, teacher, temperature), expected.mean())
    torch.testing.assert_close(distillation_loss(student, teacher, temperature, "sum"), expected.sum())
    (gradient,) = torch.autograd.grad(distillation_loss(student, teacher, temperature, "sum"), student)
    # Equation 2, with the factor T².
    torch.testing.assert_close(gradient, temperature * ((student / temperature).softmax(1) - p).detach())


def test_gradients_at_high_temperature_are_those_of_matching_logits():
    """Equation 4: for zero-meaned logits and a high temperature, T² times the gradient is (z - v) / N."""
    student = torch.randn(1, 4, dtype=torch.float64)
    teacher = torch.randn(1, 4, dtype=torch.float64)
    student = (student - student.mean()).requires_grad_()
    teacher = teacher - teacher.mean()
    (gradient,) = torch.autograd.grad(distillation_loss(student, teacher, 1e4), student)
    torch.testing.assert_close(gradient, (student.detach() - teacher) / 4, rtol=1e-3, atol=1e-6)


def test_dimensions_dtypes_and_agreement():
    logits = torch.randn(2, 3, 4, 5)
    other = torch.randn(2, 3, 4, 5)
    found = distillation_loss(logits, other, reduction="none")
    assert found.shape == (2, 4, 5)
    last = distillation_loss(logits.movedim(1, -1), other.movedim(1, -1), reduction="none", class_dim=-1)
    torch.testing.assert_close(last, found)
    assert distillation_loss(logits, logits).item() == pytest.approx(0, abs=1e-6)
    assert distillation_loss(logits.bfloat16(), other.bfloat16()).dtype is torch.float32


def test_wrong_arguments():
    a, b = torch.zeros(2, 3), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="same classes"):
        distillation_loss(a, b)
    with pytest.raises(ValueError, match="positive number"):
        distillation_loss(a, a, 0.0)
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none'"):
        distillation_loss(a, a, reduction="batchmean")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"temperature": 0.0}, ValueError, "positive number"),
        ({"alpha": 1.5}, ValueError, "from 0 to 1"),
        ({"alpha": 0.0}, ValueError, "change nothing"),
        ({"teacher": 3}, TypeError, "a module, a function"),
        ({"teacher": "a.pt", "weights": "b.pt"}, ValueError, "two paths"),
    ],
)
def test_arguments_out_of_range(arguments, error, words):
    with pytest.raises(error, match=words):
        Distillation(**{"teacher": nn.Linear(4, 3), **arguments})


# --- in training


def _model(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.0), nn.ReLU(), nn.Linear(width, 3))


def _seeded(seed, make=_model):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _data(samples=32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


def _batches():
    x, y = _data()
    return list(zip(x.split(8), y.split(8), strict=True))


def _trainer(tmp_path, *algorithms, model=None, **arguments):
    return hocket.Trainer(**{
        "model": _seeded(1) if model is None else model, "loss": "cross_entropy", "optimizer": "sgd(lr=0.5)", "device": "cpu",
        "train_data": _batches(), "algorithms": list(algorithms), "duration": "2ep", "seed": 1, "folder": tmp_path, **arguments,
    })  # fmt: skip


def _plain_loop(teacher, student, loss, batches=None, epochs=2):
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for _ in range(epochs):
        for x, y in batches or _batches():
            with torch.no_grad():
                taught = teacher.eval()(x)
            optimizer.zero_grad()
            loss(student, taught, x, y).backward()
            optimizer.step()
    return student


def _soft(outputs, taught, y):
    return 0.3 * F.cross_entropy(outputs, y) + 0.7 * 16 * F.kl_div(
        (outputs / 4).log_softmax(1), (taught / 4).softmax(1), reduction="batchmean"
    )


def _assert_close(trainer, model, **tolerance):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trainer.model_state_dict()[name], value, **tolerance)


@pytest.mark.parametrize("microbatch", [None, 3])
def test_training_is_that_of_a_plain_loop(tmp_path, microbatch):
    teacher = _seeded(2)
    teacher.train()
    trainer = _trainer(tmp_path, Distillation(copy.deepcopy(teacher), 4.0, 0.7), microbatch=microbatch)
    trainer.fit()
    expected = _plain_loop(teacher, _seeded(1), lambda model, taught, x, y: _soft(model(x), taught, y))
    _assert_close(trainer, expected, rtol=1e-4, atol=1e-6)


def test_the_teacher_is_not_part_of_the_run(tmp_path):
    class Noisy(nn.Dropout):
        def forward(self, inputs):
            modes.append(self.training)
            return super().forward(inputs)

    modes = []
    teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Noisy(0.5), nn.Linear(8, 3)).train()
    before = copy.deepcopy(teacher.state_dict())
    trainer = _trainer(tmp_path, Distillation(teacher))
    saved = trainer.state_dict()
    trainer.fit()
    assert modes == [False] * 8
    assert all(value.equal(before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert set(trainer.model_state_dict()) == set(_model().state_dict())
    assert "distillation" not in saved["plugins"].get("algorithms", {})
    held = {id(p) for group in trainer.state.optimizers[0].param_groups for p in group["params"]}
    assert not held & {id(p) for p in teacher.parameters()}
    modes.clear()
    trainer.evaluate(_batches())
    assert not modes  # an evaluation needs no teacher


def test_hooks_on_the_model_are_gone_after_a_fit(tmp_path):
    trainer = _trainer(tmp_path, Distillation(_seeded(2), features=["0"]))
    trainer.fit()
    pickle.dumps(trainer.state.model)
    assert not any(module._forward_hooks for module in trainer.state.model.modules())


def test_the_window(tmp_path):
    """Outside of it, training is that without distillation."""
    teacher = _seeded(2)
    trainer = _trainer(tmp_path, Distillation(teacher, 4.0, 0.7, start="2ba", stop="5ba"))
    trainer.fit()
    batch = iter(range(8))

    def loss(model, taught, x, y):
        return _soft(model(x), taught, y) if 2 <= next(batch) < 5 else F.cross_entropy(model(x), y)

    _assert_close(trainer, _plain_loop(teacher, _seeded(1), loss), rtol=1e-4, atol=1e-6)


def test_features(tmp_path):
    teacher = _seeded(2, lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)))
    features = Distillation(teacher, 4.0, 0.7, features={"2": "0"}, feature_weight=0.2)
    trainer = _trainer(tmp_path, features, microbatch=4)
    trainer.fit()

    def loss(model, taught, x, y):
        hidden = model[:3](x)
        return _soft(model[3](hidden), taught, y) + 0.2 * (hidden - teacher[0](x).detach()).square().mean()

    _assert_close(trainer, _plain_loop(teacher, _seeded(1), loss), rtol=1e-4, atol=1e-6)


def test_errors_of_features(tmp_path):
    with pytest.raises(ValueError, match="the model, a Sequential, has no such module"):
        _trainer(tmp_path, Distillation(_seeded(2), features=["7"]))
    with pytest.raises(ValueError, match="the teacher, a Linear, has no such module"):
        _trainer(tmp_path, Distillation(nn.Linear(4, 3), features=["2"]))
    wide = _seeded(2, lambda: _model(16))
    with pytest.raises(ValueError, match=r"have shape \(8, 8\) and those of the teacher's '2' \(8, 16\)"):
        _trainer(tmp_path, Distillation(wide, features=["2"])).fit()


class _Tokens(nn.Module):
    """Logits (N, T, K) of tokens, for a loss that transposes them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs)


def _token_loss(outputs, targets):
    return F.cross_entropy(outputs.transpose(1, 2), targets), (targets != -100).sum()


@pytest.mark.parametrize("microbatch", [None, 1])
def test_ignored_positions_and_the_loss_own_weight(tmp_path, microbatch):
    teacher, model = _seeded(2, _Tokens), _seeded(1, _Tokens)
    x, y = torch.randn(4, 5, 4), torch.randint(3, (4, 5))
    y[0, 1:] = y[1, 3:] = -100
    expected = copy.deepcopy(model)
    trainer = _trainer(
        tmp_path, Distillation(teacher, 1.0, 0.5), model=model, loss=_token_loss, train_data=[(x, y)], microbatch=microbatch
    )  # fmt: skip
    trainer.fit()

    def loss(model, taught, x, y):
        counted = y != -100
        outputs, taught = model(x)[counted], taught[counted]
        divergence = F.kl_div(outputs.log_softmax(1), taught.softmax(1), reduction="batchmean")
        return 0.5 * F.cross_entropy(outputs, y[counted]) + 0.5 * divergence

    _assert_close(trainer, _plain_loop(teacher, expected, loss, [(x, y)]), rtol=1e-4, atol=1e-6)


class _TokenTask(hocket.Task):
    """Logits (N, T, K), and a loss that only the task knows."""

    def __init__(self, model):
        super().__init__()
        self.network = model

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


class _TokenTeacher(_TokenTask):
    """The same with weights that no optimizer has."""


def test_the_classes_of_a_custom_task_are_not_guessed(tmp_path):
    x, y = torch.randn(4, 5, 4), torch.randint(3, (4, 5))
    teacher, model = _seeded(2, _Tokens), _seeded(1, _Tokens)

    def train(**arguments):
        given = Distillation(_TokenTeacher(teacher), 1.0, 0.5, **arguments)
        trainer = _trainer(tmp_path, given, model=_TokenTask(copy.deepcopy(model)), loss=None, train_data=[(x, y)])
        trainer.fit()
        return {name.removeprefix("network."): value for name, value in trainer.model_state_dict().items()}

    with pytest.raises(ValueError, match=r"shape \(4, 5, 3\), has the classes. Write class_dim=-1"):
        train()

    def loss(model, taught, x, y):
        outputs, taught = model(x).flatten(0, 1), taught.flatten(0, 1)
        divergence = F.kl_div(outputs.log_softmax(1), taught.softmax(1), reduction="batchmean")
        return 0.5 * F.cross_entropy(outputs, y.flatten()) + 0.5 * divergence

    found = train(class_dim=-1)
    for name, value in _plain_loop(teacher, copy.deepcopy(model), loss, [(x, y)]).state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "shape", "targets", "dim"),
    [
        (F.cross_entropy, (4, 3, 3), (4, 3), 1),  # by the definition of the loss
        (partial(F.cross_entropy, label_smoothing=0.1), (4, 3, 5, 5), None, 1),  # probabilities
        (nn.CrossEntropyLoss(), (4, 3, 5), (4, 5), 1),
        (_token_loss, (4, 5, 3), (4, 5), -1),
        (_token_loss, (4, 5, 5), (4, 5), None),
        (_token_loss, (4, 5, 3), (20,), None),
        (_token_loss, (4, 1, 3), (4, 1), -1),
        (None, (4, 5, 3), None, -1),  # transformers' language models
        (None, (4, 3, 8, 8), None, None),  # and its segmentation models
        (None, (4, 3), None, 1),
        (_token_loss, (4, 1), (4,), "two or more"),
        (F.cross_entropy, (4, 1, 6), (4, 6), "two or more"),
    ],
)
def test_the_dimension_of_the_classes(loss, shape, targets, dim):
    task = SupervisedTask(nn.Linear(4, 3), loss)
    given = None if targets is None else torch.zeros(targets, dtype=torch.long)
    if not isinstance(dim, int):
        with pytest.raises(ValueError, match=dim or "class_dim=-1"):
            class_dim_of(task, torch.zeros(shape), given, None)
    else:
        assert class_dim_of(task, torch.zeros(shape), given, None) == dim


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_features_alone_need_no_logits_of_the_teacher(tmp_path, reduction):
    """With alpha=0 the teacher has other classes, or none."""
    teacher = _seeded(2, lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.LSTM(8, 5)))
    features = Distillation(teacher, alpha=0.0, features={"2": "0"}, feature_weight=0.2)
    rate = 0.5 if reduction == "mean" else 0.0625  # 8 samples: a sum at an eighth of the rate
    trainer = _trainer(
        tmp_path, features, loss=nn.CrossEntropyLoss(reduction=reduction), optimizer=f"sgd(lr={rate})", microbatch=3
    )
    trainer.fit()

    def loss(model, taught, x, y):
        hidden = model[:3](x)
        return F.cross_entropy(model[3](hidden), y) + 0.2 * (hidden - teacher[0](x).detach()).square().mean()

    _assert_close(trainer, _plain_loop(teacher, _seeded(1), loss), rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_a_sum(tmp_path):
    teacher = _seeded(2)
    trainer = _trainer(
        tmp_path, Distillation(teacher, 4.0, 0.7), loss=nn.CrossEntropyLoss(reduction="sum"), optimizer="sgd(lr=0.0625)",
        microbatch=3,
    )  # fmt: skip
    trainer.fit()
    expected = _plain_loop(teacher, _seeded(1), lambda model, taught, x, y: _soft(model(x), taught, y))
    _assert_close(trainer, expected, rtol=1e-4, atol=1e-6)  # 8 samples: a sum at an eighth of the rate


def test_beside_label_smoothing(tmp_path):
    """The teacher's part does not depend on how the targets of the task's loss are changed."""
    teacher = _seeded(2)
    trainer = _trainer(tmp_path, LabelSmoothing(0.2), Distillation(teacher, 4.0, 0.7))
    trainer.fit()

    def loss(model, taught, x, y):
        outputs = model(x)
        return _soft(outputs, taught, y) + 0.3 * (
            F.cross_entropy(outputs, y, label_smoothing=0.2) - F.cross_entropy(outputs, y)
        )

    _assert_close(trainer, _plain_loop(teacher, _seeded(1), loss), rtol=1e-4, atol=1e-6)


class _WithLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs, labels=None):
        logits = self.inner(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def test_models_that_compute_their_own_loss(tmp_path):
    teacher, model = _seeded(2, _WithLogits), _seeded(1, _WithLogits)
    expected = copy.deepcopy(model)
    data = [{"inputs": x, "labels": y} for x, y in _batches()]
    trainer = _trainer(tmp_path, Distillation(teacher, 4.0, 0.7), model=model, loss=None, train_data=data)
    trainer.fit()
    taught = nn.Sequential(teacher.inner)
    plain = _plain_loop(taught, expected, lambda model, taught, x, y: _soft(model.inner(x), taught, y))
    _assert_close(trainer, plain, rtol=1e-4, atol=1e-6)


def test_a_teacher_from_a_file(tmp_path):
    teacher = _seeded(2)
    torch.save(teacher.state_dict(), tmp_path / "teacher.pt")
    path = tmp_path / "teacher.pt"
    results = []
    for number, given in enumerate((
        Distillation(teacher), Distillation(path), Distillation(str(path)), Distillation(_model, weights=path),
        Distillation(_model(), weights=str(path)),
    )):  # fmt: skip
        trainer = _trainer(tmp_path / str(number), given)
        trainer.fit()
        results.append(trainer.model_state_dict())
    for other in results[1:]:
        assert all(other[name].equal(value) for name, value in results[0].items())


def test_a_teacher_must_be_another_model(tmp_path):
    model = _model()
    with pytest.raises(ValueError, match=r"copy\.deepcopy"):
        _trainer(tmp_path, Distillation(model), model=model)
    with pytest.raises(TypeError, match="made a list"):
        _trainer(tmp_path, Distillation(list))
    with pytest.raises(TypeError, match="output_key="):
        _trainer(tmp_path, Distillation(nn.LSTM(4, 3))).fit()


def test_ranks(tmp_path):
    pytest.importorskip("hocket_strategies")
    teacher, (x, y) = _seeded(2), _data()

    def train(rank, strategy):
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(x, y), 4)
        trainer = _trainer(tmp_path / strategy, Distillation(teacher, 4.0, 0.7), train_data=data, strategy=strategy)
        trainer.fit()
        return trainer.model_state_dict()

    expected = _plain_loop(teacher, _seeded(1), lambda model, taught, x, y: _soft(model(x), taught, y)).state_dict()
    for strategy in ("ddp", "fsdp"):
        for weights in run_ranks(train, 2, strategy):
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("teacher", ["models:teacher", "{models:teacher: {width: 16}}", "./teacher.pt"])
def test_in_a_configuration_file(tmp_path, monkeypatch, teacher):
    (tmp_path / "models.py").write_text(
        "import torch\n"
        "def teacher(width=4): return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 3))\n"
        "def data(): return [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))]\n"
    )
    torch.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).state_dict(), tmp_path / "teacher.pt")
    (tmp_path / "run.yaml").write_text(
        "model: models:teacher\nloss: cross_entropy\noptimizer: sgd\ntrain_data: {models:data: {}}\nduration: 1ba\n"
        f"device: cpu\nalgorithms:\n  - distillation: {{teacher: {teacher}, temperature: 4.0}}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.yaml"]) == 0


@pytest.mark.parametrize(
    "loss", ["mse_loss", nn.SmoothL1Loss(), "binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss()]
)
def test_outputs_that_are_no_classes_are_refused(tmp_path, loss):
    binary = "inary" in str(loss) or isinstance(loss, nn.BCEWithLogitsLoss)
    y = torch.randint(2, (8, 3)).float() if binary else torch.randn(8, 3)
    teacher = _seeded(1)
    with pytest.raises(ValueError, match=r"exclude each other.* alpha=0 with features=.* hocket.Task"):
        _trainer(tmp_path, Distillation(teacher), loss=loss, train_data=[(torch.randn(8, 4), y)]).fit()
    features = Distillation(teacher, alpha=0.0, features=["0"])
    _trainer(tmp_path, features, loss=loss, train_data=[(torch.randn(8, 4), y)], duration="1ep").fit()


def test_class_probabilities_are_accepted(tmp_path):
    y = torch.rand(8, 3).softmax(1)
    _trainer(tmp_path, Distillation(_seeded(1)), train_data=[(torch.randn(8, 4), y)], duration="1ep").fit()


def test_the_ignored_index_is_that_of_the_loss(tmp_path):
    """Against a plain loop that omits the ignored sample from both means."""
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 255, 2, 255, 1])
    loss = nn.CrossEntropyLoss(ignore_index=255)
    teacher, student = _seeded(1), _seeded(2)
    trainer = _trainer(
        tmp_path, Distillation(teacher), model=copy.deepcopy(student), loss=loss, train_data=[(x, y)], duration="1ba",
        optimizer="sgd(lr=0.1)",
    )  # fmt: skip
    trainer.fit()
    kept = y != 255
    outputs = student(x[kept])
    (0.5 * F.cross_entropy(outputs, y[kept]) + 0.5 * distillation_loss(outputs, teacher(x[kept]))).backward()
    for found, parameter in zip(trainer.state.model.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(found, parameter - 0.1 * parameter.grad)
    with pytest.raises(ValueError, match="ignore_index=7, and the loss ignores 255"):
        _trainer(tmp_path, Distillation(teacher, ignore_index=7), loss=loss)


class _Normalizing(SupervisedTask):
    """A task that normalizes its inputs, as those for images do."""

    def __init__(self, model, head=False):
        super().__init__(model, F.cross_entropy)
        self.register_buffer("mean", torch.tensor(3.0), persistent=False)
        self.head = nn.Linear(3, 3) if head else None

    def forward(self, batch):
        outputs = self.network(batch[0] - self.mean)
        return outputs if self.head is None else self.head(outputs)


@pytest.mark.parametrize("head", [False, True])
def test_a_task_calls_the_teacher_as_its_model(tmp_path, head):
    """Unless the task has parameters, which the teacher must not get."""
    seen, teacher = [], _seeded(1)
    teacher.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = torch.randn(8, 4)
    task = _Normalizing(_seeded(2), head)
    _trainer(
        tmp_path, Distillation(teacher), model=task, loss=None, train_data=[(x, torch.randint(3, (8,)))], duration="1ba"
    ).fit()
    assert seen[0].equal(x if head else x - 3.0)
    assert task.training and not teacher.training


@pytest.mark.parametrize("features", ["2", 2])
def test_features_of_another_type(features):
    with pytest.raises(TypeError, match=r"a list of names .* features=\['layer2'\]"):
        Distillation(_seeded(1), features=features)


@pytest.mark.parametrize("microbatch", [1, 5, 8])
def test_its_mean_has_the_divisor_of_the_loss_or_is_refused(microbatch):
    torch.manual_seed(0)
    inputs, targets = torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3
    student, teacher = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def train(loss, targets, **options):
        model = copy.deepcopy(student)
        hocket.Trainer(
            model, [(inputs, targets)], loss=loss, optimizer="sgd(lr=1.0)", duration="1ba", device="cpu",
            algorithms=[Distillation(copy.deepcopy(teacher))], **options,
        ).fit()  # fmt: skip
        return model.weight.detach()

    def formula(targets, counted, **settings):
        student_logits, logits = student(inputs), teacher(inputs)
        soft = F.kl_div((student_logits / 2).log_softmax(1), (logits / 2).softmax(1), reduction="none").sum(1)
        value = 0.5 * F.cross_entropy(student_logits, targets, **settings) + 0.5 * 4 * soft[counted].mean()
        return student.weight.detach() - torch.autograd.grad(value, student.weight)[0]

    ignored = targets.where(torch.arange(24) % 5 > 1, -100)
    for labels in (targets, ignored):
        expected = formula(labels, labels != -100)
        for options in ({}, {"microbatch": microbatch}):
            found = train("cross_entropy", labels, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # the divergence is float32 times the factor
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
    weighted = nn.CrossEntropyLoss(weight=weights)
    everything = torch.ones(24, dtype=torch.bool)
    torch.testing.assert_close(train(weighted, targets), formula(targets, everything, weight=weights))
    with pytest.raises(ValueError, match=r"adds up means over different numbers.* A plug-in added the other mean"):
        train(weighted, targets, microbatch=microbatch)


@pytest.mark.parametrize(
    "added",
    [
        lambda outputs: outputs.square().mean(),
        lambda outputs: F.mse_loss(outputs, torch.zeros_like(outputs)),
        lambda outputs: -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean(),
        lambda outputs: outputs.square().sum() / len(outputs),
        lambda outputs: torch.mean(outputs.logsumexp(1) ** 2),
        lambda outputs: F.cross_entropy(outputs, torch.arange(len(outputs)) % 3),
    ],
)
def test_a_mean_that_a_plug_in_adds_to_a_loss_with_ignored_labels_is_refused_if_the_batch_is_divided(added):
    class Added(hocket.Algorithm):
        events = {hocket.Event.AFTER_LOSS}

        def apply(self, event, state):
            state.loss = state.loss + added(state.outputs)

    targets = torch.tensor([0, 1, -100, 2, -100, 1])
    options = {
        "loss": "cross_entropy", "train_data": [(torch.randn(6, 4), targets)], "optimizer": "sgd(lr=0.1)", "duration": "1ep",
        "device": "cpu",
    }  # fmt: skip
    hocket.Trainer(nn.Linear(4, 3), algorithms=[Added()], **options).fit()
    hocket.Trainer(nn.Linear(4, 3), algorithms=[Added()], microbatch=3, loss_reduction="mean", **options).fit()
    with pytest.raises(ValueError, match="A plug-in added the other mean"):
        hocket.Trainer(nn.Linear(4, 3), algorithms=[Added()], microbatch=3, **options).fit()


def test_what_is_wrong_with_a_teacher_is_said_of_the_teacher(tmp_path):
    broken = nn.Linear(4, 3)
    broken.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"teacher of Distillation has NaN in weight\. Load"):
        _trainer(tmp_path, Distillation(broken))
    with pytest.raises(RuntimeError) as caught:
        _trainer(tmp_path, Distillation(nn.Linear(5, 3))).fit()
    assert "Distillation called its teacher with the model's inputs. Give" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match=r"Give a teacher of the student's classes"):
        _trainer(tmp_path, Distillation(nn.Linear(4, 12))).fit()
    torch.save(nn.Linear(5, 3).state_dict(), tmp_path / "other.pt")
    with pytest.raises(RuntimeError, match=r"weight \(\[3, 5\].*Give Distillation weights of its teacher") as misfit:
        _trainer(tmp_path, Distillation(nn.Linear(4, 3), weights=tmp_path / "other.pt"))
    assert "remap" not in str(misfit.value) and "\n" not in str(misfit.value)
    assert "nothing was loaded: of another shape: weight" in str(misfit.value)
    for given, says in {
        "resnet50": "a function that makes it: teacher=resnet50",
        "no/such.pt": "such.pt",
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=says) as absent:
            _trainer(tmp_path, Distillation(given))
        assert ".." not in str(absent.value) and "architecture" not in str(absent.value)
    with pytest.raises(ValueError, match=r"two or more classes in dimension 3.*alpha=0 with features="):
        _trainer(tmp_path, Distillation(nn.Linear(4, 3), class_dim=3)).fit()


def test_arguments_without_effect_are_refused(tmp_path):
    for arguments, said in (
        ({"alpha": True}, "alpha=True"),
        ({"feature_weight": 5}, "feature_weight=5, with no features"),
    ):
        with pytest.raises(ValueError, match=said):
            Distillation(nn.Linear(4, 3), **arguments)
    with pytest.raises(ValueError, match=r"output_key='logits' for models that return tensors\. Omit it"):
        _trainer(tmp_path, Distillation(nn.Linear(4, 3), output_key="logits")).fit()
