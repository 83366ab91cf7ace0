"""What computes a run on this rank: the ranks that it has joined, its device, and the models that are prepared for both."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hocket.basics import launch_environment
from hocket.devices import model_placement
from hocket.plugins.bus import Bus
from hocket.run import same_on_ranks
from hocket.run.resolving import Parts


class Joined:
    """Join the other ranks, and prepare models and optimizers for strategy, precision and device.

    Args:
        devices: the number of ranks to start on this machine, unless a launcher has.
        given: what has to be identical on all ranks.
    """

    def __init__(self, parts: Parts, bus: Bus, devices: int | None, given: same_on_ranks.Given) -> None:
        self.bus = bus
        self.strategy, self.precision, self.device_kind = parts.strategy, parts.precision, parts.device
        if devices is not None and devices > 1:
            launch_environment.start(devices)
        #: The device of this rank.
        self.device: torch.device = bus.setup_environment(parts.device)
        bus.on_rank(self.strategy.rank)
        self.precision.device = self.device
        same_on_ranks.over_ranks(bus, self.world_size, {**same_on_ranks.of_plugins(parts.attachments), **given})
        weakref.finalize(self, parts.strategy.shutdown)

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.strategy.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    def convert(self, module: nn.Module) -> Any:
        """Move the module to the device, and convert it to the storage dtypes of the precision."""
        return self.bus.convert_module(self.place(module))

    def place(self, module: nn.Module) -> Any:
        """Move the module to the device, unless the strategy moves it part by part."""
        return module if self.strategy.places else model_placement.move(module, self.device)

    def prepare(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return a converted module and its optimizers, prepared by the strategy."""
        for optimizer in optimizers:
            self.bus.check_optimizer(optimizer)
        prepared = self.bus.prepare_model(module, self.precision)
        return prepared, [self.bus.prepare_optimizer(optimizer) for optimizer in optimizers]
