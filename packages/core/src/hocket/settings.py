"""The Trainer's settings: checks of its arguments, and what of them is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from hocket.algorithm import Need
from hocket.hookspecs import StrategyLike
from hocket.plugins.spec import Voice


def describe(model: nn.Module) -> str:
    """Class and size."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {parameters:,} parameters"


def check_microbatch(given: Any, strategy: StrategyLike) -> int | None:
    """Samples per microbatch to begin with."""
    if given == "auto" and Need.FULL_PARAMETERS not in strategy.offers:
        raise ValueError(
            f"microbatch='auto' lets each rank try alone what fits, which it cannot under {type(strategy).__name__}: a forward "
            "pass needs the other ranks, which would wait for one that runs out of memory. Give a number, such as microbatch=8."
        )
    if given is None or given == "auto":
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"microbatch={given!r} is not a number of samples; give a positive int, 'auto' or None.")
    return given


def check_clipping(given: Any) -> tuple[Any, float] | None:
    """Kind and threshold of gradient clipping."""
    if given is None:
        return None
    kind, threshold = given if isinstance(given, tuple | list) and len(given) == 2 else ("norm", given)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if kind not in ("norm", "value", "adaptive") or not number or not threshold > 0:
        raise ValueError(
            f"clip_gradients={given!r} is neither a positive norm, such as 1.0, nor a kind and a threshold, such as "
            "('value', 0.5) or ('adaptive', 0.01)."
        )
    return kind, float(threshold)


def check_reduction(given: Any) -> Literal["mean", "sum"] | None:
    """What losses are."""
    if given not in (None, "mean", "sum"):
        raise ValueError(f"loss_reduction={given!r} is neither 'mean' nor 'sum'; None for what the loss function says.")
    return given  # type: ignore[no-any-return]  # just checked


def hyperparameters(arguments: Mapping[str, Any], voices: Sequence[Voice]) -> dict[str, Any]:
    """The Trainer's arguments and the attached plug-ins, as JSON-like values; what is neither is named by its class."""
    simple = {name: plain(value) for name, value in arguments.items() if name not in _DATA}
    attached: dict[str, Any] = {}
    for voice in voices:
        attached.setdefault(voice.kind, {})[voice.name] = plain(voice.config)
    return {**simple, **attached}


_DATA = {"train_data", "eval_data", "algorithms", "callbacks", "loggers", "strategy", "precision", "actions"}


def plain(value: Any) -> Any:
    """JSON-like values as they are, all else as the name of its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return getattr(value, "__qualname__", None) or type(value).__qualname__
