"""MixUp against its equation, and against losses computed by hand."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.data import Mixture, count, join, move, split
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_vision import CutMix, MixUp
from hocket_vision.functional import mixup
from hocket_vision.mixing import draw_share
from hocket_vision.mixup import mix


class TestMixUp(AlgorithmConformance):
    def make(self):
        return MixUp(alpha=1.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def partners_of(mixed, images, share):
    """Return which sample each one was mixed with."""
    each = range(len(images))
    return [
        next(j for j in each if torch.allclose(mixed[i], share * images[i] + (1 - share) * images[j])) for i in each
    ]


# --- the functional form


def test_inputs_and_loss_are_those_of_equation_1():
    images = torch.randn(6, 3, 4, 4, dtype=torch.float64, generator=seeded(1))
    labels, logits = torch.arange(6) % 3, torch.randn(6, 3)
    mixed, targets = mixup(images, labels, alpha=1.0, generator=seeded())
    share = targets.share
    partners = partners_of(mixed, images, share)
    assert sorted(partners) == list(range(6)) and 0.5 <= share < 1
    assert targets.second.equal(labels[partners])
    soft = share * F.one_hot(labels, 3) + (1 - share) * F.one_hot(labels[partners], 3)
    torch.testing.assert_close(targets.loss(F.cross_entropy, logits), F.cross_entropy(logits, soft))


def test_the_sample_itself_has_the_larger_share():
    images = torch.randn(4, 3, generator=seeded())
    for seed in range(20):
        mixed, targets = mixup(images, torch.arange(4), alpha=1.0, generator=seeded(seed))
        assert 0.5 <= targets.share <= 1
        torch.testing.assert_close(mixed, targets.share * images + (1 - targets.share) * images[targets.second])


def test_the_larger_share_gives_the_batches_of_the_paper():
    """λ and 1 - λ give the same mixtures in another order, with the inverse permutation."""
    images, partners = torch.randn(5, 2), torch.tensor([3, 0, 4, 1, 2])
    assert torch.allclose(mix(images, partners, 0.3), mix(images, partners.argsort(), 0.7)[partners])


def test_shares_have_the_beta_distribution():
    generator = seeded(1)
    drawn = torch.tensor([draw_share(0.4, generator) for _ in range(4000)])
    assert abs(drawn.mean() - 0.5) < 0.03
    assert abs(drawn.var() - 1 / (4 * (2 * 0.4 + 1))) < 0.01  # the variance of Beta(a, a)
    assert draw_share(0.0) == 1.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_keeps_dtype_memory_format_and_the_given_tensors(dtype):
    images = (torch.rand(4, 3, 6, 5) * 255).to(dtype).contiguous(memory_format=torch.channels_last)
    before = images.clone()
    mixed = mixup(images, alpha=1.0, generator=seeded())
    assert mixed.dtype is dtype and mixed.is_contiguous(memory_format=torch.channels_last)
    assert images.equal(before) and not mixed.equal(images)


def test_targets_of_any_kind_are_permuted():
    targets = {"class": torch.arange(4), "boxes": torch.arange(8).view(4, 2)}
    mixed = mixup(torch.rand(4, 2), targets, generator=seeded())[1]
    assert mixed.second["boxes"][:, 0].equal(mixed.second["class"] * 2)
    assert sorted(mixed.second["class"].tolist()) == [0, 1, 2, 3]


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(TypeError, match=r"averaged.*int64"):
        mixup(torch.arange(4))
    for alpha in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha"):
            MixUp(alpha=alpha)


def test_a_mixture_is_counted_split_joined_and_moved():
    batch = torch.zeros(5, 2), Mixture(torch.arange(5), torch.arange(5).flip(0), 0.7)
    assert count(batch).samples == 5
    parts = split(batch, 2)
    assert [part[1].second.tolist() for part in parts] == [[4, 3], [2, 1], [0]]
    assert join(parts)[1].first.equal(torch.arange(5)) and join(parts)[1].share == 0.7
    assert move(batch, torch.device("meta"))[1].second.device.type == "meta"
    with pytest.raises(ValueError, match="different shares"):
        join([Mixture(torch.zeros(1), torch.zeros(1), share) for share in (0.5, 0.6)])


# --- in a run


class Seen(hocket.Callback):
    """Keeps the inputs of the model, its outputs and the losses of each batch."""

    def __init__(self):
        self.inputs, self.losses, self.targets = [], [], []

    def before_forward(self, state):
        if isinstance(state.batch, tuple):
            self.inputs.append(state.batch[0].clone())

    def after_loss(self, state):
        if isinstance(state.batch, tuple):
            self.targets.append(state.batch[1])

    def after_train_batch(self, state):
        self.losses.append(state.loss.item())


def train(algorithms, batch, loss, microbatch=None, **arguments):
    torch.manual_seed(0)
    model = arguments.pop("model", None) or nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    seen = Seen()
    trainer = hocket.Trainer(
        model=model, loss=loss, train_data=arguments.pop("data", [batch]), optimizer="sgd(lr=0.1)", duration="2ep",
        seed=3, device="cpu",
        algorithms=algorithms, callbacks=[seen], microbatch=microbatch, checkpoints=False, loggers=[], **arguments,
    )  # fmt: skip
    trainer.fit()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


IMAGES = torch.randn(7, 3, 2, 2, dtype=torch.float64, generator=seeded(5))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 2])
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def masked_l1(outputs, targets):
    counts = targets > 0.3
    return (outputs - targets).abs()[counts].mean(), counts.sum()


LOSSES = {
    "index targets": (LABELS, F.cross_entropy),
    "class weights": (LABELS, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "ignored labels": (LABELS.where(LABELS != 0, -100), nn.CrossEntropyLoss()),
    "probabilities": (torch.rand(7, 3, dtype=torch.float64, generator=seeded(6)).softmax(1), F.cross_entropy),
    "several labels": ((torch.rand(7, 3, generator=seeded(7)) > 0.5).double(), F.binary_cross_entropy_with_logits),
    "regression": (torch.rand(7, 3, dtype=torch.float64, generator=seeded(8)), F.l1_loss),
    "mean and weight": (torch.rand(7, 3, dtype=torch.float64, generator=seeded(9)), masked_l1),
    "named losses": (LABELS, lambda o, t: {"a": F.cross_entropy(o, t), "b": F.multi_margin_loss(o, t)}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_is_the_mixture_of_two_and_does_not_depend_on_microbatches(name):
    targets, loss = LOSSES[name]
    whole, weights = train([MixUp(alpha=1.0)], (IMAGES, targets), loss)
    for microbatch in (1, 3):
        parts, same = train([MixUp(alpha=1.0)], (IMAGES, targets), loss, microbatch)
        torch.testing.assert_close(same, weights)
        torch.testing.assert_close(parts.losses, whole.losses)
    # By hand: which sample is mixed with which, from the inputs that the model saw.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    mixed = whole.inputs[0]
    pairs = [(i, j) for i in range(7) for j in range(7) if i != j]
    share = next(
        s for i, j in pairs
        if 0.5 <= (s := float(((mixed[i] - IMAGES[j]) / (IMAGES[i] - IMAGES[j])).mean())) <= 1
        and torch.allclose(mixed[i], s * IMAGES[i] + (1 - s) * IMAGES[j])
    )  # fmt: skip
    partners = partners_of(mixed, IMAGES, share)

    def value(targets):
        found = loss(model(mixed), targets)
        return sum(found.values()) if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found

    expected = share * value(targets) + (1 - share) * value(targets[partners])
    assert whole.losses[0] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"weight": CLASS_WEIGHTS}, {"ignore_index": 0}], ids=["plain", "weights", "ignored"]
)
def test_label_smoothing_smooths_both_targets(options, microbatch):
    smoothing = pytest.importorskip("hocket_general").LabelSmoothing(0.2)
    loss = nn.CrossEntropyLoss(**options)
    seen, weights = train([MixUp(alpha=1.0), smoothing], (IMAGES, LABELS), loss, microbatch)
    same = train([MixUp(alpha=1.0)], (IMAGES, LABELS), nn.CrossEntropyLoss(label_smoothing=0.2, **options))
    torch.testing.assert_close((seen.losses, weights), (same[0].losses, same[1]))
    assert torch.cat(seen.targets[: len(seen.targets) // 2]).equal(LABELS)


def test_metrics_and_evaluation_see_plain_targets():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    trainer = hocket.Trainer(
        model=model, loss=F.cross_entropy, train_data=[(IMAGES, LABELS)], eval_data=[(IMAGES, LABELS)], optimizer="sgd(lr=0.1)",
        duration="1ep", device="cpu", algorithms=["mixup"], metrics="accuracy", train_metrics="accuracy", checkpoints=False,
    )  # fmt: skip
    metrics = trainer.fit().metrics
    assert metrics["eval/loss"] == pytest.approx(F.cross_entropy(model(IMAGES), LABELS).item())
    assert 0 <= metrics["train/accuracy"] <= 1


def test_batches_in_dicts_and_custom_tasks():
    class Classifier(hocket.Task):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 3).double()

        def forward(self, batch):
            assert isinstance(batch["label"], torch.Tensor)  # not a mixture
            return self.layer(batch["image"].flatten(1))

        def loss(self, outputs, batch):
            return F.cross_entropy(outputs, batch["label"])

    for microbatch in (None, 2):
        trainer = hocket.Trainer(
            model=Classifier(), train_data=[{"image": IMAGES, "label": LABELS}], optimizer="sgd(lr=0.1)", duration="2ep",
            device="cpu", algorithms=[MixUp(input_key="image", target_key="label")], microbatch=microbatch, checkpoints=False,
        )  # fmt: skip
        trainer.fit()


def test_a_loss_that_does_not_see_the_targets_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 3).double()

        def forward(self, image, label):
            return {"loss": F.cross_entropy(self.layer(image.flatten(1)), label)}

    with pytest.raises(ValueError, match="computes its own loss"):
        train([MixUp(input_key="image", target_key="label")], {"image": IMAGES, "label": LABELS}, None, model=Own())


def test_mixers_conflict():
    for pair in ([MixUp(), CutMix()], [CutMix(), MixUp()]):
        with pytest.raises(hocket.basics.plugin_errors.ConflictError, match="cannot be combined"):
            train(pair, (IMAGES, LABELS), F.cross_entropy)


def test_windows_of_batches_and_second_gradients():
    """With accumulate= every batch of a window has its own mixture, and SAM computes gradients of one batch twice."""
    sam = pytest.importorskip("hocket_general").SAM
    batches = [(IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:])]
    weights = [
        train([MixUp(alpha=1.0), sam()], None, F.cross_entropy, m, data=batches, accumulate="2ba")[1] for m in (None, 2)
    ]
    torch.testing.assert_close(*weights)


def test_acts_after_augmentation_and_between_start_and_stop():
    seen, _ = train([MixUp(alpha=1.0, start="1ba"), "cutout"], (IMAGES, LABELS), F.cross_entropy)
    first, second = seen.inputs
    assert ((first == IMAGES) | (first == 0)).all()
    assert not ((second == IMAGES) | (second == 0)).all()  # zeros were mixed with pixels


def test_ranks_mix_their_own_samples():
    pytest.importorskip("hocket_strategies")
    shares = run_ranks(_share_of_rank, 2)
    assert shares[0] != shares[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_weight_losses_by_their_labels(strategy):
    """The loss of all ranks is that of their mixed batches together, also with class weights and microbatches."""
    pytest.importorskip("hocket_strategies")
    losses, hands = zip(*run_ranks(_loss_of_rank, 2, strategy), strict=True)
    assert losses[0] == losses[1]
    (first, second), weights = zip(*hands, strict=True)
    assert losses[0] == pytest.approx((first * weights[0] + second * weights[1]) / sum(weights), rel=1e-9)


def _loss_of_rank(rank, strategy):
    part = slice(0, 4) if rank == 0 else slice(4, 7)
    images, labels, loss = IMAGES[part], LABELS[part], nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    mixed = []

    class Look(hocket.Callback):
        def batch_start(self, state):
            mixed.append(state.batch)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    by_hand = copy.deepcopy(model)
    trainer = hocket.Trainer(
        model=model, loss=loss, train_data=[(images, labels)], optimizer="sgd(lr=0.1)", duration="1ba", seed=3, device="cpu",
        algorithms=[MixUp(alpha=1.0)], callbacks=[Look()], microbatch=2, strategy={strategy: {"split_data": False}},
        checkpoints=False,
    )  # fmt: skip
    trainer.fit()
    inputs, targets = mixed[0]
    return trainer.state.loss.item(), (targets.loss(loss, by_hand(inputs)).item(), CLASS_WEIGHTS[labels].sum().item())


def _share_of_rank(rank):
    seen, _ = train([MixUp(alpha=1.0)], (IMAGES, LABELS), F.cross_entropy, strategy={"ddp": {"split_data": False}})
    return float((seen.inputs[0] - IMAGES).abs().sum())


def test_two_mixers_are_refused_and_a_failed_batch_leaves_nothing_behind():
    with pytest.raises(ValueError, match="another mixer has mixed already"):
        train([MixUp(alpha=1.0), MixUp(alpha=1.0)], (IMAGES, LABELS), F.cross_entropy)

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(IMAGES[0].numel(), 3, dtype=torch.float64)

        def forward(self, images):
            if self.training:
                raise LookupError("planned")
            return self.head(images.flatten(1))

    trainer = hocket.Trainer(
        model=Fails(), loss=F.cross_entropy, train_data=[(IMAGES, LABELS)], eval_data=[(IMAGES, LABELS)], device="cpu",
        optimizer="sgd(lr=0.1)", duration="1ep", algorithms=[MixUp(alpha=1.0)],
    )  # fmt: skip
    with pytest.raises(LookupError, match="planned"):
        trainer.fit()
    assert trainer.evaluate()["eval/loss"] > 0


def test_inputs_that_are_no_tensor_are_refused():
    with pytest.raises(TypeError, match="was given list"):
        mixup([IMAGES[0], IMAGES[1]], LABELS[:2])


@pytest.mark.parametrize("algorithms", [["mixup"], ["cutmix", "colout", "cutout"], ["augmix"]], ids="-".join)
def test_a_shuffled_run_that_resumes_sees_the_same_samples_and_draws(algorithms, tmp_path):
    """In Composer draws on the CPU move the generator that shuffles: a resumed run has another order and other weights."""
    taken, order = [], []

    class Look(hocket.Callback):
        def batch_checkpoint(self, state):
            order[-1].append(state.batch[0].clone())
            if state.timestamp.batch == 6 and not taken:
                taken.append(copy.deepcopy(whole.state_dict()))

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 3))
        images, labels = torch.rand(16, 3, 8, 8), torch.arange(16) % 3
        order.append([])
        return hocket.Trainer(
            model=model, loss=F.cross_entropy, train_data=DataLoader(TensorDataset(images, labels), 4, shuffle=True),
            optimizer="sgd(lr=0.1)", duration="3ep", device="cpu", algorithms=algorithms, callbacks=[Look()], seed=1,
            folder=tmp_path,
        )  # fmt: skip

    whole = fresh()
    whole.fit()
    resumed = fresh()
    torch.manual_seed(9)
    resumed.load_state_dict(taken[0])
    resumed.fit()
    assert len(order[0]) == 12 and all(a.equal(b) for a, b in zip(order[0][6:], order[1], strict=True))
    for mine, theirs in zip(resumed.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
@pytest.mark.parametrize(("sizes", "warned"), [((1, 1, 1), 1), ((4, 1), 0)])
def test_batches_of_one_sample_warn_once_that_nothing_is_mixed(kind, sizes, warned):
    batches = [(torch.randn(size, 1, 4, 4), torch.arange(size) % 3) for size in sizes]
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    trainer = hocket.Trainer(
        model, batches, loss=nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="2ep", device="cpu",
        algorithms=[kind()], loggers=[],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit()
    messages = [str(each.message) for each in seen if each.category is hocket.NoEffectWarning]
    assert len(messages) == warned
    assert all("has one sample" in message and "batch_size" in message for message in messages)
