"""Batch-size warm-up against plain loops over the parts of each batch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import make_data, make_model, make_trainer, momentum, weights

import hocket
from hocket_general import SAM, BatchSizeWarmup
from hocket_general.functional import batch_size_steps
from hocket_testkit import AlgorithmConformance, run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class TestBatchSizeWarmup(AlgorithmConformance):
    def make(self):
        return BatchSizeWarmup(initial=0.25, warmup="0.75dur")


def plain(batches, steps, epochs=2):
    """Train on the parts of each batch; ``steps`` by batch, the batches of each rank side by side.

    Of two ranks the first has its larger parts at the beginning, and the second as many parts later.
    """
    model = make_model()
    optimizer = momentum(model.parameters())
    numbers, losses = iter(steps), []
    for _ in range(epochs):
        for of_ranks in batches():
            number, total = next(numbers), 0.0
            divided = []
            for rank, (inputs, targets) in enumerate(of_ranks):
                sizes = [len(part) for part in torch.arange(len(inputs)).tensor_split(number)]
                turned = rank * (len(inputs) % number) % number
                sizes = sizes[number - turned :] + sizes[: number - turned]
                divided.append(list(zip(inputs.split(sizes), targets.split(sizes), strict=True)))
            samples = sum(len(targets) for _, targets in of_ranks)
            for parts in zip(*divided, strict=True):
                inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                total += loss.item() * len(targets) / samples
            losses.append(total)
    return model, losses


def assert_close(one, other):
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Seen:
    """A metric that counts samples."""

    def reset(self):
        self.samples = 0

    def update(self, outputs, targets):
        self.samples += len(targets)

    def compute(self):
        return float(self.samples)


def test_it_is_the_loop_over_parts_of_each_batch():
    logger = hocket.loggers.MemoryLogger()
    trainer = make_trainer(
        train_data=make_data(batch_size=16, shuffle=False), optimizer=momentum,
        train_metrics={"seen": Seen()}, algorithms=[BatchSizeWarmup(0.25, "0.75dur")], loggers=[logger], log_every="1ba",
    )  # fmt: skip
    result = trainer.fit()
    steps = [int(value) for _, value in logger.metrics["batch-size-warmup/steps"]]
    assert steps == [batch_size_steps(batch / 9, 0.25) for batch in range(12)]
    assert steps == sorted(steps, reverse=True) and steps[0] == 4 and steps[-3:] == [1, 1, 1]
    model, losses = plain(lambda: ([batch] for batch in make_data(batch_size=16, shuffle=False)), steps)
    assert_close(trainer, model)
    assert [value for _, value in logger.metrics["train/loss"]] == pytest.approx(losses, rel=1e-5)
    assert (result.timestamp.batch, result.timestamp.sample) == (12, 168)
    assert result.metrics["train/seen"] == 84  # each sample of an epoch once


def test_a_window_is_divided_as_the_batch_that_it_is():
    """accumulate="4ba" over batches of 4 is a full batch of 16: its parts are those of a loader of 16."""
    trainer = make_trainer(
        train_data=make_data(samples=80, batch_size=4, shuffle=False), optimizer=momentum, accumulate="4ba",
        algorithms=[BatchSizeWarmup(0.25, "8ba")],
    )  # fmt: skip
    result = trainer.fit()
    assert (result.timestamp.batch, result.timestamp.sample) == (10, 160)
    steps = [batch_size_steps(number / 8, 0.25) for number in range(10)]
    assert 3 in steps  # which does not divide 16, nor a batch of 4
    model, _ = plain(lambda: ([batch] for batch in make_data(samples=80, batch_size=16, shuffle=False)), steps)
    assert_close(trainer, model)


class Asks(hocket.Callback):
    """Requests a number of steps, and notes the samples in each forward pass by step."""

    def __init__(self, steps):
        self.steps, self.sizes = steps, []

    def batch_start(self, state):
        state.request_steps(self.steps)

    def before_train_batch(self, state):
        self.sizes.append([])

    def before_forward(self, state):
        self.sizes[-1].append(len(state.batch[0]))


@pytest.mark.parametrize(("samples", "steps"), [(9, 8), (10, 4), (7, 3), (12, 4), (8, 8)])
def test_parts_are_as_equal_as_possible(samples, steps):
    """As numpy.array_split divides; each part is one forward pass."""
    asks = Asks(steps)
    make_trainer(train_data=make_data(samples=samples, batch_size=samples), callbacks=[asks], duration="1ep").fit()
    assert asks.sizes == [[len(part)] for part in torch.arange(samples).tensor_split(steps)]


def test_a_part_of_a_window_computes_on_each_of_its_batches_once():
    """Batches of 5 and 3 samples in three parts of 3, 3 and 2: the second part has two samples of one and one of the other."""
    asks, data = Asks(3), [(torch.randn(size, 8), torch.zeros(size, dtype=torch.long)) for size in (5, 3)]
    make_trainer(train_data=data, accumulate="2ba", callbacks=[asks], duration="1ep").fit()
    assert asks.sizes == [[3], [2, 1], [2]]


class Packed(hocket.Task):
    """A task that splits batches in its own way, and does not say how to join them."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def split(self, batch, size):
        pieces.append(size)
        images, targets = batch
        return [(Bag(a), b) for a, b in zip(images.tensor.split(size), targets.split(size), strict=True)]

    def count(self, batch):
        return len(batch[1])

    def forward(self, batch):
        return self.network(batch[0].tensor)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


class Bag:
    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return len(self.tensor)


pieces: list[int] = []


def test_a_task_that_cannot_join_gets_pieces_that_are_parts():
    pieces.clear()
    asks = Asks(3)
    trainer = make_trainer(
        model=Packed(make_model()), loss=None, optimizer=momentum, duration="1ep",
        train_data=[(Bag(images), targets) for images, targets in make_data(batch_size=16, shuffle=False)],
        callbacks=[asks],
    )  # fmt: skip
    trainer.fit()
    assert pieces[0] == 6 and asks.sizes[:3] == [[6], [6], [4]]


def test_a_batch_with_fewer_samples_than_steps_says_so():
    asks = Asks(8)
    with pytest.warns(UserWarning, match="8 steps were requested on a batch of 5 samples, and 5 are taken"):
        make_trainer(train_data=make_data(samples=5, batch_size=5), callbacks=[asks], duration="1ep").fit()
    assert asks.sizes == [[1]] * 5


def test_ranks_have_larger_parts_in_turn():
    """3 samples on each of two ranks are 6: in 4 steps they are 2, 2, 1 and 1, and none is empty."""
    pytest.importorskip("hocket_strategies")

    def train(rank):
        data, asks = [(torch.randn(3, 8), torch.arange(3))], Asks(4)
        make_trainer(
            train_data=data, strategy={"ddp": {"split_data": False}}, callbacks=[asks], duration="1ep", device="cpu"
        ).fit()
        return len(asks.sizes)

    assert run_ranks(train, 2) == [4, 4]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks_each_step_has_a_part_of_each_slice(strategy):
    """Slices of 8 samples on each rank, so each step has 2 + 2, 3 + 3 … samples of them."""
    pytest.importorskip("hocket_strategies")

    def train(rank):
        trainer = make_trainer(
            train_data=make_data(samples=64, batch_size=8, shuffle=False), optimizer=momentum, strategy=strategy,
            algorithms=[BatchSizeWarmup(0.25, "1dur")], device="cpu",
        )  # fmt: skip
        result = trainer.fit()
        return [each.numpy() for each in weights(trainer)], result.timestamp.sample

    (first, samples), (second, _) = run_ranks(train, 2)
    assert samples == 128
    read = list(make_data(samples=64, batch_size=8, shuffle=False))
    model, _ = plain(
        lambda: zip(read[::2], read[1::2], strict=True), [batch_size_steps(batch / 8, 0.25) for batch in range(8)]
    )
    for mine, also, theirs in zip(first, second, weights(model), strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-5, atol=1e-6)
        assert (mine == also).all()


def test_a_rank_with_fewer_samples_than_steps_computes_on_padding():
    """Batches of 5 and 1 samples: rank 1 has a sample in one of four steps, and each sample counts once."""
    pytest.importorskip("hocket_strategies")

    def train(rank):
        data = [(torch.full((5 - 4 * rank, 8), float(rank)), torch.arange(5 - 4 * rank) % 3)] * 2
        trainer = make_trainer(
            train_data=data, strategy={"ddp": {"split_data": False}}, algorithms=[BatchSizeWarmup(0.2, "100dur")],
            duration="1ep", device="cpu",
        )  # fmt: skip
        return trainer.fit().timestamp.sample, [each.numpy() for each in weights(trainer)]

    (samples, first), (_, second) = run_ranks(train, 2)
    assert samples == 12
    assert all((mine == also).all() for mine, also in zip(first, second, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_without_samples_takes_part(strategy):
    """The last batch of 9 samples has one, on one of two ranks."""
    pytest.importorskip("hocket_strategies")

    def train(rank):
        trainer = make_trainer(
            train_data=make_data(samples=9, batch_size=8, shuffle=False), global_batch=8, strategy=strategy,
            algorithms=[BatchSizeWarmup(0.25, "100dur")], device="cpu",
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "4 steps were requested on a batch of 1 samples")
            return trainer.fit().timestamp.sample, [each.numpy() for each in weights(trainer)]

    (samples, first), (_, second) = run_ranks(train, 2)
    assert samples == 18
    assert all((mine == also).all() for mine, also in zip(first, second, strict=True))


def test_sam_takes_its_step_on_each_part():
    trainer = make_trainer(
        train_data=make_data(batch_size=16), train_metrics={"seen": Seen()},
        algorithms=[BatchSizeWarmup(0.25, "1dur"), SAM(rho=0.1)],
    )  # fmt: skip
    assert trainer.fit().metrics["train/seen"] == 84


def test_a_fit_that_fails_between_two_steps_cannot_be_continued():
    class Fails(hocket.Callback):
        calls = 0

        def before_forward(self, state):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("planned")

    trainer = make_trainer(algorithms=[BatchSizeWarmup(0.25)], callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="planned"):
        trainer.fit()
    with pytest.raises(RuntimeError, match="training cannot be continued"):
        trainer.fit()


def test_sizes_grow_linearly_and_are_never_larger_than_asked():
    for thousandth in range(1001):
        done = thousandth / 1000
        steps = batch_size_steps(done, 0.1)
        asked = 0.1 + 0.9 * done
        assert 1 / steps <= asked + 1e-9 and (steps == 1 or 1 / (steps - 1) > asked)
    assert batch_size_steps(7.0) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"initial": 0}, "fraction"),
        ({"initial": 2}, "fraction"),
        ({"warmup": "0ba"}, "positive"),
        ({"warmup": "2min"}, "same batch"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        BatchSizeWarmup(**arguments)


def test_the_function_refuses_what_is_no_fraction():
    with pytest.raises(ValueError, match="fraction"):
        batch_size_steps(-0.1)


def test_a_plugin_cannot_ask_for_no_step():
    class Asks(hocket.Callback):
        def batch_start(self, state):
            state.request_steps(0)

    with pytest.raises(ValueError, match="at least one step"):
        make_trainer(callbacks=[Asks()]).fit()
