"""Batches of any nesting are split where it is certain what belongs to which sample, and refused by name otherwise."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

import hocket
from hocket.data import batches, nesting
from hocket_testkit import no_sync


class Frozen(Mapping[str, Any]):
    """Immutable, and made from something else than a dict."""

    def __init__(self, *pairs: tuple[str, Any]) -> None:
        self._pairs = pairs

    def __getitem__(self, key: str) -> Any:
        return dict(self._pairs)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._pairs))

    def __len__(self) -> int:
        return len(self._pairs)


Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


def plain(item: Any) -> Any:
    """A tree to compare: lists of numbers and dicts."""
    if isinstance(item, Tensor | np.ndarray):
        return item.tolist()
    if isinstance(item, Mapping):
        return {key: plain(value) for key, value in item.items()}
    if dataclasses.is_dataclass(item):
        return plain(vars(item))
    return [plain(part) for part in item] if isinstance(item, list | tuple) else item


MAPPINGS = {
    "dict": dict,
    "defaultdict": lambda items: defaultdict(list, items),
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "ChainMap": ChainMap,
    "proxy": MappingProxyType,
    "frozen": lambda items: Frozen(*items.items()),
}


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS)
def test_every_kind_of_mapping_is_moved_counted_split_and_trained_on(make) -> None:
    class Fit(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, batch: Any) -> Any:
            return self.layer(batch["x"])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return (outputs.squeeze(1) - batch["y"]).square().mean()

    batch = make({"x": torch.rand(4, 2), "y": torch.arange(4.0)})
    assert batches.count(batch).samples == 4
    doubled = nesting.map_tensors(lambda tensor: tensor * 2, batch)
    assert plain(doubled) == {"x": (batch["x"] * 2).tolist(), "y": [0, 2, 4, 6]}
    assert plain(batch)["y"] == [0, 1, 2, 3], "the batch that was given is as before"
    assert [plain(piece)["y"] for piece in batches.split(batch, 3)] == [[0, 1, 2], [3]]
    trainer = hocket.Trainer(model=Fit(), train_data=[batch], optimizer="sgd(lr=0.1)", duration="1ba", microbatch=2)
    assert trainer.fit().timestamp.sample == 4


def test_tokens_are_the_elements_of_input_ids() -> None:
    assert batches.count({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2)}) == (2, 6)
    assert batches.count({"labels": torch.zeros(2, 3)}) == (2, 0)


def test_a_mapping_keeps_its_kind_and_what_else_it_has() -> None:
    moved = nesting.map_tensors(lambda tensor: tensor + 1, defaultdict(list, x=torch.zeros(2)))
    assert type(moved) is defaultdict and moved["missing"] == []
    assert type(nesting.map_tensors(lambda tensor: tensor, UserDict(x=torch.zeros(2)))) is UserDict
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.zeros(2, 3)}, n_sequences=5)
    moved = nesting.map_tensors(lambda tensor: tensor + 1, encoding)
    assert type(moved) is transformers.BatchEncoding and moved.n_sequences == 5 and moved["input_ids"].sum() == 6


def boxes(number: int) -> dict[str, Tensor]:
    return {"boxes": torch.rand(number, 4)}


IMAGE = torch.zeros(3, 8, 8)
#: A batch of as many samples as is said, what samples 1 to 2 of it are, and nothing else.
SPLIT: dict[str, tuple[Any, int, Any]] = {
    "nested": ({"a": [torch.arange(3), (torch.arange(3),)]}, 3, {"a": [torch.tensor([1]), (torch.tensor([1]),)]}),
    "None, text and numbers": (
        {"x": torch.arange(3), "none": None, "text": "all", "number": 0.5, "scalar": torch.tensor(7)}, 3,
        {"x": torch.tensor([1]), "none": None, "text": "all", "number": 0.5, "scalar": torch.tensor(7)},
    ),
    "a list of names": ([torch.arange(3), ["a", "b", "c"]], 3, [torch.tensor([1]), ["b"]]),
    "sizes": ([torch.arange(2), [(480, 640), (1, 2)]], 2, [torch.tensor([1]), [(1, 2)]]),
    "numpy": ({"x": np.arange(3), "y": torch.arange(3)}, 3, {"x": np.array([1]), "y": torch.tensor([1])}),
    "a named tuple": (Pair(torch.arange(2), ["a", "b"]), 2, Pair(torch.tensor([1]), ["b"])),
    "a dataclass": (Sample(torch.arange(3), None), 3, Sample(torch.tensor([1]), None)),
    "two samples": ([torch.arange(4).view(2, 2), torch.arange(2)], 2, [torch.tensor([[2, 3]]), torch.tensor([1])]),
    "two samples with targets like them": ([torch.arange(2), torch.arange(2)], 2, [torch.tensor([1])] * 2),
    "views": ([[torch.arange(3), torch.arange(3)], torch.arange(3)], 3, [[torch.tensor([1])] * 2, torch.tensor([1])]),
    "detection": (([IMAGE, IMAGE + 1], [boxes(5), boxes(2)]), 2, None),
    "three images of three channels": (([IMAGE, IMAGE + 1, IMAGE], (boxes(5), boxes(2), boxes(3))), 3, None),
    "three images with three boxes each": (([IMAGE, IMAGE, IMAGE], [boxes(3)] * 3), 3, None),
    "pairs": ([(IMAGE, boxes(1)), (IMAGE + 1, boxes(2)), (IMAGE, boxes(3))], 3, None),
    "scalar targets": ([[IMAGE, IMAGE + 1], [torch.tensor(0), torch.tensor(1)]], 2, None),
    "images without boxes": (([IMAGE, IMAGE + 1], [boxes(0), boxes(0)]), 2, None),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "samples", "second"), SPLIT.values(), ids=SPLIT)
def test_what_counts_is_split(batch: Any, samples: int, second: Any) -> None:
    pieces = batches.split(batch, 1, samples)
    assert len(pieces) == samples
    assert all(type(piece) is type(batch) for piece in pieces)
    if second is None:  # lists of samples, one within the other
        second = [batch[1]] if batch[0] is not None and len(batch) == samples and len(batch[0]) == 2 else None
        if second is None or isinstance(batch[0], list):
            second = type(batch)(part[1:2] for part in batch)
    assert plain(pieces[1]) == plain(second)


class Opaque:
    """As a graph of torch_geometric, which is no mapping and no sequence."""


REFUSED: dict[str, tuple[Any, int, str]] = {
    "two lengths": ({"a": torch.zeros(16, 4), "b": torch.zeros(8, 4)}, 16, r"batch\['b'\], a Tensor of shape \(8, 4\)"),
    "a graph": ({"x": torch.zeros(10, 3), "edge_index": torch.zeros(2, 40)}, 2, r"batch\['x'\]"),
    "an opaque batch": (Opaque(), 4, "batch, a Opaque"),
    "an opaque part": ({"x": torch.zeros(4), "meta": Opaque()}, 4, r"batch\['meta'\], a Opaque"),
    "names of classes": ({"x": torch.zeros(4), "classes": ["cat", "dog"]}, 4, r"batch\['classes'\], a list of 2 items"),
    "nothing in it": ({"temperature": 0.5}, 4, "a batch of dict, which counts 4"),
    "sparse": ([torch.zeros(4, 4).to_sparse()], 4, "not dense"),
    "nested": ([torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]), torch.zeros(2)], 2, "not dense"),
    "images or views": (([IMAGE, IMAGE, IMAGE], torch.zeros(3)), 3, "3 items that have 3 each"),
    "channels or images": ([IMAGE, IMAGE, IMAGE], 3, "3 items that have 3 each"),
}


@pytest.mark.parametrize(("batch", "samples", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_certain_is_refused_by_name(batch: Any, samples: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.*define split"):
        batches.split(batch, 1, samples)
    assert batches.split(batch, samples, samples) == [batch]


def test_packed_sequences_count_their_sequences_and_are_moved() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    assert batches.count((packed, torch.arange(2))).samples == 2
    doubled = nesting.map_tensors(lambda tensor: tensor.to(torch.float64) * 2, packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(doubled)
    assert padded.T.tolist() == [[0, 2, 4], [0, 2, 0]] and lengths.tolist() == [3, 2]


class Detect(hocket.Task):
    """The mean over samples of something that depends on each image and its boxes, and what it has been shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.shown: list[int] = []

    def forward(self, batch: Any) -> Any:
        images, targets = batch
        self.shown.append(len(images))
        each = zip(images, targets, strict=True)
        return torch.stack([self.weight * image.mean() * target["boxes"].sum() for image, target in each])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()

    def count(self, batch: Any) -> int:
        return len(batch[0])


@pytest.mark.parametrize("numbers", [(5, 2), (1, 2, 3), (3, 3, 1, 2)])
def test_detection_is_trained_the_same_in_microbatches(numbers) -> None:
    torch.manual_seed(0)
    batch = ([torch.rand(3, 8, 8) for _ in numbers], [boxes(number) for number in numbers])
    expected = sum(float(image.mean() * b["boxes"].sum()) for image, b in zip(*batch, strict=True)) / len(numbers)
    for microbatch in (None, 1, 2):
        task = Detect()
        hocket.Trainer(
            model=task, train_data=[batch], optimizer="sgd(lr=1.0)", duration="1ba", microbatch=microbatch
        ).fit()
        assert task.weight.item() == pytest.approx(1 - expected, rel=1e-5)
        assert sum(task.shown) == len(numbers) and max(task.shown) == (microbatch or len(numbers))


def graphs(sizes: list[int]) -> dict[str, Tensor]:
    """Nodes of all graphs, and which graph each belongs to."""
    return {
        "x": torch.arange(float(sum(sizes))),
        "graph": torch.tensor([i for i, n in enumerate(sizes) for _ in range(n)]),
    }


class Graphs(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Any:
        return torch.zeros(self.count(batch)).index_add(0, batch["graph"], batch["x"] * self.weight)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()

    def count(self, batch: Any) -> int:
        return int(batch["graph"].max()) + 1

    def split(self, batch: Any, size: int) -> Any:
        starts = range(0, self.count(batch), size)
        chosen = [(batch["graph"] >= start) & (batch["graph"] < start + size) for start in starts]
        return [
            {"x": batch["x"][mask], "graph": batch["graph"][mask] - start}
            for start, mask in zip(starts, chosen, strict=True)
        ]


def test_a_task_splits_its_batches_itself() -> None:
    for microbatch in (None, 1, 2):
        task = Graphs()
        hocket.Trainer(
            model=task, train_data=[graphs([2, 3, 1])], optimizer="sgd(lr=1.0)", duration="1ba", microbatch=microbatch
        ).fit()
        assert task.weight.item() == pytest.approx(1 - (0 + 1 + 2 + 3 + 4 + 5) / 3)


@pytest.mark.parametrize("of", [iter, tuple, lambda pieces: (piece for piece in pieces)])
def test_any_iterable_of_batches_is_a_split(of: Any) -> None:
    task = type("Lazy", (Graphs,), {"split": lambda self, batch, size: of(Graphs.split(self, batch, size))})()
    hocket.Trainer(
        model=task, train_data=[graphs([2, 3, 1])], optimizer="sgd(lr=1.0)", duration="1ba", microbatch=2
    ).fit()
    assert task.weight.item() == pytest.approx(1 - (0 + 1 + 2 + 3 + 4 + 5) / 3)


@pytest.mark.parametrize("returned", [None, 3, {}, torch.zeros(3)])
def test_what_is_no_list_of_batches_is_refused(returned: Any) -> None:
    task = type("Wrong", (Graphs,), {"split": lambda self, batch, size: returned})()
    with pytest.raises(TypeError, match=r"split\(batch, size\) of Wrong returned .*a list of batches"):
        hocket.Trainer(
            model=task, train_data=[graphs([1, 1])], optimizer="sgd(lr=1.0)", duration="1ba", microbatch=1
        ).fit()


@pytest.mark.parametrize("counted", ["3", None, 3.0, -3, (3, -1), (1, 2, 3), [3, 3], ()])
def test_counts_are_integers(counted: Any) -> None:
    """A negative number of samples trained on, and a duration in samples that never ended, without a word."""
    task = type("Wrong", (Detect,), {"count": lambda self, batch: counted})()
    batch = ([torch.rand(3, 8, 8)], [boxes(1)])
    with pytest.raises(ValueError, match=r"count\(batch\) of Wrong returned .* integers, 0 or more"):
        hocket.Trainer(model=task, train_data=[batch], optimizer="sgd(lr=1.0)", duration="1sp").fit()


@pytest.mark.parametrize("counted", [2, torch.tensor(2), (2, torch.tensor(5))])
def test_counts_may_be_any_integers(counted: Any) -> None:
    task = type("Right", (Detect,), {"count": lambda self, batch: counted if len(batch[0]) == 2 else len(batch[0])})()
    batch = ([torch.rand(3, 8, 8)] * 2, [boxes(1)] * 2)
    trainer = hocket.Trainer(model=task, train_data=[batch], optimizer="sgd(lr=1.0)", duration="2sp", microbatch=1)
    assert type(trainer.fit().timestamp.sample) is int and trainer.state.timestamp.sample == 2


@pytest.mark.parametrize("duration", ["1ep", "1sp"])
def test_an_epoch_without_samples_trains_nothing_and_says_so(duration: str) -> None:
    with pytest.raises(ValueError, match="1 batches of epoch 0 count 0 samples"):
        hocket.Trainer(
            model=nn.Linear(3, 2), loss=nn.functional.cross_entropy, optimizer="sgd(lr=1.0)", duration=duration,
            train_data=[(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))],
        ).fit()  # fmt: skip


@pytest.mark.parametrize("says", ["lost", "twice"])
def test_a_split_that_loses_or_repeats_samples_is_an_error(says) -> None:
    class Wrong(Graphs):
        def split(self, batch: Any, size: int) -> Any:
            pieces = super().split(batch, size)
            return pieces[:2] if says == "lost" else [pieces[0], *pieces]

    trainer = hocket.Trainer(
        model=Wrong(), train_data=[graphs([2, 3, 1])], optimizer="sgd(lr=1.0)", duration="1ba", microbatch=1
    )
    with pytest.raises(ValueError, match=f"3 samples was split .* {says}.*split and count of Wrong"):
        trainer.fit()


def test_without_a_count_of_its_own_a_batch_holds_fields() -> None:
    """Anchors, positives and negatives of three samples. Two views of two samples may be two samples of two views."""
    triplets = [torch.zeros(3, 4), torch.ones(3, 4), torch.ones(3, 4)]
    assert [len(piece) for piece in batches.split(triplets, 2)] == [3, 3]
    views = [[torch.zeros(2, 3), torch.ones(2, 3)], torch.arange(2)]
    assert batches.count(views).samples == 2
    with pytest.raises(ValueError, match="2 items that have 2 each"):
        batches.split(views, 1)


def test_lists_of_views_are_split_along_samples() -> None:
    """As default_collate makes them of samples that are lists."""
    batch = default_collate([([torch.tensor([i, 0.0]), torch.tensor([i, 1.0])], i) for i in range(5)])
    pieces = batches.split(batch, 2)
    assert [piece[1].tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert [view[:, 0].tolist() for view in pieces[1][0]] == [[2, 3], [2, 3]]


class Share:
    """The share of outputs whose largest is at the target."""

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.all += len(targets)

    def compute(self) -> float:
        return self.right / self.all


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [("x", "y"), (lambda batch: batch["x"], lambda batch: batch["y"])],
    ids=["names", "functions"],
)
def test_where_inputs_and_targets_are_is_said_once(inputs, targets) -> None:
    torch.manual_seed(0)
    net, batch = nn.Linear(3, 4), {"x": torch.rand(6, 3), "y": torch.arange(6) % 4, "name": ["a"] * 6}
    with torch.no_grad():
        outputs = net(batch["x"])
    expected = {
        "eval/loss": nn.functional.cross_entropy(outputs, batch["y"]).item(),
        "eval/right": (outputs.argmax(1) == batch["y"]).double().mean().item(),
    }
    settings = {"model": net, "loss": nn.functional.cross_entropy, "metrics": {"right": Share()}, "device": "cpu"}
    trainer = hocket.Trainer(**settings, inputs=inputs, targets=targets, eval_data=[batch])
    assert trainer.evaluate() == pytest.approx(expected)
    with pytest.raises(ValueError, match="targets= to the Trainer"):
        hocket.Trainer(
            **{**settings, "loss": lambda o, b: nn.functional.cross_entropy(o, b["y"])}, inputs="x", eval_data=[batch]
        ).evaluate()
    with pytest.raises(KeyError, match=r"nothing at 'label'.*'name'"):
        hocket.Trainer(**settings, inputs="x", targets="label", eval_data=[batch]).evaluate()


@pytest.mark.parametrize(
    "batch",
    [
        (torch.arange(10).reshape(5, 2), torch.arange(5)),
        {"image": torch.zeros(5, 3, 4, 4).contiguous(memory_format=torch.channels_last), "name": list("abcde")},
        [torch.arange(2), torch.arange(3), torch.arange(1), torch.arange(4), torch.arange(2)],
        {"x": np.arange(10).reshape(5, 2), "scale": 2.0},
        pack_sequence([torch.ones(4, 2), torch.zeros(3, 2), torch.ones(2, 2), torch.ones(2, 2), torch.ones(1, 2)]),
    ],
)
def test_samples_are_taken_by_a_tensor_of_indices_too(batch: Any) -> None:
    taken = batches.take_samples(batch, torch.tensor([0, 2, 3]), 5)
    assert repr(taken) == repr(batches.take_samples(batch, [0, 2, 3], 5)) != repr(batch)
    if isinstance(batch, dict) and "image" in batch:
        assert taken["image"].is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_of_indices_is_not_read_for_a_batch_of_tensors() -> None:
    inputs, indices = torch.arange(10).reshape(5, 2), torch.tensor([0, 2])
    with no_sync(simulate=True):
        taken = batches.take_samples((inputs, inputs[:, 0]), indices, 5)
    assert taken[0].equal(inputs[[0, 2]])
