"""Query-key normalisation: attention whose logits cannot grow without bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policy, Replacement, replace_modules, why_no_effect
from hocket_nlp.argument_checks import number
from hocket_nlp.meta_device import refuse_meta
from hocket_nlp.projections import Finisher, is_of_transformers, refuse_adapters, with_finish

if TYPE_CHECKING:
    from hocket.state.state import State

Norm = Literal["rms", "layer"]


def qk_norm(model: nn.Module, *, norm: Norm = "rms", eps: float = 1e-6) -> tuple[nn.Module, list[Replacement]]:
    """Normalise queries and keys of each head before their dot product, in place.

    ``softmax(norm(q) norm(k)^T / sqrt(d)) v``: with weights of 1 no logit exceeds ``sqrt(d)``, whatever the model has learned
    (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442, section 2.3). The norm is over the ``d``
    dimensions of a head, before rotary positions, with a learned weight of ``d`` numbers for the queries and one for the keys
    of each layer, which all heads share, as in Qwen3.

    The projections compute it, so that attention of any implementation does the same. They keep class (as subclasses),
    parameters and names in the ``state_dict``; the new weights are called ``<projection>.norm.weight``, or ``.q_norm.weight``
    and ``.k_norm.weight`` for projections that compute queries and keys together. transformers knows nothing of them:
    ``save_pretrained`` saves them, and after ``from_pretrained`` apply this again and load the ``state_dict``.

    Args:
        model: a model of transformers, or any module with attention of one of these forms: Llama and others with ``q_proj``,
            ``k_proj`` and ``head_dim`` (Mistral, Qwen2, OPT, BART, CLIP); BERT and others with ``query``, ``key`` and
            ``attention_head_size`` (RoBERTa, ViT); GPT-2; GPT-NeoX.
        norm: ``"rms"``, which divides by the root of the mean square, or ``"layer"``, which subtracts the mean first.
        eps: added to the mean square, or to the variance.

    Returns:
        The model and a record of each replaced projection. Add the new parameters to an existing optimizer with
        `hocket.surgery.update_optimizer`.

    Raises:
        ValueError: ``norm`` or ``eps`` is out of range, a projection does not give the heads that its layer has, or the model
            is on the meta device.

    Warns:
        NoEffectWarning: there is no such attention, or it has norms already.

    Example:
        >>> import transformers
        >>> from hocket_nlp.functional import qk_norm
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
        >>> model, replaced = qk_norm(transformers.GPT2LMHeadModel(config))
        >>> print(replaced[0])
        transformer.h.0.attn.c_attn: Conv1D -> FusedNormConv1D
    """
    choice = _Choice(norm, eps)
    refuse_meta("qk_norm", model, "where the weights of norms would get no values")
    return model, choice.operate(model)


def normalize_heads(projected: Tensor, norm: nn.RMSNorm | nn.LayerNorm) -> Tensor:
    """Return ``norm`` of each head: ``(..., heads * head_dim) -> (..., heads * head_dim)``.

    Computed in the dtype of the norm's weight, which is float32 under autocast, and returned in that of ``projected``.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import normalize_heads
        >>> normalize_heads(torch.tensor([3.0, -3.0, 0.1, 0.1]), torch.nn.RMSNorm(2, eps=1e-9))
        tensor([ 1.0000, -1.0000,  1.0000,  1.0000], grad_fn=<ViewBackward0>)
    """
    (head_dim,) = norm.normalized_shape
    return _normalized(projected.unflatten(-1, (-1, head_dim)), norm).flatten(-2)


def _normalized(heads: Tensor, norm: Any) -> Tensor:
    normed: Tensor = norm(heads.to(norm.weight.dtype))
    return normed.to(heads.dtype)


class HeadNorm(Finisher):
    """A projection to queries or to keys that normalises each head."""

    norm: nn.RMSNorm | nn.LayerNorm

    def finish(self, input: Tensor, output: Tensor) -> Tensor:
        """Return the heads, normalised."""
        return normalize_heads(output, self.norm)


class FusedNorm(Finisher):
    """A projection to queries, keys and values, or to keys and values, that normalises each head of queries and keys."""

    q_norm: nn.RMSNorm | nn.LayerNorm
    k_norm: nn.RMSNorm | nn.LayerNorm
    #: How many of queries, keys and values the output has, and whether those of a head lie together (GPT-NeoX).
    parts: int
    by_head: bool

    def finish(self, input: Tensor, output: Tensor) -> Tensor:
        """Return queries, keys and values in the same places."""
        if self.by_head:
            (head_dim,) = self.k_norm.normalized_shape
            q, k, v = output.unflatten(-1, (-1, 3, head_dim)).unbind(-2)
            return torch.stack([_normalized(q, self.q_norm), _normalized(k, self.k_norm), v], -2).flatten(-3)
        *queries, k, v = output.chunk(self.parts, -1)
        normed = [normalize_heads(q, self.q_norm) for q in queries]
        return torch.cat([*normed, normalize_heads(k, self.k_norm), v], -1)


class QKNorm(Algorithm):
    """Normalise queries and keys before attention (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, 2302.05442).

    Changes the model once, before optimizers exist; see :func:`qk_norm`, whose arguments these are. Logs the number of layers
    of attention as ``qk-norm/layers``.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.QKNorm()], device="cpu")
        >>> model.transformer.h[0].attn.c_attn.q_norm
        RMSNorm((4,), eps=1e-06, elementwise_affine=True)
    """

    events = {Event.INIT}
    phase = Phase.MODEL

    def __init__(self, norm: Norm = "rms", eps: float = 1e-6) -> None:
        self._choice = _Choice(norm, eps)

    def apply(self, event: Event, state: State) -> None:
        """Change the projections of the model."""
        # Also on the meta device: the strategy then broadcasts the values of rank 0.
        changed = self._choice.operate(state.model)
        state.replacements += changed
        state.log({"qk-norm/layers": len({each.name.rpartition(".")[0] for each in changed})})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return the projections that would be changed."""
        return [f"{site.name}: {site.kind.__name__} over {site.head_dim} dimensions" for site in _sites(model)]


class _Site(NamedTuple):
    """A projection of an attention module that gives queries, keys or both."""

    name: str
    module: nn.Module
    kind: type[Finisher]
    head_dim: int
    options: dict[str, Any]


@dataclass(frozen=True)
class _Choice:
    norm: str
    eps: float

    def __post_init__(self) -> None:
        if self.norm not in ("rms", "layer"):
            raise WrongValue(f"norm is {self.norm!r}. Give 'rms' or 'layer'.")
        number("QKNorm", "eps", self.eps, 1e-6)  # above 0, for queries and keys of zeros

    def operate(self, model: nn.Module) -> list[Replacement]:
        """Change all projections; see `qk_norm`."""
        refuse_adapters(model, "QK norm")
        sites = {site.module: site for site in _sites(model)}
        if not sites:
            warn(_why_not(model), NoEffectWarning)
            return []
        return replace_modules(
            model, {nn.Module: Policy(lambda old, index: self._build(sites[old]), sites.__contains__)}
        )

    def _build(self, site: _Site) -> nn.Module:
        new = with_finish(site.module, site.kind)
        for name, value in site.options.items():
            setattr(new, name, value)
        for name in ("norm",) if site.kind is HeadNorm else ("q_norm", "k_norm")[3 - site.options["parts"] :]:
            kind = nn.RMSNorm if self.norm == "rms" else _BiaslessLayerNorm
            setattr(new, name, kind(site.head_dim, eps=self.eps))
        return new


class _BiaslessLayerNorm(nn.LayerNorm):
    """A bias would add the same to all logits of a query, and let keys grow."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__(head_dim, eps=eps, bias=False)


def _sites(model: nn.Module) -> list[_Site]:
    """Return the projections to change, in order. Raises ValueError for a layout that is unknown."""
    return [site for name, module in model.named_modules() for site in _of(f"{name}." if name else "", module)]


def _of(prefix: str, module: Any) -> list[_Site]:
    if _names_of_norms(module):
        return []
    kind = next((known for known in ("GPT2Attention", "GPTNeoXAttention") if is_of_transformers(module, known)), None)
    if kind == "GPT2Attention":
        crossed = (
            [_Site(f"{prefix}q_attn", module.q_attn, HeadNorm, module.head_dim, {})]
            if module.is_cross_attention
            else []
        )
        options = {"parts": 2 if crossed else 3, "by_head": False}
        return [*crossed, _Site(f"{prefix}c_attn", module.c_attn, FusedNorm, module.head_dim, options)]
    if kind == "GPTNeoXAttention":
        options = {"parts": 3, "by_head": True}
        return [_Site(f"{prefix}query_key_value", module.query_key_value, FusedNorm, module.head_size, options)]
    for names, size in ((("q_proj", "k_proj"), "head_dim"), (("query", "key"), "attention_head_size")):
        head_dim = getattr(module, size, None)
        if isinstance(head_dim, int) and all(isinstance(getattr(module, name, None), nn.Module) for name in names):
            found = [_Site(f"{prefix}{name}", getattr(module, name), HeadNorm, head_dim, {}) for name in names]
            _check_heads(module, found[0])
            return found
    return []


def _names_of_norms(module: nn.Module) -> list[str]:
    """Return the norms of queries and keys that an attention module has."""
    own = [name for name, _ in module.named_children() if name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")]
    return own or [name for name, child in module.named_children() if isinstance(child, Finisher)]


def _check_heads(module: Any, site: _Site) -> None:
    """Raise ValueError unless the queries are the heads of the configuration, one after the other."""
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    features = getattr(site.module, "out_features", None)
    if isinstance(heads, int) and isinstance(features, int) and features != heads * site.head_dim:
        raise WrongValue(
            f"QKNorm expects {heads} heads of {site.head_dim} from {site.name}, and {type(module).__name__} has {features} "
            "features there, in an order that it does not know: remove qk-norm."
        )


def _why_not(model: nn.Module) -> str:
    norms = {
        f"{name}.{part}": module.get_submodule(part)
        for name, module in model.named_modules()
        if not isinstance(module, Finisher)
        for part in _names_of_norms(module)
    }
    theirs = next((name for name, module in norms.items() if not isinstance(module, HeadNorm | FusedNorm)), None)
    if theirs is not None:
        return (
            f"QKNorm found nothing to change in {type(model).__name__}, which normalises queries and keys already: {theirs}. "
            "Remove qk-norm."
        )
    lacking = (
        "no attention that it knows, with q_proj and k_proj, query and key, or of GPT-2 or GPT-NeoX. Remove qk-norm."
    )
    return why_no_effect("QKNorm", model, lacking, norms)
