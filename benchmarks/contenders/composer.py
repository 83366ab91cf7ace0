"""MosaicML Composer: without progress bar and logging, and the defaults."""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from typing import Any

import composer
import torch
from workload import Stopwatch, Workload

DISTRIBUTIONS = ("mosaicml",)
logging.disable(logging.WARNING)


class Model(composer.ComposerModel):
    """The workload as a ComposerModel."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload, self.model = workload, workload.model()

    def forward(self, batch: Any) -> Any:
        """Outputs."""
        return self.model(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The workload's."""
        return self.workload.loss(outputs, batch[1])


def fit(workload: Workload, data: Stopwatch, **arguments: Any) -> None:
    """One epoch."""
    torch.manual_seed(0)
    model = Model(workload)
    with tempfile.TemporaryDirectory() as folder:
        trainer = composer.Trainer(
            model=model,
            train_dataloader=data,
            optimizers=workload.optimizer(model.parameters()),
            max_duration="1ep",
            device="cpu",
            save_folder=None,
            run_name=folder.rsplit("/")[-1],
            **arguments,
        )
        trainer.fit()
        trainer.close()


CASES = {
    "Composer, barest": (partial(fit, progress_bar=False, log_to_console=False), 1),
    "Composer, default": (fit, 1),
}
