"""Replacements of position embeddings that leave no trace of positions, and the check that a replacement fits."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue
from hocket_nlp.linear_bias import register


class _Registered(nn.Module):
    """Registers the attention functions in a process that unpickles a model."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()


class NoPositions(_Registered):
    """Replaces a learned position embedding: has no weights, takes any positions, returns a scalar zero to add.

    Example:
        >>> import torch
        >>> from hocket_nlp.alibi_positions import NoPositions
        >>> NoPositions()(torch.arange(3))
        tensor(0.)
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a 0-dimensional zero: adding it keeps shape and dtype."""
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor):
                return torch.zeros((), device=given.device)
        return torch.zeros(())


class NoRotation(_Registered):
    """Replaces a rotary embedding: has no weights, and returns cosines of 1 and sines of 0, so that nothing is rotated.

    Args:
        widths: the size of the last dimension of the cosines, by type of layer. Rotary embeddings that do not depend on the
            type of the layer have one entry, for None.

    Example:
        >>> import torch
        >>> from hocket_nlp.alibi_positions import NoRotation
        >>> cos, sin = NoRotation({None: 4})(torch.zeros(2, 3, 8), torch.arange(3)[None])
        >>> cos.shape, cos.min(), sin.max()
        (torch.Size([1, 3, 4]), tensor(1.), tensor(0.))
    """

    def __init__(self, widths: dict[str | None, int]) -> None:
        super().__init__()
        self.widths = widths

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)`` of shape ``(*position_ids.shape, width)`` in the dtype of ``x``; they take no memory."""
        shape = (*position_ids.shape, self.widths[layer_type])
        return x.new_ones(()).expand(shape), x.new_zeros(()).expand(shape)


def no_positions(old: nn.Module) -> nn.Module:
    """Return the replacement of a learned position embedding."""
    return NoPositions()


def no_rotation(old: nn.Module) -> nn.Module:
    """Return the replacement of a rotary embedding that is called with ``(x, position_ids)`` and returns ``(cos, sin)``.

    Calls the rotary embedding on two positions, to learn the width of its cosines.

    Raises:
        ValueError: it returns something else, such as complex numbers.
    """
    buffer = next(old.buffers(), torch.zeros(()))
    x, positions = torch.zeros(1, 2, 8, device=buffer.device), torch.arange(2, device=buffer.device)[None]
    by_type = "layer_type" in inspect.signature(old.forward).parameters
    kinds: list[Any] = sorted(set(getattr(old, "layer_types", ()))) if by_type else [None]
    widths: dict[str | None, int] = {}
    for kind in kinds:
        try:
            with torch.no_grad():
                made = old(x, positions, kind) if by_type else old(x, positions)
            (cos, sin), told = made if isinstance(made, tuple) else (None, None), ""
        except Exception as error:
            cos, sin, told = None, None, f" ({type(error).__name__}: {error})"
        if not (
            isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.shape == sin.shape and cos.shape[:-1] == (1, 2)
        ):
            raise WrongValue(
                f"ALiBi replaces rotary embeddings that are called with (x, position_ids) and return (cos, sin) of shape "
                f"(batch, length, width), and {type(old).__name__} does not{told}. A model like this needs an AlibiPolicy "
                "with a replacement of its own: see the card of alibi."
            )
        widths[kind] = cos.shape[-1]
    return NoRotation(widths)


def check_replacement(name: str, old: nn.Module, new: Any) -> None:
    """Raise TypeError unless ``new`` is a module that can be called in every way in which ``old`` can be.

    Args:
        name: of the module ``old`` in the model, for the message.
    """
    who = f"The replacement of {name} ({type(old).__name__})"
    if not isinstance(new, nn.Module):
        raise WrongType(f"{who} is {new!r}, not a module: correct the policy's `replacement`.")
    if type(new).forward is getattr(nn.Module, "forward"):  # noqa: B009  # mypy: torch declares it as an attribute
        raise WrongType(f"{who} is {type(new).__name__}, which has no forward: correct the policy's `replacement`.")
    wanted, offered = inspect.signature(old.forward), inspect.signature(new.forward)
    every = list(wanted.parameters.values())
    positional = [each for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in positional if each.default is each.empty]
    named = [each.name for each in every if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    only = [each.name for each in every if each.kind is each.KEYWORD_ONLY]
    required = [each.name for each in every if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    ways: list[tuple[int, list[str]]] = [
        (len(needed), required),
        (len(positional), only),
        (sum(each.kind is each.POSITIONAL_ONLY for each in every), named),
    ]
    for count, names in ways:
        try:
            offered.bind(*[None] * count, **dict.fromkeys(names))
        except TypeError as error:
            raise WrongType(
                f"{who} is {type(new).__name__}, which cannot be called as {type(old).__name__} can: {error}. Its forward "
                f"has the signature {offered}, and {wanted} is needed; correct the policy's `replacement`."
            ) from None
