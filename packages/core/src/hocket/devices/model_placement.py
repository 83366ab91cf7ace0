"""Check that a model can be moved to its device, and move it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue


def check_model(model: nn.Module, device: object, materializes: bool = False) -> None:
    """Raise TypeError or ValueError for a model that cannot be moved to its device; the message names the parameter."""
    if not isinstance(model, nn.Module):
        raise WrongType(
            f"«model={short(model)}» is {type(model).__name__}; give a torch.nn.Module or a hocket.Task. {_instead(model)}"
        )
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise WrongValue(
            f"{type(model).__name__}.{lazy[0]} has no shape yet: it is of a lazy layer, such as torch.nn.LazyLinear, and an "
            "optimizer needs parameters. Call the model once before: model(next(iter(loader))[0])."
        )
    places: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        places.setdefault(tensor.device, name)
    kind = type(model).__name__
    meta = torch.device("meta")
    if materializes:
        places.pop(meta, None)
    if meta in places:
        raise WrongValue(
            f"{kind}.{places[meta]} is on the meta device and has no values. Give it values first: "
            "model.to_empty(device='cpu'), then initialize or load the weights."
        )
    if len(places) > 1:
        where = ", ".join(f"{kind}.{name} on {place}" for place, name in places.items())
        raise WrongValue(f"The model is spread over devices: {where}. Move it to one: model.to('cpu').")
    if device not in (None, "auto") and isinstance(device, str):
        for place, name in places.items():
            if place.type not in ("cpu", device):
                raise WrongValue(
                    f"{kind}.{name} is on {place}, but the Trainer was given «device='{device}'». Pass "
                    f"«device='{place.type}'», or move the model first: model.to('{device}')."
                )


def _instead(given: object) -> str:
    """Return what to write instead of something that is not a model."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"Write «model={given.__name__}()¦model='module:{given.__name__}'»."
    if isinstance(given, Mapping):
        return "Write trainer.load_weights(state_dict) after making the Trainer with the model."
    if isinstance(given, list | tuple):
        return "Write model=torch.nn.Sequential(*modules)."
    if hasattr(given, "__iter__") and not isinstance(given, str):
        return "The model comes first: hocket.Trainer(model, train_data)."
    if isinstance(given, torch.optim.Optimizer):
        return "Write the model first: setup(model, optimizer)."
    return "Write «model=Net()¦model='module:Net'», for a class Net of torch.nn.Module."


def move(task: nn.Module, device: torch.device) -> Any:
    """Move the task to the device, except tensors on the meta device, which have no values."""
    if any(tensor.is_meta for tensor in [*task.parameters(), *task.buffers()]):
        return task._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return task.to(device)
