"""A run that was stopped at any step and continued by another Trainer is the uninterrupted run, to the last bit."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)
from torchmetrics.classification import MulticlassAccuracy

from hocket import Callback, EvalSet, State, Trainer
from hocket.data import seeded
from hocket.data.errors import DataError
from hocket.loggers.memory import MemoryLogger
from hocket_insight.callbacks.early_stopping import EarlyStopping

SAMPLES, BATCH = 18, 4  # five batches, the last one of two


def tensors(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    )


def net(seed: int, dropout: float = 0.3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


class At(Callback):
    """The Trainer's state after so many batches, or epochs, as if read from a file."""

    def __init__(self, batch: int | None = None, epoch: int | None = None) -> None:
        self._batch, self._epoch = batch, epoch
        self.trainer: Trainer | None = None
        self.tree: Any = None
        self.logged: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"batch {self._batch}" if self._epoch is None else f"epoch {self._epoch}"

    def batch_checkpoint(self, state: State) -> None:
        if state.timestamp.batch == self._batch:
            self._take(state)

    def epoch_checkpoint(self, state: State) -> None:
        if state.timestamp.epoch == self._epoch:
            self._take(state)

    def _take(self, state: State) -> None:
        assert self.trainer is not None
        self.tree = through_a_file(self.trainer.state_dict())
        (logger,) = (attachment.obj for attachment in state.bus.attachments if attachment.kind == "loggers")
        self.logged = {name: len(values) for name, values in logger.metrics.items()}


def through_a_file(tree: Any) -> Any:
    """Read back by torch's unpickler of nothing but tensors and plain values."""
    only_plain(tree)
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def only_plain(tree: Any, where: str = "") -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            assert type(key) is str, where
            only_plain(value, f"{where}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            only_plain(value, f"{where}/{index}")
    else:
        assert tree is None or type(tree) in (bool, int, float, str, bytes, Tensor), (where, type(tree))


def comparable(trainer: Trainer) -> dict[str, Any]:
    """Weights, averages, optimizers, metrics, random numbers: what should be the same, clocks aside."""
    tree = trainer.state_dict()
    tree["ranks"] = [{**own, "data": None} for own in tree["ranks"]]
    names = (
        "model", "optimizers", "schedules", "plugins", "progress", "metrics", "microbatch", "epoch_length", "guard", "ranks",
        "fit", "requested",
    )  # fmt: skip
    times = {name: value for name, value in tree["timestamp"].items() if not name.endswith("seconds")}
    return {**{name: tree[name] for name in names}, "timestamp": times}


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), (where, one.keys() ^ other.keys())
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    elif not where.endswith("/sec"):  # a clock
        assert one == other or (one != one and other != other), (where, one, other)


def check(make: Callable[..., Trainer], stops: Any, **fit: Any) -> None:
    """Compare the uninterrupted run with its continuation from the state after each of ``stops``."""

    def run(callbacks: list[At]) -> Trainer:
        torch.manual_seed(77)
        random.seed(77)
        np.random.seed(77)
        trainer = make(model=net(0), callbacks=callbacks)
        for each in callbacks:
            each.trainer = trainer
        trainer.fit(**fit)
        return trainer

    whole = run([])
    expected, log = comparable(whole), logger_of(whole).metrics
    whole.close()
    taken = [at if isinstance(at, At) else At(at) for at in stops]
    first = run(taken)
    first.close()
    before = logger_of(first).metrics
    for at in taken:
        where = f"after {at}"
        assert at.tree is not None, where
        torch.manual_seed(5)  # another process would have other random numbers
        random.seed(5)
        np.random.seed(5)
        second = make(model=net(9), callbacks=[])
        second.load_state_dict(at.tree)
        second.fit(**fit)
        got = comparable(second)
        second.close()
        after = logger_of(second).metrics
        assert_same(expected, got, where)
        joined = {
            name: before.get(name, [])[: at.logged.get(name, 0)] + after.get(name, []) for name in {*before, *after}
        }
        assert joined == log, where


def logger_of(trainer: Trainer) -> MemoryLogger:
    (logger,) = (attachment.obj for attachment in trainer.state.bus.attachments if attachment.kind == "loggers")
    assert isinstance(logger, MemoryLogger)
    return logger


def maker(data: Callable[[], Any], **options: Any) -> Callable[..., Trainer]:
    """Trainers that differ in their model and callbacks."""

    def make(model: nn.Module, callbacks: list[Any]) -> Trainer:
        arguments: dict[str, Any] = {
            "loss": nn.functional.cross_entropy,
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            "duration": "2ep",
            "seed": 3,
            "log_every": "2ba",
            "train_metrics": lambda: {"accuracy": MulticlassAccuracy(3)},
            **options,
        }
        return Trainer(
            model=model,
            train_data=data(),
            eval_data=arguments.pop("eval_data", lambda: None)(),
            callbacks=[*arguments.pop("callbacks", list)(), *callbacks],
            loggers=[MemoryLogger()],
            algorithms=arguments.pop("algorithms", list)(),
            **arguments,
        )

    return make


class Shuffled(Sampler[int]):
    """Draws from Python's global random numbers for every index, and from a generator of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.own = np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.count))
        self.own.shuffle(left)
        while left:
            yield left.pop(random.randrange(len(left)))

    def __len__(self) -> int:
        return self.count


class Drawn(Sampler[int]):
    """Draws its whole order before it is asked for the first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


def with_generator(**options: Any) -> DataLoader[Any]:
    return DataLoader(tensors(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def replacing() -> DataLoader[Any]:
    sampler = RandomSampler(tensors(), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(2))
    return DataLoader(tensors(), BATCH, sampler=sampler)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(tensors(), BATCH, shuffle=True),
    "generator": with_generator,
    "in order": lambda: DataLoader(tensors(), BATCH),
    "drop_last": lambda: DataLoader(tensors(), BATCH, shuffle=True, drop_last=True),
    "own sampler": lambda: DataLoader(tensors(), BATCH, sampler=Shuffled(SAMPLES)),
    "own sampler, drawn at once": lambda: DataLoader(tensors(), BATCH, sampler=Drawn()),
    "own batch sampler": lambda: DataLoader(tensors(), batch_sampler=BatchSampler(Shuffled(SAMPLES), BATCH, False)),
    "list of batches": lambda: [tuple(b) for b in DataLoader(tensors(), BATCH)],
    "without batches": lambda: DataLoader(
        [tuple(b) for b in DataLoader(tensors(), BATCH)], batch_size=None, shuffle=True
    ),
    "with replacement": replacing,
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_step_of_every_kind_of_data(name: str) -> None:
    check(maker(LOADERS[name]), [*range(1, 9), At(epoch=1)])


@pytest.mark.long
@pytest.mark.parametrize(
    ("generator", "persistent"),
    [
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((False, False), (False, True), (True, False))),
    ],
)
def test_worker_processes(generator: bool, persistent: bool) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}

    def data() -> DataLoader[Any]:
        return with_generator(**options) if generator else DataLoader(tensors(), BATCH, shuffle=True, **options)

    check(maker(data, duration="3ep"), [2, 5, 7, At(epoch=1), At(epoch=2), 14])


def test_everything_at_once_at_every_step() -> None:
    def evaluated(seed: int) -> DataLoader[Any]:
        return DataLoader(tensors(10), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))

    def sets() -> dict[str, EvalSet]:
        return {"a": EvalSet(evaluated(1), every="2ba"), "b": EvalSet(evaluated(2), every="1ep")}

    make = maker(
        LOADERS["shuffle"],
        eval_data=sets,
        algorithms=lambda: [{"ema": {"half_life": "3ba"}}, {"sam": {"rho": 0.1, "interval": 2}}, "label-smoothing"],
        callbacks=lambda: [EarlyStopping("a/loss", patience=50), EarlyStopping("b/loss", patience=40)],
        schedule="cosine(warmup=0.3dur)",
        microbatch=2,
        clip_gradients=1.0,
    )
    check(make, [*range(1, 11), At(epoch=1), At(epoch=2)])


@pytest.mark.long
@pytest.mark.parametrize("persistent", [False, True])
def test_augmentation_by_algorithms(persistent: bool) -> None:
    """ColOut drops columns of whole batches here, and of each sample where it is loaded."""

    def data() -> DataLoader[Any]:
        samples = tensors()
        images = TensorDataset(samples.tensors[0].reshape(-1, 1, 2, 3), samples.tensors[1])
        return DataLoader(images, BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)

    def check_with(**options: Any) -> None:
        def make(model: nn.Module, callbacks: list[Any]) -> Trainer:
            pooled = nn.Sequential(nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), *model)
            return inner(pooled, callbacks)

        inner = maker(data, algorithms=lambda: [{"colout": {"p_row": 0.3, "p_col": 0.4, **options}}])
        check(make, [3, At(epoch=1), 7])

    check_with(batch=True)
    check_with(batch=False)


def test_evaluation_data_with_workers_and_a_generator_of_its_own() -> None:
    def data() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        return DataLoader(tensors(), 4, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)

    check(maker(LOADERS["shuffle"], eval_data=data, eval_every="3ba"), [2, 4])


class Unfreeze(Callback):
    """Trains the first layer from the fourth batch on, and its batch norm in eval mode."""

    def init(self, state: State) -> None:
        state.model[0].requires_grad_(False)

    def batch_end(self, state: State) -> None:
        if state.timestamp.batch == 4:
            state.model[0].requires_grad_(True)
            state.model[1].eval()


def test_what_is_frozen_and_in_eval_mode() -> None:
    check(maker(LOADERS["shuffle"], callbacks=lambda: [Unfreeze()]), [2, 4, 7])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions(precision: str) -> None:
    overflowing = {"fp16": {"init_scale": 2.0**40}} if precision == "fp16" else precision
    check(maker(LOADERS["generator"], precision=overflowing, schedule="cosine(warmup=0.3dur)"), [1, 3, 5, 8])


# --- data that is not a plain DataLoader


class Augmented(Dataset[Any]):
    """Draws from every global generator for each sample; on request from one of its own."""

    def __init__(self, own: bool = False) -> None:
        self.samples = tensors()
        self.own = np.random.RandomState(8) if own else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.samples[index]
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        return inputs + noise + (self.own.rand() if self.own else 0.0), target


class Stream(IterableDataset[Any]):
    """Says where it is if it is asked; counts what it is asked for."""

    def __init__(self) -> None:
        self.samples, self.place, self.read = tensors(), 0, 0

    def __iter__(self) -> Iterator[Any]:
        start, self.place = self.place, 0
        for index in range(start, SAMPLES):
            self.place, self.read = index + 1, self.read + 1
            yield self.samples[index]
        self.place = 0


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class Divided(StatefulStream):
    """Each of two workers has samples of its own: the first two batches of 4 and 2, the second three of 4."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for sample in super().__iter__():
            if info is None or ((self.place - 1) % 3 == 0) == (info.id == 0):
                yield sample


class Endless(IterableDataset[Any]):
    """A pass goes on where the last one ended."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.place += 1
            yield torch.randn(6, generator=torch.Generator().manual_seed(self.place)), self.place % 3
            if self.place % SAMPLES == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class OwnLoader:
    """A loader of one's own that asks its data set where it is."""

    def __init__(self) -> None:
        self.loader = DataLoader(Endless(), BATCH)
        self.state_dict = self.loader.dataset.state_dict  # type: ignore[attr-defined]
        self.load_state_dict = self.loader.dataset.load_state_dict  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class OwnIterator(OwnLoader):
    """An iterator that is never begun anew."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(iter(self.loader))


class Batches:
    """An iterable of one's own, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return (tuple(batch) for batch in DataLoader(tensors(), BATCH, shuffle=True))


@pytest.mark.parametrize("own", [False, True])
def test_augmentation_in_the_main_process(own: bool) -> None:
    check(maker(lambda: DataLoader(Augmented(own), BATCH, shuffle=True)), [1, 3, 5, 7])


class Curriculum(Dataset[Any]):
    """Samples that grow with the number of those that were loaded."""

    def __init__(self) -> None:
        self.samples, self.loaded = tensors(), 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        inputs, target = self.samples[index]
        return inputs * (1 + self.loaded / 10), target

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["loaded"]


def test_data_sets_that_count() -> None:
    check(maker(lambda: DataLoader(Curriculum(), BATCH, shuffle=True)), [2, 5, At(epoch=1), 7])


def test_what_data_sets_count_in_workers_is_not_kept_and_a_warning_says_so() -> None:
    loader = DataLoader(Curriculum(), BATCH, num_workers=1)
    trainer = maker(lambda: loader, duration="1ba")(net(0), [])
    with pytest.warns(
        UserWarning, match="Curriculum has a state_dict, but it cannot be read from the 1 worker processes"
    ) as told:
        trainer.state_dict()
        trainer.state_dict()
    assert len(told) == 1


@pytest.mark.long
@pytest.mark.parametrize("persistent", [False, True])
def test_augmentation_in_workers_with_numbers_of_each_sample(persistent: bool) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(
            seeded(Augmented(), seed=4), BATCH, shuffle=True, num_workers=2, persistent_workers=persistent
        )

    check(maker(data), [2, 5, 7])


def test_another_number_of_workers_goes_on_alike() -> None:
    def run(workers: int, tree: Any = None) -> tuple[Any, Any]:
        at = At(3)
        loader = DataLoader(
            seeded(Augmented()), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=workers
        )
        trainer = maker(lambda: loader)(net(0), [at])
        at.trainer = trainer
        if tree is not None:
            trainer.load_state_dict(tree)
        trainer.fit()
        trainer.close()
        return at.tree, trainer.model_state_dict()

    tree, expected = run(2)
    for workers in (0, 1, 3):
        assert_same(dict(expected), dict(run(workers, tree)[1]))


def test_streams_that_say_where_they_are_are_told_and_not_read_again() -> None:
    streams: list[StatefulStream] = []

    def data() -> DataLoader[Any]:
        streams.append(StatefulStream())
        return DataLoader(streams[-1], BATCH)

    check(maker(data), [3, 7])
    assert [stream.read for stream in streams] == [36, 36, 36 - 12, 18 - 8]


@pytest.mark.parametrize("data", [lambda: DataLoader(Endless(), BATCH), OwnLoader, OwnIterator])
def test_streams_go_on_between_passes(data: Callable[[], Any]) -> None:
    check(maker(data, duration="3ep", limit_train=4), [2, At(epoch=1), 6, At(epoch=2)])


def test_torchdatas_loader_over_streams_goes_on_between_passes() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    check(maker(lambda: stateful(Endless(), BATCH)), [2, At(epoch=1), 7])
    check(maker(lambda: stateful(Endless(), BATCH), duration="3ep", limit_train=3), [At(epoch=1), At(epoch=2)])


@pytest.mark.parametrize("stream", [Endless, StatefulStream])
def test_streams_that_begin_anew_when_they_end_do_so_once(stream: Any) -> None:
    """The last batch of a pass is a smaller one: with it the data set has ended."""
    check(maker(lambda: DataLoader(stream(), BATCH), duration="3ep"), [4, 5, 6, 10, At(epoch=2)])


@pytest.mark.parametrize("workers", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))])
def test_torchdatas_loader_over_streams_that_begin_anew(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    length = 5 * max(workers, 1)  # each worker has the whole stream
    check(maker(lambda: stateful(StatefulStream(), BATCH, num_workers=workers)), [2, length, At(epoch=1), length + 1])


@pytest.mark.long
def test_torchdatas_loader_of_which_a_worker_has_ended() -> None:
    """What torchdata restores would have it yield its samples again."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    check(maker(lambda: stateful(Divided(), BATCH, num_workers=2)), [3, 4])


@pytest.mark.filterwarnings("ignore:.*current epoch again:UserWarning")
@pytest.mark.long
def test_streams_in_persistent_workers() -> None:
    """Workers that a resumed run starts draw a seed, which those that went on would not have drawn."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for loader in (DataLoader, stateful):
        options = {"num_workers": 1, "persistent_workers": True}
        check(maker(lambda: loader(StatefulStream(), BATCH, **options)), [3, 5, At(epoch=1), 7])  # noqa: B023


def test_streams_of_evaluation_go_on() -> None:
    check(maker(LOADERS["shuffle"], eval_data=lambda: DataLoader(Endless(), 3), eval_every="2ba"), [3, At(epoch=1), 6])


@pytest.mark.parametrize(
    "data", [Batches, lambda: DataLoader(Stream(), BATCH), lambda: DataLoader(Stream(), 3, num_workers=2)]
)
def test_other_iterables_are_read_again_and_say_so(data: Any) -> None:
    with pytest.warns(UserWarning, match="reads the past batches of the current epoch again") as told:
        check(maker(data), [3])
    assert len([each for each in told if "current epoch again" in str(each.message)]) == 1


def test_an_iterator_goes_on_where_it_was() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(
            maker(
                lambda: (tuple(batch) for _ in range(9) for batch in DataLoader(tensors(), BATCH)),
                limit_train=4,
                duration="3ep",
            ),
            [2, 6, At(epoch=1), 12],
        )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_torchdatas_stateful_loader(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    check(maker(lambda: stateful(tensors(), BATCH, shuffle=True, num_workers=workers)), [2, 5, At(epoch=1), 7])


def test_past_batches_are_not_loaded() -> None:
    class Counting(Dataset[Any]):
        def __init__(self) -> None:
            self.loaded = 0

        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Any:
            self.loaded += 1
            return torch.full((6,), float(index)), index % 3

    at, sets = At(90), [Counting(), Counting()]
    make = maker(lambda: DataLoader(sets.pop(), BATCH, shuffle=True), duration="1ep")
    loaded = list(sets)
    first = make(net(0), [at])
    at.trainer = first
    first.fit()
    second = make(net(1), [])
    second.load_state_dict(at.tree)
    second.fit()
    assert (loaded[1].loaded, loaded[0].loaded) == (400, 40)
    assert_same(dict(first.model_state_dict()), dict(second.model_state_dict()))


def test_other_data_than_before_is_an_error() -> None:
    at = At(3)
    first = maker(LOADERS["shuffle"])(net(0), [at])
    at.trainer = first
    first.fit()
    others = {
        "had 5 batches": lambda: DataLoader(tensors(30), BATCH),
        "kind 'indices'": LOADERS["list of batches"],
        "sampler .* was BatchSampler of RandomSampler .* is BatchSampler of SequentialSampler": LOADERS["in order"],
        f"length .* was {SAMPLES} .* is {SAMPLES - 1} now": lambda: DataLoader(
            tensors(SAMPLES - 1), BATCH, shuffle=True
        ),
    }
    for message, data in others.items():
        second = maker(data)(net(0), [])
        second.load_state_dict(at.tree)
        with pytest.raises(DataError, match=message):
            second.fit()


# --- durations, schedules, seeds


@pytest.mark.parametrize("duration", [pytest.param("5ba", marks=pytest.mark.long), "7ba", "10ba", "36sp"])
def test_the_last_step_of_any_duration(duration: str) -> None:
    last = {"5ba": 5, "7ba": 7, "10ba": 10, "36sp": 10}[duration]
    data = lambda: tensors_loader(10)  # noqa: E731
    check(maker(LOADERS["shuffle"], duration=duration, eval_data=data), [1, last - 1, last])


def tensors_loader(samples: int) -> DataLoader[Any]:
    return DataLoader(tensors(samples), BATCH)


@pytest.mark.filterwarnings("ignore:OneCycleLR has total_steps=12")
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 6]),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
            ],
            [3],
        ),
        "linear(warmup=2ba)",
    ],
)
def test_schedules(schedule: Any) -> None:
    check(maker(LOADERS["shuffle"], schedule=schedule), [1, 3, 6])


def test_without_a_seed_the_random_numbers_of_the_process_are_part_of_it() -> None:
    check(maker(LOADERS["shuffle"], seed=None), [2, 5, 8])


def test_with_limits_of_an_epoch() -> None:
    check(maker(with_generator, limit_train=3, duration="3ep"), [2, 3, At(epoch=1), 7])


def test_a_fit_that_was_given_its_duration_is_finished_by_the_same_call() -> None:
    check(maker(LOADERS["shuffle"], duration=None), [2, 5], duration="7ba")


def test_data_that_fit_was_given() -> None:
    def check_with(data: Callable[[], Any]) -> None:
        at = At(3)
        make = maker(lambda: None)
        first, second = make(net(0), [at]), make(net(1), [])
        at.trainer = first
        first.fit(train_data=data())
        second.load_state_dict(at.tree)
        second.fit(train_data=data())
        assert_same(comparable(first)["model"], comparable(second)["model"])

    check_with(LOADERS["generator"])


def test_between_fits() -> None:
    make = maker(with_generator, duration=None)
    first, second = make(net(0), []), make(net(1), [])
    first.fit("3ba")
    tree = through_a_file(first.state_dict())
    second.load_state_dict(tree)
    assert_same(comparable(second), {**comparable(first)})  # before anything has been done with it
    first.fit("4ba")
    second.fit("4ba")
    assert_same(comparable(first), comparable(second))


def test_at_the_end_of_a_fit_the_state_is_that_between_fits() -> None:
    class Last(Callback):
        def fit_end(self, state: State) -> None:
            self.tree = through_a_file(first.state_dict())

    last, make = Last(), maker(with_generator, duration=None)
    first, second = make(net(0), [last]), make(net(1), [])
    first.fit("3ba")
    second.load_state_dict(last.tree)
    first.fit("4ba")
    second.fit("4ba")
    assert_same(comparable(first)["model"], comparable(second)["model"])


def test_only_where_the_state_is_complete() -> None:
    class Early(Callback):
        def batch_end(self, state: State) -> None:
            trainer.state_dict()

    trainer = maker(LOADERS["shuffle"])(net(0), [Early()])
    with pytest.raises(RuntimeError, match="batch_checkpoint"):
        trainer.fit()
