"""A data module: the same training as with its loaders, methods called once when needed, and the same after a resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import hocket
from hocket.data import DataModule
from hocket_testkit import RankError, run_ranks


def squares(count: int = 48) -> TensorDataset:
    inputs = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3).sin()
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


class Squares(DataModule):
    """A split that is drawn in setup; it records the calls."""

    def __init__(self, shuffle: bool = True) -> None:
        self.shuffle, self.calls = shuffle, list[str]()

    def prepare(self) -> None:
        self.calls.append("prepare")

    def setup(self) -> None:
        self.calls.append("setup")
        self.first, self.rest = random_split(squares(), [40, 8])

    def train(self) -> DataLoader[Any]:
        self.calls.append("train")
        return DataLoader(self.first, 8, shuffle=self.shuffle)

    def eval(self) -> Any:
        self.calls.append("eval")
        return {"test": DataLoader(self.rest, 4)}

    def predict(self) -> Any:
        self.calls.append("predict")
        return DataLoader(self.rest, 4)


def make(**arguments: Any) -> hocket.Trainer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    given = {"loss": "mse_loss", "optimizer": "adamw(lr=0.01)", "duration": "3ep", "device": "cpu", "seed": 5}
    return hocket.Trainer(model, **given | arguments)


def same(one: hocket.Trainer, other: hocket.Trainer) -> bool:
    mine, theirs = one.model_state_dict(), other.model_state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine) and mine.keys() == theirs.keys()


# --- calls


@pytest.mark.parametrize("seed", [5, None])
def test_it_trains_as_its_loaders_do(seed: int | None) -> None:
    """What its methods draw moves neither the training's random numbers nor the process's."""
    module = Squares()
    trainer = make(data=module, seed=seed)
    result = trainer.fit()
    drawn = torch.rand(2)
    plain = make(
        train_data=DataLoader(module.first, 8, shuffle=True), eval_data={"test": DataLoader(module.rest, 4)}, seed=seed
    )
    expected = plain.fit()
    assert same(trainer, plain)
    assert result.metrics == expected.metrics
    assert torch.equal(torch.rand(2), drawn)


def test_methods_are_called_once_and_when_needed() -> None:
    module = Squares()
    trainer = make(data=module)
    print(trainer.plan(), trainer)
    assert module.calls == []
    trainer.predict()
    assert module.calls == ["prepare", "setup", "predict"]
    trainer.evaluate()
    trainer.evaluate()
    assert module.calls[3:] == ["eval"]
    trainer.fit("1ep")
    trainer.fit("1ep")
    trainer.evaluate()
    trainer.state_dict()
    assert module.calls[4:] == ["train"]


def test_other_data_comes_before_that_of_the_module() -> None:
    module = Squares()
    trainer = make(data=module)
    batches = list(DataLoader(squares(8), 4))
    trainer.fit(batches, batches, duration="1ep")
    trainer.evaluate({"other": batches})
    assert len(trainer.predict(batches)) == 2
    assert module.calls == []
    assert trainer.state.timestamp.batch == 2


def test_the_split_depends_on_the_seed_only() -> None:
    """Whichever method is needed first, and whatever the process has drawn."""
    splits = []
    for seed, before in ((5, "evaluate"), (5, "fit"), (6, "fit")):
        module = Squares()
        trainer = make(data=module, seed=seed)
        torch.rand(len(splits))
        getattr(trainer, before)()
        splits.append(list(module.first.indices))
    assert splits[0] == splits[1] != splits[2]


def test_one_module_for_two_trainers_is_as_two() -> None:
    """At the same time: each Trainer sets it up, and has data of its own."""
    module = Squares()
    trainers = [make(data=module), make(data=module)]
    for _ in range(2):
        for trainer in trainers:
            trainer.fit("7ba")
    assert same(*trainers)
    assert module.calls == ["prepare", "setup", "train", "eval"] * 2


def test_without_evaluation_data() -> None:
    class Only(DataModule):
        def train(self) -> Any:
            return DataLoader(squares(), 8)

    trainer = make(data=Only())
    assert trainer.fit().timestamp.batch == 18
    with pytest.raises(ValueError, match=r"nothing to evaluate on.*eval\(\) of the data module"):
        trainer.evaluate()
    with pytest.raises(ValueError, match=r"nothing to predict on.*predict\(\) of the data module"):
        trainer.predict()


def test_evaluation_alone_needs_no_training_data() -> None:
    class Only(DataModule):
        def eval(self) -> Any:
            return hocket.EvalSet(DataLoader(squares(), 8), every="2ba")

    trainer = make(data=Only())
    plain = make().evaluate(DataLoader(squares(), 8))
    assert trainer.evaluate() == plain
    trainer.state_dict()
    with pytest.raises(ValueError, match=r"nothing to train on.*train\(\) of the data module"):
        trainer.fit()


@pytest.mark.parametrize("arguments", [{"overfit": 2}, {"fast_dev_run": 2}, {"global_batch": 4}, {"accumulate": "2ba"}])
def test_settings_of_data_apply(arguments: dict[str, Any]) -> None:
    module = Squares(shuffle=True)
    trainer = make(data=module, **arguments)
    trainer.fit()
    plain = make(train_data=DataLoader(module.first, 8, shuffle=True), eval_data={"test": DataLoader(module.rest, 4)},
                 **arguments)  # fmt: skip
    plain.fit()
    assert same(trainer, plain)
    assert trainer.state.timestamp.batch == plain.state.timestamp.batch


# --- resume


class Stop(hocket.Callback):
    """Raises after some batches, as if the process died."""

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == 7:
            raise KeyError("killed")


class Growing(Squares):
    """Has state: how often it was loaded into, and samples to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 8

    def setup(self) -> None:
        super().setup()
        self.first.indices = self.first.indices[: -self.left_out]

    def extra_state(self) -> Any:
        return {"left_out": self.left_out, "vector": torch.arange(3)}

    def load_extra_state(self, state: Any) -> None:
        assert self.calls == ["prepare", "setup"]
        assert torch.equal(state["vector"], torch.arange(3))
        self.calls.append(f"load {state['left_out']}")


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("kind", [Squares, Growing])
def test_a_resumed_run_is_bitwise_that_which_was_not_killed(
    kind: type[Squares], seed: int | None, tmp_path: Path
) -> None:
    def run(folder: str, callbacks: list[Any]) -> tuple[hocket.Trainer, Squares]:
        module = kind()
        checkpoints = hocket.Checkpoints(tmp_path / folder, every="2ba")
        trainer = make(
            data=module,
            seed=seed,
            callbacks=callbacks,
            checkpoints=checkpoints,
            resume="auto",
            folder=tmp_path / "runs",
        )
        return trainer, module

    whole, _ = run("whole", [])
    expected = whole.fit()
    killed, first = run("killed", [Stop()])
    with pytest.raises(KeyError, match="killed"):
        killed.fit()
    torch.manual_seed(1000)  # another process
    resumed, second = run("killed", [])
    assert resumed.state.timestamp.batch == 6
    assert second.calls == []
    result = resumed.fit()
    assert second.calls == ["prepare", "setup", *(["load 8"] if kind is Growing else []), "train", "eval"]
    assert second.first.indices == first.first.indices
    assert same(whole, resumed)
    assert result.metrics == expected.metrics


def test_state_is_loaded_into_a_module_that_is_set_up(tmp_path: Path) -> None:
    class Counts(Squares):
        stage = 0

        def extra_state(self) -> Any:
            return self.stage

        def load_extra_state(self, state: Any) -> None:
            self.stage = state

    module = Counts()
    trainer = make(data=module)
    trainer.fit("1ep")
    module.stage = 2
    saved = trainer.state_dict()
    module.stage = 3
    trainer.load_state_dict(saved)
    assert module.stage == 2
    with pytest.raises(
        ValueError, match=r"has the state of a data module, and this Trainer has none. Give the same one"
    ):
        make(train_data=DataLoader(squares(40), 8)).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"but Squares defines no load_extra_state\(state\)"):
        make(data=Squares()).load_state_dict(saved)


def test_a_state_that_was_loaded_and_not_continued_is_kept() -> None:
    one = make(data=Squares())
    one.fit("7ba")
    other = make(data=Squares())
    other.load_state_dict(one.state_dict())
    third = make(data=Squares())
    third.load_state_dict(other.state_dict())  # without a fit in between
    for each in (one, third):
        each.fit()
    assert same(one, third)


# --- ranks


class Files(Squares):
    """Prepares files in a folder, and counts how often."""

    def __init__(self, folder: Path, rank: int, fails: str = "") -> None:
        super().__init__()
        self.folder, self.rank, self.fails = folder, rank, fails

    def _enter(self, name: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(f"{self.rank}")
        if self.fails == f"{name} of {self.rank}":
            raise OSError(f"no space left in {name}")

    def prepare(self) -> None:
        self._enter("prepare")

    def setup(self) -> None:
        assert (self.folder / "prepare").exists()
        self._enter("setup")
        super().setup()

    def train(self) -> Any:
        self._enter("train")
        return super().train()


def test_ranks_prepare_once_for_each_machine_and_set_up_each(tmp_path: Path) -> None:
    pytest.importorskip("hocket_strategies")

    def main(rank: int) -> Any:
        module = Files(tmp_path, rank)
        trainer = make(data=module, strategy="ddp", folder=tmp_path)
        torch.rand(rank)  # ranks draw differently, and split alike
        result = trainer.fit()
        plain = make(
            train_data=DataLoader(module.first, 8, shuffle=True), eval_data={"test": DataLoader(module.rest, 4)},
            strategy="ddp", folder=tmp_path,
        )  # fmt: skip
        return list(module.first.indices), result.metrics == plain.fit().metrics and same(trainer, plain)

    (first, fits), (second, too) = run_ranks(main, 2)
    assert first == second
    assert fits and too
    assert (tmp_path / "prepare").read_text() == "0"
    assert sorted((tmp_path / "setup").read_text()) == ["0", "1"]


@pytest.mark.parametrize("fails", ["prepare of 0", "setup of 1", "train of 0"])
def test_a_failure_on_one_rank_ends_all_with_the_error(fails: str, tmp_path: Path) -> None:
    pytest.importorskip("hocket_strategies")

    def main(rank: int) -> str:
        try:
            make(data=Files(tmp_path, rank, fails), strategy="ddp", folder=tmp_path).fit()
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    name, _, failed = fails.rpartition(" of ")
    expected = [f"OSError: no space left in {name}", f"WrongState: Rank {failed}: no space left in {name}"]
    assert run_ranks(main, 2) == expected[:: 1 if failed == "0" else -1]


def test_one_rank_without_the_module_is_said(tmp_path: Path) -> None:
    pytest.importorskip("hocket_strategies")

    def main(rank: int) -> None:
        data = {"data": Squares()} if rank else {"train_data": DataLoader(squares(40), 8)}
        make(strategy="ddp", folder=tmp_path, **data)

    with pytest.raises(RankError, match="Rank 1 was given different arguments from rank 0"):
        run_ranks(main, 2)


# --- messages


class Misnamed(DataModule):
    def prepare_data(self) -> None: ...
    def train_dataloader(self) -> Any: ...
    def val_dataloader(self) -> Any: ...


class Foreign:
    def prepare_data(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def train_dataloader(self) -> Any: ...
    def val_dataloader(self) -> Any: ...


class Staged(DataModule):
    def setup(self, stage: str) -> None: ...  # type: ignore[override]


class Shadowed(DataModule):
    def __init__(self) -> None:
        self.train = squares()  # type: ignore[assignment, method-assign]


def returning(value: Any) -> DataModule:
    return type("Mine", (DataModule,), {"train": lambda self: value, "eval": lambda self: value})()


class Items(Dataset[Any]):
    def __getitem__(self, index: int) -> Any: ...


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: make(data=DataLoader(squares(), 8)), ["data=DataLoader(…) is not a hocket.data.DataModule", "train_data=…"]),
        (lambda: make(data="digits"), ["data='digits'", "plugins.get('datasets', 'digits')('train')"]),
        (lambda: make(data=Squares), ["data=Squares is a class", "data=Squares(…)"]),
        (lambda: make(data=3), ["data=3 is not"]),
        (lambda: make(data=Foreign()), ["LightningDataModule", "instead of prepare_data: prepare(self)", "train(self)"]),
        (lambda: make(data=Staged()), ["setup of data=Staged(…)", "'stage'", "Define def setup(self)."]),
        (lambda: make(data=Shadowed()), ["train of data=Shadowed(…) is TensorDataset(…)", "Define def train(self)."]),
        (lambda: hocket.Trainer(nn.Linear(3, 1), Squares()), ["train_data is a data module (Squares)", "data=module)"]),
        (lambda: make(train_data=Squares), ["train_data is a data module", "data=module"]),
        (lambda: make(eval_data=Squares()), ["eval_data is a data module", "data=module"]),
        (lambda: make().fit(Squares()), ["train_data is a data module", "data=module"]),
        (lambda: make().evaluate(Squares()), ["eval_data is a data module", "data=module"]),
        (lambda: make().predict(Squares()), ["predict(data) is a data module", "data=module"]),
        (lambda: make(data=Squares(), train_data=[]), ["train_data= and data=Squares(…) are both given", "omit train_data="]),
        (lambda: make(data=Squares(), eval_data=[]), ["eval_data= and data=Squares(…)", "omit eval_data="]),
        (lambda: make(data=returning(squares())).fit(), ["train() of data=Mine(…) is a data set", "return torch.utils.data"]),
        (lambda: make(data=returning(Items())).evaluate(), ["eval() of data=Mine(…) is a data set", "return torch"]),
        (lambda: make(data=returning(squares().tensors)).fit(), ["train() of data=Mine(…) is a tuple of 2", "return Data"]),
        (lambda: make(data=returning({"a": DataLoader(squares())})).fit(), ["dict of loaders", "return hocket.data.Sev"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_paragraph(act: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        act()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


def test_methods_of_lightning_in_a_data_module_are_said() -> None:
    with pytest.warns(
        UserWarning, match="Misnamed defines prepare_data, train_dataloader, val_dataloader, which"
    ) as caught:
        make(data=Misnamed())
    assert len(caught) == 1
    assert "instead of val_dataloader: eval(self)" in str(caught[0].message)
    assert re.search(r"test_data_module\.py", caught[0].filename)
