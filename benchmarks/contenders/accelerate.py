"""Accelerate: the loop of its documentation."""

from __future__ import annotations

import accelerate
import torch
from workload import Stopwatch, Workload

DISTRIBUTIONS = ("accelerate",)


def fit(workload: Workload, data: Stopwatch) -> None:
    """One epoch, data left alone."""
    torch.manual_seed(0)
    on_cpu = workload.device == "cpu"
    accelerator = accelerate.Accelerator(cpu=on_cpu, mixed_precision="bf16" if workload.precision == "bf16" else "no")
    model = workload.model()
    model, optimizer = accelerator.prepare(model, workload.optimizer(model.parameters()))
    for inputs, targets in data:
        if not on_cpu:
            inputs, targets = (each.to(accelerator.device, non_blocking=True) for each in (inputs, targets))
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = workload.loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()


CASES = {"Accelerate": (fit, 1)}
