"""The layers of a model for layer-wise learning-rate decay: its repeated blocks, found by structure and not by name alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from torch import nn

#: Containers whose items are in a numbered place, whatever their names, such as ``encoder_layer_0`` in torchvision's ViT.
_LISTS = (nn.Sequential, nn.ModuleList)
#: Names of attributes that are a numbered place: ``block_1``, ``stage3b``.
_NUMBERED = re.compile(r"\d+[a-z]?$")
#: The class of a block; of a plain container, those of its items too.
_Kind = tuple[type, ...]


def layers(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return the number of the layer of each parameter, from 0; empty if the model has no repeated blocks.

    Each block is one layer, in the order of the model, with everything in it. Parameters before the first block (embeddings,
    a stem) are one layer, those between blocks belong to the block before, and those after the last block (a last norm, a
    head) are one more layer.

    Blocks are the outermost modules of one class in neighbouring numbered places: items of a Sequential, or attributes such
    as ``block_1`` and ``block_2``. Items of a ModuleList are blocks too, and so are modules of such a class in other numbered
    places. A list with nothing but modules of one class, such as ``layer1`` of a ResNet, is not a block but contains blocks.
    In a model without blocks, such as a multilayer perceptron or a VGG, each matrix or kernel in a list begins a layer.

    Args:
        names: the names of the parameters, in order; those that are not in the model are no part of a block.

    Example:
        >>> from torch import nn
        >>> from hocket_general.layer_order import layers
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> layers(model, [name for name, _ in model.named_parameters()])
        {'0.weight': 0, '0.bias': 0, '2.weight': 1, '2.bias': 1}
    """
    repeated = (_blocks(model, set(_blocks(model, (), inside).values()), inside) for inside in (False, True))
    for paths in (*repeated, _blocks(model, _alone(model), inside=True), _in_lists(model)):
        found = _by_name(names, list(paths))
        if len(set(found.values())) > 1:
            return found
    return {}


def _by_name(names: Sequence[str], paths: Sequence[str]) -> dict[str, int]:
    """Return the layer of each parameter, given the paths of the blocks."""
    number = {path: index for index, path in enumerate(paths)}
    blocks = [next((number[each] for each in _parents(name) if each in number), None) for name in names]
    inside = [index for index, block in enumerate(blocks) if block is not None]
    if not inside:
        return {}
    first = int(inside[0] > 0)
    found, layer = {}, 0
    for index, (name, block) in enumerate(zip(names, blocks, strict=True)):
        if block is not None:
            layer = block + first
        elif index > inside[-1]:
            layer = len(paths) + first
        found[name] = layer
    return found


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _blocks(module: nn.Module, known: Collection[_Kind], inside: bool, prefix: str = "") -> dict[str, _Kind]:
    """Return the kind of each block by its path: those that repeat, and those of a known kind.

    With ``inside``, also search in numbered modules that are not blocks, such as a model that is an item of a Sequential.
    """
    places = {
        name: _kind(child)
        for name, child in module.named_children()
        if (isinstance(module, _LISTS) or _NUMBERED.search(name)) and _is_composite(child)
    }
    kinds = {kind for kind, following in pairwise(places.values()) if kind == following}
    kinds |= {*known, *(places.values() if isinstance(module, nn.ModuleList) else ())}
    found: dict[str, _Kind] = {}
    for name, child in module.named_children():
        kind = places.get(name)
        if kind is not None and kind in kinds:
            found[prefix + name] = kind
        elif kind is None or inside:
            found |= _blocks(child, known, inside, f"{prefix}{name}.")
    return found


def _alone(model: nn.Module) -> set[_Kind]:
    """Return the kinds of the only items of lists: the block of a model that has one."""
    lists = [_trained(module) for module in model.modules() if isinstance(module, _LISTS)]
    return {kind for each in lists if len(each) == 1 and _is_composite(each[0]) and (kind := _kind(each[0]))}


def _in_lists(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the paths of modules with a matrix or kernel, and without modules in them, in lists."""
    for name, child in module.named_children():
        if isinstance(module, _LISTS) and _has_matrix(child) and not _trained(child):
            yield prefix + name
        else:
            yield from _in_lists(child, f"{prefix}{name}.")


def _kind(module: nn.Module) -> _Kind | None:
    """Return what modules have in common that repeat; None for a list of blocks."""
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return (type(module),)
    items = _trained(module)
    if all(map(_is_composite, items)) and len({type(each) for each in items}) == 1:
        return None
    return (type(module), *map(type, items))


def _is_composite(module: nn.Module) -> bool:
    """Whether it may be a block: it has a matrix, and is more than a layer of torch."""
    return _has_matrix(module) and bool(_trained(module) or not type(module).__module__.startswith("torch.nn."))


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _trained(module: nn.Module) -> list[nn.Module]:
    """Return the children that have parameters."""
    return [each for each in module.children() if any(True for _ in each.parameters())]
