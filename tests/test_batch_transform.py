"""``batch_transform=`` changes each batch once, on its device, before anything else acts on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket_cli import main
from hocket_testkit import run_ranks

torch.manual_seed(0)
INPUTS, TARGETS = torch.rand(6, 3), torch.rand(6, 1)
START = torch.rand(1, 3)


def network() -> nn.Linear:
    layer = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(START)
    return layer


def stepped(inputs: Tensor, targets: Tensor) -> Tensor:
    """The weights after one step of SGD with learning rate 1, by the formula of the mean square."""
    return START - 2 * ((inputs @ START.T - targets) * inputs).mean(0)


def trainer(**arguments: Any) -> hocket.Trainer:
    given: dict[str, Any] = {"train_data": [(INPUTS, TARGETS)], "duration": "1ba"}
    return hocket.Trainer(
        model=network(), loss=nn.functional.mse_loss, optimizer="sgd(lr=1.0)", device="cpu", **given | arguments
    )


def train(**arguments: Any) -> Tensor:
    made = trainer(**arguments)
    made.fit()
    return made.model_state_dict()["weight"]


def centred(batch: Any) -> Any:
    """The mean of the batch, so that it matters that it is called once, with the whole batch."""
    inputs, targets = batch
    return inputs - inputs.mean(0), targets


def twice(batch: Any) -> Any:
    """Two copies of the samples, as repeated augmentation makes them, the second one changed."""
    inputs, targets = batch
    return torch.cat([inputs, 2 * inputs]), torch.cat([targets, targets])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(3.0))
        self.modes: list[bool] = []

    def forward(self, batch: Any) -> Any:
        self.modes.append(self.training)
        return batch[0] * self.factor, batch[1]


CENTRED = INPUTS - INPUTS.mean(0)


@pytest.mark.parametrize("microbatch", [None, 4])
def test_it_gets_the_whole_batch_once(microbatch: int | None) -> None:
    torch.testing.assert_close(train(batch_transform=centred, microbatch=microbatch), stepped(CENTRED, TARGETS))
    scaled = train(batch_transform=[centred, Scale()], microbatch=microbatch)
    torch.testing.assert_close(scaled, stepped(3 * CENTRED, TARGETS))


@pytest.mark.parametrize("microbatch", [None, 4])
def test_weights_follow_another_number_of_samples(microbatch: int | None) -> None:
    made = trainer(batch_transform=twice, microbatch=microbatch)
    made.fit()
    expected = stepped(*twice((INPUTS, TARGETS)))
    torch.testing.assert_close(made.model_state_dict()["weight"], expected)
    assert made.state.timestamp.sample == 6, "progress counts the samples of the data"


def test_windows_transform_each_of_their_batches() -> None:
    parts = [(INPUTS[:4], TARGETS[:4]), (INPUTS[4:], TARGETS[4:])]
    inputs = torch.cat([centred(part)[0] for part in parts])
    torch.testing.assert_close(
        train(train_data=parts, accumulate="2ba", batch_transform=centred), stepped(inputs, TARGETS)
    )


def test_the_first_listener_of_the_event_sees_the_result() -> None:
    class Sees(hocket.Algorithm):
        events = (hocket.Event.AFTER_DATALOADER,)
        phase = hocket.Phase.SELECT
        seen: Any = None

        def apply(self, event: Any, state: Any) -> None:
            self.seen = state.batch[0].clone()

    sees = Sees()
    train(algorithms=[sees], batch_transform=centred)
    torch.testing.assert_close(sees.seen, CENTRED)


def test_evaluation_and_prediction_use_it_too() -> None:
    scale = Scale()
    made = trainer(batch_transform=scale, eval_data=[(INPUTS, TARGETS)], sanity_eval=1)
    expected = nn.functional.mse_loss(3 * INPUTS @ START.T, TARGETS).item()
    assert made.evaluate() == pytest.approx({"eval/loss": expected})
    torch.testing.assert_close(made.predict([(INPUTS, TARGETS)])[0], 3 * INPUTS @ START.T)
    assert scale.modes == [False, False]
    made.fit()
    assert scale.modes == [False, False, False, True, False], "sanity evaluation, training, evaluation"
    only = trainer(batch_transform={"train": centred, "eval": scale})
    torch.testing.assert_close(only.predict([(INPUTS, TARGETS)])[0], 3 * INPUTS @ START.T)
    torch.testing.assert_close(train(batch_transform={"eval": scale}), stepped(INPUTS, TARGETS))


def test_the_data_is_not_changed_by_assignment() -> None:
    def assigned(batch: Any) -> Any:
        batch["input"] = batch["input"] * 2
        return batch

    data = [{"input": INPUTS, "target": TARGETS}]
    train(train_data=data, inputs="input", targets="target", batch_transform=assigned, duration="2ep")
    assert data[0]["input"] is INPUTS


def noisy(batch: Any) -> Any:
    return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


@pytest.mark.parametrize("seed", [None, 3])
def test_random_transforms_resume_bitwise(tmp_path: Path, seed: int | None) -> None:
    data = [(INPUTS, TARGETS)] * 4

    class Die(hocket.Callback):
        def batch_end(self, state: Any) -> None:
            if state.timestamp.batch == 3:
                raise KeyError("killed")

    def of(name: str, **arguments: Any) -> hocket.Trainer:
        torch.manual_seed(5)
        checkpoints = hocket.Checkpoints(tmp_path / name, every="1ba")
        return trainer(
            train_data=data, batch_transform=noisy, duration="2ep", seed=seed, checkpoints=checkpoints, **arguments
        )

    whole = of("whole")
    whole.fit()
    with pytest.raises(KeyError):
        of("killed", callbacks=[Die()], eval_data=[(INPUTS, TARGETS)], eval_every="1ba").fit()
    again = of("killed", resume="auto")
    again.fit()
    assert torch.equal(again.model_state_dict()["weight"], whole.model_state_dict()["weight"])


WRONG: dict[str, tuple[Any, str]] = {
    "a text": ("normalize", "'normalize' is not a function of a batch. Give a function"),
    "a class": (Scale, "is not a function of a batch"),
    "another split": ({"train": centred, "test": centred}, "has 'test'.*'train': function, 'eval': function"),
    "a list with text": ([centred, 3], "3 is not a function"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_function_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"batch_transform.*{message}"):
        trainer(batch_transform=given)


def test_a_transform_that_returns_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match=r"batch_transform=.*forgets.* returned None for a batch.*`return batch`"):
        train(batch_transform=forgets)


def forgets(batch: Any) -> None:
    batch[0].clamp(0, 1)


def test_an_exception_in_it_says_where() -> None:
    with pytest.raises(AttributeError) as caught:
        train(batch_transform=lambda batch: batch.normalize())
    assert "gets the whole batch, on cpu" in "".join(caught.value.__notes__)


def test_other_names_lead_to_it() -> None:
    with pytest.raises(TypeError, match="batch_transform=function"):
        trainer(device_transforms=[centred])


CONFIGURATION = """
model: {torch.nn:Linear: [3, 1]}
loss: mse_loss
optimizer: sgd(lr=0.1)
duration: 1ep
device: cpu
train_data: data:batches
eval_data: data:batches
batch_transform: %s
"""
DATA = """
import torch
from torch import nn
seen = []
def batches():
    return [(torch.ones(2, 3), torch.ones(2, 1))]
def double(batch):
    seen.append(batch[0].sum().item())
    return batch[0] * 2, batch[1]
class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, batch):
        seen.append(batch[0].sum().item())
        return batch[0] * self.factor, batch[1]
"""


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("data:double", [6, 6]),
        ("[data:double, {data:Times: {factor: 3}}]", [6, 12, 6, 12]),
        ("{train: data:double, eval: {data:Times: {factor: 3}}}", [6, 6]),
    ],
)
def test_it_is_written_in_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, seen: list[float]
) -> None:
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "run.yaml").write_text(CONFIGURATION % written)
    assert main(["train", "run.yaml"]) == 0
    assert sys.modules["data"].seen == seen


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
def test_over_two_ranks_each_transforms_its_slice() -> None:
    def rank_main(rank: int) -> Tensor:
        return train(batch_transform=twice, strategy="ddp", global_batch=6)

    for weight in run_ranks(rank_main, 2, timeout=120):
        torch.testing.assert_close(weight, stepped(*twice((INPUTS, TARGETS))))
