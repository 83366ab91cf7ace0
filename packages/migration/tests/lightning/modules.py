"""Modules as Lightning's documentation writes them, on tiny data, and what compares two Trainers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.demos.transformer import Transformer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split


def pairs(samples: int, features: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class LitAutoEncoder(pl.LightningModule):
    def __init__(self, hidden: int = 3, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(8, hidden), nn.ReLU())
        self.decoder = nn.Linear(hidden, 8)
        self.example_input_array = torch.zeros(2, 8)

    def forward(self, x: Any) -> Any:
        return self.encoder(x)

    def _reconstruct(self, batch: Any) -> Any:
        x, _ = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._reconstruct(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._reconstruct(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._reconstruct(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(pairs(22, 8, 1), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(pairs(7, 8, 2), batch_size=3)

    def test_dataloader(self) -> Any:
        return DataLoader(pairs(7, 8, 3), batch_size=3)


class VAE(LitAutoEncoder):
    """Random numbers in training and in validation, and batch norm."""

    def __init__(self) -> None:
        super().__init__(hidden=4)
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.decoder = nn.Linear(2, 8)

    def _reconstruct(self, batch: Any) -> Any:
        mean, log_variance = self.encoder(batch[0]).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum(1).mean() / 2
        return F.mse_loss(self.decoder(z), batch[0]) + 0.1 * divergence


class GAN(pl.LightningModule):
    """Manual optimization with two optimizers and their schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, z: Any) -> Any:
        return self.generator(z)

    def adversarial_loss(self, y_hat: Any, y: Any) -> Any:
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], 3).type_as(real)
        valid, fake = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        self.clip_gradients(optimizer_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), valid)
        d_loss = (real_loss + self.adversarial_loss(self.discriminator(self(z).detach()), fake)) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        return [g, d], [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (g, d)]

    def train_dataloader(self) -> Any:
        return DataLoader(pairs(20, 4, 1), batch_size=4, shuffle=True)

    def on_train_epoch_end(self) -> None:
        self(torch.zeros(1, 3))


class Accumulating(GAN):
    """Gradients of two batches, a closure, and no toggling: gradients stay in `.grad` until `zero_grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        real, _ = batch
        g, d = self.optimizers()
        loss = self.adversarial_loss(self.discriminator(self(real[:, :3])), torch.ones(real.size(0), 1)) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            g.step()
            g.zero_grad()

        def closure() -> Any:
            d.zero_grad()
            d_loss = self.adversarial_loss(self.discriminator(real), torch.ones(real.size(0), 1))
            self.manual_backward(d_loss)
            return d_loss

        d.step(closure=closure)
        return {"loss": loss, "batch_idx": batch_idx}


class DigitsDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(7)
        images, labels = torch.randn(30, 1, 8, 8, generator=generator), torch.arange(30) % 3
        self.train_set, self.val_set, self.test_set = random_split(
            TensorDataset(images, labels), [18, 7, 5], generator=generator
        )

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.val_set, batch_size=3), DataLoader(self.test_set, batch_size=3)]

    def test_dataloader(self) -> Any:
        return DataLoader(self.test_set, batch_size=3)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.test_set, batch_size=3)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] / 2, batch[1]

    def state_dict(self) -> Any:
        return {"seen": 3}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = state_dict["seen"]


class ImageClassifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3)
        )
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.val_acc = nn.ModuleList([torchmetrics.Accuracy(task="multiclass", num_classes=3) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log_dict({"train/loss": loss, "largest": logits.max()}, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        self.val_acc[dataloader_idx](logits, batch[1])
        self.log("val_acc", self.val_acc[dataloader_idx])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), on_step=True, on_epoch=True)
        return logits

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test_loss": F.cross_entropy(self(batch[0]), batch[1]), "one": 1.0})

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LanguageModel(pl.LightningModule):
    def __init__(self, vocab_size: int = 20) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=8, nhead=2, nhid=8, nlayers=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        output = self.model(inputs, target)
        return F.nll_loss(output, target.view(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def train_dataloader(self) -> Any:
        tokens = torch.randint(20, (12, 6), generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=3, shuffle=True)


class Episodes(IterableDataset):
    """Experience that the network in training generates."""

    def __init__(self, play: Any) -> None:
        self.play = play

    def __iter__(self) -> Any:
        return self.play()


class Reinforce(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.total_reward = 0.0

    def play(self) -> Any:
        state = torch.zeros(2)
        for step in range(24):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=self.net(state)).sample()
            reward = 1.0 if action == step % 2 else 0.0
            self.total_reward += reward
            yield state, action, torch.tensor(reward)
            state = torch.tensor([float(step % 2), reward])

    def training_step(self, batch: Any, _: int) -> Any:
        states, actions, rewards = batch
        logits = F.log_softmax(self.net(states), dim=-1)
        loss = -(logits[range(len(actions)), actions] * (rewards - rewards.mean())).mean()
        self.log("total_reward", self.total_reward, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(Episodes(self.play), batch_size=4)


class Losses(pl.Callback):
    """A user's callback, which records the outputs of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item() if outputs else 0.0)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def arguments(**others: Any) -> dict[str, Any]:
    """The arguments of a Trainer that shows and writes nothing."""
    return {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 3, **others,
    }  # fmt: skip


def trained(
    trainer_class: Any, module: Any, fit: Any = None, callbacks: Any = (), **others: Any
) -> tuple[Any, Any, Any]:
    """Return the module, the Trainer and the recorded losses after a fit with either Trainer."""
    torch.manual_seed(3)
    made, losses = module(), Losses()
    trainer = trainer_class(**arguments(callbacks=[losses, *callbacks], **others))
    (fit or (lambda trainer, module: trainer.fit(module)))(trainer, made)
    return made, trainer, losses


def compare(module: Any, fit: Any = None, metrics: bool = True, rates: bool = True, **others: Any) -> tuple[Any, Any]:
    """Train with both Trainers, and compare every loss, learning rate, weight, counter and logged value."""
    from hocket_migration.lightning import Trainer

    ours, trainer, mine = trained(Trainer, module, fit, **others)
    theirs, reference, expected = trained(pl.Trainer, module, fit, **others)
    torch.testing.assert_close(mine.losses, expected.losses, rtol=0, atol=1e-6)
    assert len(mine.losses) > 1
    assert not rates or mine.rates == expected.rates
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-6)
    assert (trainer.global_step, trainer.current_epoch) == (reference.global_step, reference.current_epoch)
    if metrics:
        found, known = trainer.callback_metrics, reference.callback_metrics
        assert found.keys() == known.keys()
        for name, value in known.items():
            torch.testing.assert_close(found[name].float(), value.float(), rtol=0, atol=1e-5, msg=name)
    return trainer, reference
