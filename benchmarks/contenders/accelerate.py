"""Accelerate: the loop of its documentation."""

from __future__ import annotations

import accelerate
import torch
from workload import Stopwatch, Workload

DISTRIBUTIONS = ("accelerate",)


def fit(workload: Workload, data: Stopwatch) -> None:
    """One epoch, data left alone."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = workload.model()
    model, optimizer = accelerator.prepare(model, workload.optimizer(model.parameters()))
    for inputs, targets in data:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(workload.loss(model(inputs), targets))
            optimizer.step()


CASES = {"Accelerate": (fit, 1)}
