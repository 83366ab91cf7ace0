"""Warn before a fit, or after it, of arguments that have no effect, or another one than expected."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket.basics.time import Unit
from hocket.data.source import known_length
from hocket.help import warn
from hocket.hookspecs.algorithm import Algorithm
from hocket.state.span import Span
from hocket.surgery import NoEffectWarning

if TYPE_CHECKING:
    from hocket.loop.settings import Settings
    from hocket.state.state import State

#: Seeds that people choose are smaller; torch draws its first one from 64 bits.
_CHOSEN = 2**32
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def checked(state: State, settings: Settings) -> Iterator[None]:
    """Warn before a fit of arguments without effect, and of algorithms that never act; and of these again after it."""
    _check(state, settings)
    unopened = _warn_of_spans(state)
    yield
    _warn_of_spans(state, unopened)


def _check(state: State, settings: Settings) -> None:
    """Warn of arguments that need other data, of batch norm in microbatches, and of weights that no seed determines."""
    if settings.metrics and not state.eval_sets:
        warn(
            "«metrics=» measures evaluation sets, and this fit has none. Pass «eval_data=»; or write «train_metrics=» for "
            "metrics of the training batches, or no «metrics= here and trainer.evaluate(data, metrics=…) after the "
            "fit¦metrics»."
        )
    if settings.sanity_eval and not state.eval_sets:
        warn("«sanity_eval=» evaluates before training, and this fit has no evaluation set. Pass «eval_data=».")
    if settings.fast_dev_run and settings.overfit:
        warn(
            f"«overfit={settings.overfit}» and «fast_dev_run={settings.fast_dev_run}» are two tests, and the run ends with the "
            "second. Remove one."
        )
    if settings.eval_every and not state.eval_sets and str(settings.eval_every.every) != "1ep":  # the default
        warn(
            f"«eval_every='{settings.eval_every.every}'» has no effect: this fit has no evaluation set. Pass «eval_data=», or "
            "remove it."
        )
    accumulate, batches = settings.accumulate, known_length(state.train_loader)
    if accumulate is not None and batches and batches < accumulate:
        warn(
            f"«accumulate='{accumulate}ba'» is more than the {batches} batches of an epoch, so each step has {batches}. Write "
            f"accumulate='{batches}ba'."
        )
    resumed = state.identity.resumed_from is not None
    begins = settings.lasting and not resumed and not state.timestamp.batch and state.strategy.rank == 0
    if settings.seed is not None and begins and torch.initial_seed() >= _CHOSEN:
        _say_unseeded(settings.seed)
    norm = next((each for each in state.task.modules() if isinstance(each, _BATCH_NORMS) and each.training), None)
    if norm is not None and isinstance(settings.microbatch, int):
        warn(
            f"{type(norm).__name__} computes its statistics over microbatches, so the result depends on «microbatch=»"
            f"{settings.microbatch!r}. Omit it, or take another norm, such as torch.nn.GroupNorm."
        )


@functools.cache  # once
def _say_unseeded(seed: int) -> None:
    print(
        f"hocket: seed={seed} repeats the run, but not the model's initial weights: they were drawn before, and torch had no "
        f"seed. To repeat them too, call torch.manual_seed({seed}) before the model is made. Loaded weights need no seed.",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _warn_of_spans(state: State, known: Collection[Span] | None = None) -> list[Span]:
    """Warn of algorithms that never act by their schedule: their `hocket.Span`, or `Algorithm.no_effect`. Return these spans.

    Args:
        known: after a fit, the spans that it was warned of before it. Then others are checked, by the time that was reached.
    """
    if known is not None and state.elapsed() < 1:
        return []
    found: list[Span] = []
    for attachment in state.bus.attachments:
        spans = [each for each in getattr(attachment.obj, "__dict__", {}).values() if isinstance(each, Span)]
        if known and any(span in known for span in spans):
            continue
        never = {span: reason for span in spans if (reason := _never(span, state, known is not None))}
        reasons = list(never.values())
        if known is not None and not reasons and isinstance(attachment.obj, Algorithm):
            reasons = list(filter(None, [attachment.obj.no_effect(state)]))
        for reason in reasons:
            warn(f"{attachment.name} has no effect: {reason}", NoEffectWarning)
        found += never
    return found


def _never(span: Span, state: State, after: bool) -> str:
    """Return why an algorithm with this span never acts, or nothing."""
    start, end = span.start, str(state.max_duration)
    if not after:
        late = span.opens(state) is False
    else:
        batches = span.batches(state)
        late = (
            start is not None and start.unit is not Unit.DURATION and state.timestamp.count(start.unit) <= start.value
        )
        if late and start is not None:
            end = f"{state.timestamp.count(start.unit)}{start.unit}"
        elif batches is not None and not batches:
            return f"none of the {state.timestamp.batch} batches is in {span}. Give a longer one, or remove it."
    if not late:
        return ""
    return f"it begins at «start='{start}'», and training ends after {end}. Give an earlier start, such as '0.2dur', or none."
