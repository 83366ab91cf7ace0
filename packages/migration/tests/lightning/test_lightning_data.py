"""The data of a fit, an evaluation or a prediction is what Lightning makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import modules as m
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from hocket_migration.lightning import Trainer


def described(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, list | tuple):
        return type(batch)(map(described, batch))
    if isinstance(batch, dict):
        return {key: described(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, np.ndarray) else batch


class Notes(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(described(batch))
        return self.layer.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((described(batch), batch_idx, dataloader_idx))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return described(batch), batch_idx, dataloader_idx


def loader(samples: int) -> Any:
    return DataLoader(RandomDataset(32, samples))


COLLECTIONS: dict[str, Callable[[], Any]] = {
    "list of tensors": lambda: [torch.ones(2, 32), torch.ones(2, 32)],
    "pairs": lambda: [(torch.ones(2, 32), torch.ones(2)), (torch.ones(3, 32), torch.ones(3))],
    "lists": lambda: [[0, 1], [2, 3]],
    "one list": lambda: [0, 1, 2],
    "range": lambda: range(2),
    "ranges": lambda: [range(2), range(3)],
    "loaders": lambda: [loader(2), loader(3)],
    "loader and list": lambda: [loader(2), [torch.ones(2, 32), torch.ones(2, 32)]],
    "dict of lists": lambda: {"a": [0, 1], "b": [2, 3, 4]},
    "strings": lambda: ["ab", "cd"],
    "arrays": lambda: [np.ones((2, 3)), np.ones((2, 3))],
    "data sets": lambda: [RandomDataset(32, 2), RandomDataset(32, 3)],
    "tensor": lambda: torch.ones(3, 32),
    "empty": lambda: [],
}


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("kind", COLLECTIONS)
def test_lists_and_other_collections_are_loaders(kind: str, verb: str) -> None:
    found = []
    for trainer_class in (Trainer, pl.Trainer):
        module, without = Notes(), {"limit_val_batches": 0} if verb == "fit" else {}
        trainer = trainer_class(**m.arguments(max_epochs=1, **without))
        returned = getattr(trainer, verb)(module, COLLECTIONS[kind]())
        found.append(returned if verb == "predict" else module.seen)
    assert found[0] == found[1]


class Reloads(m.LitAutoEncoder):
    """Each loader that it makes has another number of batches."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.made: list[tuple[str, float]] = []
        self.several = several

    def _made(self, name: str, samples: int, seed: int) -> Any:
        epoch = self.trainer.current_epoch
        data = m.pairs(samples + 8 * (epoch % 3), 8, seed + epoch)
        made = DataLoader(data, batch_size=4, shuffle=name == "train")
        return [made, DataLoader(m.pairs(7, 8, 5), batch_size=4)] if self.several else made

    def train_dataloader(self) -> Any:
        return self._made("train", 8, 1)

    def val_dataloader(self) -> Any:
        return self._made("val", 3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.made.append((str(self.trainer.is_last_batch), self.trainer.num_training_batches))
        return super().training_step(batch[0] if self.several else batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.made.append((f"{batch_idx}", dataloader_idx))
        self.log("val_loss", self._reconstruct(batch))


@pytest.mark.parametrize(
    "how",
    [
        {"reload_dataloaders_every_n_epochs": 1},
        {"reload_dataloaders_every_n_epochs": 2, "limit_train_batches": 0.5},
        {"reload_dataloaders_every_n_epochs": 1, "accumulate_grad_batches": 2, "limit_val_batches": 1},
        {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_loaders_are_reloaded_in_the_epochs_of_lightning(several: bool, how: dict[str, Any]) -> None:
    ours, theirs = m.compare(lambda: Reloads(several), max_epochs=5, rates=False, **how)
    assert ours.lightning_module.made == theirs.lightning_module.made
    assert ours.num_training_batches == theirs.num_training_batches
    assert ours.num_val_batches == theirs.num_val_batches


class Asked(BoringModel):
    """Notes in which epochs validation loaders are asked for, and with how many batches each epoch is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def val_dataloader(self) -> Any:
        self.seen.append((self.trainer.current_epoch, self.trainer.sanity_checking))
        return DataLoader(RandomDataset(32, 1 + len(self.seen)))

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.trainer.num_val_batches)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("reload", [1, 2, 3])
def test_the_loaders_of_a_sanity_check_serve_its_epoch_only_if_that_is_validated(reload: int, every: int) -> None:
    found = []
    how = {"reload_dataloaders_every_n_epochs": reload, "check_val_every_n_epoch": every, "limit_train_batches": 1}
    for trainer_class in (Trainer, pl.Trainer):
        module = Asked()
        trainer_class(**m.arguments(max_epochs=7, **how)).fit(module)
        found.append(module.seen)
    assert found[0] == found[1]


def test_the_number_of_epochs_between_two_loaders_is_checked() -> None:
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs=-1"):
        Trainer(reload_dataloaders_every_n_epochs=-1)


class Epochs(DistributedSampler[Any]):
    def __init__(self, data: Any, noted: list[int]) -> None:
        super().__init__(data, num_replicas=1, rank=0)
        self.noted = noted

    def set_epoch(self, epoch: int) -> None:
        self.noted.append(epoch)
        super().set_epoch(epoch)


@pytest.mark.parametrize(
    "form", [lambda each: each, lambda each: [each], lambda each: CombinedLoader(each, "max_size")]
)
@pytest.mark.parametrize("how", [{}, {"val_check_interval": 0.5}, {"num_sanity_val_steps": 0}])
def test_samplers_of_validation_loaders_know_the_epoch(how: dict[str, Any], form: Any) -> None:
    noted = []
    for trainer_class in (Trainer, pl.Trainer):
        epochs: list[int] = []
        data = RandomDataset(32, 4)
        trainer = trainer_class(**m.arguments(max_epochs=3, **how))
        trainer.fit(BoringModel(), DataLoader(data), form(DataLoader(data, sampler=Epochs(data, epochs))))
        noted.append(epochs)
    assert noted[0] == noted[1]


class Longer:
    """A loader with a length that never ends."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        while True:
            yield torch.ones(1, 32)


def test_data_that_is_longer_than_it_says_ends_at_its_length() -> None:
    found = []
    for trainer_class in (Trainer, pl.Trainer):
        trainer = trainer_class(**m.arguments(max_epochs=2))
        module = Notes()
        trainer.fit(module, Longer(), Longer())
        trainer.validate(module, Longer(), verbose=False)
        found.append((len(module.seen), trainer.global_step, len(trainer.predict(module, Longer()))))
    assert found[0] == found[1]
