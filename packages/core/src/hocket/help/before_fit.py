"""Warn before a fit, or after it, of arguments that have no effect, or another one than expected."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket.help import warn
from hocket.span import Span
from hocket.surgery import NoEffectWarning
from hocket.time import Unit

if TYPE_CHECKING:
    from hocket.settings import Settings
    from hocket.state import State

#: Seeds that people choose are smaller; torch draws its first one from 64 bits.
_CHOSEN = 2**32
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check(state: State, settings: Settings, metrics: bool) -> None:
    """Warn of arguments that need an evaluation set, of batch norm in microbatches, and of weights that no seed determines.

    Args:
        metrics: whether the Trainer was given metrics.
    """
    if metrics and not state.eval_sets:
        warn(
            "metrics= measures evaluation sets, and this fit has none. Pass eval_data=; or write train_metrics= for "
            "metrics of the training batches, or no metrics= here and trainer.evaluate(data, metrics=…) after the fit."
        )
    if settings.sanity_eval and not state.eval_sets:
        warn("sanity_eval= evaluates before training, and this fit has no evaluation set. Pass eval_data=.")
    begins = settings.lasting and state.resumed_from is None and not state.timestamp.batch and state.strategy.rank == 0
    if settings.seed is not None and begins and torch.initial_seed() >= _CHOSEN:
        _say_unseeded(settings.seed)
    norm = next((each for each in state.task.modules() if isinstance(each, _BATCH_NORMS) and each.training), None)
    if norm is not None and isinstance(settings.microbatch, int):
        warn(
            f"{type(norm).__name__} computes its statistics over microbatches, so the result depends on microbatch="
            f"{settings.microbatch!r}. Omit it, or take another norm, such as torch.nn.GroupNorm."
        )


@functools.cache  # once
def _say_unseeded(seed: int) -> None:
    print(
        f"hocket: seed={seed} repeats the run, but not the model's initial weights: they were drawn before, and torch had no "
        f"seed. To repeat them too, call torch.manual_seed({seed}) before the model is made. Loaded weights need no seed.",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def warn_of_window(accumulate: int | None, batches: int | None) -> None:
    """Warn if ``accumulate=`` asks for more batches than an epoch has."""
    if accumulate is not None and batches and batches < accumulate:
        warn(
            f"accumulate='{accumulate}ba' is more than the {batches} batches of an epoch, so each step has {batches}. Write "
            f"accumulate='{batches}ba'."
        )


def warn_of_spans(state: State, known: Collection[Span] | None = None) -> list[Span]:
    """Warn of algorithms that never act because their `hocket.Span` begins after the end of training; return these spans.

    Args:
        known: after a fit, the spans that it was warned of before it. Then others are checked, by the time that was reached.
    """
    if known is not None and state.elapsed() < 1:
        return []
    found = []
    for attachment in state.bus.attachments:
        for span in getattr(attachment.obj, "__dict__", {}).values():
            if not isinstance(span, Span) or span.start is None:
                continue
            end = str(state.max_duration)
            if known is not None:
                if span in known or span.start.unit is Unit.DURATION:
                    continue
                done = state.timestamp.count(span.start.unit)
                never, end = done <= span.start.value, f"{done}{span.start.unit}"
            else:
                never = span.opens(state) is False
            if never:
                found.append(span)
                warn(
                    f"{attachment.name} has no effect: it begins at start='{span.start}', and training ends after {end}. Give "
                    "an earlier start=, such as '0.2dur', or omit it.",
                    NoEffectWarning,
                )
    return found
