import canary
import torch
from lightning.pytorch import LightningDataModule  #: maps
from torch.utils.data import DataLoader, random_split
from torchvision.datasets import CIFAR10


class CIFARData(LightningDataModule):  #: maps
    def __init__(self, folder: str = "data", batch_size: int = 128):
        super().__init__()
        self.save_hyperparameters()  #: maps

    def prepare_data(self):  #: maps
        CIFAR10(self.hparams.folder, download=True)  #: maps

    def setup(self, stage):  #: maps
        full = CIFAR10(self.hparams.folder)  #: maps
        generator = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(full, [45000, 5000], generator)
        self.test = CIFAR10(self.hparams.folder, train=False)  #: maps

    def train_dataloader(self):  #: maps
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)  #: maps

    def val_dataloader(self):  #: maps
        return DataLoader(self.val, self.hparams.batch_size)  #: maps

    def test_dataloader(self):  #: maps
        return DataLoader(self.test, self.hparams.batch_size)  #: maps

    def teardown(self, stage):  #: maps
        if self.trainer.is_global_zero:  #: maps
            print(canary)


# ruff: noqa
