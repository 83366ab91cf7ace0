"""transformers' Trainer: everything that can be turned off turned off, and the defaults."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from workload import Stopwatch, Workload

DISTRIBUTIONS = ("transformers", "accelerate")
transformers.logging.set_verbosity_error()


class Model(nn.Module):
    """The workload as the Trainer wants it: keyword arguments in, a dict with the loss out."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload, self.model = workload, workload.model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss only."""
        return {"loss": self.workload.loss(self.model(x), labels)}


class Batches(Dataset[Any]):
    """The Trainer wants a data set; its items are whole batches, and time themselves like the others'."""

    def __init__(self, data: Stopwatch) -> None:
        self.data, self.iterator = data, iter(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, targets = next(self.iterator)
        if index == len(self) - 1:
            next(self.iterator, None)  # the last batch is fetched one step early, here and in no other contender's loop
        return {"x": inputs, "labels": targets}


class Trainer(transformers.Trainer):
    """Takes the batches as they are, in order."""

    def get_train_dataloader(self) -> Any:
        """No collation, no shuffling."""
        return DataLoader(self.train_dataset, batch_size=None)


def fit(workload: Workload, data: Stopwatch, **arguments: Any) -> None:
    """One epoch."""
    torch.manual_seed(0)
    model = Model(workload)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            use_cpu=workload.device == "cpu",
            bf16=workload.precision == "bf16",
            report_to=[],
            save_strategy="no",
            per_device_train_batch_size=1,
            **arguments,
        )
        optimizers = (workload.optimizer(model.parameters()), None)
        Trainer(model=model, args=settings, train_dataset=Batches(data), optimizers=optimizers).train()


CASES = {
    "transformers Trainer, barest": (partial(fit, disable_tqdm=True, logging_strategy="no", max_grad_norm=0.0), 1),
    "transformers Trainer, default": (fit, 1),
}
