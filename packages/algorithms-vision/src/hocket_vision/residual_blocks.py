"""The residual blocks that stochastic depth knows: their classes, and the parts of their branches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Residual:
    """The parts of a block ``activation(branch(x) + shortcut(x))``, by name; the branch ends with the first of ``ends``."""

    ends: tuple[str, ...]
    shortcut: str
    activation: str


#: Block classes that need no ``blocks=``. None: the output is the input plus branches.
_KNOWN = {
    "hocket_vision.models.ResidualBlock": Residual(("norm2",), "shortcut", "relu"),
    "torchvision.models.resnet.BasicBlock": Residual(("bn2",), "downsample", "relu"),
    "torchvision.models.resnet.Bottleneck": Residual(("bn3",), "downsample", "relu"),
    "timm.models.resnet.BasicBlock": Residual(("se", "bn2"), "downsample", "act2"),
    "timm.models.resnet.Bottleneck": Residual(("se", "bn3"), "downsample", "act3"),
    "timm.models.vision_transformer.Block": None,
    "torch.nn.modules.transformer.TransformerEncoderLayer": None,
    "torchvision.models.vision_transformer.EncoderBlock": None,
}


def known_class(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Return the name in `_KNOWN` of the class that defines the forward of ``module``, an instance of ``cls``, or None."""
    for base in cls.__mro__:
        if "forward" in vars(base):
            name = f"{base.__module__}.{base.__qualname__}"
            # The output of post-norm is not the input plus branches.
            post_norm = isinstance(module, nn.TransformerEncoderLayer) and not module.norm_first
            return name if name in _KNOWN and not post_norm else None
    return None


def residual_of(module: nn.Module, cls: type[nn.Module]) -> Residual | None:
    """Return the parts of a block, or None if its output is the input plus branches."""
    name = known_class(module, cls)
    return None if name is None else _KNOWN[name]


def end_of(module: nn.Module, residual: Residual) -> str:
    """Return the name of the last module of the branch."""
    return next(name for name in residual.ends if getattr(module, name, None) is not None)
