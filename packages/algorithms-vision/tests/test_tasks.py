"""Tasks against metrics and losses computed by hand over the whole set."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.plugins import registry
from hocket_vision import ClassificationTask, SegmentationTask, small_resnet

pytest.importorskip("torchmetrics")


def trainer(task: hocket.Task, data=None, **changes) -> hocket.Trainer:
    arguments = {
        "train_data": data,
        "optimizer": "sgd(lr=0.1)",
        "duration": "1ep",
        "seed": 0,
        "device": "cpu",
        **changes,
    }
    return hocket.Trainer(model=task, **arguments)


def linear(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, classes))


def labelled(count: int, classes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, 4, 4, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return list(zip(images.split(4), labels.split(4), strict=True))


@pytest.mark.parametrize("ignore_index", [-100, 0, 255])
def test_classification_reports_loss_accuracy_and_top_5(ignore_index):
    data = labelled(18, 8)
    if ignore_index == 255:
        data[1] = (data[1][0], torch.tensor([255, 1, 255, 3]))
    task = ClassificationTask(linear(8), ignore_index=ignore_index)
    assert task.num_classes == 8
    values = trainer(task, microbatch=3).evaluate(data)
    images, labels = (torch.cat(each) for each in zip(*data, strict=True))
    logits, counts = task.network(images), labels != ignore_index
    assert values["eval/loss"] == pytest.approx(F.cross_entropy(logits[counts], labels[counts]).item(), rel=1e-5)
    right = logits.argmax(1) == labels
    assert values["eval/accuracy"] == pytest.approx(right[counts].float().mean().item())
    right = (logits.topk(5).indices == labels[:, None]).any(1)
    assert values["eval/top5"] == pytest.approx(right[counts].float().mean().item())
    assert "eval/top5" not in trainer(ClassificationTask(linear(5))).evaluate(labelled(8, 5))


def test_class_probabilities_are_targets_too():
    data = [(images, F.one_hot(labels, 8) * 0.9 + 0.0125) for images, labels in labelled(16, 8)]
    plain = trainer(ClassificationTask(linear(8))).evaluate(labelled(16, 8))
    values = trainer(ClassificationTask(linear(8)), data).evaluate(data)
    assert values["eval/accuracy"] == plain["eval/accuracy"] and values["eval/loss"] != plain["eval/loss"]


def segmented(ignored: int = -100) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(7, 3, 6, 5, generator=generator)
    labels = (images[:, 0] * 3.2).long()  # class 4 never occurs
    if ignored != -100:
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = ignored
        labels[0] = ignored
    return list(zip(images.split(3), labels.split(3), strict=True))


@pytest.mark.parametrize("ignored", [-100, 255, -1])
def test_segmentation_reports_what_the_confusion_matrix_says(ignored):
    torch.manual_seed(0)
    data = segmented(ignored)
    task = SegmentationTask(nn.Conv2d(3, 5, 1), ignore_index=ignored)
    with torch.no_grad():
        task.network.bias[4] = -9  # nor is it predicted
    values = trainer(task, microbatch=2).evaluate(data)
    images, labels = (torch.cat(each) for each in zip(*data, strict=True))
    logits, counts = task.network(images), labels != ignored
    predicted, labels = logits.argmax(1)[counts], labels[counts]
    iou, dice = [], []
    for k in range(4):
        both = ((predicted == k) & (labels == k)).sum()
        sizes = (predicted == k).sum() + (labels == k).sum()
        iou.append(both / (sizes - both))
        dice.append(2 * both / sizes)
    assert values["eval/miou"] == pytest.approx(torch.stack(iou).mean().item(), rel=1e-5)
    assert values["eval/dice"] == pytest.approx(torch.stack(dice).mean().item(), rel=1e-5)
    assert values["eval/accuracy"] == pytest.approx((predicted == labels).float().mean().item(), rel=1e-5)
    assert values["eval/loss"] == pytest.approx(F.cross_entropy(logits.movedim(1, -1)[counts], labels).item(), rel=1e-5)


def test_ignored_pixels_count_nothing_in_microbatches():
    def train(**changes) -> dict:
        torch.manual_seed(0)
        task = SegmentationTask(nn.Conv2d(3, 5, 1), ignore_index=255)
        run = trainer(task, segmented(255), **changes)
        run.fit()
        return run.model_state_dict()

    full, split = train(), train(microbatch=1)
    for name, weight in split.items():
        torch.testing.assert_close(weight, full[name], atol=1e-6, rtol=1e-5)


def test_a_part_of_the_models_output_and_of_the_batch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Conv2d(3, 5, 1)

        def forward(self, images):
            return {"out": self.head(images)}

    torch.manual_seed(0)
    task = SegmentationTask(Model(), inputs="image", targets="mask", outputs="out")
    data = [{"image": images, "mask": labels, "id": torch.arange(len(images))} for images, labels in segmented()]
    assert trainer(task, data).fit().metrics.keys() == {"train/loss"}
    assert trainer(task).evaluate(data)["eval/miou"] > 0
    with pytest.raises(KeyError, match=r"SegmentationTask\(…, inputs='image', targets='id'\)"):
        SegmentationTask(Model(), outputs="out")(data[0])


@pytest.mark.parametrize("normalised", [False, True])
def test_uint8_images_are_converted_and_normalised_where_the_model_is(normalised):
    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)} if normalised else {}
    seen = []

    class Model(nn.Module):
        num_classes = 2

        def forward(self, images):
            seen.append(images)
            return images.flatten(1)[:, :2]

    images = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4).to(torch.uint8)
    task = ClassificationTask(Model(), **settings)
    task((images, None))
    task((images / 255, None))
    assert seen[0].equal(seen[1]) and seen[0].dtype == torch.float32
    expected = images / 255
    if normalised:
        expected = torch.stack([(expected[:, c] - 0.1 * (c + 1)) / (0.5 + 0.1 * c) for c in range(3)], 1)
    torch.testing.assert_close(seen[0], expected)
    assert not task.state_dict()
    with pytest.raises(ValueError, match="both mean= and std="):
        ClassificationTask(Model(), mean=[0.5])


def test_number_of_classes_is_found_or_asked_for():
    assert ClassificationTask(small_resnet(7)).num_classes == 7
    assert ClassificationTask(small_resnet(7), 3).num_classes == 3
    assert SegmentationTask(nn.Conv2d(3, 21, 1)).num_classes == 21
    with pytest.raises(ValueError, match="Pass num_classes="):
        ClassificationTask(nn.Identity())


def test_losses_by_name_or_function():
    data = labelled(8, 8)
    by_name = trainer(ClassificationTask(linear(8), loss="nll_loss")).evaluate(data)
    by_function = trainer(ClassificationTask(linear(8), loss=F.nll_loss)).evaluate(data)
    assert by_name == by_function != trainer(ClassificationTask(linear(8))).evaluate(data)


def test_without_torchmetrics_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    task = ClassificationTask(linear(8))
    trainer(task, labelled(8, 8)).fit()  # training needs none
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchmetrics>="):
        trainer(task).evaluate(labelled(8, 8))


OURS = sorted(entry.name for entry in registry.entries("algorithms") if entry.target.startswith("hocket_vision."))


@pytest.mark.parametrize("name", OURS)
def test_every_algorithm_of_the_package_works_with_a_task(name):
    torch.manual_seed(0)
    task = ClassificationTask(small_resnet(8, 3, widths=(16, 128)))
    images = torch.rand(8, 3, 8, 8)
    data = DataLoader(TensorDataset(images, torch.arange(8)), 4)
    before = task.network.get_parameter("classifier.weight").detach().clone()
    run = trainer(task, data, algorithms=[name], eval_data=data)
    metrics = run.fit().metrics
    assert metrics["eval/loss"] > 0 and "eval/top5" in metrics
    assert not before.equal(run.model_state_dict()["classifier.weight"])


def test_loss_and_metrics_ignore_the_same_label():
    for loss in ("cross_entropy", F.cross_entropy, nn.CrossEntropyLoss()):
        with pytest.raises(ValueError, match=r"ignore_index=255, and its loss ignores -100"):
            SegmentationTask(nn.Conv2d(3, 4, 1), loss=loss, ignore_index=255)
    for loss in (nn.CrossEntropyLoss(ignore_index=255), lambda logits, labels: logits.sum()):
        assert SegmentationTask(nn.Conv2d(3, 4, 1), loss=loss, ignore_index=255).ignore_index == 255
