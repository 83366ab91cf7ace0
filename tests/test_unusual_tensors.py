"""Sparse and quantized tensors of a model are resumed bitwise; what checkpoints cannot hold is refused before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import weights
from torch import Tensor, nn

import hocket
from hocket.basics.plain_data import decode, encode
from hocket.basics.plugin_errors import PlanError
from hocket.checkpoints import CheckpointError, export, read_weights
from hocket_checkpoints.reachable_state import fingerprint, same

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantiz")

DATA = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3) for i in range(6)]
DENSE = torch.diag(torch.arange(1.0, 5.0))
INTEGERS = torch.arange(16.0).view(4, 4)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "coo": DENSE.to_sparse,
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 2.0, 3.0], (4, 4)),
    "hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 4), (4, 4)),
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
    "quint8": lambda: torch.quantize_per_tensor(INTEGERS, 0.1, 3, torch.quint8),
    "qint8": lambda: torch.quantize_per_tensor(INTEGERS, 0.3, 0, torch.qint8),
    "qint32": lambda: torch.quantize_per_tensor(INTEGERS, 0.1, 3, torch.qint32),
    "channels": lambda: torch.quantize_per_channel(
        INTEGERS, torch.arange(1, 5) / 7, torch.zeros(4, dtype=torch.long), 1, torch.qint8
    ),
}


def parts(tensor: Tensor) -> list[Any]:
    """Return everything that a tensor consists of."""
    if tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        return [tensor.dtype, tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
    if tensor.is_quantized:
        scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [tensor.dtype, tensor.int_repr(), scales, points, tensor.q_per_channel_axis()]
    if tensor.layout is torch.sparse_coo:
        return [tensor.shape, tensor.is_coalesced(), tensor._indices(), tensor._values()]
    return [tensor.shape, tensor.layout, tensor.values(), tensor.to_dense()]


def equal(one: Tensor, other: Tensor) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(parts(one), parts(other), strict=True)
    )


class Graph(nn.Module):
    """Multiplies by an adjacency matrix, to which each batch adds entries with ``grows``."""

    adjacency: Tensor

    def __init__(self, adjacency: Tensor, persistent: bool = True, grows: Any = None) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency, persistent=persistent)
        torch.manual_seed(0)
        self.linear, self.grows = nn.Linear(4, 3), grows

    def forward(self, x: Tensor) -> Tensor:
        odd = self.adjacency
        dense = odd.dequantize() if odd.is_quantized else odd.to_dense() if odd.layout is not torch.strided else odd
        if self.grows is not None and self.training:
            self.adjacency = self.grows(dense + 0.1 * dense.roll(1, 0))
        return self.linear(x @ dense)


def trainer(model: nn.Module, **arguments: Any) -> hocket.Trainer:
    arguments = {"loss": "cross_entropy", "optimizer": "sgd(lr=0.01)", "duration": "6ba", "seed": 1, **arguments}
    return hocket.Trainer(model, DATA, device="cpu", **arguments)


@pytest.mark.parametrize("kind", TENSORS)
def test_plain_data_of_them_is_the_same_tensor_again(kind: str) -> None:
    tensor = TENSORS[kind]()
    again = decode(encode({"a": [tensor]}))["a"][0]
    assert equal(again, tensor)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_buffer_is_resumed_bitwise(kind: str) -> None:
    def made(**arguments: Any) -> hocket.Trainer:
        return trainer(Graph(TENSORS[kind]()), **arguments)

    whole = made()
    whole.fit()
    made(checkpoints=hocket.Checkpoints("c", every="1ba")).fit("3ba")
    # The tensor comes from the checkpoint.
    other = TENSORS[kind]() if kind == "channels" or TENSORS[kind]().is_quantized else TENSORS[kind]() * 2
    resumed = trainer(Graph(other), checkpoints=hocket.Checkpoints("c", every="1ba"), resume="auto")
    resumed.fit()
    assert all(map(torch.equal, weights(resumed.state.model.linear), weights(whole.state.model.linear)))  # type: ignore[arg-type]
    assert equal(resumed.state.model.adjacency, whole.state.model.adjacency)  # type: ignore[arg-type]
    assert resumed.evaluate({"t": DATA}, checkpoint="latest") == whole.evaluate({"t": DATA})
    assert equal(read_weights(f"c/{resumed.result().checkpoints[-1]}")["adjacency"], TENSORS[kind]())


@pytest.mark.parametrize("grows", [Tensor.to_sparse, Tensor.to_sparse_csr, lambda dense: dense.to_sparse_bsr((2, 2))])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.filterwarnings("ignore:early", "ignore:The values")
def test_one_that_grows_in_training_is_resumed(grows: Callable[[Tensor], Tensor], persistent: bool) -> None:
    def made(**arguments: Any) -> hocket.Trainer:
        return trainer(Graph(grows(torch.eye(4)), persistent, grows), **arguments)

    whole = made()
    whole.fit()
    made(checkpoints=hocket.Checkpoints("c", every="1ba", asynchronous=True)).fit("3ba")
    resumed = made(checkpoints=hocket.Checkpoints("c", every="1ba"), resume="auto")
    resumed.fit()
    assert all(map(torch.equal, weights(resumed.state.model.linear), weights(whole.state.model.linear)))  # type: ignore[arg-type]
    assert equal(resumed.state.model.adjacency, whole.state.model.adjacency)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", TENSORS)
def test_a_new_tensor_at_the_address_of_a_freed_one_is_another(kind: str) -> None:
    tensor = TENSORS[kind]()
    first, address = fingerprint(tensor), id(tensor)
    assert same(first, fingerprint(tensor))
    for _ in range(100):
        del tensor
        tensor = TENSORS[kind]()
        if id(tensor) == address:
            break
    assert not same(first, fingerprint(tensor))


@pytest.mark.parametrize("kind", ["coo", "csr", "qint8", "channels"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"algorithms": [{"ema": {"half_life": "2ba"}}]},
        {"algorithms": [{"swa": {"start": "0dur", "update_interval": "1ba"}}]},
        {"callbacks": [{"early-stopping": {"monitor": "eval/loss"}}]},
        {"algorithms": [{"loss-spike-guard": {"every": 2, "warmup": 1, "window": 2}}]},
    ],
    ids=lambda arguments: str(next(iter(next(iter(arguments.values()))[0]))),
)
@pytest.mark.filterwarnings("ignore:The loss spiked")
def test_plug_ins_that_copy_the_model_keep_them(kind: str, arguments: dict[str, Any]) -> None:
    made = trainer(Graph(TENSORS[kind]()), eval_data=DATA, eval_every="2ba", **arguments)
    assert made.fit().metrics["eval/loss"] > 0
    assert equal(made.state.model.adjacency, TENSORS[kind]())  # type: ignore[arg-type]


def test_weights_only_and_export() -> None:
    made = trainer(Graph(TENSORS["csr"]()), checkpoints=hocket.Checkpoints("c", weights_only=True))
    (name,) = made.fit().checkpoints
    assert not made.load_weights(f"c/{name}")
    with pytest.raises(CheckpointError, match=r"adjacency of .* is sparse or quantized, and safetensors"):
        export(f"c/{name}", "weights.safetensors")


def test_quantized_modules_are_resumed() -> None:
    from torch.ao.nn.quantized.dynamic import Linear

    def quantized(scale: float) -> nn.Module:
        made: nn.Module = Linear(4, 4)
        made.set_weight_bias(torch.quantize_per_tensor(INTEGERS, scale, 0, torch.qint8), torch.ones(4))  # type: ignore[operator]
        torch.manual_seed(0)
        return nn.Sequential(made, nn.Linear(4, 3))

    whole = trainer(quantized(0.2))
    whole.fit()
    trainer(quantized(0.2), checkpoints=hocket.Checkpoints("c", every="1ba")).fit("3ba")
    resumed = trainer(quantized(0.4), checkpoints=hocket.Checkpoints("c", every="1ba"), resume="auto")
    resumed.fit()
    assert all(map(torch.equal, weights(resumed.state.model[1]), weights(whole.state.model[1])))  # type: ignore[index]


@pytest.mark.parametrize("persistent", [True, False])
def test_others_are_refused_before_training(persistent: bool) -> None:
    odd = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(PlanError, match=r"cannot hold adjacency of Graph: it is a nested tensor.*without checkpoints="):
        trainer(Graph(odd, persistent), checkpoints="c")
    rows = torch.quantize_per_channel(INTEGERS, torch.ones(4), torch.ones(4), 0, torch.quint8)
    with pytest.raises(PlanError, match=r"quantized tensor .*float_qparams"):
        trainer(Graph(rows, persistent), checkpoints="c")


class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.eye(4).to_sparse()), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sparse.mm(self.weight, x.T).T)


def test_trained_sparse_weights() -> None:
    trainer(SparseWeight(), checkpoints="c").fit()
    for name in ("ema", "swa"):
        with pytest.raises(PlanError, match="weight of SparseWeight is sparse"):
            trainer(SparseWeight(), algorithms=[name]).fit()


def test_parts_that_do_not_fit_are_refused() -> None:
    tree = encode({"a": TENSORS["coo"]()})
    tree["a"]["~tensor"]["indices"] += 100
    with pytest.raises(ValueError, match="do not fit together"):
        decode(tree)
    tree = encode({"a": TENSORS["channels"]()})
    tree["a"]["~tensor"]["axis"] = 7
    with pytest.raises(ValueError, match="do not fit together"):
        decode(tree)
