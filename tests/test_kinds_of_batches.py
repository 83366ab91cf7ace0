"""Batches as people have them: each is counted, moved, split over microbatches and ranks, and joined, exactly.

Each model has one weight w = 1, and its loss is the mean over samples of w times a value of each sample. After one step of SGD
with learning rate 1 the weight is 1 minus the mean of these values, which every test computes by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import hocket
from hocket.data import count, join, map_tensors, move, register_batch, split
from hocket_testkit import run_ranks

SEQUENCES = [torch.arange(1.0, n + 1) * (n + 1) for n in (2, 5, 1, 3, 4)]
IMAGES = [torch.full((3, 4, 4 + n), float(n)) for n in range(5)]
BOXES = [torch.full((n + 1, 4), n + 1.0) for n in range(5)]


@dataclasses.dataclass(frozen=True)
class Inner:
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    inner: Inner
    doubled: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x * 10)  # not idempotent: a second call would change the values
        object.__setattr__(self, "doubled", self.x * 2)


@attrs.frozen
class Attrs:
    x: Tensor
    names: list[str]


class Plain:
    """A class as the tutorial about pinned memory has it."""

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        self.x, self.y = torch.tensor(pairs).T


class Registered:
    def __init__(self, values: list[float], device: str = "cpu") -> None:
        self.values, self.device = values, device

    def to(self, device: Any) -> Registered:
        return Registered(self.values, str(device))


register_batch(
    Registered,
    count=lambda batch: len(batch.values),
    take=lambda batch, indices: Registered([batch.values[index] for index in indices]),
    join=lambda parts: Registered([value for part in parts for value in part.values]),
)


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def sums(sequences: Any) -> Tensor:
    return torch.stack([sequence.sum() for sequence in sequences])


def detection(batch: Any) -> Tensor:
    images, targets = batch
    assert len(images) == len(targets)
    return torch.stack([i.mean() * t["boxes"].sum() for i, t in zip(images, targets, strict=True)])


def shared() -> tuple[Tensor, Tensor]:
    """Two jagged tensors with the same offsets, which may be added."""
    first = jagged(SEQUENCES)
    return first, torch.nested.nested_tensor_from_jagged(first.values() * 2, first.offsets())


five = torch.arange(5.0)
#: The batch of five samples, the value of each sample, and those values by hand.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor], list[float]]] = {
    "detection": (
        lambda: (IMAGES, [{"boxes": each, "labels": torch.ones(len(each))} for each in BOXES]), detection,
        [n * (n + 1) * 4 * (n + 1.0) for n in range(5)],
    ),
    "detection, zipped": (
        lambda: tuple(zip(*[(i, {"boxes": b}) for i, b in zip(IMAGES, BOXES, strict=True)], strict=True)), detection,
        [n * (n + 1) * 4 * (n + 1.0) for n in range(5)],
    ),
    "a list of dicts": (
        lambda: [{"image": i, "boxes": b, "id": 7} for i, b in zip(IMAGES, BOXES, strict=True)],
        lambda batch: torch.stack([each["image"].mean() * each["boxes"].sum() for each in batch]),
        [n * (n + 1) * 4 * (n + 1.0) for n in range(5)],
    ),
    "a list of pairs": (
        lambda: list(zip(IMAGES, range(5), strict=True)),
        lambda batch: torch.stack([image.mean() * label for image, label in batch]), [n * n for n in range(5)],
    ),
    "ragged lists": (
        lambda: (SEQUENCES, [each * 2 for each in SEQUENCES]), lambda batch: sums(batch[0]) + sums(batch[1]),
        [3 * 9, 3 * 90, 3 * 2, 3 * 24, 3 * 50],
    ),
    "ragged by name": (
        lambda: {"x": SEQUENCES, "y": five}, lambda batch: sums(batch["x"]) * batch["y"], [0, 90, 4, 72, 200]
    ),
    "packed": (
        lambda: (pack_sequence(SEQUENCES, enforce_sorted=False), five),
        lambda batch: sums(unpack_sequence(batch[0])) * batch[1], [0, 90, 4, 72, 200],
    ),
    "packed in order": (
        lambda: (pack_sequence(sorted(SEQUENCES, key=len, reverse=True)), five),
        lambda batch: sums(unpack_sequence(batch[0])) * batch[1], [0, 50, 48, 27, 8],
    ),
    "frozen dataclasses": (
        lambda: Record(five, Inner(five + 1)), lambda batch: batch.x * batch.inner.y + batch.doubled,
        [10 * n * (n + 1) + 20 * n for n in range(5)],
    ),
    "a namespace": (
        lambda: SimpleNamespace(x=five, y=five + 1, name="a"), lambda batch: batch.x * batch.y,
        [n * (n + 1) for n in range(5)],
    ),
    "attrs": (
        lambda: Attrs(five, list("abcde")), lambda batch: batch.x * (1 + len(batch.names) - len(batch.x)), [*range(5)]
    ),
    "an object": (lambda: Plain([(n, n + 1) for n in range(5)]), lambda batch: batch.x * batch.y, [0, 2, 6, 12, 20]),
    "a registered class": (
        lambda: (Registered([*range(5)]), five), lambda batch: torch.tensor(batch[0].values) * batch[1],
        [n * n for n in range(5)],
    ),
    "jagged": (
        lambda: (jagged(SEQUENCES), five), lambda batch: sums(batch[0].unbind()) * batch[1], [0, 90, 4, 72, 200]
    ),
    "jagged, added": (shared, lambda batch: sums((batch[0] + batch[1]).unbind()), [27, 270, 6, 72, 150]),
}  # fmt: skip


class Mean(hocket.Task):
    def __init__(self, values: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.weight, self.values = nn.Parameter(torch.ones(())), values
        self.sizes: list[int] = []

    def forward(self, batch: Any) -> Any:
        values = self.values(batch)
        self.sizes.append(len(values))
        return self.weight * values

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()


def trained(kind: str, **arguments: Any) -> tuple[float, list[int], int]:
    make, values, _ = KINDS[kind]
    task = Mean(values)
    trainer = hocket.Trainer(
        model=task, train_data=[make()], optimizer="sgd(lr=1.0)", duration="1ba", loss_reduction="mean", device="cpu",
        **arguments,
    )  # fmt: skip
    trainer.fit()
    return task.weight.item(), task.sizes, trainer.state.timestamp.sample


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_are_exact(kind: str) -> None:
    expected = 1 - sum(KINDS[kind][2]) / 5
    for microbatch, sizes in ((None, [5]), (2, [2, 2, 1]), (1, [1] * 5)):
        weight, seen, samples = trained(kind, microbatch=microbatch)
        assert weight == pytest.approx(expected, rel=1e-6)
        assert (seen, samples) == (sizes, 5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
def test_slices_over_ranks_are_exact() -> None:
    def rank_main(rank: int) -> list[Any]:
        return [trained(kind, strategy="ddp", global_batch=5) for kind in KINDS]

    first, second = run_ranks(rank_main, 2, timeout=120)
    for kind, one, other in zip(KINDS, first, second, strict=True):
        assert one == (pytest.approx(1 - sum(KINDS[kind][2]) / 5, rel=1e-6), [3], 5), kind
        assert other[0] == one[0] and other[1] == [2], kind


def tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a registered class"])
def test_join_undoes_split_and_moving_keeps_types(kind: str) -> None:
    batch = KINDS[kind][0]()
    again = join(split(batch, 2))
    assert type(again) is type(batch) and count(again) == count(batch) == (5, 0)
    assert KINDS[kind][1](again).tolist() == KINDS[kind][1](batch).tolist() == KINDS[kind][2]
    moved = move(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    lengths = sum(isinstance(part, PackedSequence) for part in (batch if isinstance(batch, tuple) else ()))
    assert all(tensor.is_meta for tensor in tensors(moved)) or lengths
    assert not any(tensor.is_meta for tensor in tensors(batch)), "the batch that was given stays"


def test_a_packed_sequence_is_split_into_packed_sequences_of_the_same_kind() -> None:
    for enforce_sorted, sequences in ((False, SEQUENCES), (True, sorted(SEQUENCES, key=len, reverse=True))):
        packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
        parts = split(packed, 2)
        for part, expected in zip(parts, (sequences[:2], sequences[2:4], sequences[4:]), strict=True):
            assert [each.tolist() for each in unpack_sequence(part)] == [each.tolist() for each in expected]
            assert (part.sorted_indices is None) == enforce_sorted
        again = join(parts)
        for one, other in zip(again, packed, strict=True):
            assert one is other is None or torch.equal(one, other)


class Detector(nn.Module):
    """It is called as those of torchvision, and its losses are means over images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if self.training and targets is None:
            raise AssertionError("targets should not be none when in training mode")
        if targets is None or not self.training:
            return [{"boxes": image.mean() * self.weight} for image in images]
        values = detection((images, targets))
        return {"classes": (self.weight * values).mean(), "boxes": (self.weight * 2 * values).mean()}


class Detection(hocket.Task):
    """As in docs/tutorials/your-model.md."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> Any:
        images, targets = batch
        return self.network(images, targets)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs

    def eval_forward(self, batch: Any) -> Any:
        return self.network(batch[0])


def test_a_detector_is_trained_by_a_task_and_predicts() -> None:
    data = list(zip(IMAGES, [{"boxes": each} for each in BOXES], strict=True))
    loader: Any = torch.utils.data.DataLoader(
        data, batch_size=5, collate_fn=lambda samples: tuple(zip(*samples, strict=True))
    )
    for microbatch in (None, 2):
        network = Detector()
        trainer = hocket.Trainer(
            model=Detection(network), train_data=loader, optimizer="sgd(lr=1.0)", duration="1ep",
            microbatch=microbatch, loss_reduction="mean", device="cpu",
        )  # fmt: skip
        trainer.fit()
        assert network.weight.item() == pytest.approx(1 - 3 * sum(KINDS["detection"][2]) / 5)
        assert [len(outputs) for outputs in trainer.predict(loader)] == [5]
    with pytest.raises(AssertionError) as caught:
        hocket.Trainer(model=Detector(), train_data=loader, optimizer="sgd(lr=1.0)", duration="1ep", device="cpu").fit()
    assert "Write a hocket.Task whose forward(self, batch) returns self.network(*batch)" in caught.value.__notes__[0]


class Moving:
    """An object that moves itself in place and returns nothing, and one that belongs to another library's units."""

    def __init__(self) -> None:
        self.device = "cpu"

    def to(self, device: Any) -> None:
        self.device = str(device)


def test_objects_are_moved_by_their_own_method_as_copies() -> None:
    given = Moving()
    moved = move({"x": torch.zeros(2), "meta": given}, torch.device("meta"))
    assert moved["meta"].device == "meta" and given.device == "cpu"
    assert move((Registered([1.0]), 3), torch.device("meta"))[0].device == "meta"


AMBIGUOUS: dict[str, Any] = {
    "ragged sequences of the same length": ([torch.zeros(5), torch.ones(5)], [torch.zeros(5), torch.ones(5)]),
    "views without labels": {"views": [torch.zeros(8, 3), torch.zeros(8, 3)]},
    "pairs of sequences": [(torch.zeros(3), torch.zeros(2)), (torch.zeros(3), torch.zeros(1)), (torch.zeros(3),) * 2],
    "a ragged list alone": [torch.zeros(5), torch.zeros(7), torch.zeros(2)],
    "a graph of torch_geometric without a batch": SimpleNamespace(x=torch.zeros(9, 3), edge_index=torch.zeros(2, 4)),
}


@pytest.mark.parametrize("batch", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_is_not_certain_is_not_counted(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"Cannot tell how many samples .* define count\(batch\) in a hocket.Task"):
        count(batch)


def test_sparse_tensors_are_counted_and_not_split() -> None:
    batch = (torch.eye(4).to_sparse(), torch.arange(4))
    assert count(batch).samples == 4
    with pytest.raises(ValueError, match=r"batch\[0\], a Tensor that is sparse.*define split"):
        split(batch, 2)


def test_only_classes_of_batches_are_registered() -> None:
    for wrong in (dict, Tensor, object, "dgl.DGLGraph"):
        with pytest.raises(TypeError, match="It takes a class of batches"):
            register_batch(wrong, count=len, take=lambda batch, indices: batch, join=list)  # type: ignore[arg-type]


def test_a_tensordict_is_split_as_one() -> None:
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": torch.arange(5.0), "y": torch.zeros(5, 2)}, batch_size=[5])
    parts = split(batch, 2)
    assert [part.batch_size for part in parts] == [(2,), (2,), (1,)] and count(batch).samples == 5
    assert join(parts)["x"].tolist() == [0, 1, 2, 3, 4] and type(join(parts)) is type(batch)
    assert move(batch, torch.device("meta"))["x"].is_meta and not batch["x"].is_meta


def test_graph_batches_are_counted_moved_split_and_joined() -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    graphs = [
        geometric.Data(
            x=torch.full((n, 2), float(n)), edge_index=torch.zeros(2, n, dtype=torch.long), y=torch.tensor([n])
        )
        for n in (2, 3, 4)
    ]
    batch = geometric.Batch.from_data_list(graphs, follow_batch=["x"])
    assert count(batch).samples == count((batch, torch.zeros(3))).samples == 3
    parts = split(batch, 2)
    assert [part.num_graphs for part in parts] == [2, 1] and parts[1].x.tolist() == [[4.0, 4.0]] * 4
    assert parts[0].x_batch.tolist() == [0, 0, 1, 1, 1] == parts[0].batch.tolist()
    again = join(parts)
    assert all(torch.equal(again[key], batch[key]) for key in batch.keys()) and again.num_graphs == 3  # noqa: SIM118
    moved = move(batch, torch.device("meta"))
    assert moved.x.is_meta and moved.num_graphs == 3 and not batch.x.is_meta
    assert map_tensors(lambda tensor: tensor * 2, batch).y.tolist() == [4, 6, 8] and batch.y.tolist() == [2, 3, 4]
    batch.added = torch.zeros(3)
    with pytest.raises(ValueError, match="has added, which was added after the graphs were collated"):
        split(batch, 2)


def test_a_plain_model_trains_on_graph_batches_exactly() -> None:
    geometric = pytest.importorskip("torch_geometric.data")

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1, bias=False)

        def forward(self, batch: Any) -> Tensor:
            sums = torch.zeros(batch.num_graphs, 2).index_add(0, batch.batch, batch.x)
            return self.layer(sums).squeeze(1)

    graphs = [geometric.Data(x=torch.rand(n, 2), y=torch.tensor([float(n)])) for n in (2, 3, 4, 1, 2)]
    trained = []
    for microbatch in (None, 2):
        torch.manual_seed(0)
        model = Pool()
        start = model.layer.weight.detach().clone()
        inputs = torch.stack([graph.x.sum(0) for graph in graphs])
        errors = inputs @ start[0] - torch.tensor([2.0, 3, 4, 1, 2])
        expected = start[0] - 0.1 * (2 * errors[:, None] * inputs).mean(0)
        hocket.Trainer(
            model=model, loss=nn.functional.mse_loss, targets="y", train_data=[geometric.Batch.from_data_list(graphs)],
            optimizer="sgd(lr=0.1)", duration="1ba", microbatch=microbatch, device="cpu",
        ).fit()  # fmt: skip
        trained.append(model.layer.weight.detach()[0])
        torch.testing.assert_close(trained[-1], expected, rtol=1e-5, atol=1e-6)
