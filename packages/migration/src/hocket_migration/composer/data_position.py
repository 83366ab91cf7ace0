"""The position in the training data at which a checkpoint of mosaicml's was taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import hocket


class _Nothing(hocket.Task):
    """A task that is never trained: all its batches are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> Any:
        return self.weight

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs * 0.0  # type: ignore[no-any-return]  # the weight

    def count(self, batch: Any) -> int:
        return 1


class _Skip(hocket.Callback):
    """Skip every batch."""

    def batch_start(self, state: hocket.State) -> None:
        state.request(hocket.Decision.SKIP_BATCH)


class _Indices(Dataset[int]):
    """The length of a data set, without its samples."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def of(trainer: hocket.Trainer, now: Mapping[str, Any], seed: int) -> tuple[Any, int, int]:
    """Return the position in the Trainer's data, after ``now["batch_in_epoch"]`` batches of epoch ``now["epoch"]``.

    Also return epoch and batch of the epoch there: after the last batch of an epoch, those of the beginning of the next.

    The batches before it are drawn, in a Trainer that skips them, with mosaicml's seed. Of a DataLoader over a map-style data
    set only the indices are drawn, so that nothing is loaded. So a shuffled epoch continues in mosaicml's order if nothing
    but the loader drew random numbers, which is what mosaicml relies on too.
    """
    data = trainer.state.train_data
    if data is None:
        return None, now["epoch"], now["batch_in_epoch"]
    skipping = hocket.Trainer(
        _Nothing(), _without_samples(data), optimizer="sgd(lr=0.0)", callbacks=[_Skip()], device="cpu", seed=seed,
        limit_train=trainer.settings.limit_train, strategy="single", log_every="1000000ba",
    )  # fmt: skip
    if now["epoch"]:
        skipping.fit(f"{now['epoch']}ep")
    if now["batch_in_epoch"]:
        skipping.fit(f"{now['batch_in_epoch']}ba")
    tree = skipping.state_dict()
    skipping.close()
    return tree["ranks"][0]["data"], tree["timestamp"]["epoch"], tree["timestamp"]["batch_in_epoch"]


def _without_samples(data: Any) -> Any:
    plain = type(data) is DataLoader and data.batch_sampler is not None and hasattr(data.dataset, "__getitem__")
    if not plain:
        return data
    return DataLoader(_Indices(len(data.dataset)), batch_sampler=data.batch_sampler)
