"""Components of checkpoints: one that a third party wrote, and what becomes of a checkpoint that does not fit or fails."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.checkpoints import Check, Component, ContentError, PerRank, Saved
from hocket_testkit.ranks import run_ranks

# --- as a third party would write it: nothing but public names


class HardSamples(hocket.Callback):
    """Keeps the samples of highest loss that this rank has seen.

    Args:
        size: how many all ranks keep together.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self.samples: list[tuple[float, torch.Tensor]] = []

    def batch_end(self, state: hocket.State) -> None:
        assert state.loss is not None
        inputs, _ = state.batch
        self.samples += [(float(each.abs().sum()) + float(state.loss), each.clone()) for each in inputs]
        self.keep(state.strategy.world_size)

    def keep(self, ranks: int) -> None:
        self.samples = sorted(self.samples, key=lambda item: -item[0])[: self.size // ranks]

    def checkpoint_components(self, state: hocket.State) -> list[Component]:
        return [SavedSamples(self, state)]


class SavedSamples(Component):
    path, scope = "acme-hard-samples", "rank"

    def __init__(self, owner: HardSamples, state: hocket.State) -> None:
        self.owner, self.ranks = owner, state.strategy.world_size

    def state_dict(self, gather: bool) -> Any:
        return {"size": self.owner.size, "samples": self.owner.samples}

    def check(self, saved: PerRank, checkpoint: Saved) -> Check:
        size = saved.own["size"]
        if size == self.owner.size:
            return Check(saved)
        return Check(
            problems=[f"{size} hard samples were kept, and {self.owner.size} are now. Pass HardSamples({size})."]
        )

    def absent(self, checkpoint: Saved) -> Check:
        return Check()

    def load_state_dict(self, saved: PerRank | None) -> None:
        if saved is not None:
            self.owner.samples = [sample for each in saved.dealt for sample in each["samples"]]
            self.owner.keep(self.ranks)


# --- it saves, is killed and resumes


class Killed(BaseException):
    pass


class Kills(hocket.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            raise Killed


def make(folder: Path | None = None, *callbacks: Any, **options: Any) -> hocket.Trainer:
    torch.manual_seed(3)
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {
        "model": nn.Linear(3, 2), "loss": nn.functional.cross_entropy, "duration": "2ep", "seed": 1, "device": "cpu",
        "train_data": DataLoader(TensorDataset(inputs, torch.arange(24) % 2), 4, shuffle=True), "global_batch": 4,
        "optimizer": "sgd(lr=0.1, momentum=0.9)", "callbacks": list(callbacks),
    }  # fmt: skip
    if folder is not None:
        arguments |= {"folder": folder / "runs", "checkpoints": hocket.Checkpoints(folder / "kept", every="2ba")}
    return hocket.Trainer(**arguments, **options)


def kept(samples: HardSamples) -> list[tuple[float, list[float]]]:
    return [(loss, inputs.tolist()) for loss, inputs in samples.samples]


def train(folder: Path, kill: int | None, resume: str | None, world_size: int) -> list[Any]:
    """What each rank has when its Trainer is made, and in the end."""

    def run(rank: int) -> Any:
        samples = HardSamples()
        callbacks = [samples] if kill is None else [samples, Kills(kill)]
        trainer = make(folder, *callbacks, strategy="ddp" if world_size > 1 else "single", resume=resume)
        begun = kept(samples)
        with contextlib.suppress(Killed):
            trainer.fit()
        return begun, kept(samples), {name: value.tolist() for name, value in trainer.model_state_dict().items()}

    return run_ranks(run, world_size, timeout=120)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_resumes_bitwise_on_as_many_ranks(ranks: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", None, None, ranks)
    killed = train(tmp_path / "killed", 8, None, ranks)
    resumed = train(tmp_path / "killed", None, "auto", ranks)
    assert [each[1:] for each in resumed] == [each[1:] for each in whole]
    assert [each[0] for each in resumed] == [each[1] for each in killed]  # the batch that was killed added nothing
    assert all(each[0] for each in resumed)


@pytest.mark.long
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_it_resumes_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    killed = train(tmp_path, 8, None, before)
    resumed = train(tmp_path, None, "auto", after)
    saved = sorted((sample for _, samples, _ in killed for sample in samples), key=lambda item: -item[0])
    begun = [sample for samples, *_ in resumed for sample in samples]
    assert sorted(begun, key=lambda item: -item[0]) == (saved if after < before else saved[: len(begun)])
    assert len(begun) == (8 if after < before else 4)  # the second of two new ranks begins with none


# --- what does not fit


def saved_by(*callbacks: Any) -> Any:
    trainer = make(None, *callbacks)
    trainer.fit("2ba")
    return copy.deepcopy(trainer.state_dict())


def test_its_check_is_one_of_all_checks_before_anything_is_loaded() -> None:
    tree = saved_by(HardSamples(4))
    samples = HardSamples(6)
    trainer = make(None, samples, schedule="cosine")
    before = copy.deepcopy(trainer.model_state_dict())
    with pytest.raises(ContentError, match=r"0 schedules .*Pass HardSamples\(4\)\. To omit parts"):
        trainer.load_state_dict(tree)
    assert samples.samples == [] and trainer.state.timestamp.batch == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.model_state_dict().items())
    trainer.fit("1ba")  # nothing was loaded, so it can train


def test_a_component_that_nobody_loads_is_refused_or_ignored() -> None:
    tree = saved_by(HardSamples())
    with pytest.raises(
        ContentError,
        match=r"'components.acme-hard-samples', which nothing here loads: attach the plug-in.*Pass an instance .*HardSamples",
    ):
        make().load_state_dict(tree)
    trainer = make()
    trainer.load_state_dict(tree, ignore=["ranks.*.components.acme-hard-samples"])
    with pytest.warns(UserWarning, match="which nothing here loads"):
        make().load_state_dict(tree, strict=False)


def test_a_checkpoint_from_before_the_component_leaves_it_fresh() -> None:
    samples = HardSamples()
    trainer = make(None, samples)
    trainer.load_state_dict(saved_by())
    assert samples.samples == [] and trainer.state.timestamp.batch == 2


def test_a_part_of_a_newer_version_is_refused_by_name() -> None:
    tree = saved_by() | {"tempo": 1}
    with pytest.raises(
        ContentError, match=r"'tempo', which nothing here loads: upgrade hocket, or .*ignore=\['tempo'\]"
    ):
        make().load_state_dict(tree)
    make().load_state_dict(tree, ignore=["tempo"])


def test_a_part_that_is_missing_is_named() -> None:
    tree = saved_by()
    del tree["guard"]
    with pytest.raises(ContentError, match="The checkpoint has no 'guard'"):
        make().load_state_dict(tree)


class Offers(hocket.Callback):
    def __init__(self, *components: Any) -> None:
        self.components = components

    def checkpoint_components(self, state: hocket.State) -> Any:
        return self.components


class Opaque(Component):
    path = "opaque"

    def state_dict(self, gather: bool) -> Any:
        return {"inside": [object()]}


def test_what_is_offered_has_to_be_a_component_with_a_path_of_its_own() -> None:
    with pytest.raises(hocket.plugins.PluginError, match="of callback 'offers' returned 'x'"):
        make(None, Offers("x")).state_dict()
    with pytest.raises(hocket.plugins.PluginError, match="have one path, 'opaque'"):
        make(None, Offers(Opaque()), Offers(Opaque())).state_dict()
    with pytest.raises(TypeError, match="'opaque' of callback 'offers'/inside/0 holds a object"):
        make(None, Offers(Opaque())).state_dict()


# --- a failure while loading


class Fails(hocket.Callback):
    """Cannot load the state of another than itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"id": id(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["id"] != id(self):
            raise KeyError("b")


def test_a_trainer_that_was_half_loaded_does_not_train() -> None:
    tree = saved_by(Fails())
    trainer = make(None, Fails())
    with pytest.raises(KeyError, match="b"):
        trainer.load_state_dict(tree)
    with pytest.raises(RuntimeError, match=r"raised KeyError: 'b' after parts of it were loaded.*Make a new Trainer"):
        trainer.fit()
    trainer.load_state_dict(tree, ignore=["plugins.callbacks.fails"])
    trainer.fit()
    assert trainer.state.timestamp.batch == 12


def test_a_rank_that_fails_marks_all_of_them() -> None:
    tree = saved_by(Fails())

    class FailsOnOne(Fails):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if torch.distributed.get_rank() == 1:
                raise KeyError("b")

    def run(rank: int) -> None:
        fails = type("Fails", (FailsOnOne,), {"__module__": Fails.__module__})()
        trainer = make(None, fails, strategy="ddp")
        with pytest.raises(KeyError if rank else RuntimeError, match="'b'"):
            trainer.load_state_dict(tree)
        with pytest.raises(RuntimeError, match="Make a new Trainer"):
            trainer.fit()

    run_ranks(run, 2, timeout=120)


class Carries(hocket.Task):
    """A Task that offers a component."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.carried = nn.Linear(3, 2), 0.0

    def forward(self, batch: Any) -> Any:
        self.carried += 1.0
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])

    def checkpoint_components(self, state: hocket.State) -> list[Component]:
        return [Carried(self)]


class Carried(Component):
    path = "carried"

    def __init__(self, task: Carries) -> None:
        self.task = task

    def state_dict(self, gather: bool) -> Any:
        return (self.task.carried, {1: "one"})  # any nesting

    def load_state_dict(self, saved: Any) -> None:
        self.task.carried, kept = saved
        assert kept == {1: "one"}


def test_a_task_offers_components_too() -> None:
    data = [(torch.ones(2, 3), torch.tensor([0, 1]))] * 3

    def trainer() -> hocket.Trainer:
        return hocket.Trainer(model=Carries(), train_data=data, optimizer="sgd(lr=0.1)", duration="2ep", device="cpu")

    first = trainer()
    first.fit("4ba")
    second = trainer()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state.task.carried == 4.0


# --- checkpoints of one's own


class InMemory(hocket.Callback):
    """Keeps the latest state of each run by name, and resumes from it: a store that a third party wrote."""

    kept: dict[str, Any] = {}

    def before_fit(self, state: hocket.State) -> None:
        if state.run.name == "refused":
            raise RuntimeError("not this one")

    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.content.worth_saving():
            self.kept[state.run.name] = copy.deepcopy(state.content.state_dict())

    def after_fit(self, state: hocket.State) -> None:
        self.kept["over"] = state.timestamp.batch

    def resume(self, state: hocket.State, where: str | Path) -> bool:
        state.content.load_state_dict(self.kept[str(where)], strict=True)
        return True


def test_a_plug_in_can_save_and_resume_runs() -> None:
    whole = make(None, InMemory(), run_name="whole")
    whole.fit()
    assert InMemory.kept["over"] == 12
    killed = make(None, InMemory(), Kills(7), run_name="killed")
    with pytest.raises(Killed):
        killed.fit()
    resumed = make(None, InMemory(), run_name="resumed", resume="killed")
    assert resumed.state.timestamp.batch == 7
    resumed.fit()
    expected = whole.model_state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model_state_dict().items())


def test_a_plug_in_can_refuse_a_fit_before_anything_is_logged() -> None:
    class Hears(hocket.Logger):
        heard: list[str] = []

        def log_hyperparameters(self, state: Any, parameters: Any) -> None:
            self.heard.append("hyperparameters")

    trainer = make(None, InMemory(), run_name="refused", loggers=[Hears()])
    with pytest.raises(RuntimeError, match="not this one"):
        trainer.fit()
    assert Hears.heard == [] and trainer.state.timestamp.batch == 0
