"""What of a checkpoint a Trainer takes: weights alone, parts left out, and the algorithms that it was taken with."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import make_trainer, same
from torch import Tensor, nn

import hocket
from hocket import Algorithm, Event, State, Task, plugins
from hocket.checkpoints import CheckpointError
from hocket.plugins import registry
from hocket_checkpoints.algorithm_records import ContentError, recorded_algorithms
from hocket_checkpoints.components.plugins import how_to_get
from hocket_checkpoints.storage import format as formats
from hocket_checkpoints.weight_files import read_weights
from hocket_checkpoints.weights import load_weights
from hocket_cli import main


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs).relu())


class Widen(Algorithm):
    """Puts more in place of the body, under other names."""

    events = frozenset({Event.INIT})

    def __init__(self, width: int = 5) -> None:
        self.width = width

    def apply(self, event: Event, state: State) -> None:
        state.model.body = nn.Sequential(nn.Linear(2, self.width), nn.Linear(self.width, 4))


class Counts(Algorithm):
    """Keeps something."""

    events = frozenset({Event.BATCH_END})

    def __init__(self, start: Any = 0) -> None:
        self.count = start

    def apply(self, event: Event, state: State) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Steepen(Algorithm):
    """Changes what the model computes, and no name or shape, as BlurPool does."""

    events = frozenset({Event.INIT})

    def apply(self, event: Event, state: State) -> None:
        state.model.body = nn.Sequential()
        state.model.body.register_parameter("weight", nn.Parameter(torch.zeros(4, 2)))
        state.model.body.register_parameter("bias", nn.Parameter(torch.zeros(4)))
        state.model.body.forward = lambda inputs: inputs @ state.model.body.weight.T * 2


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    given = {"widen": Widen, "counts": Counts, "steepen": Steepen}
    for name, algorithm in given.items():
        plugins.register("algorithms", name, algorithm)
    yield
    for name in given:
        plugins.unregister("algorithms", name)


def make(model: nn.Module | None = None, **changes: Any) -> hocket.Trainer:
    torch.manual_seed(changes.pop("weights", 0))
    arguments = {
        "model": model or Net(), "optimizer": "adamw(lr=0.1)", "device": "cpu", "seed": 1,
        "train_data": [(torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))] * 3,
    }  # fmt: skip
    return make_trainer(**{**arguments, **changes})


def saved(folder: Path, weights_only: bool = False, **changes: Any) -> tuple[Path, hocket.Trainer]:
    policy = hocket.Checkpoints(folder, every=None, weights_only=weights_only)
    trainer = make(checkpoints=policy, **changes)
    (name,) = trainer.fit("1ep").checkpoints
    return folder / name, trainer


class OwnTask(Task):
    """Its model is itself, and has a part that is called as Trainer's own tasks call the model."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Net()

    def forward(self, batch: Any) -> Tensor:
        return self.network(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


# --- weights alone


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("own_task", [False, True])
def test_weights_of_a_checkpoint_fit_the_model_itself(tmp_path: Path, weights_only: bool, own_task: bool) -> None:
    changes = {"model": OwnTask(), "loss": None} if own_task else {}
    path, trainer = saved(tmp_path / "run", weights_only, **changes)
    expected = trainer.model_state_dict()
    fresh = OwnTask() if own_task else Net()
    assert not load_weights(fresh, read_weights(path)) and same(fresh.state_dict(), expected)
    assert main(["checkpoint", "export", str(path), str(tmp_path / "w.safetensors")]) == 0
    assert same(safetensors.torch.load_file(tmp_path / "w.safetensors"), expected)
    again = make(OwnTask() if own_task else None, loss=changes.get("loss", nn.functional.cross_entropy), weights=5)
    before = again.state.optimizers[0]
    assert not again.load_weights(path) and same(again.model_state_dict(), expected)
    assert again.state.timestamp.batch == 0 and not before.state  # nothing but weights
    again.fit()


def test_a_trainer_says_what_does_not_fit(tmp_path: Path) -> None:
    path, first = saved(tmp_path / "run")
    other = make(Net(classes=7), weights=5)
    before = copy.deepcopy(other.model_state_dict())
    with pytest.raises(CheckpointError, match=r"of another shape: head.weight \(\[3, 4\], the module has \[7, 4\]\)"):
        other.load_weights(path)
    assert same(other.model_state_dict(), before)
    assert not other.load_weights(path, ignore=["head.*"])
    report = other.load_weights({"new": torch.ones(1), "body.weight": torch.zeros(4, 2)}, strict=False)
    assert report.unexpected == ("new",) and "head.weight" in report.missing
    now, theirs = other.model_state_dict(), first.model_state_dict()
    assert torch.equal(now["body.bias"], theirs["body.bias"]) and not now["body.weight"].any()
    assert torch.equal(now["head.weight"], before["head.weight"])
    renamed = {name.replace("body.", "encoder."): value for name, value in theirs.items()}
    same_head = make(weights=5)
    assert not same_head.load_weights(renamed, remap={"encoder.": "body."})
    assert same(same_head.model_state_dict(), theirs)


def test_not_during_a_fit() -> None:
    class Loads(hocket.Callback):
        def batch_end(self, state: State) -> None:
            trainer.load_weights({})

    trainer = make(callbacks=[Loads()])
    with pytest.raises(RuntimeError, match="before fit starts"):
        trainer.fit()


class Counted(Net):
    """Keeps a number beside its weights."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "also": (torch.ones(2),)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_is_no_weight(tmp_path: Path) -> None:
    model = Counted()
    model.calls = 3
    path, trainer = saved(tmp_path / "run", model=model)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    weights = dict(model.named_parameters())
    for source in (path, tmp_path / "x.pt"):
        assert read_weights(source).keys() == weights.keys()
        fresh = Counted()
        assert not load_weights(fresh, read_weights(source)) and same(dict(fresh.named_parameters()), weights)
        other = make(Counted(), weights=5)
        assert not other.load_weights(source) and same(dict(other.state.model.named_parameters()), weights)
        assert other.state.model.calls == fresh.calls == 0
    assert not load_weights(fresh, model.state_dict()) and fresh.calls == 3
    again = make(Counted())
    again.load_state_dict(trainer.state_dict())
    assert again.state.model.calls == 3


# --- parts left out


@pytest.mark.filterwarnings("ignore:This run is configured differently")
def test_what_is_ignored_stays_as_it_is(tmp_path: Path) -> None:
    path, first = saved(tmp_path / "run", algorithms=["counts"])
    tree = formats.read(path)
    other = make(Net(classes=7), weights=5, optimizer="sgd(lr=0.5)")
    head = other.model_state_dict()["head.weight"].clone()
    with pytest.raises(ContentError, match=r"AdamW.*SGD.*counts"):
        other.load_state_dict(tree)
    other.load_state_dict(tree, ignore=["model.*.head.*", "optimizers.*", "plugins.algorithms.counts"])
    weights = other.model_state_dict()
    assert torch.equal(weights["head.weight"], head)
    assert torch.equal(weights["body.weight"], first.model_state_dict()["body.weight"])
    assert other.state.timestamp.batch == 3 and other.state.optimizers[0].param_groups[0]["lr"] == 0.5
    other.fit()
    assert other.state.timestamp.batch == 6


def test_a_plug_in_that_is_new_can_begin_anew(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "run")
    counts = Counts(100)
    trainer = make(algorithms=[counts])
    with pytest.raises(ContentError, match="taken without it"):
        trainer.load_state_dict(formats.read(path))
    trainer.load_state_dict(formats.read(path), ignore=["plugins.algorithms.counts"])
    trainer.fit()
    assert counts.count == 103


def test_what_is_not_ignored_has_to_fit(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "run", algorithms=["counts"])
    with pytest.raises(ContentError, match="counts"):
        make().load_state_dict(formats.read(path), ignore=["optimizers.*"])
    with pytest.raises(ValueError, match=r"ignore=\['heads.\*'\] matches nothing"):
        make(algorithms=["counts"]).load_state_dict(formats.read(path), ignore=["heads.*", "optimizers.*"])


# --- the algorithms that it was taken with


@pytest.mark.parametrize("weights_only", [False, True])
def test_urls(tmp_path: Path, weights_only: bool) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    trainer = make(checkpoints=hocket.Checkpoints(url, every=None, weights_only=weights_only), algorithms=["widen"])
    (name,) = trainer.fit("1ep").checkpoints
    assert recorded_algorithms(f"{url}/{name}") == recorded_algorithms(f"{url}/latest") == [{"widen": {}}]
    other = make(algorithms=["widen"], weights=5)
    assert not other.load_weights(f"{url}/{name}/") and same(other.model_state_dict(), trainer.model_state_dict())
    with pytest.raises(CheckpointError, match="has no checkpoint 'ba0'"):
        read_weights(f"{url}/ba0")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.filterwarnings("ignore:The weights of")
@pytest.mark.parametrize("weights_only", [False, True])
def test_what_changes_the_model_is_applied_again(tmp_path: Path, weights_only: bool) -> None:
    path, first = saved(tmp_path / "run", weights_only, algorithms=[{"widen": {"width": 9}}, "counts"])
    assert recorded_algorithms(path) == [{"widen": {"width": 9}}]
    assert recorded_algorithms(path, every=True) == [{"widen": {"width": 9}}, {"counts": {}}]
    with pytest.raises(CheckpointError, match=r"missing from the weights: body\.weight"):
        make(weights=5).load_weights(path)
    again = make(weights=5, algorithms=recorded_algorithms(path))
    again.load_weights(path)
    assert same(again.model_state_dict(), first.model_state_dict())
    if not weights_only:
        resumed = make(weights=5, algorithms=recorded_algorithms(path, every=True), resume=path)
        assert same(resumed.model_state_dict(), first.model_state_dict()) and resumed.state.timestamp.batch == 3


def test_weights_of_a_model_that_was_changed_otherwise(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, algorithms=["steepen"])
    with pytest.warns(UserWarning, match=r"algorithms=\[{'steepen': {}}\]"):
        make().load_weights(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(algorithms=["steepen"]).load_weights(path)


def test_what_cannot_be_applied_again_is_an_error(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "instance", algorithms=[Widen(9)])
    with pytest.raises(ContentError, match=r"given as an instance.*algorithms=\[Widen\(…\)\]"):
        recorded_algorithms(path)
    path, _ = saved(tmp_path / "run", algorithms=["widen"])
    with pytest.raises(CheckpointError, match=rf"there is no such folder\. Give the folder of one, such as {path}\."):
        recorded_algorithms(Path(path).parent / "nosuch")
    tree = formats.read(path)
    widen = next(each for each in tree["attached"] if each["name"] == "widen")
    formats.write(tmp_path / "class", {"attached": [{**widen, "class": "os.system"}]}, {})
    with pytest.raises(ContentError, match=r"'widen' was a os\.system .* and is a .*Widen now"):
        recorded_algorithms(tmp_path / "class")
    absent = {**widen, "name": "vibrato", "dist": "hocket-vibrato", "version": "1.2"}
    formats.write(tmp_path / "absent", {"attached": [absent]}, {})
    with pytest.raises(ContentError, match=r"a wheel of hocket-vibrato; and pass algorithms=\['vibrato'\]"):
        recorded_algorithms(tmp_path / "absent")


@pytest.mark.parametrize(
    ("dist", "cls", "says"),
    [
        ("hocket", "hocket.EarlyStopping", r"a package of hocket.*type: pip install .*insight; and pass .callbacks="),
        ("acme", "acme.EarlyStopping", r"acme 0\.1\.0.*if you trust it, type: pip install acme==0\.1\.0; and pass"),
    ],
)
def test_how_to_get_a_recorded_monitor_or_leave_it_out(monkeypatch, dist, cls, says) -> None:
    monkeypatch.setattr(registry, "names", lambda kind: ())
    text = how_to_get("callbacks", {"name": "early-stopping", "class": cls, "dist": dist, "version": "0.1.0"})
    assert re.search(says, text) and "ignore=['plugins.callbacks.early-stopping']" in text


def test_a_run_that_continues_under_another_name_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs, name in enumerate(("first", "first", "other"), 1):
        hocket.Trainer(
            model=nn.Linear(2, 1), loss="mse_loss", optimizer="sgd(lr=0.1)", device="cpu", run_name=name,
            train_data=[(torch.ones(2, 2), torch.ones(2, 1))], checkpoints=str(tmp_path / "ck"), resume="auto",
            duration=f"{epochs}ep", folder=tmp_path / "runs",
        ).fit()  # fmt: skip
        said = capsys.readouterr().err
        assert ("is of run 'first', which continues under the name 'other'" in said) is (name == "other"), said
