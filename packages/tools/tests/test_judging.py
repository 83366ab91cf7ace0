"""``hocket evaluate``: what it measures is what the Trainer measures, for runs, data, corruptions and two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_cli import main
from hocket_testkit import CommandConformance, run_ranks
from hocket_tools import How, compared, corrupt, judge, mcnemar, withstand
from hocket_tools.judging.evaluate import command as evaluate
from hocket_tools.judging.predict import command as predict

pytest.importorskip("sklearn")

MINE = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def split(which):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    part = slice(0, 600) if which == "train" else slice(600, 900)
    return TensorDataset(images[part], labels[part])

def train():
    return DataLoader(split("train"), 50, shuffle=True)

def test(shuffle: bool = False, batch_size: int = 64):
    return DataLoader(split("test"), batch_size, shuffle=shuffle)

def net(width: int = 32):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""
CONFIGURATION = """
model: {mine:net: {}}
train_data: mine:train
eval_data: {test: mine:test, again: {mine:test: {batch_size: 7}}}
loss: cross_entropy
metrics:
  accuracy: accuracy
  top3: {torchmetrics.classification:MulticlassAccuracy: {num_classes: 10, top_k: 3, average: micro}}
optimizer: adamw(lr=0.005)
duration: 2ep
device: cpu
seed: 1
loggers: [jsonl]
"""


class TestEvaluate(CommandConformance):
    calls = {"": 2, "nothing.yaml": 2}

    def make(self) -> Any:
        return evaluate


class TestPredict(CommandConformance):
    calls = {"": 2}

    def make(self) -> Any:
        return predict


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    (folder / "mine.py").write_text(MINE)
    (folder / "c.yaml").write_text(CONFIGURATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        sys.modules.pop("mine", None)
        assert main(["train", "c.yaml", "run_name=a"]) == 0
        assert main(["train", "c.yaml", "run_name=b", "seed=2", "model.width=8"]) == 0
    return folder


@pytest.fixture
def typed(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(project)

    def call(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = main(["evaluate", *words])
        out, said = capsys.readouterr()
        return code, json.loads(out) if "--json" in words and code == 0 else out, said

    return call


@pytest.mark.long
def test_a_run_is_judged_as_the_trainer_measures_it(typed: Any) -> None:
    code, plain, _ = typed("c.yaml", "--weights", "runs/a")
    expected = dict(line.split() for line in plain.splitlines())
    code, found, said = typed("runs/a", "test", "--metrics", "loss,accuracy,top3,f1", "--json", "--resamples", "200")
    assert code == 0, said
    (judged,) = found["runs"]
    for name in ("loss", "accuracy", "top3"):
        value = judged["metrics"][name]
        assert value["value"] == pytest.approx(float(expected[f"test/{name}"]), rel=1e-5)
        assert value["low"] < value["value"] < value["high"]
    confusion = np.array(judged["confusion"])
    assert confusion.sum() == judged["samples"] == 300
    assert judged["classes"][3]["recall"] == pytest.approx(confusion[3, 3] / confusion[3].sum())
    code, shuffled, said = typed(
        "runs/a", "{mine:test: {shuffle: true, batch_size: 41}}", "--metrics", "loss,f1", "--json", "--resamples", "200"
    )
    assert "shuffles; samples are read in the order" in said
    for name in ("loss", "f1"):
        for part in ("value", "low", "high"):
            assert shuffled["runs"][0]["metrics"][name][part] == pytest.approx(judged["metrics"][name][part], rel=1e-5)
    assert [each["sample"] for each in shuffled["runs"][0]["worst"]] == [each["sample"] for each in judged["worst"]]
    assert "runs/a on test: 300 samples" in typed("runs/a", "test")[1]


@pytest.mark.long
def test_the_worst_samples_are_those_of_highest_loss_and_in_the_report(typed: Any, project: Path) -> None:
    code, found, said = typed("runs/a", "test", "--worst", "5", "--json", "--report")
    assert code == 0, said
    with torch.no_grad():
        import mine  # type: ignore[import-not-found]
        from safetensors.torch import load_file

        net = mine.net()
        net.load_state_dict(load_file("runs/a/weights.safetensors"))
        images, labels = mine.split("test").tensors[0][600:900], mine.split("test").tensors[1]
        images = torch.stack([mine.split("test")[at][0] for at in range(300)])
        labels = torch.stack([mine.split("test")[at][1] for at in range(300)])
        losses = nn.functional.cross_entropy(net(images), labels, reduction="none")
    worst = found["runs"][0]["worst"]
    assert [each["sample"] for each in worst] == losses.argsort(descending=True)[:5].tolist()
    assert [each["loss"] for each in worst] == pytest.approx(losses.sort(descending=True).values[:5].tolist(), rel=1e-4)
    assert [each["target"] for each in worst] == labels[[each["sample"] for each in worst]].tolist()
    lines = [json.loads(line) for line in Path("runs/a/media/metrics.jsonl").read_text().splitlines()]
    (shown,) = [each for each in lines if each.get("images") == "judgement/test/worst"]
    assert len(shown["files"]) == 5 and all((project / "runs/a/media" / each).is_file() for each in shown["files"])
    (table,) = [each for each in lines if each.get("table") == "judgement/test/worst"]
    assert [row[0] for row in table["rows"]] == [each["sample"] for each in worst]
    assert main(["report", "runs/a", "--out", "r.html"]) == 0 and "judgement/test/worst" in Path("r.html").read_text()


@pytest.mark.long
def test_two_runs_are_compared_on_the_same_samples(typed: Any) -> None:
    code, found, said = typed(
        "runs/a", "runs/b", "test", "--compare", "--metrics", "accuracy,loss,top3", "--json", "--resamples", "150"
    )
    assert code == 0, said
    one, two = (each["metrics"] for each in found["runs"])
    for name, each in found["differences"].items():
        assert each["difference"]["value"] == pytest.approx(two[name]["value"] - one[name]["value"])
        assert (each["first"], each["second"]) == (one[name]["value"], two[name]["value"])
    assert found["differences"]["accuracy"]["test"] == "McNemar, mid-p"
    assert found["differences"]["top3"]["test"] == "permutation"
    assert found["differences"]["loss"]["p_value"] < 0.01
    code, said, _ = typed("runs/a", "runs/a", "test", "--compare", "--metrics", "accuracy,loss")
    assert said.count("1.0000") == 2
    assert typed("runs/a", "runs/b", "test")[0] == 2 and "--compare" in typed("runs/a", "runs/b", "test")[2]
    assert "1 run is named" in typed("runs/a", "test", "--compare")[2]


@pytest.mark.long
def test_corrupted_images_are_those_of_the_function(typed: Any) -> None:
    words = (
        "runs/a",
        "test",
        "--corruptions",
        "gaussian-noise,fog",
        "--severity",
        "1,5",
        "--json",
        "--metrics",
        "accuracy",
    )
    code, found, said = typed(*words)
    assert code == 0, said
    import mine
    from safetensors.torch import load_file

    net = mine.net()
    net.load_state_dict(load_file("runs/a/weights.safetensors"))
    images, labels = (torch.stack(each) for each in zip(*mine.split("test"), strict=True))
    errors = {}
    for kind in ("gaussian-noise", "fog"):
        for severity in (1, 5):
            predicted = net(corrupt(images, kind, severity)).argmax(1)
            errors[kind, severity] = (predicted != labels).float().mean().item()
            assert found["runs"][0]["corruptions"][kind][str(severity)] == pytest.approx(
                errors[kind, severity], abs=1e-6
            )
    mean = found["runs"][0]["mean_corruption_error"]
    assert mean["value"] == pytest.approx(np.mean(list(errors.values()))) and mean["low"] < mean["value"] < mean["high"]
    again = typed(*words, "eval_data.test.batch_size=17")[1]
    assert again["runs"][0]["corruptions"] == found["runs"][0]["corruptions"]
    assert "pixels from 0 to 255" in typed("runs/a", "test", "--corruptions", "fog", "--std", "16")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Name the folder of a run"),
        (("c.yaml",), "needs --weights"),
        (("runs/a",), "evaluation sets test, again. Name the one to evaluate, such as hocket evaluate runs/a test"),
        (("runs/a", "tset"), "no evaluation set 'tset'; the configuration has test, again"),
        (("runs/a", "test", "again"), "test and again both name data"),
        (("runs/a", "test", "--metrics", "acuracy"), "Write --metrics accuracy"),
        (("runs/a", "test", "--metrics", "mae"), "'mae' needs numbers as outputs"),
        (("runs/a", "test", "--level", "95"), "--level 95.0 is not a fraction between 0 and 1. Write --level 0.95."),
        (("runs/a", "test", "--corruptions", "rain"), "no corruption 'rain'"),
        (("runs/a", "test", "--corruptions", "fog", "--severity", "9"), "--severity 9 is not a severity"),
        (("runs/a", "test", "--corruptions", "fog", "--severity", "high"), "not a list of 1 to 5"),
        (("runs/a", "test", "--corruptions", "fog", "--mean", "grey"), "not a list of numbers"),
        (("runs/a", "test", "--corruptions", "fog", "--std", "0"), "--std 0.0 has to be positive"),
        (("runs/a", "test", "--corruptions", "fog", "--std", "-1"), "--std -1.0 has to be positive"),
        (("runs/a", "test", "--corruptions", "fog", "--mean", "0,0,0", "--std", "1,1"), "as many as --mean 0.0,0.0,0.0"),
        (("runs/a", "test", "--corruptions", "all,fog"), "Write --corruptions all alone"),
        (("runs/a", "test", "--corruptions", ""), "Write --corruptions all alone"),
        (("runs/a", "test", "--worst", "-3"), "--worst -3 is too small. Give 0 or more: --worst 10."),
        (("runs/a", "test", "--seed", "-1"), "--seed -1 is too small. Give 0 or more"),
        (("runs/a", "test", "--severity", "3"), "--severity 3 has no effect without --corruptions. Add that, or remove"),
        (("runs/a", "test", "--mean", "0.5"), "--mean 0.5 has no effect without --corruptions"),
        (("runs/a", "runs/nope", "test", "--compare"), "runs/nope does not exist"),
        (("runs/a", "runs/nope", "--compare"), "runs/nope does not exist"),
        (("c.yaml", "test", "--weights", "runs/nothing", "--report"), "--report adds to the folder of a run, and c.yaml has"),
        (("runs", "test"), "runs: It has no config.yaml"),
        (("runs/nothing", "test"), "runs/nothing: It does not exist"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(typed: Any, words: Any, said: str) -> None:
    code, _, explained = typed(*words)
    assert code == 2 and said in explained.replace("«", "").replace("»", ""), explained
    assert "Traceback" not in explained


def trainer(**options: Any) -> hocket.Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(45, 1, 8, 8, generator=generator), torch.randint(4, (45,), generator=generator)
    data = DataLoader(TensorDataset(images, labels), 6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    return hocket.Trainer(model=model, loss="cross_entropy", eval_data={"test": data}, device="cpu", **options)


def judged(rank: int = 0, **options: Any) -> Any:
    run = trainer(**options)
    found = judge(run, "test", how=How(resamples=200))
    withstand(run, found, ["gaussian-noise"], [3], how=How(resamples=200))
    return found.as_json()


def on_rank(rank: int) -> Any:
    return judged(strategy="ddp")


def test_two_ranks_judge_as_one() -> None:
    one, two = run_ranks(on_rank, 2)
    alone = judged()
    assert one == two
    for each in (one, alone):
        each.pop("values")
    assert one["confusion"] == alone["confusion"] and one["corruptions"] == alone["corruptions"]
    assert json.dumps(one) == json.dumps(alone)


class WithMasks(hocket.Task):
    """Labels of each pixel, some ignored, whose loss is a mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 1)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1]), (batch[1] != -100).sum()


def test_losses_of_samples_are_weighed_as_the_trainer_weighs_them() -> None:
    generator = torch.Generator().manual_seed(1)
    masks = torch.randint(3, (20, 5, 5), generator=generator)
    masks[torch.rand(20, 5, 5, generator=generator) < 0.4] = -100
    data = DataLoader(TensorDataset(torch.randn(20, 1, 5, 5, generator=generator), masks), 7)
    run = hocket.Trainer(model=WithMasks(), eval_data={"test": data}, device="cpu")
    found = judge(run, "test", metrics=["loss", "accuracy", "f1"], how=How(resamples=200))
    assert found.estimates["loss"].value == pytest.approx(run.evaluate()["test/loss"], rel=1e-6)
    outputs = torch.cat(run.predict(data)).argmax(1)
    assert found.estimates["accuracy"].value == pytest.approx((outputs == masks)[masks != -100].float().mean().item())
    regression = hocket.Trainer(
        model=nn.Linear(3, 2), loss="mse", eval_data=[(torch.randn(9, 3), torch.randn(9, 2))], device="cpu"
    )
    values = judge(regression, "eval", how=How(resamples=200)).estimates
    assert values["loss"].value == pytest.approx(values["rmse"].value ** 2, rel=1e-6)
    assert mcnemar(0, 0) == 1


def test_outputs_that_are_not_finite_are_counted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, labels = torch.eye(4)[torch.arange(12) % 4], torch.arange(12) % 4
    inputs[[2, 7, 11], 0] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    batches = [(inputs[:8], labels[:8]), (inputs[8:], labels[8:])]
    run = hocket.Trainer(
        model=nn.Linear(4, 4), loss="cross_entropy", eval_data={"test": batches}, metrics=["accuracy"], device="cpu"
    )
    found = judge(run, "test", run="a", how=How(resamples=100))
    assert found.as_json()["nonfinite"] == 3
    assert "a has NaN or infinity in the outputs of 3 of 12 samples of 'test'" in capsys.readouterr().err
    fine = hocket.Trainer(
        model=nn.Linear(4, 4), loss="cross_entropy", eval_data={"test": [(torch.eye(4), labels[:4])]}, device="cpu"
    )
    assert judge(fine, "test", how=How(resamples=100)).as_json()["nonfinite"] == 0 and not capsys.readouterr().err


def test_weights_of_one_run_are_not_compared_with_themselves(typed: Any) -> None:
    code, _, said = typed("runs/a", "runs/b", "test", "--compare", "--weights", "runs/a/weights.safetensors")
    assert code == 2 and "would evaluate them for both" in said and "runs/a runs/b --compare" in said


def test_only_evaluations_of_the_same_samples_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = torch.rand(40, 4), torch.arange(40) % 2

    def of(inputs: torch.Tensor, targets: torch.Tensor, size: int = 8, **options: Any) -> Any:
        data = {"test": DataLoader(TensorDataset(inputs, targets), size)}
        options = {"loss": "cross_entropy", **options}
        return judge(hocket.Trainer(nn.Linear(4, 2), eval_data=data, device="cpu", **options), "test")

    first = of(inputs, targets)
    assert compared(first, of(inputs, targets, 5))["loss"].p_value > 0
    assert capsys.readouterr().err == ""
    others = inputs.clone()
    others[3:] += 1
    compared(first, of(others, targets))
    assert "the inputs of 37 of 40 samples differ between the two evaluations, first those of sample 3." in (
        capsys.readouterr().err
    )
    flipped = torch.cat([targets[:5], 1 - targets[5:]])
    for other, said in (
        (of(inputs[:30], targets[:30]), "they have 40 and 30 samples"),
        (of(inputs, flipped), "their targets differ, first that of sample 5"),
        (
            of(inputs, torch.rand(40, 2), loss="mse_loss"),
            "their targets are of different kinds, such as classes and numbers",
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"{said}\. Judge both on one set, in one order, judge\(trainer, 'test'\)"
        ):
            compared(first, other)


def test_channels_of_mean_and_std_are_those_of_the_images() -> None:
    made = trainer()
    found = judge(made, "test")
    with pytest.raises(
        ValueError, match=r"one number of mean= and std= for all channels or one for each, here 2; the inputs are"
    ):
        withstand(made, found, ["fog"], [1], mean=[0.1, 0.2])


def test_a_set_that_was_given_as_data_is_replaced_there(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    assert main(["predict", "runs/a", "tset", "--to", "p"]) == 2
    assert "has test, again. Write test in place of tset." in capsys.readouterr().err
