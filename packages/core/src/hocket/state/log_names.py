"""Errors and warnings about logged values, and what to write instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, strided

from hocket.basics.history import POSITION
from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue
from hocket.help import names

_REDUCTIONS = ("mean", "sum", "min", "max", "last", "metric")
_OVER = ("interval", "epoch")


def over(given: object) -> tuple[str, ...]:
    """Return what a value is reduced over, as a tuple. Raises ValueError or TypeError."""
    asked = (given,) if isinstance(given, str) else given
    if not isinstance(asked, Sequence) or not asked or not all(isinstance(span, str) for span in asked):
        raise WrongType(
            f"«over={short(given)}» is not a text. Write «over='interval'», «over='epoch'», or both as a tuple."
        )
    for span in asked:
        if span not in _OVER:
            raise WrongValue(
                f"«over={span!r}» is unknown; there are 'interval', which ends with every «log_every=», and 'epoch', or both "
                f"as a tuple. Write «over={_meant(span, _OVER, 'over')!r}». In an evaluation every value is over its set."
            )
    return tuple(dict.fromkeys(asked))


def check_name(name: object) -> None:
    """Raise TypeError for a name that is no text."""
    if not isinstance(name, str) or not name:
        raise WrongType(
            f"A value was logged under the name {short(name)}; names are texts. Write self.log('accuracy', value), or "
            "state.log({'accuracy': value}) in a callback."
        )


def check(name: object, reduce: object, weight: object) -> None:
    """Raise TypeError or ValueError for a name, a reduction or a weight that cannot be."""
    check_name(name)
    if reduce not in _REDUCTIONS:
        text = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "")
        raise WrongValue(
            f"«reduce={short(reduce)}» of {name!r} is unknown; there are 'mean', 'sum', 'min', 'max', 'last', and 'metric' for "
            f"an object with update, compute and reset. Write «reduce={_meant(text, _REDUCTIONS, 'reduce')!r}»."
        )
    if weight is not None and reduce != "mean":
        raise WrongValue(
            f"{name!r} was logged with «reduce={reduce!r}» and a weight=, which only a mean has. Write «reduce='mean'», or "
            "omit weight=."
        )
    if name in POSITION:
        raise WrongValue(
            f"{name!r} is a column of result.history, the position of a row. Write a name with a slash, such as 'my/{name}'."
        )


def weight(given: float | Tensor) -> float | Tensor:
    """Return a weight as a float or a scalar tensor, whose value is not read. Raises TypeError and ValueError."""
    if isinstance(given, Tensor) and given.numel() == 1:
        return given
    if isinstance(given, str | Tensor):
        kind = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise WrongType(f"weight= was given {kind}; it is one number. Write weight=len(targets), for instance.")
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise WrongType(
            f"weight= was given {short(given)}; it is one number. Write weight=len(targets), for instance."
        ) from None
    if not 0 <= number < math.inf:
        raise WrongValue(
            f"weight= was given {number:g}; it is 0 or more, and finite. Write weight=len(targets), for instance; with 0 "
            "the value does not count."
        )
    return number


def unnamed(given: tuple[object, ...]) -> TypeError:
    """Return the error for arguments of ``state.log`` that are no mapping."""
    name, value = repr(given[0]) if isinstance(given[0], str) else "'name'", short(given[1]) if given[1:] else "value"
    return WrongType(
        f"state.log was given {', '.join(map(short, given))}; it takes values by name. Write state.log({{{name}: {value}}})."
    )


def not_a_number(name: str, value: object) -> TypeError:
    """Return the error for a value that is not one number."""
    kind, write = found_instead(value)
    return WrongType(f"{name!r} was logged as {kind}. {write}")


def found_instead(value: object) -> tuple[str, str]:
    """Return what a value is that is not one number, and what to log instead."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}", "Log one number, such as its mean(); or a name for each."
    if isinstance(value, Tensor) and value.is_meta:
        return "a tensor on the device 'meta', which has no value", "Log a tensor that was computed, or a number."
    if isinstance(value, Tensor) and value.layout is not strided:
        return f"a tensor that is not dense ({value.layout})", "Log its to_dense(), or a number."
    if isinstance(value, Tensor):
        return f"a complex number ({value.dtype})", "Log its abs(), for instance."
    if isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c":
        return f"the complex number {short(value)}", "Log its abs(), for instance."
    if isinstance(value, int):
        return f"an int of {value.bit_length()} bits, too large for a float", "Log its math.log(), for instance."
    if callable(getattr(value, "compute", None)):
        return f"the metric {type(value).__name__}", "Write «reduce='metric'»."
    return f"{short(value)}", "Log numbers or tensors of one element; loggers take texts by log_text."


def not_a_metric(name: str, value: object) -> TypeError:
    """Return the error for a number in place of a metric object."""
    return WrongType(
        f"{name!r} was logged as {short(value)} with «reduce='metric'», or was a metric before. Log the object itself, with "
        "update, compute and reset, or a number under another name."
    )


def not_combined(name: str, value: object, world: int) -> TypeError:
    """Return the error for a metric object that ranks cannot combine."""
    return WrongType(
        f"The metric {type(value).__name__} logged as {name!r} cannot be combined over {world} ranks. Log a torchmetrics "
        "metric, or give it merge_state(others), which adds what other metrics of its class have seen."
    )


def in_buffers(name: str, value: object, buffers: Iterable[str]) -> ValueError:
    """Return the error for a metric whose sums other ranks overwrite."""
    return WrongValue(
        f"The metric {type(value).__name__} logged as {name!r} is a module of the Task with sums in buffers "
        f"({', '.join(buffers)}). Those of rank 0 are copied to all ranks after every batch, so what other ranks counted would "
        "be lost. Keep sums in attributes, such as self.total = torch.zeros(()) in reset(), or log a metric of torchmetrics."
    )


def shared_metric(name: str, value: object) -> ValueError:
    """Return the error for a metric object that training and evaluation have in common."""
    return WrongValue(
        f"The metric {type(value).__name__} logged as {name!r} is logged in training and in evaluation, whose values would "
        "mix. Use an object for each, chosen by self.training, or define metrics(split), which makes one for each."
    )


def metric_over_both(name: str) -> ValueError:
    """Return the error for one metric object over interval and epoch."""
    return WrongValue(
        f"The metric logged as {name!r} is over the interval and the epoch, and is reset at the end of each. Use an object for "
        "each, logged under two names."
    )


def reserved(name: str, by: str) -> ValueError:
    """Return the error for a name that something else measures."""
    return WrongValue(f"{name!r} is {by}. Log the value under another name, such as {_other(name)!r}.")


def logged_otherwise(name: str, before: str, now: str) -> ValueError:
    """Return the error for a name that was logged in two ways."""
    return WrongValue(
        f"{name!r} was logged with {before} before, and with {now} now. Use a name for each, such as {_other(name)!r}."
    )


def differs(name: str, over: str, reduce: str, by_rank: Mapping[int, str], world: int) -> str:
    """Return the warning about a name that some ranks have not logged, or in another way."""
    have = [rank for rank, how in by_rank.items() if how == reduce]
    lacking = [rank for rank in range(world) if rank not in by_rank]
    others = [f"with «reduce={how!r}» on {_ranks([rank])}" for rank, how in by_rank.items() if how != reduce]
    where = [*others, *([f"not on {_ranks(lacking)}"] if lacking else [])]
    return (
        f"{name!r} was logged with «reduce={reduce!r}» on {_ranks(have)}, and {' and '.join(where)}, in the same {over}. Its "
        f"value is that of {_ranks(have)}. Log it in the same way on all ranks"
        + ("; where there is nothing to count, with «weight=0»." if reduce == "mean" else ".")
    )


def lost(name: str, ranks: Sequence[int]) -> str:
    """Return the warning about a name that was logged without a reduction, but not on rank 0."""
    return (
        f"{name!r} was logged on {_ranks(ranks)}, and not on rank 0. Without a reduction loggers get the values of rank 0, so "
        f"it is in no log. Log it on rank 0 too, or write state.log({{{name!r}: …}}, reduce='mean')."
    )


def twice(both: Sequence[str]) -> str:
    """Return the warning about names that were logged with and without a reduction in one interval."""
    return (
        f"{', '.join(map(repr, both))} {'was' if len(both) == 1 else 'were'} logged both with a reduction and without in one "
        f"interval; the reduced value is kept. Use a name for each, such as {_other(both[0])!r}."
    )


def outside(kind: str) -> str:
    """Return the message for `Task.log` outside of a run."""
    return (
        f"{kind}.log(…) was called outside of a run, where nothing takes the value. It works while a hocket.Trainer fits, "
        "evaluates or predicts with this task; a copy of the task is not in the run. To use the model by itself, log in "
        "loss(outputs, batch), which only a Trainer calls, instead of forward."
    )


def foreign(arguments: Mapping[str, object], call: str) -> TypeError:
    """Return the error for arguments of other libraries' ``log``."""
    advice = [f"instead of {name}=: {text}" for name in arguments if (text := argument(name))]
    unknown = [name for name in arguments if argument(name) is None]
    return WrongType(
        f"{call} takes reduce=, over= and weight=, and was given {', '.join(f'{name}=' for name in arguments)}. "
        + (f"Write {'; '.join(advice)}. " if advice else "")
        + (f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown here." if unknown else "")
    )


def argument(name: str) -> str | None:
    """Return what to write instead of an argument of another library's ``log``, or None."""
    option = names.closest(name, ("reduce", "over", "weight"))
    return names.listed(name, "log-arguments") or (option and f"{option}=")


def _meant(given: str, options: Sequence[str], table: str) -> str:
    known = names.listed(given, "log-values", table) if given else None
    return known or names.closest(given, options, 0.4) or options[0]


def _other(name: str) -> str:
    head, _, last = name.rpartition("/")
    return re.sub("^/", "", f"{head}/my_{last}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
