import canary
import pytorch_lightning as pl  #: maps
import torch
from pytorch_lightning import Trainer as T  #: maps
from torch import nn


class GAN(pl.LightningModule):  #: maps
    def __init__(self, latent=16):
        super().__init__()
        self.automatic_optimization = False  #: maps
        self.generator = nn.Linear(latent, 64)
        self.discriminator = nn.Linear(64, 1)
        self.latent = latent

    def training_step(self, batch, batch_idx):  #: maps
        generator_step, discriminator_step = self.optimizers()  #: maps
        noise = torch.randn(len(batch), self.latent, device=self.device)  #: maps
        fake = self.generator(noise)

        self.toggle_optimizer(generator_step)  #: changes
        loss = nn.functional.softplus(-self.discriminator(fake)).mean()
        generator_step.zero_grad()
        self.manual_backward(loss)  #: maps
        self.clip_gradients(generator_step, gradient_clip_val=0.5)  #: maps
        generator_step.step()
        self.untoggle_optimizer(generator_step)  #: changes

        real = nn.functional.softplus(-self.discriminator(batch)).mean()
        false = nn.functional.softplus(self.discriminator(fake.detach())).mean()
        discriminator_step.zero_grad()
        self.manual_backward(real + false)  #: maps
        discriminator_step.step()
        self.log_dict({"real": real, "fake": false}, prog_bar=True)  #: maps changes
        if self.trainer.is_last_batch:  #: maps
            for scheduler in self.lr_schedulers():  #: maps
                scheduler.step()
        canary.sing()

    def on_train_epoch_end(self):  #: maps
        self.logger.experiment.add_scalar("done", self.global_step)  #: maps changes

    def training_epoch_end(self, outputs):  #: changes
        pass

    def configure_optimizers(self):  #: maps
        first = torch.optim.Adam(self.generator.parameters(), lr=2e-4)
        second = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4)
        return [first, second], []


def run(made: "pl.Trainer", model):  #: maps
    made.fit(model)  #: maps
    return made.callback_metrics  #: maps


trainer = T(max_steps=100, barebones=True, nonsense=1)  #: maps changes none
run(trainer, GAN())
trainer.fit_loop.epoch_loop.reset()  #: none
trainer.frobnicate()  #: none

# ruff: noqa
