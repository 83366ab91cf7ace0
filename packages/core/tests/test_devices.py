"""Which device is chosen, and what a device is told; see test_xla.py for training on one that computes later."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.devices.xla import XLA
from hocket.plugins import PluginError
from hocket.testkit.imports import import_in_fresh_process
from hocket.testkit.reference import convolutional_network, labelled_images

without_torch_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is there")


@without_torch_xla
def test_xla_that_is_not_installed_says_what_to_type(monkeypatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not XLA().available()
    with pytest.raises(PluginError, match=r"not installed.*pip install 'hocket\[xla\]'"):
        hocket.Runtime(device="xla")


def test_xla_beside_the_wrong_torch_says_so(monkeypatch, tmp_path) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch4lazy')")
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"cannot be imported beside torch .*undefined symbol.*torch 2\.9"):
        XLA().torch_device(0)


def test_xla_is_looked_for_without_importing_it(monkeypatch, tmp_path) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert not XLA().available(), "nobody asked for it"
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert XLA().available()


def test_xla_runs_one_process() -> None:
    with pytest.raises(ValueError, match="one process"):
        XLA().torch_device(1)


def test_the_module_brings_nothing_along() -> None:
    imported = import_in_fresh_process("hocket.devices.xla", ("hocket",))
    assert not imported.error and not imported.changed and "torch_xla" not in imported.packages


class Counting(hocket.Device):
    """The CPU, with a count of batches."""

    batches = 0

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def batch_end(self) -> None:
        self.batches += 1


def test_a_device_hears_of_every_batch() -> None:
    device = Counting()
    data = labelled_images()
    with hocket.Trainer(
        model=convolutional_network(), loss=F.cross_entropy, optimizer="sgd(lr=0.1)", train_data=data, device=device,
        duration="2ep", microbatch=3,
    ) as trainer:  # fmt: skip
        trainer.fit()
        assert device.batches == 2 * len(data)
        trainer.evaluate(data)
        assert device.batches == 3 * len(data)


def test_a_device_hears_of_the_batches_and_steps_of_an_own_loop() -> None:
    device = Counting()
    runtime = hocket.Runtime(device=device)
    model, optimizer = runtime.setup(network := nn.Linear(2, 1), torch.optim.SGD(network.parameters(), lr=0.1))
    data = [torch.ones(3, 2)] * 4
    for batch in runtime.setup_data(data):
        runtime.backward(model(batch).mean())
    assert device.batches == 4
    runtime.step(optimizer)
    assert device.batches == 5
