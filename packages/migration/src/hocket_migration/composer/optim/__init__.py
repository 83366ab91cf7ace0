"""Composer's ``composer.optim``: decoupled optimizers, which are hocket's, and schedulers."""

from __future__ import annotations

from typing import Any

import hocket.plugins
from hocket.help.lazy import lazy

_OPTIMIZERS = {"DecoupledAdamW": "decoupled-adamw", "DecoupledSGDW": "decoupled-sgdw"}
_SCHEDULERS = (
    "ComposerScheduler", "ConstantScheduler", "ConstantWithWarmupScheduler", "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler", "CosineAnnealingWithWarmupScheduler", "ExponentialScheduler", "LinearScheduler",
    "LinearWithWarmupScheduler", "MultiStepScheduler", "MultiStepWithWarmupScheduler", "PolynomialScheduler",
    "PolynomialWithWarmupScheduler", "StepScheduler",
)  # fmt: skip

_schedulers, _ = lazy(
    __name__,
    {"scheduler": "", **dict.fromkeys(_SCHEDULERS, "scheduler"), "compile_composer_scheduler": "schedulers"},
)


def __getattr__(name: str) -> Any:
    if name in _OPTIMIZERS:
        return hocket.plugins.get("optimizers", _OPTIMIZERS[name])
    return _schedulers(name)


def __dir__() -> list[str]:
    return sorted([*_OPTIMIZERS, *_SCHEDULERS, "compile_composer_scheduler", "scheduler"])
