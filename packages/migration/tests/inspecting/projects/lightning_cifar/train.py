"""Train a classifier of CIFAR-10."""

import lightning as L  #: maps
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor  #: maps
from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint  #: maps
from lightning.pytorch.cli import LightningCLI  #: changes
from lightning.pytorch.loggers import TensorBoardLogger  #: maps

from cifar.callbacks import Images
from cifar.data import CIFARData
from cifar.model import Classifier


def main(options: dict):
    L.seed_everything(7, workers=True)  #: maps
    data, model = CIFARData(), Classifier(lr=0.05)
    best = ModelCheckpoint(monitor="val/loss", save_top_k=2)  #: maps
    trainer = L.Trainer(  #: maps
        max_epochs=30,  #: maps
        accelerator="auto",  #: maps
        devices=2,  #: maps
        strategy="ddp",  #: maps
        precision="bf16-mixed",  #: maps
        accumulate_grad_batches=4,  #: changes
        gradient_clip_val=1.0,  #: maps
        callbacks=[best, EarlyStopping("val/loss"), LearningRateMonitor(), Images()],  #: maps
        logger=TensorBoardLogger("logs"),  #: maps
        reload_dataloaders_every_n_epochs=1,  #: none
        **options,  #: unread
    )
    trainer.fit(model, datamodule=data, ckpt_path="last")  #: maps
    trainer.test(  #: maps
        model,
        datamodule=data,  #: maps
        ckpt_path=best.best_model_path,  #: maps
    )
    return Classifier.load_from_checkpoint(best.best_model_path)  #: maps


def cli():
    LightningCLI(Classifier, CIFARData, save_config_kwargs={"overwrite": True})  #: changes


if __name__ == "__main__":
    main({"max_steps": 1000})

# ruff: noqa
