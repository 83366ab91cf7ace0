"""Refuse models on the meta device, which has no values."""

from __future__ import annotations

from torch import nn

from hocket.errors import WrongValue


def refuse_meta(who: str, model: nn.Module, why: str) -> None:
    """Raise ValueError if a parameter is on the meta device; the message names it, and says what to write."""
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        raise WrongValue(
            f"{who} was given {type(model).__name__}, whose {name} is on the meta device, {why}. Give it values first: "
            "model.to_empty(device='cpu'), then initialize or load its weights. For the strategy fsdp, build it on the CPU on "
            "every rank."
        )
