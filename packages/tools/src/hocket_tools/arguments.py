"""Checks of arguments that several tools take."""

from __future__ import annotations

import argparse

from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue


def check_trainer(trainer: object, call: str) -> None:
    """Raise WrongType for something else than a Trainer, such as its model."""
    from hocket.run.trainer import Trainer

    if not isinstance(trainer, Trainer):
        raise WrongType(
            f"{call}({type(trainer).__name__}, …): a {type(trainer).__name__} is not a Trainer, which has model and data. "
            f"Write {call}(hocket.Trainer(model, …), …)."
        )


def check_effect(args: argparse.Namespace, needed: bool, without: str, **defaults: object) -> None:
    """Raise WrongValue for an option that was given and has no effect, because the command lacks what it needs."""
    given = [name for name, default in defaults.items() if getattr(args, name) != default and not needed]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise WrongValue(
            f"{option} {getattr(args, given[0])} has no effect without {without}. Add that, or remove {option}."
        )


def check_weights(model: nn.Module) -> None:
    """Raise WrongValue for parameters with NaN or infinity, and buffers with NaN: masks have infinity."""
    parameters = (name for name, each in model.named_parameters() if _wide(each) and not each.isfinite().all())
    buffers = (name for name, each in model.named_buffers() if _wide(each) and each.isnan().any())
    if wrong := [*parameters, *buffers]:
        raise WrongValue(
            f"{type(model).__name__} has weights with NaN or infinity, in {', '.join(wrong[:3])}. Load those of an earlier "
            "checkpoint."
        )


def _wide(tensor: Tensor) -> bool:
    """Whether a tensor has values, in a dtype that has NaN and infinity."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not tensor.is_meta
