"""RoPE scaling: use models with rotary positions on longer sequences than they were pretrained on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policy, Replacement, replace_modules
from hocket_nlp.argument_checks import number, whole_number
from hocket_nlp.configuration import own_configuration

if TYPE_CHECKING:
    from hocket.state.state import State

Kind = Literal["linear", "ntk", "dynamic-ntk", "yarn"]

#: The attribute of a configuration that says how its positions were scaled; saved with the others by transformers.
_RECORD = "hocket_rope_scaling"


def rope_scaling(
    model: nn.Module,
    factor: float,
    kind: Kind = "yarn",
    *,
    original_max_position_embeddings: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
) -> tuple[nn.Module, list[Replacement]]:
    """Let the rotary positions of a model cover ``factor`` times as many tokens, in place.

    A rotary embedding turns pair ``i`` of ``d`` dimensions by ``position * theta^(-2i/d)``. For sequences ``s = factor`` times
    as long as the original ``L``:

    - ``"linear"``: all frequencies are divided by s (position interpolation; Chen et al. 2023, arXiv 2306.15595, eq. 4).
    - ``"ntk"``: theta becomes ``theta * s^(d/(d-2))``, so that the lowest frequency is divided by s and the highest stays
      (NTK-aware; Peng et al. 2023, arXiv 2309.00071, section 3).
    - ``"dynamic-ntk"``: sequences shorter than L are computed as before. For n > L tokens theta becomes
      ``theta * (s * n/L - (s - 1))^(d/(d-2))``, as transformers computes it; with ``factor=1`` this is the paper's
      ``(n/L)^(d/(d-2))``, which fits any length.
    - ``"yarn"``: frequencies that turn more than ``beta_fast`` times in L tokens stay, those that turn less than ``beta_slow``
      times are divided by s, and a ramp over the dimensions lies between, as in the authors' code; queries and keys are
      multiplied by ``attention_factor`` (arXiv 2309.00071, section 3).

    The settings go into the model's configuration (``rope_parameters`` and ``max_position_embeddings``), of which the model
    gets a private copy. ``save_pretrained`` saves them, and ``from_pretrained`` returns a scaled model.

    Args:
        model: a model of transformers 5 or later whose rotary positions follow ``config.rope_parameters``, such as Llama,
            Mistral, Qwen or GPT-NeoX, with any head, or a module that holds such models.
        factor: how many times as long sequences become, at least 1.
        kind: one of the four above.
        original_max_position_embeddings: L, in tokens; None for ``config.max_position_embeddings``.
        beta_fast: turns in L tokens above which YaRN keeps frequencies.
        beta_slow: turns in L tokens below which YaRN divides them by s.
        attention_factor: YaRN's factor of queries and keys; None for ``0.1 * ln(s) + 1``.

    Returns:
        The model, and a record of the replaced rotary embeddings. They have no parameters.

    Raises:
        TypeError: the model has no rotary positions that its configuration describes.
        ValueError: ``factor`` is below 1, an argument does not belong to ``kind``, the positions are scaled already in another
            way, layers have different ones, or fewer than 4 dimensions turn (NTK).

    Warns:
        NoEffectWarning: the model is already scaled in this way, or ``factor`` is 1.

    Example:
        >>> import transformers
        >>> from hocket_nlp.functional import rope_scaling
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=16, max_position_embeddings=128)
        >>> model, replaced = rope_scaling(transformers.LlamaForCausalLM(config), factor=4)
        >>> model.config.max_position_embeddings, model.config.rope_parameters["rope_type"]
        (512, 'yarn')
    """
    scaling = _Scaling(factor, kind, original_max_position_embeddings, beta_fast, beta_slow, attention_factor)
    return model, scaling.operate(model)


class RoPEScaling(Algorithm):
    """Train on longer sequences than a model with rotary positions has seen (Peng et al. 2023, arXiv 2309.00071).

    Before training, the model is changed by :func:`rope_scaling`, whose arguments these are. Evaluation uses the same
    positions.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=16, max_position_embeddings=128)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.RoPEScaling(factor=4)], device="cpu")
        >>> model.model.rotary_emb.rope_type
        'yarn'
    """

    events = {Event.INIT}
    phase = Phase.MODEL
    conflicts = ("alibi",)  # which does without rotary positions

    def __init__(
        self,
        factor: float,
        kind: Kind = "yarn",
        original_max_position_embeddings: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
    ) -> None:
        self._scaling = _Scaling(factor, kind, original_max_position_embeddings, beta_fast, beta_slow, attention_factor)

    def apply(self, event: Event, state: State) -> None:
        """Change the model once."""
        state.replacements += self._scaling.operate(state.model)

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return the rotary embeddings that would be scaled."""
        return [
            f"{name}: {type(module).__name__}, {self._scaling.kind} by {self._scaling.factor:g}"
            for name, module in model.named_modules()
            if _is_rotary(module) and not self._scaling.applied(module.config)
        ]


@dataclass(frozen=True)
class _Scaling:
    factor: float
    kind: str
    original: int | None
    beta_fast: float
    beta_slow: float
    attention_factor: float | None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise WrongValue(f"kind is {self.kind!r}. Give one of {', '.join(map(repr, get_args(Kind)))}.")
        who = "RoPEScaling"
        number(who, "factor", self.factor, 4, least=1)
        whole_number(who, "original_max_position_embeddings", self.original, 4096, optional=True)
        number(who, "beta_fast", self.beta_fast, 32)
        number(who, "beta_slow", self.beta_slow, 1)
        number(who, "attention_factor", self.attention_factor, 1.1, optional=True)
        defaults = (self.beta_fast, self.beta_slow, self.attention_factor) == (32, 1, None)
        if self.kind != "yarn" and not defaults:
            raise WrongValue(
                f"beta_fast, beta_slow and attention_factor are YaRN's: leave them out with «kind={self.kind!r}», or write "
                "kind='yarn'."
            )
        if not self.beta_fast > self.beta_slow:
            raise WrongValue(
                f"RoPEScaling was given «beta_fast={self.beta_fast}» and «beta_slow={self.beta_slow}», but beta_fast is above "
                "beta_slow. YaRN's are 32 and 1."
            )

    def operate(self, model: nn.Module) -> list[Replacement]:
        """Scale all rotary embeddings; see `rope_scaling`."""
        rotary = [module for module in model.modules() if _is_rotary(module)]
        if not rotary:
            raise WrongType(
                "RoPE scaling is for models of transformers with rotary positions and config.rope_parameters, such as Llama, "
                f"Qwen or GPT-NeoX, and there is none in {type(model).__name__}. Give one of these, or remove rope-scaling."
            )
        configurations = list({id(module.config): module.config for module in rotary}.values())
        for config in configurations:
            self._check(config, [2 * len(_frequencies(each)) for each in rotary if each.config is config])
        todo = [config for config in configurations if not self.applied(config)]
        if not todo or (self.factor == 1 and self.kind != "dynamic-ntk"):
            done = (
                f"are scaled by {self.kind} and {self.factor:g} already"
                if not todo
                else "stay as they are with «factor=1»"
            )
            warn(
                f"RoPE scaling changed nothing: the rotary positions of {type(model).__name__} {done}. Remove rope-scaling.",
                NoEffectWarning,
            )
            return []
        chosen = [module for module in rotary if any(module.config is config for config in todo)]
        for config in todo:
            own = own_configuration(model, config)
            module = next(module for module in chosen if module.config is own)
            self._try(module, copy.deepcopy(own))
            self._write(own, 2 * len(_frequencies(module)))
        return replace_modules(
            model, {nn.Module: Policy(lambda old, index: type(old)(config=old.config), lambda old: old in chosen)}
        )

    def _try(self, module: Any, config: Any) -> None:
        """Raise ValueError if transformers cannot scale this model, before anything is changed."""
        try:
            self._write(config, 2 * len(_frequencies(module)))
            type(module)(config=config)
        except Exception as error:
            raise WrongValue(
                f"transformers cannot scale the rotary positions of {type(config).__name__} by {self.kind} ({error}). Try "
                "another kind, such as 'linear', or remove rope-scaling."
            ) from error

    def applied(self, config: Any) -> bool:
        """Whether this scaling is in a configuration already."""
        record = getattr(config, _RECORD, None)
        if not record:
            return False
        asked = self._record(config)
        return record == (asked if self.original else {**asked, "original": record["original"]})

    def _record(self, config: Any) -> dict[str, Any]:
        """Return what the configuration remembers, in the form in which JSON gives it back."""
        return {
            "factor": float(self.factor),
            "kind": self.kind,
            "original": self.original or config.max_position_embeddings,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": self.attention_factor,
        }

    def _check(self, config: Any, dimensions: list[int]) -> None:
        """Raise ValueError if a configuration cannot be scaled."""
        given, name = config.rope_parameters, type(config).__name__
        if any(isinstance(value, dict) for value in given.values()) or "rope_type" not in given:
            raise WrongValue(
                f"RoPE scaling does not know which positions of {name} to scale, whose layers have several: "
                f"{', '.join(map(str, given))}. Set config.rope_parameters yourself, before the model is made."
            )
        if self.applied(config):
            return
        if given["rope_type"] != "default" or getattr(config, _RECORD, None):
            how = getattr(config, _RECORD, None) or given
            raise WrongValue(
                f"The rotary positions of {name} are scaled already: {how}. Give a model with its original positions, or "
                "remove rope-scaling."
            )
        if "ntk" in self.kind and min(dimensions) < 4:
            raise WrongValue(
                f"{self.kind} divides by d - 2, and only {min(dimensions)} dimensions of each head of {name} turn. Write "
                "«kind='linear'» or 'yarn'."
            )

    def _write(self, config: Any, dimensions: int) -> None:
        """Write the settings into a configuration of the model's own, in the words of transformers."""
        record = self._record(config)
        original, factor = record["original"], record["factor"]
        new = dict(config.rope_parameters)
        if self.kind == "ntk":
            new["rope_theta"] = new["rope_theta"] * factor ** (dimensions / (dimensions - 2))
        else:
            new.update(rope_type={"dynamic-ntk": "dynamic"}.get(self.kind, self.kind), factor=factor)
        if self.kind == "yarn":
            new.update(
                original_max_position_embeddings=original, beta_fast=record["beta_fast"], beta_slow=record["beta_slow"]
            )
            if self.attention_factor is not None:
                new["attention_factor"] = float(self.attention_factor)
        # transformers takes the original length of the dynamic kind from here.
        config.max_position_embeddings = original if self.kind == "dynamic-ntk" else round(original * factor)
        config.rope_parameters = new
        setattr(config, _RECORD, record)


def _is_rotary(module: nn.Module) -> bool:
    """Whether it computes rotary positions as its configuration says, in the way of transformers 5."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    return isinstance(parameters, dict) and hasattr(module, "rope_type") and bool(list(_tensors(module)))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")]


def _frequencies(module: nn.Module) -> Tensor:
    return _tensors(module)[0]
