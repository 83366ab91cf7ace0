"""Which checkpoints a run keeps, and what it goes on from. Faults are in `faults/`."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_trainer, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.checkpoints import CheckpointError
from hocket_checkpoints.algorithm_records import recorded_algorithms
from hocket_checkpoints.storage import manifest
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.weight_files import read_weights
from hocket_cli import main
from hocket_testkit import run_ranks

EPOCHS, BATCHES = 3, 6


class Network(nn.Module):
    """Draws random numbers and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.first(inputs)).relu()))


def make(folder: Path | str = "checkpoints", resume: Any = None, **changes: Any) -> hocket.Trainer:
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(44, 8, generator=generator), torch.randint(3, (44,), generator=generator))
    policy = {"every": "1ba", **changes.pop("policy", {})}
    arguments = {
        "model": Network(), "train_data": DataLoader(samples, 8, shuffle=True),
        "eval_data": DataLoader(samples, 16), "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "schedule": "cosine(warmup=0.2dur)", "duration": f"{EPOCHS}ep", "algorithms": ["sam", {"ema": {"half_life": "3ba"}}],
        "seed": 7, "device": "cpu", "checkpoints": hocket.Checkpoints(folder, **policy), "resume": resume,
    }  # fmt: skip
    return make_trainer(**{**arguments, **changes})


def trained(trainer: hocket.Trainer) -> dict[str, Tensor]:
    """Everything that training has made, metrics included."""
    weights = {name: value.clone() for name, value in trainer.model_state_dict().items()}
    averages = {f"averaged {name}": value for name, value in trainer.model_state_dict(evaluated=True).items()}
    metrics = {name: torch.tensor(value) for name, value in trainer.state.metrics.items()}
    return {**weights, **averages, **metrics}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    trainer = make(tmp_path_factory.mktemp("whole") / "checkpoints", policy={"every": None})
    trainer.fit()
    return trained(trainer)


# --- which are kept


def test_the_latest_are_kept_and_the_end_is_written() -> None:
    result = make(policy={"every": "2ba", "keep": 2}).fit()
    assert list(result.checkpoints) == ["ep2-ba16", "ep3-ba18"]
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["ep2-ba16", "ep3-ba18", "latest"]
    assert list(make("odd", policy={"every": "4ba"}).fit().checkpoints) == ["ep1-ba12", "ep2-ba16", "ep3-ba18"]


@pytest.mark.parametrize("keep", [2, None])
def test_one_position_has_one_checkpoint(keep: int | None) -> None:
    """Of an interval and of the best at the end of an epoch, after one batch; the best by another evaluation there stays."""
    best = ("eval/loss", "min", 5)
    result = make(policy={"every": "3ba", "keep": keep, "best": best}, duration="2ep").fit()
    names = [*result.checkpoints]
    assert names == ["ep0-ba3", "ep1-ba6", "ep1-ba9", "ep2-ba12"][-4 if keep is None else -3 :]
    weights = [read_weights(f"checkpoints/{name}")["first.weight"] for name in names]
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(weights))
    data = [(torch.ones(8, 8), torch.zeros(8, dtype=torch.long))]
    sets = {"a": hocket.EvalSet(data, every="2ba"), "b": data}
    policy = {"every": "1ep", "keep": 1, "best": ("a/loss", "min", 9)}
    assert {"ep0-ba6", "ep1-ba6"} <= {*make("two", policy=policy, duration="1ep", eval_data=sets).fit().checkpoints}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_that_cannot_be_removed_stays_until_the_next_write(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """A warning, though `on_error="stop"`: the new checkpoint is complete. Others are removed meanwhile."""
    left, remove = [3], Store.remove

    def fails_three_times(store: Store, name: str) -> None:
        if name == "ep0-ba1" and left[0]:
            left[0] -= 1
            raise CheckpointError(f"{name} was not removed: it is in use.")
        remove(store, name)

    monkeypatch.setattr(Store, "remove", fails_three_times)
    with pytest.warns(RuntimeWarning, match="An old checkpoint stays: ep0-ba1 was not removed") as told:
        trainer = make(policy={"keep": 1, "asynchronous": asynchronous}, eval_data=None)
        there = [list(trainer.fit("1ba").checkpoints) for _ in range(5)]
    first, *later = [f"ep0-ba{number}" for number in range(1, 6)]
    assert there == [[first], *([first, each] for each in later[:3]), later[3:]]
    assert sum("stays" in str(each.message) for each in told) == 3


def test_what_others_have_put_there_stays() -> None:
    """Links are no checkpoints, neither to one that is kept nor to one that is not; copies do not count."""
    trainer = make(policy={"every": "1ep", "keep": 1, "best": ("eval/loss", "min", 1)}, duration="5ep")
    trainer.fit("1ep")
    shutil.copytree("checkpoints/ep1-ba6", "checkpoints/my_backup")
    Path("checkpoints/first").symlink_to("ep1-ba6")
    Path("checkpoints/last").symlink_to("ep5-ba30")
    for _ in range(4):
        trainer.fit("1ep")
    store = hocket.Checkpoints("checkpoints").store
    assert store.names()[0] == "my_backup" and store.names()[-1] == "ep5-ba30" and len(store.names()) <= 3
    assert Path("checkpoints/first").is_symlink() and Path("checkpoints/last").resolve().name == "ep5-ba30"
    assert make("other", resume="checkpoints/last", duration="6ep").state.timestamp.batch == 30


def test_the_end_is_written_with_what_was_evaluated_then() -> None:
    """Also where the last batch was saved before, which it replaces. Again only where there is news."""
    trainer = make(policy={"every": "2ba", "keep": None}, duration="1ep")
    result = trainer.fit()
    store = hocket.Checkpoints("checkpoints").store
    assert list(result.checkpoints) == ["ep0-ba2", "ep0-ba4", "ep1-ba6"]
    assert store.about("ep1-ba6")["metrics"] == {"eval/loss": result.metrics["eval/loss"]}
    assert list(make("odd", policy={"every": "2ba"}, duration="1ep", eval_data=None).fit().checkpoints)[-1] == "ep0-ba6"


def test_one_trainer_after_the_other() -> None:
    """The end of each is written; a Trainer cannot go on with what was given to another since."""
    checkpoints = hocket.Checkpoints("checkpoints", every=None, overwrite=True)
    for seed in (1, 2):
        trainer = make(checkpoints=checkpoints, eval_data=None, duration="3ba", seed=seed)
        trainer.fit()
        assert same(read_weights("checkpoints/ep0-ba3"), trainer.model_state_dict())
    make(checkpoints=checkpoints)
    with pytest.raises(ValueError, match=r"each Trainer its own: checkpoints=hocket\.Checkpoints\('checkpoints'\)"):
        trainer.fit("1ba")


class Zeros(hocket.Callback):
    """Sets the final weights, as averages over a run are."""

    def fit_end(self, state: hocket.State) -> None:
        for parameter in state.model.parameters():
            parameter.data.zero_()


@pytest.mark.parametrize("every", ["1ep", "2ba", "5ba"])
def test_weights_to_publish_are_those_at_the_end(every: str) -> None:
    trainer = make(policy={"every": every, "weights_only": True}, duration="1ep", callbacks=[Zeros()])
    trainer.fit()
    store = hocket.Checkpoints("checkpoints").store
    assert same(store.read(store.latest() or "none")["model"], trainer.model_state_dict())


@pytest.mark.filterwarnings("ignore:Training is over")
def test_what_is_over_stays_among_the_best_when_it_goes_on() -> None:
    policy = {"every": None, "keep": 1, "best": ("eval/score", "max", 1)}

    def run(duration: str, *scores: float) -> None:
        make(resume="auto", metrics={"score": Scripted(*scores)}, duration=duration, policy=policy).fit()

    with pytest.raises(InterruptedError):
        make(metrics={"score": Scripted(9.0)}, duration="1ep", policy=policy, callbacks=[Killed()]).fit()
    run("1ep")
    run("2ep", 1.0)
    assert hocket.Checkpoints("checkpoints").store.names() == ["ep1-ba6", "ep2-ba12"]


class Killed(hocket.Callback):
    """Between the last checkpoint of an epoch and the end of the fit."""

    def fit_end(self, state: hocket.State) -> None:
        raise InterruptedError


class Scripted:
    """A metric that is, at one evaluation after the other, what the script says."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> float:
        return self.values.pop(0)

    def reset(self) -> None: ...


@pytest.mark.parametrize("mode, kept", [("max", {9.0, 7.0, 2.0}), ("min", {1.0, 2.0})])
def test_the_best_are_kept(mode: Any, kept: set[float]) -> None:
    """Of six evaluations, two batches apart, the two best; and the latest, which is among the best only in one case."""
    trainer = make(
        metrics={"score": Scripted(3.0, 1.0, 9.0, float("nan"), 7.0, 2.0)}, eval_every="2ba", duration="12ba",
        policy={"every": None, "keep": 1, "best": ("eval/score", mode, 2)},
    )  # fmt: skip
    names = trainer.fit().checkpoints
    store = hocket.Checkpoints("checkpoints").store
    assert {store.about(name)["metrics"]["eval/score"] for name in names} == kept and len(names) == len(kept)


@pytest.mark.parametrize("every", ["1ep", "5ba"])
def test_only_what_was_evaluated_there_is_among_the_best(every: str) -> None:
    """Whether or not it was due at the evaluation, and whatever is written between two evaluations."""
    trainer = make(
        metrics={"score": Scripted(0.5, 0.9, 0.8, 0.7, 0.85, 0.6)}, duration="6ep",
        policy={"every": every, "keep": 1, "best": ("eval/score", "max", 3)},
    )  # fmt: skip
    assert list(trainer.fit().checkpoints) == ["ep2-ba12", "ep3-ba18", "ep5-ba30", "ep6-ba36"]


def test_the_best_by_one_of_two_sets() -> None:
    """An evaluation of the other one brings nothing new, and is not missing the metric."""
    data = make().state.train_data
    sets = {"a": hocket.EvalSet(data, every="2ba"), "b": hocket.EvalSet(data, {"score": Scripted(9.0, 1.0)})}
    trainer = make(eval_data=sets, duration="2ep", policy={"every": None, "keep": 1, "best": ("b/score", "max", 2)})
    assert list(trainer.fit().checkpoints) == ["ep1-ba6", "ep2-ba12"]


def test_the_best_while_a_thread_removes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not look at what is being removed, and reads each manifest a few times per save."""
    read: list[Path] = []

    def load(folder: Path) -> manifest.Manifest:
        read.append(folder)
        time.sleep(0.001)
        return original(folder)

    original = manifest.load
    monkeypatch.setattr(manifest, "load", load)
    policy = {"every": "2ba", "keep": 1, "best": ("eval/loss", "max", 6), "asynchronous": True}
    result = make(eval_every="1ba", duration="30ba", policy=policy).fit()
    assert 6 <= len(result.checkpoints) <= 7 and len(read) < 30 * 5 * 8


@pytest.mark.parametrize("duration", ["1ep", "3ba"])
def test_a_metric_that_is_not_there_is_an_error(duration: str) -> None:
    with pytest.raises(
        ValueError, match=r"best by 'eval/score', but there is no such metric\. There are: eval/accuracy, eval/"
    ):
        make(duration=duration, metrics="accuracy", policy={"every": "1ep", "best": ("eval/score", "max", 1)}).fit()


# --- disks that fail


class Breaks(hocket.Callback):
    def batch_start(self, state: hocket.State) -> None:
        if Path("breaks").is_dir():
            shutil.rmtree("breaks")
            Path("breaks").write_text("")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_written(asynchronous: bool, uninterrupted: dict[str, Tensor]) -> None:
    """Training stops, or goes on and says so, as asked."""
    with pytest.raises(CheckpointError, match=r"could not be written to breaks"):
        make("breaks", policy={"asynchronous": asynchronous}, callbacks=[Breaks()]).fit()
    Path("file").write_text("")
    trainer = make("file/checkpoints", policy={"asynchronous": asynchronous})
    with pytest.raises(CheckpointError, match=r"No checkpoint can be written to .*: Not a directory\. .*give another"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0
    trainer = make("file/checkpoints", policy={"asynchronous": asynchronous, "every": "1ep", "on_error": "warn"})
    with pytest.warns(RuntimeWarning, match="Training continues without it"):
        trainer.fit()
    assert same(trained(trainer), uninterrupted)


# --- going on


def test_nothing_to_resume_is_a_fresh_start(uninterrupted: dict[str, Tensor]) -> None:
    trainer = make(resume="auto")
    trainer.fit()
    assert same(trained(trainer), uninterrupted)
    with pytest.raises(ValueError, match="pass checkpoints="):
        make(checkpoints=None, resume="auto")
    with pytest.raises(CheckpointError, match="no checkpoint 'none'"):
        make(resume="checkpoints/none")


def test_from_any_of_them(uninterrupted: dict[str, Tensor]) -> None:
    make(policy={"every": "4ba", "keep": None}).fit()
    for name in hocket.Checkpoints("checkpoints").store.names():
        trainer = make(f"from-{name}", resume=f"checkpoints/{name}", policy={"every": None})
        if "ba18" not in name:
            trainer.fit()
        assert same(trained(trainer), uninterrupted), name


def test_an_asynchronous_write_is_of_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it begins when training has gone on."""
    later, save = threading.Event(), Store.save

    def late(*arguments: Any) -> None:
        assert later.wait(60)
        save(*arguments)

    class GoesOn(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 3:
                later.set()

    make("now", policy={"every": "2ba"}, duration="3ba").fit()
    monkeypatch.setattr(Store, "save", late)
    make("later", policy={"every": "2ba", "asynchronous": True}, duration="3ba", callbacks=[GoesOn()]).fit()
    expected, found = (Store(folder).read("ep0-ba2", only=["model"])["model"] for folder in ("now", "later"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items()) and len(expected) == len(found)


def test_weights_only() -> None:
    trainer = make(policy={"every": None, "weights_only": True})
    (name,) = trainer.fit().checkpoints
    saved = trainer.settings.checkpoints.store.read(name)["model"]  # type: ignore[union-attr]
    assert same(saved, trainer.model_state_dict())
    with pytest.raises(ValueError, match="holds weights only"):
        make(resume="auto")


@pytest.mark.parametrize("weights_only", [False, True])
def test_algorithms_are_recorded_with_what_brings_them(weights_only: bool) -> None:
    images = [(torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0]))]

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(4, 3))

    given = [{"blurpool": {"min_channels": 1}}, {"ema": {"half_life": "3ba"}}]
    trainer = make(
        model=model(), train_data=images, eval_data=None, algorithms=given, policy={"weights_only": weights_only}
    )
    (*_, name) = trainer.fit().checkpoints
    blurpool, ema = (
        {"hocket-algorithms-vision/blurpool": given[0]["blurpool"]},
        {"hocket-algorithms-general/ema": given[1]["ema"]},
    )
    assert recorded_algorithms(f"checkpoints/{name}") == [blurpool]
    assert recorded_algorithms(f"checkpoints/{name}", every=True) == [blurpool, ema]
    make("other", model=model(), train_data=images, eval_data=None, algorithms=[blurpool, ema]).fit("1ba")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), pytest.param((1, 2), marks=pytest.mark.long)])
def test_ranks_that_stop_and_others_that_go_on(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """In the middle of an epoch; with as many ranks to the bit, with another number to rounding."""

    def run(world_size: int, folder: Path, duration: str, resume: str | None) -> dict[str, Tensor]:
        def rank_main(rank: int) -> dict[str, Tensor]:
            trainer = make(
                folder, resume, duration=duration, strategy="ddp" if world_size > 1 else "single",
                model=Plain(), schedule=None, global_batch=8,
            )  # fmt: skip
            trainer.fit()
            return trained(trainer)

        return run_ranks(rank_main, world_size)[0]

    expected = run(ranks[0], tmp_path / "whole", "14ba", None)
    run(ranks[0], tmp_path / "parts", "9ba", None)
    found = run(ranks[1], tmp_path / "parts", "14ba", "auto")
    if ranks[0] == ranks[1]:
        assert same(found, expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


class Plain(Network):
    """Without random numbers, which ranks draw for their own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)


# --- by name


def test_best_and_latest_are_names_wherever_a_path_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Compared with the path that the result names, and with each checkpoint's own value."""
    policy: dict[str, Any] = {"every": "1ep", "keep": None, "best": ("eval/loss", "min", 1)}
    trainer = make(policy=policy, duration="1ep", algorithms=[])
    result = trainer.fit()
    with torch.no_grad():
        trainer.state.model.head.weight.mul_(-30)  # worse from here
    result = trainer.fit("1ep")
    assert result.best is not None and result.best.path.endswith("ep1-ba6")
    for name, is_now in (("best", "ep1-ba6"), ("latest", "ep2-ba12")):
        path, expected = f"checkpoints/{name}", read_weights(f"checkpoints/{is_now}")
        assert same(read_weights(path), expected)
        other = make("other", algorithms=[])
        other.load_weights(path)
        assert same(dict(other.model_state_dict()), expected)
        assert make("other", resume=path, algorithms=[]).state.timestamp.batch == int(is_now.partition("ba")[2])
        for value in (trainer.evaluate(path), trainer.evaluate(checkpoint=Path(path))):
            assert value == trainer.evaluate(checkpoint=f"checkpoints/{is_now}")
        data = [(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))]
        predicted = (trainer.predict(data, checkpoint=where)[0] for where in (path, f"checkpoints/{is_now}"))
        assert torch.equal(*predicted)
        for arguments in (["inspect", path], ["verify", path], ["export", path, f"{name}.safetensors"]):
            assert main(["checkpoint", *arguments]) == 0, arguments
        assert same(read_weights(f"{name}.safetensors"), expected)
        assert main(["checkpoint", "diff", path, f"checkpoints/{is_now}"]) == 0
    shutil.copytree("checkpoints/ep2-ba12", "checkpoints/best")
    assert same(read_weights("checkpoints/best"), read_weights("checkpoints/latest"))  # what is there comes first
    capsys.readouterr()


def test_there_is_no_best_where_none_was_ranked() -> None:
    trainer = make(duration="2ba")
    trainer.fit()
    for action in (trainer.load_weights, trainer.evaluate, read_weights, lambda path: make("other", resume=path)):
        with pytest.raises(CheckpointError, match=r"no 'best' checkpoint: .*best=.*It has ep0-ba1, ep0-ba2.*'latest'"):
            action("checkpoints/best")


@pytest.mark.parametrize("given", ["1ep", "500ba", "30min", "0.1dur"])
def test_an_interval_is_no_folder(given: str) -> None:
    for make_it in (lambda: make_trainer(checkpoints=given), lambda: hocket.Checkpoints(given)):
        with pytest.raises(ValueError, match=rf"'{given}' is an interval.*every='{given}'\).*'\./{given}'"):
            make_it()
    assert not Path(given).exists()
    Path(given).mkdir()
    assert hocket.Checkpoints(given).store.names() == hocket.Checkpoints(f"./{given}").store.names() == []
