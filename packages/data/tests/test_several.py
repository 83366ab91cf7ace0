"""Several loaders as one: compared with loops written by hand, continued at every position, refused where unclear."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

import hocket
from hocket.data import Counts, Padding, Several, adapt, count, seeded, split
from hocket.data.adapters import prepared
from hocket.data.checks import MODES
from hocket.data.errors import DataError
from hocket_testkit import SourceConformance
from hocket_testkit.compare import difference


def few(**options: Any) -> DataLoader[Any]:
    """Two batches of four, and a generator of its own."""
    return DataLoader(
        TensorDataset(torch.arange(100, 108)), 4, shuffle=True, generator=torch.Generator().manual_seed(7), **options
    )


def many(**options: Any) -> DataLoader[Any]:
    """Five batches of four, drawn from the global generator."""
    return DataLoader(TensorDataset(torch.arange(20)), 4, shuffle=True, **options)


class Stream(IterableDataset[Any]):
    """Numbers with a position, and no length."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 12:
            self.at += 1
            yield self.at + torch.randint(100, ()) * 100
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Unpositioned:
    """Three batches, without state or length."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.randperm(4) for _ in range(3))


# --- the suite of all adapters


class TestCycle(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        return Several({"few": few(), "many": many()}, "cycle")


class TestShortest(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        return Several({"many": many(), "few": few()}, "shortest")


class TestInTurn(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        return Several({"few": few(), "list": [torch.arange(4)] * 3, "many": many()}, "in turn")


class TestWeighted(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        return Several({"few": few(), "many": many()}, "weighted", weights={"few": 3, "many": 1})


@pytest.mark.long
class TestWorkers(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        return Several({"few": few(num_workers=1, persistent_workers=True), "many": many(num_workers=2)}, "cycle")


class TestEveryKindOfData(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        return Several(
            {"stream": DataLoader(Stream(), 4), "none": Unpositioned(), "many": many(), "list": [torch.arange(4)] * 2},
            "cycle",
        )


@pytest.mark.long
class TestEveryKindOfDataInTurn(TestEveryKindOfData):
    """A position may be before the first batch of a loader."""

    def make(self) -> Any:
        several = super().make()
        torchdata = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        return Several(
            {**several.loaders, "torchdata": torchdata(Stream(), 4), "workers": few(num_workers=1)}, "in turn"
        )


class TestNested(SourceConformance):
    kind = "several"

    def make(self) -> Any:
        mixed = Several({"x": few(), "y": many()}, "weighted", weights={"x": 1, "y": 2}, batches=7, named=False)
        return Several({"mixed": mixed, "many": many()}, "in turn")


# --- loops written by hand


def seen(batches: Any, epochs: int = 3) -> list[Any]:
    torch.manual_seed(1)
    found: list[Any] = []
    for epoch in range(epochs):
        for batch in batches(epoch):
            found += [batch, torch.rand(1)]  # a model that draws, from what the loaders draw from too
    return found


def by_adapter(make: Any) -> list[Any]:
    source = adapt(make())
    return seen(source.begin)


def test_shortest_is_zip() -> None:
    a, b = many(), few()
    expected = seen(lambda _: ({"a": x, "b": y} for x, y in zip(a, b, strict=False)))
    assert difference(by_adapter(lambda: Several({"a": many(), "b": few()}, "shortest")), expected) is None
    assert len(expected) == 3 * 2 * 2


def test_cycle_is_the_longest_beside_one_that_begins_again() -> None:
    a, b = many(), few()

    def by_hand(_: int) -> Iterator[Any]:
        long, short = iter(a), iter(b)
        for x in long:
            y = next(short, None)
            if y is None:
                short = iter(b)
                y = next(short)
            yield {"a": x, "b": y}

    expected = seen(by_hand)
    assert difference(by_adapter(lambda: Several({"a": many(), "b": few()}, "cycle")), expected) is None
    assert len(expected) == 3 * 5 * 2


def test_in_turn_sees_every_batch_once() -> None:
    a, b = many(), few()

    def by_hand(_: int) -> Iterator[Any]:
        left = {"a": iter(a), "b": iter(b)}
        while left:
            for name in list(left):
                if (batch := next(left[name], None)) is None:
                    del left[name]
                else:
                    yield {name: batch}

    expected = seen(by_hand)
    assert difference(by_adapter(lambda: Several({"a": many(), "b": few()}, "in turn")), expected) is None
    assert len(expected) == 3 * 7 * 2


def test_weighted_draws_the_loaders_with_the_standard_library() -> None:
    a, b = many(), few()

    def by_hand(epoch: int) -> Iterator[Any]:
        left, choice = {"a": iter(a), "b": iter(b)}, random.Random(f"5/{epoch}")
        for name in choice.choices(["a", "b"], [1, 3], k=20):
            batch = next(left[name], None)
            if batch is None:
                left[name] = iter({"a": a, "b": b}[name])
                batch = next(left[name])
            yield {name: batch}

    make = lambda: Several({"a": many(), "b": few()}, "weighted", weights={"b": 3, "a": 1}, batches=20, seed=5)  # noqa: E731
    expected = seen(by_hand)
    assert difference(by_adapter(make), expected) is None
    assert {name for batch in expected[::2] for name in batch} == {"a", "b"}


def test_weights_are_probabilities_and_epochs_differ() -> None:
    data = Several({"a": [1], "b": [2], "c": [3]}, "weighted", weights={"a": 1, "b": 2, "c": 7}, batches=4000)
    first, second = list(data), [*itertools.islice(data, 100)]
    assert first[:100] != second
    for name, probability in {"a": 0.1, "b": 0.2, "c": 0.7}.items():
        assert abs(sum(name in batch for batch in first) / 4000 - probability) < 4 * (0.25 / 4000) ** 0.5
    data.set_epoch(0)
    assert [*itertools.islice(data, 100)] == first[:100]


@pytest.mark.parametrize("lengths", list(itertools.product((1, 2, 4), (1, 3, 4), (2, 4))))
def test_cycle_reads_no_batch_in_vain(lengths: tuple[int, ...]) -> None:
    """Whatever the order: a stream that counts its reads has yielded exactly the batches that were used."""

    class Counting:
        def __init__(self, length: int) -> None:
            self.length, self.reads = length, 0

        def __iter__(self) -> Iterator[int]:
            for number in range(self.length):
                self.reads += 1
                yield number

    loaders = {str(index): Counting(length) for index, length in enumerate(lengths)}
    batches = list(Several(loaders, "cycle"))
    assert len(batches) == max(lengths)
    assert [each.reads for each in loaders.values()] == [max(lengths)] * len(lengths)
    assert all(
        batch == {name: step % each.length for name, each in loaders.items()} for step, batch in enumerate(batches)
    )


@pytest.mark.parametrize(("mode", "length"), {"cycle": 5, "shortest": 2, "in turn": 7, "weighted": 7}.items())
def test_the_length_of_an_epoch(mode: Any, length: int) -> None:
    weights = {"a": 1, "b": 1} if mode == "weighted" else None
    data = Several({"a": many(), "b": few()}, mode, weights=weights)
    assert len(data) == length == len(list(data))
    if mode != "weighted":
        unknown = Several({"a": many(), "b": Unpositioned()}, mode)
        with pytest.raises(TypeError, match="unknown"):
            len(unknown)
        assert adapt(unknown).length() is None


# --- epochs of the loaders


class Epochs(Sampler[int]):
    """Notes the epochs that it is told."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("mode", "expected"),
    {"cycle": [[0, 1, 2, 3, 4, 5], [0, 1]], "shortest": [[0, 1], [0, 1]], "in turn": [[0, 1], [0, 1]]}.items(),
)
def test_set_epoch_counts_the_epochs_of_each_loader(mode: Any, expected: Any) -> None:
    a, b = Epochs(2), Epochs(6)
    data = {name: DataLoader(torch.arange(6), 1, sampler=each) for name, each in {"a": a, "b": b}.items()}  # type: ignore[arg-type]
    source = adapt(Several(data, mode))
    for epoch in range(2):
        batches = source.begin(epoch)
        next(batches), next(batches)
        position = source.position(2)
        list(batches)
    assert [a.epochs, b.epochs] == expected
    again = adapt(Several(data, mode))
    list(again.begin(1, position))
    list(again.begin(2))
    assert a.epochs[len(expected[0]) :] == [*expected[0][len(expected[0]) // 2 :], *(
        {"cycle": [6, 7, 8]}.get(mode, [2])
    )]  # fmt: skip


def test_new_data_in_a_later_epoch_counts_from_there() -> None:
    sampler = Epochs(2)
    source = adapt(Several({"a": DataLoader(torch.arange(2), 1, sampler=sampler)}, "in turn"))  # type: ignore[arg-type]
    list(source.begin(4))
    assert sampler.epochs == [4]


# --- a Trainer: labelled and unlabelled data, and many tasks


class Noisy(Dataset[Any]):
    """Random augmentation from the global generators."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.inputs, self.targets = torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + 0.1 * torch.randn(4), self.targets[index]


class SemiSupervised(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, batch: Any) -> Any:
        return {name: self.network(inputs) for name, (inputs, _) in batch.items()}

    def loss(self, outputs: Any, batch: Any) -> Any:
        labelled = nn.functional.cross_entropy(outputs["labelled"], batch["labelled"][1])
        return labelled + 0.3 * outputs["unlabelled"].softmax(1).square().mean()

    def count(self, batch: Any) -> int:
        return len(batch["labelled"][0])

    def split(self, batch: Any, size: int) -> Any:
        parts = -(-self.count(batch) // size)
        each = {name: split(own, -(-len(own[0]) // parts)) for name, own in batch.items()}
        return [dict(zip(each, part, strict=True)) for part in zip(*each.values(), strict=True)]


class ManyTasks(SemiSupervised):
    def loss(self, outputs: Any, batch: Any) -> Any:
        ((name, (_, targets)),) = batch.items()
        return (1 if name == "labelled" else 0.5) * nn.functional.cross_entropy(outputs[name], targets)

    def count(self, batch: Any) -> Any:
        return count(batch)

    def split(self, batch: Any, size: int) -> Any:
        return split(batch, size)


class Stop(Exception):
    pass


class Watch(hocket.Callback):
    def __init__(self, at: int | None = None) -> None:
        self.at, self.trainer, self.tree, self.losses = at, None, None, []

    def batch_end(self, state: hocket.State) -> None:
        self.losses.append(state.loss.item())

    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.at:
            self.tree = copy.deepcopy(self.trainer.state_dict())
            raise Stop


def train(mode: Any, at: int | None = None, tree: Any = None, **options: Any) -> Watch:
    weights = {"labelled": 2, "unlabelled": 1} if mode == "weighted" else None
    workers = options.pop("workers", 0)
    loaders = {
        "labelled": DataLoader(seeded(Noisy(8)) if workers else Noisy(8), 4, shuffle=True, num_workers=workers),
        "unlabelled": DataLoader(seeded(Noisy(60)) if workers else Noisy(60), 12, shuffle=True, num_workers=workers),
    }
    watch = Watch(at)
    trainer = hocket.Trainer(
        model=(SemiSupervised if mode in ("cycle", "shortest") else ManyTasks)(), optimizer="adamw(lr=0.01)", schedule="cosine",
        train_data=Several(loaders, mode, weights=weights), duration="3ep", callbacks=[watch], loggers=[], device="cpu", seed=3,
        **options,
    )  # fmt: skip
    watch.trainer = trainer
    if tree is not None:
        trainer.load_state_dict(tree)
    with contextlib.suppress(Stop):
        trainer.fit()
    watch.final = [each.clone() for each in trainer.model_state_dict().values()]
    return watch


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_continues_bitwise_from_within_an_epoch(mode: Any, workers: int) -> None:
    whole = train(mode, workers=workers)
    per_epoch = len(whole.losses) // 3
    for at in (1, per_epoch - 1, per_epoch, per_epoch + 1, 3 * per_epoch - 1) if not workers else (per_epoch + 1,):
        before = train(mode, at, workers=workers)
        assert before.losses == whole.losses[:at]
        after = train(mode, tree=before.tree, workers=workers)
        assert after.losses == whole.losses[at:]
        assert difference(after.final, whole.final) is None


def test_a_trainer_is_the_loop_by_hand() -> None:
    """The losses of semi-supervised training, bitwise."""
    found = train("cycle").losses
    task, losses = SemiSupervised(), []
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.01)
    labelled, unlabelled = DataLoader(Noisy(8), 4, shuffle=True), DataLoader(Noisy(60), 12, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    torch.manual_seed(3)
    for _ in range(3):
        few, many = iter(labelled), iter(unlabelled)
        for number in range(5):
            if number < 2:
                first, second = next(few), next(many)
            else:  # the longest is read first, because it may end the epoch
                second = next(many)
                few = iter(labelled) if number % 2 == 0 else few
                first = next(few)
            batch = {"labelled": first, "unlabelled": second}
            optimizer.zero_grad()
            loss = task.loss(task(batch), batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    assert found == losses


@pytest.mark.parametrize("mode", ["cycle", "weighted"])
def test_microbatches_and_global_batches(mode: Any) -> None:
    """Microbatches change a step by rounding only; a global batch sets the sizes, in proportion where a batch has both."""
    sizes: list[Any] = []

    class Sizes(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            sizes.append({name: len(own[0]) for name, own in state.batch.items()})

    options = {"global_batch": 8, "clip_gradients": None}
    weights = {"labelled": 2, "unlabelled": 1} if mode == "weighted" else None

    def losses(**more: Any) -> list[float]:
        sizes.clear()
        data = {"labelled": DataLoader(Noisy(8), 4), "unlabelled": DataLoader(Noisy(60), 12)}
        watch = Watch()
        task = (SemiSupervised if mode == "cycle" else ManyTasks)()
        task.network[1].p = 0.0
        hocket.Trainer(
            model=task, train_data=Several(data, mode, weights=weights), optimizer="sgd(lr=0.1)", duration="2ep", device="cpu",
            callbacks=[watch, Sizes()], loggers=[], seed=3, **options, **more,
        ).fit()  # fmt: skip
        return watch.losses

    whole = losses()
    if mode == "cycle":
        assert sizes == [{"labelled": 8, "unlabelled": 24}] * 2 + [{"labelled": 8, "unlabelled": 12}] + sizes[3:]
    else:
        assert len(sizes) == 2 * (1 + 8) and {size for each in sizes for size in each.values()} == {8}
    assert losses(microbatch=2) == pytest.approx(whole, rel=1e-5)


def test_data_that_raises_is_asked_again() -> None:
    """After an exception the same Trainer continues bitwise, or says why it cannot."""

    class Flaky(Noisy):
        failing: int | None = None

        def __getitem__(self, index: int) -> Any:
            if Flaky.failing == 0:
                Flaky.failing = None
                raise OSError("the disk")
            Flaky.failing = None if Flaky.failing is None else Flaky.failing - 1
            return self.inputs[index], self.targets[index]

    def run(failing: int | None, first: Any) -> list[float]:
        watch, Flaky.failing = Watch(), failing
        trainer = hocket.Trainer(
            model=SemiSupervised(), optimizer="sgd(lr=0.1)", duration="2ep", device="cpu", callbacks=[watch], seed=3,
            train_data=Several({"labelled": first(), "unlabelled": DataLoader(Flaky(60), 12, shuffle=True)}, "cycle"),
        )  # fmt: skip
        try:
            trainer.fit()
        except OSError:
            trainer.fit()
        return watch.losses

    plain = lambda: DataLoader(Flaky(60), 4, shuffle=True)  # noqa: E731  # fails itself, too
    fixed = lambda: [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))] * 3  # noqa: E731
    for first in (plain, fixed):
        whole = run(None, first)
        for failing in (20, 40):  # while the first loader is in its first epoch, and later
            assert run(failing, first) == whole and len(whole) == 2 * (15 if first is plain else 5)

    class Labelled(Stream):
        def __iter__(self) -> Iterator[Any]:
            return ((torch.ones(4), torch.tensor(0)) for _ in super().__iter__())

    with pytest.raises(DataError, match="'labelled' was read before another one raised"):
        run(20, lambda: DataLoader(Labelled(), 4))


# --- counting and splitting


def test_a_batch_counts_what_its_loaders_agree_on() -> None:
    ids = torch.zeros(4, 16, dtype=torch.long)
    assert count({"qa": {"input_ids": ids}}) == Counts(4, 64)
    assert count({"qa": {"input_ids": ids}, "nli": {"input_ids": ids}}) == Counts(4, 128)
    pair = {"a": (torch.arange(4), torch.arange(4)), "b": torch.arange(4)}
    assert count(pair) == Counts(4)
    first, second = split(pair, 3)
    assert difference(first, {"a": (torch.arange(3), torch.arange(3)), "b": torch.arange(3)}) is None
    assert difference(second, {"a": (torch.tensor([3]), torch.tensor([3])), "b": torch.tensor([3])}) is None
    uneven = {"a": torch.zeros(4), "b": torch.zeros(12)}
    with pytest.raises(ValueError, match=r"sizes \[4, 12\].*define count"):
        count(uneven)
    with pytest.raises(ValueError, match=r"define split"):
        split(uneven, 2, samples=4)


# --- refused


X, Y = torch.rand(8, 4), torch.arange(8) % 2


def trainer(**arguments: Any) -> hocket.Trainer:
    return hocket.Trainer(
        model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        loggers=[], **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("data", [{"a": few(), "b": many()}, {"a": few(), "b": [X]}, [few(), many()], (few(), many())])
def test_loaders_without_a_mode_are_refused(data: Any) -> None:
    with pytest.raises(
        TypeError, match=r"train_data is a \w+ of .*loaders.*hocket\.data\.Several\(\{.*'cycle'.*'in turn'.*'weighted'"
    ):
        trainer(train_data=data)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([few()], "cycle"), TypeError, "dict of loaders by name"),
        (({}, "cycle"), TypeError, "dict of loaders by name"),
        (({1: [X]}, "cycle"), TypeError, "dict of loaders by name"),
        (({"a": [X]}, "max_size_cycle"), ValueError, "'cycle': a batch of each.*'shortest'.*'in turn'.*'weighted'"),
        (({"a": iter([X])}, "cycle"), TypeError, r"'a' is an iterator \(list_iterator\)"),
        (({"a": itertools.cycle([X])}, "shortest"), TypeError, "'a' is an iterator"),
        (({"a": [X], "b": [X]}, "weighted"), ValueError, "weights=None. Give a dict, such as weights={'a': 1.0, 'b': 1.0}"),
        (({"a": [X], "b": [X]}, "weighted", {"a": 1}), ValueError, "positive weight for each"),
        (({"a": [X], "b": [X]}, "weighted", {"a": 1, "b": 0}), ValueError, "positive weight for each"),
        (({"a": [X]}, "cycle", {"a": 1}), ValueError, "weights= is for mode='weighted'"),
        (({"a": [X]}, "cycle", None, 3), ValueError, "batches= is for mode='weighted'"),
        (({"a": [X]}, "weighted", {"a": 1}, 0), ValueError, "batches=0 is not a number"),
        (({"a": [X]}, "cycle", None, None, False), ValueError, "named=False is for batches of one loader"),
    ],
)  # fmt: skip
def test_arguments(arguments: Any, error: Any, message: str) -> None:
    loaders, mode, weights, batches, named = (*arguments, *(None, None, True)[len(arguments) - 2 :])
    with pytest.raises(error, match=message):
        Several(loaders, mode, weights=weights, batches=batches, named=named)


def test_loaders_that_would_disturb_each_other() -> None:
    loader = few()
    with pytest.raises(ValueError, match="'a' and 'b' are the same object"):
        Several({"a": loader, "b": loader}, "shortest")
    base = seeded(TensorDataset(X, Y))
    halves = {"a": DataLoader(Subset(base, range(4)), 2), "b": DataLoader(Subset(base, range(4, 8)), 2)}
    for mode in ("cycle", "weighted"):
        with pytest.raises(ValueError, match=r"'a' and 'b' share a SeededDataset.*one for each"):
            Several(halves, mode, weights={"a": 1, "b": 1} if mode == "weighted" else None)  # type: ignore[arg-type]
    Several(halves, "shortest")  # all are in the same epoch


def test_data_sets_among_the_loaders_are_refused() -> None:
    with pytest.raises(TypeError, match=r"train_data\['b'\] is a data set \(TensorDataset\)"):
        trainer(train_data=Several({"a": few(), "b": TensorDataset(X, Y)}, "cycle"))


def test_a_loader_without_batches_is_named() -> None:
    empty: list[Any] = []
    for mode in ("shortest", "cycle", "weighted"):
        weights = {"a": 1, "b": 1} if mode == "weighted" else None
        with pytest.raises(DataError, match=r"Loader 'b' \(list of length 0\) yielded no batch"):
            list(Several({"a": [1], "b": empty}, mode, weights=weights, batches=weights and 20))  # type: ignore[arg-type]
    assert list(Several({"a": [1], "b": empty}, "in turn")) == [{"a": 1}]


def test_an_epoch_of_unknown_length_needs_batches() -> None:
    loaders = {"a": Unpositioned(), "b": [X]}
    with pytest.raises(ValueError, match="batches=1000"):
        trainer(train_data=Several(loaders, "weighted", weights={"a": 1, "b": 1}))
    assert len(list(Several(loaders, "weighted", weights={"a": 1, "b": 1}, batches=9))) == 9


def test_evaluation_and_prediction_see_every_sample_once() -> None:
    batches = [(X, Y)]
    for mode in ("cycle", "shortest"):
        data = Several({"a": batches, "b": [(X, Y)] * 2}, mode)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"every sample counts once.*eval_data=\{'a': …, 'b': …\}"):
            trainer(eval_data=data)
        with pytest.raises(ValueError, match="every sample counts once"):
            trainer().predict(data)
    data = Several({"a": batches, "b": [(X, Y)] * 2}, "in turn", named=False)
    model = trainer(eval_data=data)
    assert model.evaluate()["eval/loss"] == pytest.approx(model.evaluate(batches)["eval/loss"])
    assert len(model.predict(data)) == 3


def test_global_batches_that_are_not_possible() -> None:
    pair = {"a": DataLoader(TensorDataset(X), 3), "b": DataLoader(TensorDataset(X), 4)}
    with pytest.raises(ValueError, match=r"global_batch=4 is the number of samples of the first.*\{'a': 3, 'b': 4\}"):
        trainer(train_data=Several(pair, "cycle"), global_batch=4)
    with pytest.raises(ValueError, match="batch_size can be set"):
        trainer(train_data=Several({**pair, "c": [X]}, "cycle"), global_batch=6)
    assert Several(pair, "cycle").global_batches(6) == {"a": 6, "b": 8}
    assert Several(pair, "in turn").global_batches(5) == {"a": 5, "b": 5}


def test_a_position_is_refused_by_loaders_that_are_combined_in_another_way() -> None:
    source = adapt(Several({"few": few(), "many": many()}, "weighted", weights={"few": 1, "many": 1}))
    next(source.begin(0))
    position = source.position(1)
    others = {
        "mode was 'weighted', is 'cycle'": Several({"few": few(), "many": many()}, "cycle"),
        r"loaders was \['few', 'many'\], is \['few', 'more'\]": Several({"few": few(), "more": many()}, "cycle"),
        r"weights was \[1.0, 1.0\], is \[2.0, 1.0\]": Several(
            {"few": few(), "many": many()}, "weighted", weights={"few": 2, "many": 1}
        ),
        "Loader 'many': .* had 5 batches .* and has 3 now": Several(
            {"few": few(), "many": DataLoader(TensorDataset(torch.arange(12)), 4, shuffle=True)}, "weighted",
            weights={"few": 1, "many": 1},
        ),
        "had 7 batches when .* and has 9 now": Several(
            {"few": few(), "many": many()}, "weighted", weights={"few": 1, "many": 1}, batches=9
        ),
    }  # fmt: skip
    for message, other in others.items():
        with pytest.raises(DataError, match=message):
            adapt(other).begin(0, position)
    with pytest.raises(DataError, match="kind 'several'"):
        adapt(many()).begin(0, position)
    plain = adapt(many())
    next(plain.begin(0))
    with pytest.raises(DataError, match="kind 'indices', and now there are several"):
        source.begin(0, plain.position(1))


def test_other_data_continues_from_the_end_of_an_epoch() -> None:
    """Between epochs loaders may be added, combined in another way, or replaced by one."""
    source = adapt(Several({"few": few(), "many": many()}, "cycle"))
    list(source.begin(0))
    position = source.position()
    more = adapt(Several({"many": many(), "list": [X]}, "in turn"))
    more.restore(position)
    assert len(list(more.begin(1))) == 6
    one = adapt(many())
    one.restore(position)
    assert len(list(one.begin(1))) == 5
    more.restore(one.position())
    assert len(list(more.begin(2))) == 6


# --- padding


def test_a_batch_is_padding_if_a_part_of_it_is(recwarn: Any) -> None:
    def divide(data: Any, train: bool, global_batch: int | None) -> Any:
        return [Padding(each) if each < 0 else each for each in data]

    whole = prepared(Several({"a": [1, -2], "b": [3, -4]}, "cycle"), divide, True)
    assert list(whole) == [{"a": 1, "b": 3}, Padding({"a": -2, "b": -4})] and not recwarn.list
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part = prepared(Several({"a": [1, -2], "b": [3, 4]}, "cycle"), divide, True)
        assert list(part) == [{"a": 1, "b": 3}, Padding({"a": -2, "b": 4})]
        list(part)
    (warning,) = caught
    assert "loader 'a' has no slice for this rank" in str(warning.message)
    plain = prepared(Several({"a": [1, -2]}, "in turn", named=False), divide, True)
    assert list(plain) == [1, Padding(-2)]
