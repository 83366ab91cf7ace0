"""A small network of blocks, its data, and what training it in one process gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit.ranks import run_ranks

WORDS, WIDTH = 12, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Embedding, three blocks, and a head that shares the embedding's weight; a buffer that no state dict holds."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(()) + 1, persistent=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x).flatten(0, 1)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def network(seed: int = 1, **options) -> Network:
    torch.manual_seed(seed)
    return Network(**options)


def data() -> DataLoader:
    """32 sequences of 6 words in batches of 8; the next word is to be predicted."""
    words = torch.randint(WORDS, (32, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(words, words.roll(1, 1)), 8)


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def trainer(model, strategy, folder, **options) -> hocket.Trainer:
    return hocket.Trainer(
        **{
            "model": model,
            "loss": loss,
            "train_data": data(),
            "global_batch": 8,
            "optimizer": adamw,
            "strategy": strategy,
            "precision": "fp64",
            "device": "cpu",
            "duration": "5ba",  # an epoch has four
            "folder": str(folder).removeprefix("file://"),
            **options,
        }
    )


def alone(folder, make=network, **options):
    """The weights that training in one process gives."""
    one = trainer(make(), "single", folder, **options)
    one.fit()
    return one.model_state_dict()


def ranks(world_size, make_strategy, folder, then=None, make=network, **options):
    """By rank: full weights after training from rank 0's, and what ``then`` makes of the Trainer."""

    def rank_main(rank):
        torch.manual_seed(rank)
        model = make(seed=1 + rank)
        made = {name: value() if name == "algorithms" else value for name, value in options.items()}
        one = trainer(model, make_strategy(), folder, **made)
        one.fit()
        return one.model_state_dict(), then and then(one)

    return run_ranks(rank_main, world_size, timeout=200)


def same(by_rank, expected, tolerance):
    """Every rank has plain names, full tensors on the CPU, the same bits, and the expected values."""
    for weights, *_ in by_rank:
        assert list(weights) == list(expected)
        assert {type(value) for value in weights.values()} == {torch.Tensor}
        torch.testing.assert_close(weights, by_rank[0][0], rtol=0, atol=0)
        torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)


def held(one: hocket.Trainer) -> int:
    """Bytes of parameters and optimizer state in this process."""
    tensors = list(one.state.task.parameters())
    for optimizer in one.state.optimizers:
        tensors += [value for values in optimizer.state.values() for value in values.values()]
    return sum((t.to_local() if hasattr(t, "to_local") else t).untyped_storage().nbytes() for t in tensors)
