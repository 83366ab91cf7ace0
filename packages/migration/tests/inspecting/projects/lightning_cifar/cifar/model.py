import lightning as L  #: maps
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F


class Base(L.LightningModule):  #: maps
    def on_train_epoch_start(self):  #: maps
        self.print("epoch", self.current_epoch)  #: maps

    def helper(self, batch):
        images, labels = batch
        return F.cross_entropy(self(images), labels)


class Classifier(Base):  #: maps
    example_input_array = torch.zeros(1, 3, 32, 32)  #: maps

    def __init__(self, width: int = 64, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()  #: maps
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, 10))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10)

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, batch_idx):  #: maps
        loss = self.helper(batch)
        self.log("train/loss", loss, prog_bar=True)  #: maps changes
        return loss

    def validation_step(self, batch, batch_idx):  #: maps
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log_dict(  #: maps
            {"val/loss": self.helper(batch), "val/accuracy": self.accuracy},
            on_epoch=True,  #: maps
            sync_dist=True,  #: changes
        )

    test_step = validation_step  #: maps

    def configure_optimizers(self):  #: maps
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)  #: maps
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.lr,  #: maps
            total_steps=self.trainer.estimated_stepping_batches,  #: maps changes
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# ruff: noqa
