"""`TrainingArguments`, field by field: arguments of `hocket.Trainer`, work that transformers does, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

import hocket
from hocket.errors import WrongType, WrongValue
from hocket_migration.transformers.fields import ELSEWHERE, FIELDS, steps_in_backward


def configuration(args: TrainingArguments) -> dict[str, Any]:
    """Return what ``args`` means as arguments of `hocket.Trainer`: names and plain values, which YAML can hold.

    With the model, the loaders and this mapping, `hocket.Trainer` trains as transformers does, without `hocket_migration`.
    Fields about data, such as ``per_device_train_batch_size``, are for the loaders that you give it. The random numbers are
    others: hocket's ``seed`` gives each run generators of its own.

    Raises:
        ValueError: a field has a value that no argument expresses; the message names it, and says what to write.

    Example:
        >>> from transformers import TrainingArguments
        >>> from hocket_migration.transformers import configuration
        >>> given = configuration(TrainingArguments(use_cpu=True, gradient_accumulation_steps=4, save_strategy="no"))
        >>> given["accumulate"], given["duration"], given["schedule"]
        ('4ba', '3ep', 'linear')
    """
    found: dict[str, Any] = {}
    for field in FIELDS.values():
        if (value := field.value(args)) is not None:
            found.setdefault(field.argument, value)
    found.setdefault("eval_every", None)  # the default of hocket is every epoch
    left = [name for name in _changed(args) if not FIELDS[name].settled]
    if left:
        lines = "".join(f"\n  {name}={getattr(args, name)!r}: {FIELDS[name].text}" for name in left)
        raise WrongValue(
            f"No argument of hocket.Trainer expresses these fields of TrainingArguments. Set them to their defaults, and write "
            f"instead:{lines}"
        )
    return found


def check_types(name: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of the Trainer that are of another kind, such as callbacks of hocket's."""
    model = given.get("model")
    if model is not None and not isinstance(model, nn.Module):
        raise WrongType(
            f"{name}(model=) was given {model!r}, which is not a torch.nn.Module. Load the model first: "
            f"{name}(model=AutoModel….from_pretrained({model if isinstance(model, str) else 'name'!r}), …)."
        )
    args = given.get("args")
    if args is not None and not isinstance(args, TrainingArguments):
        raise WrongType(
            f"{name}(args=) was given {type(args).__name__}. Write {name}(model=model, "
            "args=TrainingArguments(output_dir='out'), …)."
        )
    for each in given.get("callbacks") or ():
        kind = each if isinstance(each, type) else type(each)
        if not issubclass(kind, TrainerCallback):
            raise WrongType(
                f"{name}(callbacks=) takes TrainerCallbacks of transformers, and was given {each!r}. Write those of hocket as "
                "hocket={'callbacks': […]}, and algorithms as hocket={'algorithms': ['ema']}."
            )


def check(args: TrainingArguments) -> None:
    """Raise ValueError for a field that the drop-in Trainer does not support at its value, with what to write."""
    for name in _changed(args):
        if refused := FIELDS[name].refused:
            raise WrongValue(f"TrainingArguments({name}={getattr(args, name)!r}) is not supported: {refused}.")
    optim = str(getattr(args.optim, "value", args.optim))
    if steps_in_backward(optim):
        raise WrongValue(
            f"TrainingArguments(optim={optim!r}) steps inside the backward pass, which hocket's loop has no place for. Choose "
            "another, such as optim='adamw_torch_fused', or pass optimizers=(optimizer, None)."
        )


def _changed(args: TrainingArguments) -> list[str]:
    """Return the fields that are not at their defaults."""
    kind: Any = next(cls for cls in type(args).__mro__ if cls.__module__.startswith("transformers."))
    default = kind(output_dir=args.output_dir, use_cpu=args.use_cpu)
    return [
        name
        for name in FIELDS
        if hasattr(args, name) and getattr(args, name) != getattr(default, name) and name != "use_cpu"
    ]


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
        raise WrongType(
            f"hocket={given!r} is a {type(given).__name__}. Write hocket={{'algorithms': ['ema']}}: arguments of "
            "hocket.Trainer by name."
        )
    known = inspect.signature(hocket.Trainer.__init__).parameters.keys() - {"self"}
    for name in given:
        if name not in known:
            raise WrongType(
                f"hocket={{{name!r}: …}} is no argument of hocket.Trainer, which takes {', '.join(sorted(known))}."
            )
        if name in ELSEWHERE:
            raise WrongType(f"hocket={{{name!r}: …}} is made by this Trainer. {ELSEWHERE[name]}")
    return dict(given)


def waits_for_metrics(scheduler: Any) -> bool:
    """Whether a scheduler is stepped after evaluations, with a metric."""
    parameters = inspect.signature(scheduler.step).parameters
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or "metrics" in parameters
