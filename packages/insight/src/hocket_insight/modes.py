"""Submodules that stay in eval mode during training, perhaps by mistake."""

from __future__ import annotations

from torch import nn

from hocket.help import warn


def warn_of_parts(model: nn.Module) -> None:
    """Warn of a model of which some is in train mode, if it is in eval mode itself, or blocks with parameters to train are."""
    names = [name for name, module in model.named_modules() if module.training]
    if not model.training:
        warn(
            f"{type(model).__name__} is in eval mode and parts of it in train mode ({_some(names)}). These modes are kept. "
            "Call model.train() before fit to put all of it into train mode."
        )
    elif blocks := _blocks(model):
        warn(
            f"Submodules with parameters to train are in eval mode, in which Dropout and BatchNorm do not train: "
            f"{_some(blocks)}. These modes are kept. Call model.train() before fit to put all of them into train mode."
        )


def _blocks(model: nn.Module) -> list[str]:
    """Return the outermost submodules in eval mode that have submodules and parameters to train."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if not module.training and not inside and trained and any(True for _ in module.children()):
            blocks.append(name)
    return blocks


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
