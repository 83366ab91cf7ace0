"""Composer's settings of parallelism, for ``Trainer(parallelism_config=…)``, which also takes them as dicts."""

from __future__ import annotations

from typing import Any


class FSDPConfig:
    """Options of FSDP. The Trainer refuses those without a counterpart by name."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class FSDP2Config(FSDPConfig):
    """Options of FSDP 2, which hocket's ``fsdp`` is."""


class TPConfig(FSDPConfig):
    """Options of tensor parallelism. The Trainer refuses them, and says what to write."""


class ParallelismConfig:
    """Options of FSDP or of tensor parallelism.

    Example:
        >>> from hocket_migration.composer.utils import FSDPConfig, ParallelismConfig
        >>> config = ParallelismConfig(fsdp=FSDPConfig(sharding_strategy="SHARD_GRAD_OP"))
    """

    def __init__(self, fsdp: Any = None, tp: Any = None, fsdp2: Any = None) -> None:
        self.fsdp, self.tp, self.fsdp2 = fsdp, tp, fsdp2
