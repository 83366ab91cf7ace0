"""`TrainingArguments`, field by field: arguments of `hocket.Trainer`, work that transformers does, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

import hocket
from hocket_migration.transformers.fields import ELSEWHERE, FIELDS, LAYERWISE

if TYPE_CHECKING:
    from transformers import TrainingArguments


def configuration(args: TrainingArguments) -> dict[str, Any]:
    """Return what ``args`` means as arguments of `hocket.Trainer`: names and plain values, which YAML can hold.

    With the model, the loaders and this mapping, `hocket.Trainer` trains as transformers does, without `hocket_migration`.
    The random numbers are others: hocket's ``seed`` gives each run generators of its own.

    Raises:
        ValueError: a field has a value for which hocket has no counterpart; the message says what to write.

    Example:
        >>> from transformers import TrainingArguments
        >>> from hocket_migration.transformers import configuration
        >>> given = configuration(TrainingArguments(use_cpu=True, gradient_accumulation_steps=4, save_strategy="no"))
        >>> given["accumulate"], given["duration"], given["schedule"]
        ('4ba', '3ep', 'linear')
    """
    check(args, FIELDS)
    found: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if field.value is not None and (value := field.value(args)) is not None:
            for argument in field.arguments:
                found.setdefault(argument, value)
        del name
    return found


def check(args: TrainingArguments, fields: Mapping[str, Any] = FIELDS) -> None:
    """Raise ValueError for a field that hocket does not support at its value, with what to write."""
    defaults = type(args).__dataclass_fields__
    for name, field in fields.items():
        value = getattr(args, name, None)
        default = defaults[name].default if name in defaults else None
        if field.refused and value not in (None, False, default, "", [], {}):
            raise ValueError(f"TrainingArguments({name}={value!r}) is not supported: {field.refused}")
    optim = str(getattr(args.optim, "value", args.optim))
    if any(each in optim for each in LAYERWISE):
        raise ValueError(
            f"TrainingArguments(optim={optim!r}) steps inside the backward pass, which hocket's loop has no place for. Choose "
            "another, such as optim='adamw_torch_fused', or pass optimizers=(optimizer, None)."
        )


def for_loop(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments of `hocket.Trainer` for a run in which transformers logs, evaluates, saves and draws numbers."""
    return {
        "accumulate": f"{args.gradient_accumulation_steps}ba" if args.gradient_accumulation_steps > 1 else None,
        "clip_gradients": args.max_grad_norm or None,
        "precision": FIELDS["bf16"].value(args) or FIELDS["fp16"].value(args) or "fp32",
        "device": args.device.type,
        "compile": FIELDS["torch_compile"].value(args) or False,
        "strategy": FIELDS["ddp_find_unused_parameters"].value(args) or "auto",
        "eval_every": None,
    }


def checked_hocket(given: Any) -> dict[str, Any]:
    """Return the arguments for `hocket.Trainer`, or raise TypeError for those that it does not have or the Trainer makes."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"hocket={given!r} is a {type(given).__name__}. Write hocket={{'algorithms': ['ema']}}: arguments of "
            "hocket.Trainer by name."
        )
    known = inspect.signature(hocket.Trainer.__init__).parameters.keys() - {"self"}
    for name in given:
        if name not in known:
            raise TypeError(
                f"hocket={{{name!r}: …}} is no argument of hocket.Trainer, which takes {', '.join(sorted(known))}."
            )
        if name in ELSEWHERE:
            raise TypeError(f"hocket={{{name!r}: …}} is made by this Trainer. {ELSEWHERE[name]}")
    return dict(given)


def waits_for_metrics(scheduler: Any) -> bool:
    """Whether a scheduler is stepped after evaluations, with a metric."""
    parameters = inspect.signature(scheduler.step).parameters
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or "metrics" in parameters


def yaml_of(found: Mapping[str, Any], dump: Callable[[Any], str]) -> str:
    """Return a `configuration` as text; ``dump`` is ``yaml.safe_dump``."""
    return dump({name: value for name, value in found.items()})
