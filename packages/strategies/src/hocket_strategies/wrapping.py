"""Choose the units of a model: modules that are gathered, freed and recomputed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hocket.errors import WrongType, WrongValue

#: Modules to wrap: "auto", classes or their names, or the minimum number of parameters of a unit; None for none.
Wrap = str | int | type[nn.Module] | Sequence[str | type[nn.Module]] | None

#: Minimum number of parameters of a unit, if the blocks of a model are unknown.
_SMALLEST = 1_000_000
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict)


def units(model: nn.Module, wrap: Wrap = "auto") -> list[nn.Module]:
    """Return the submodules of ``model`` to wrap, inner ones before outer ones; never ``model`` itself.

    Args:
        wrap: ``"auto"`` takes the blocks that the model declares (``_no_split_modules``, as in transformers), else the
            elements of every ModuleList of two or more modules of one class, else units by size. Classes, or names of
            classes: their instances, subclasses included. An int: units of at least that many parameters, not counting
            those of inner units. None: no units.

    Raises:
        TypeError: ``wrap`` is none of these. ValueError: no module is of a named class, or one shares a parameter with
            the rest of the model, so that it cannot be gathered alone.
    """
    if wrap is None:
        return []
    if isinstance(wrap, int) and not isinstance(wrap, bool) and wrap > 0:
        return _by_size(model, wrap)
    if wrap == "auto":
        return _automatic(model)
    classes = [wrap] if isinstance(wrap, str | type) else wrap
    if not isinstance(classes, Iterable) or not all(isinstance(each, str | type) for each in classes):
        raise WrongType(
            f"«wrap={wrap!r}» is not valid: give 'auto', a number of parameters such as 1_000_000, classes or their names such "
            "as ['Block'], or «None»."
        )
    found = []
    for each in classes:
        instances = [module for module in _inner_first(model) if module is not model and _is(module, each)]
        if not instances:
            there = ", ".join(sorted({type(module).__name__ for module in model.modules() if module is not model}))
            raise WrongValue(f"«wrap={wrap!r}»: the model has no {_name(each)}. Its classes are {there}.")
        found += instances
    chosen = _ordered(model, found)
    for module in chosen:
        if shared := _shared(model, module):
            raise WrongValue(
                f"«wrap={wrap!r}»: {type(module).__name__} shares {shared} with the rest of the model, so it cannot be a "
                "separate unit. Name a class that holds all users of that parameter, or none of them."
            )
    return chosen


def units_of_one_dtype(model: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Return ``chosen`` and every submodule whose parameters differ in dtype from most of the model, inner ones first.

    Parameters that are gathered together must have one dtype. An example are float32 normalisation layers in a 16-bit model.
    """
    sizes: Counter[Any] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    common = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    odd = [
        module
        for module in model.modules()
        if module is not model and any(parameter.dtype != common for parameter in module.parameters(recurse=False))
    ]
    return _ordered(model, [*chosen, *odd])


def _automatic(model: nn.Module) -> list[nn.Module]:
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = [module for module in model.modules() if module is not model and type(module).__name__ in named]
    if not found:
        for container in model.modules():
            if isinstance(container, nn.ModuleList) and len(container) > 1 and len(set(map(type, container))) == 1:
                found += [module for module in container if any(True for _ in module.parameters())]
    if not found:
        return _by_size(model, _SMALLEST)
    return [module for module in _ordered(model, found) if not _shared(model, module)]


def _by_size(model: nn.Module, smallest: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    seen: set[nn.Parameter] = set()

    def left(module: nn.Module) -> int:
        """Return the number of parameters outside of inner units."""
        own = [p for p in module.parameters(recurse=False) if p not in seen]
        seen.update(own)
        total = sum(parameter.numel() for parameter in own)
        # Its output projection is used without calling its forward, so it would not be gathered.
        children: Any = () if isinstance(module, nn.MultiheadAttention) else module.children()
        if isinstance(module, nn.MultiheadAttention):
            total = sum(parameter.numel() for parameter in module.parameters())
        total += sum(left(child) for child in children)
        if total < smallest or module is model or isinstance(module, _NO_FORWARD) or _shared(model, module):
            return total
        found.append(module)
        return 0

    left(model)
    return found


def _inner_first(model: nn.Module) -> list[nn.Module]:
    """Return every module once, after its submodules."""
    order: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                visit(child)
            order.append(module)

    visit(model)
    return order


def _ordered(model: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    wanted = set(chosen)
    return [module for module in _inner_first(model) if module in wanted]


def _shared(model: nn.Module, unit: nn.Module) -> str | None:
    """Return the name of a parameter of ``unit`` that modules outside of it use too, or None."""
    inside = set(unit.modules())
    mine = {parameter: name for name, parameter in unit.named_parameters()}
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                if parameter in mine:
                    return mine[parameter]
    return None


def _is(module: nn.Module, kind: str | type) -> bool:
    return isinstance(module, kind) if isinstance(kind, type) else kind in (c.__name__ for c in type(module).__mro__)


def _name(kind: str | type) -> str:
    return kind if isinstance(kind, str) else kind.__name__
