"""Gated linear units: feed-forward layers whose hidden units are multiplied by a second projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policy, Replacement, replace_modules, why_no_effect
from hocket_nlp.argument_checks import switch
from hocket_nlp.meta_device import refuse_meta
from hocket_nlp.projections import Finisher, is_of_transformers, refuse_adapters, with_finish

if TYPE_CHECKING:
    from hocket.state.state import State

Init = Literal["identity", "normal"]
Activation = Callable[[Tensor], Tensor]

#: By class of transformers: the names of the first projection and of the activation that follows it.
_FEED_FORWARDS = {
    "BertIntermediate": ("dense", "intermediate_act_fn"),
    "RobertaIntermediate": ("dense", "intermediate_act_fn"),
    "GPT2MLP": ("c_fc", "act"),
    "GPTNeoXMLP": ("dense_h_to_4h", "act"),
    "OPTDecoderLayer": ("fc1", "activation_fn"),
}


def gated_linear_units(
    model: nn.Module,
    activation: str | Activation | None = None,
    *,
    init: Init = "identity",
    bias: bool = True,
    gate_bias: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[nn.Module, list[Replacement]]:
    """Multiply the hidden units of feed-forward layers by a gate: ``(act(x W) * (x V)) W2``, in place.

    Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202, eqs. 5 and 6). W and W2, the weights that the model
    has, stay: the same parameters under the same names. V is new, of W's shape, and called ``<first projection>.gate``.
    Dropout and layer norms are not touched. Each layer gets ``d_model * d_ff`` weights more, and ``d_ff`` biases; for as many
    parameters as before, make the model with two thirds of its ``d_ff``, as the paper does.

    Args:
        model: ``GPT2Model``, ``BertModel``, ``RobertaModel``, ``OPTModel`` or ``GPTNeoXModel`` of transformers with any head,
            or a module that holds such models.
        activation: the name of an activation of transformers, such as ``"silu"`` (SwiGLU), ``"gelu"`` (GEGLU), ``"sigmoid"``
            (GLU) or ``"linear"`` (bilinear), or a function; None for the model's own.
        init: ``"identity"``: V = 0 with a bias of 1, so that a model computes exactly what it did before, and learns the gate;
            for pretrained models.
            ``"normal"``: V from a normal distribution of variance ``1/d_model``, so that gates of normalised inputs have
            variance 1 and hidden units keep their size; biases are 0. Better from scratch.
        bias: keep the bias of W; the paper has none.
        gate_bias: give V a bias; ``"identity"`` needs it.
        generator: source of the weights of ``"normal"``; torch's default generator if None.

    Returns:
        The model and a record of each replaced projection, and then of each activation, whose place an Identity takes; the
        list is empty if nothing matched, with a NoEffectWarning. Add the new parameters to an existing optimizer with
        `hocket.surgery.update_optimizer`.

    Raises:
        ValueError: an argument is unknown, ``init="identity"`` without ``gate_bias``, a projection is neither Linear nor
            Conv1D, or the model is on the meta device.

    Example:
        >>> import transformers
        >>> from hocket_nlp.functional import gated_linear_units
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
        >>> model, replaced = gated_linear_units(transformers.GPT2LMHeadModel(config), "silu")
        >>> print(replaced[0])
        transformer.h.0.mlp.c_fc: Conv1D -> GatedConv1D
    """
    choice = _Choice(activation, init, bias, gate_bias)
    refuse_meta("gated_linear_units", model, "where gates would get no values")
    return model, choice.operate(model, generator)


class Gated(Finisher):
    """The first projection of a feed-forward layer, with its activation and a gate."""

    activation: Activation
    gate: nn.Linear

    def finish(self, input: Tensor, output: Tensor) -> Tensor:
        """Return ``act(x W) * (x V)``."""
        return self.activation(output) * self.gate(input)


class GatedLinearUnits(Algorithm):
    """Gate the feed-forward layers of a language model (Shazeer 2020, arXiv 2002.05202).

    Changes the model once, before optimizers exist; see :func:`gated_linear_units`, whose arguments these are. New weights come
    from the run's seed. Logs the number of gated layers as ``gated-linear-units/layers``.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.GatedLinearUnits("silu")], device="cpu")
        >>> model.transformer.h[0].mlp.c_fc.gate
        Linear(in_features=8, out_features=32, bias=True)
    """

    events = {Event.INIT}
    phase = Phase.MODEL
    before = ("factorize",)  # which takes projections apart

    def __init__(
        self,
        activation: str | Activation | None = None,
        init: Init = "identity",
        bias: bool = True,
        gate_bias: bool = True,
    ) -> None:
        self._choice = _Choice(activation, init, bias, gate_bias)

    def apply(self, event: Event, state: State) -> None:
        """Gate the feed-forward layers of the model."""
        # Also on the meta device: the strategy then broadcasts the values of rank 0.
        changed = self._choice.operate(state.model, state.generator(self))
        state.replacements += changed
        state.log({"gated-linear-units/layers": sum(isinstance(each.new, Gated) for each in changed)})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return the projections that would get a gate, and the names of the activations that would be a part of it."""
        return [
            f"{site.name}: {type(site.projection).__name__} -> Gated, with {site.activation}" for site in _sites(model)
        ]


class _Site(NamedTuple):
    """The first projection of a feed-forward layer."""

    name: str
    projection: Any
    parent: nn.Module
    #: The name of the activation in the parent.
    activation: str


@dataclass(frozen=True)
class _Choice:
    activation: str | Activation | None
    init: str
    bias: bool
    gate_bias: bool

    def __post_init__(self) -> None:
        if self.init not in ("identity", "normal"):
            raise WrongValue(f"init is {self.init!r}. Give 'identity' or 'normal'.")
        for name in ("bias", "gate_bias"):
            switch("GatedLinearUnits", name, getattr(self, name))
        if isinstance(self.activation, type) or not (
            isinstance(self.activation, str | None) or callable(self.activation)
        ):
            raise WrongType(
                f"GatedLinearUnits was given «activation={short(self.activation)}»: give the name of an activation of "
                "transformers, a function such as torch.nn.functional.silu, or «None» for the model's own. Write for instance "
                "activation='silu'."
            )
        if self.init == "identity" and not self.gate_bias:
            raise WrongValue(
                "«init='identity'» begins with gates of 1, which are V's biases, but gate_bias is False: write "
                "«init='normal'», or leave out gate_bias."
            )

    def operate(self, model: nn.Module, generator: torch.Generator | None) -> list[Replacement]:
        """Gate all feed-forward layers; see `gated_linear_units`."""
        refuse_adapters(model, "Gated linear units")
        sites = {site.projection: site for site in _sites(model)}
        if not sites:
            warn(_why_not(model), NoEffectWarning)
            return []
        chosen = _activation(self.activation)

        def build(old: Any, index: int) -> nn.Module:
            site = sites[old]
            new = with_finish(old, Gated)
            new.activation = getattr(site.parent, site.activation) if chosen is None else chosen
            new.gate = self._gate(site, generator)
            if not self.bias:
                _remove_bias(new)
            return new

        changed = replace_modules(model, {nn.Module: Policy(build, sites.__contains__)})
        for site in sites.values():
            old, new = getattr(site.parent, site.activation), nn.Identity().train(site.parent.training)
            setattr(site.parent, site.activation, new)
            place = "".join(site.name.rpartition(".")[:2])
            changed.append(Replacement(f"{place}{site.activation}", old, new, model))
        return changed

    def _gate(self, site: _Site, generator: torch.Generator | None) -> nn.Linear:
        sizes = [getattr(site.projection, name, None) for name in ("in_features", "out_features", "nx", "nf")]
        found = [size for size in sizes if isinstance(size, int)]
        if len(found) != 2:
            raise WrongValue(
                f"GatedLinearUnits does not know the shape of {site.name}, a {type(site.projection).__name__}: apply it before "
                "other methods, to a model whose projections are Linear or Conv1D."
            )
        # Without the random numbers of Linear: the process's generator is not ours.
        gate = nn.utils.skip_init(nn.Linear, *found, bias=self.gate_bias)
        with torch.no_grad():
            if self.init == "identity":
                gate.weight.zero_()
            else:
                gate.weight.normal_(std=1 / math.sqrt(found[0]), generator=generator)
            if self.gate_bias:
                gate.bias.fill_(1.0 if self.init == "identity" else 0.0)
        return gate


def _activation(given: str | Activation | None) -> Activation | None:
    if not isinstance(given, str):
        return given
    from transformers.activations import ACT2FN

    if given not in ACT2FN:
        raise WrongValue(
            f"transformers has no activation {given!r}. Give 'silu', 'gelu', 'relu', 'sigmoid', 'linear' or another of "
            "transformers.activations.ACT2FN, or a function."
        )
    made: Activation = ACT2FN[given]
    return made


def _remove_bias(projection: Any) -> None:
    if hasattr(projection, "nf"):  # Conv1D adds its bias, whatever it is
        zeros = torch.zeros_like(projection.bias.detach())
        del projection.bias
        projection.register_buffer("bias", zeros, persistent=False)
    else:
        projection.bias = None


def _sites(model: nn.Module) -> list[_Site]:
    sites = []
    for name, module in model.named_modules():
        known = next((places for kind, places in _FEED_FORWARDS.items() if is_of_transformers(module, kind)), None)
        if known is not None and not isinstance(projection := getattr(module, known[0]), Gated):
            path = f"{name}.{known[0]}" if name else known[0]
            sites.append(_Site(path, projection, module, known[1]))
    return sites


def _why_not(model: nn.Module) -> str:
    gates = {f"{name}.gate": part.gate for name, part in model.named_modules() if isinstance(part, Gated)}
    theirs = next((name for name, _ in model.named_modules() if name.endswith((".gate_proj", ".wi_0"))), None)
    if theirs is not None and not gates:
        return (
            f"GatedLinearUnits found nothing to change in {type(model).__name__}, whose feed-forward layers have gates "
            f"already: {theirs}. Remove gated-linear-units."
        )
    lacking = f"no {', '.join(_FEED_FORWARDS)} of transformers. Remove gated-linear-units."
    return why_no_effect("GatedLinearUnits", model, lacking, gates)
