"""Adapters of peft in a model: merge them into the weights that they change, or name their weights."""

from __future__ import annotations

from torch import nn

from hocket.errors import Unsupported
from hocket_tools.finetuning.adapters import merge_adapters


def has_adapters(module: nn.Module) -> bool:
    """Whether some layer has adapters."""
    return any(hasattr(each, "adapter_layer_names") or hasattr(each, "peft_config") for each in module.modules())


def merge(module: nn.Module) -> nn.Module:
    """Merge all adapters of a module, if it has some, as `merge_adapters`.

    Raises Unsupported for adapters that cannot be merged, such as those of a prompt.
    """
    try:
        return merge_adapters(module) if has_adapters(module) else module
    except Exception as error:
        raise Unsupported(
            f"The adapters of {type(module).__name__} cannot be merged: {str(error).rstrip('.')}. Write adapters='apart'. "
            "Nothing was written."
        ) from error


def adapter_names(network: nn.Module) -> set[str]:
    """Return the names of the weights of adapters, as in the ``state_dict`` of the network."""
    names: set[str] = set()
    for prefix, module in network.named_modules():
        for attribute in getattr(module, "adapter_layer_names", ()):
            start = f"{prefix}.{attribute}." if prefix else f"{attribute}."
            names |= {name for name in network.state_dict() if name.startswith(start)}
    return names
