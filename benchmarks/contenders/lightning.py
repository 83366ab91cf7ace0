"""Lightning: `Trainer(barebones=True)`, the defaults without and with logging, and Fabric."""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from typing import Any

import lightning
import torch
from workload import Stopwatch, Workload

DISTRIBUTIONS = ("lightning",)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """The workload as a LightningModule."""

    def __init__(self, workload: Workload, logs: bool) -> None:
        super().__init__()
        self.workload, self.logs = workload, logs
        self.model = workload.model()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Forward and loss."""
        inputs, targets = batch
        loss = self.workload.loss(self.model(inputs), targets)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The workload's."""
        return self.workload.optimizer(self.model.parameters())


def _where(workload: Workload) -> dict[str, Any]:
    precision = "bf16-mixed" if workload.precision == "bf16" else "32-true"
    return {"accelerator": {"cuda": "gpu"}.get(workload.device, workload.device), "precision": precision}


def fit(workload: Workload, data: Stopwatch, logs: bool = False, **arguments: Any) -> None:
    """One epoch with the Trainer."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_epochs=1, devices=1, default_root_dir=folder, **_where(workload), **arguments)
        trainer.fit(Module(workload, logs), data)


def fabric(workload: Workload, data: Stopwatch) -> None:
    """One epoch with Fabric."""
    torch.manual_seed(0)
    runtime = lightning.Fabric(devices=1, **_where(workload))
    model = workload.model()
    model, optimizer = runtime.setup(model, workload.optimizer(model.parameters()))
    for inputs, targets in data:
        if workload.device != "cpu":
            inputs, targets = (each.to(runtime.device, non_blocking=True) for each in (inputs, targets))
        optimizer.zero_grad()
        with runtime.autocast():
            loss = workload.loss(model(inputs), targets)
        runtime.backward(loss)
        optimizer.step()


CASES = {
    "Lightning, barebones": (partial(fit, barebones=True), 1),
    "Lightning, default, logging the loss": (partial(fit, logs=True), 1),
    "Fabric": (fabric, 1),
}
