"""float8 linear layers, by torchao."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import nn

from hocket import Precision
from hocket.errors import WrongType, WrongValue
from hocket.surgery import Policy, replace_modules
from hocket_strategies.precisions.torchao_import import torchao

Recipe = Literal["tensorwise", "rowwise"]
_MULTIPLE = 16


class FP8(Precision):
    """Multiply in float8 in linear layers, forward and backward; the rest runs under bfloat16 autocast; weights in 32 bits.

    Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433), by torchao's `convert_to_float8_training`.
    Each `nn.Linear` whose sizes are multiples of 16 becomes a ``Float8Linear`` with the same parameters; subclasses, and
    layers named in ``keep``, are not converted. Scales are recomputed for each product, so there is nothing to save.

    Args:
        recipe: one scale for each tensor, ``"tensorwise"``, or for each row, ``"rowwise"``, which is more exact and slower.
        emulate: emulate float8 in wider floats: slow, but on every device. On a CPU always, as many have no such product.
        keep: substrings of the names of layers to leave unconverted, such as the last one: ``["head"]``.

    Raises:
        ValueError: an unknown recipe; later, for hardware without float8, or a model without a convertible layer.
        ImportError: torchao is not installed.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
        >>> precision = hocket_strategies.FP8(emulate=True, keep=["1"])
        >>> trainer = hocket.Trainer(model=model, precision=precision, device="cpu")
        >>> type(model[0]).__name__
        'Float8Linear'
    """

    compute_dtype = torch.bfloat16

    def __init__(
        self, recipe: Recipe = "tensorwise", emulate: bool = False, keep: list[str] | tuple[str, ...] = ()
    ) -> None:
        if recipe not in get_args(Recipe):
            raise WrongValue(f"FP8 has no «recipe={recipe!r}»; use one of {', '.join(map(repr, get_args(Recipe)))}.")
        if isinstance(keep, str):
            raise WrongType(f"FP8 was given «keep={keep!r}»; give a list of parts of names: [{keep!r}].")
        self._recipe, self._emulate, self._keep = recipe, emulate, tuple(keep)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers by float8 ones."""
        float8 = torchao("float8")
        if not self._emulate:
            _check(self.device)
        config = float8.Float8LinearConfig.from_recipe_name(self._recipe)
        emulate = self._emulate or self.device.type == "cpu"
        config = dataclasses.replace(config, emulate=emulate, pad_inner_dim=True)
        kept = {part for name, part in module.named_modules() if any(text in name for text in self._keep)}

        def matches(linear: nn.Linear) -> bool:
            sizes = (linear.in_features, linear.out_features)
            return type(linear) is nn.Linear and linear not in kept and not any(size % _MULTIPLE for size in sizes)

        def build(linear: nn.Module, index: int) -> nn.Module:
            converted: nn.Module = float8.convert_to_float8_training(linear, config=config)
            return converted

        if not replace_modules(module, {nn.Linear: Policy(build, matches)}):
            raise WrongValue(
                f"«precision='fp8'» found no torch.nn.Linear whose in_features and out_features are multiples of {_MULTIPLE}, "
                "so nothing would run in 8 bits. Change the sizes, or pass «precision='bf16'»."
            )
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16, except in the converted layers."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _check(device: torch.device) -> None:
    """Raise ValueError if the device has no float8 matrix products."""
    if device.type == "cpu":
        return
    what = f"{device.type} devices"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        needed = (9, 4) if torch.version.hip else (8, 9)
        if (major, minor) >= needed:
            return
        what = f"the {torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    raise WrongValue(
        f"«precision='fp8'» needs float8 matrix products, which {what} cannot do: NVIDIA GPUs have them from compute "
        "capability 8.9 (Ada, Hopper), AMD's from MI300. Pass «precision='bf16'», or to try it slowly "
        "«precision={'fp8': {'emulate': True}}»."
    )
