"""Spans that never open are said; those that do are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hocket


class Acts(hocket.Algorithm):
    """Counts the batches in which it acts."""

    events = {hocket.Event.BATCH_START}

    def __init__(self, start: str | None, stop: str | None = None) -> None:
        self.span = hocket.Span(start, stop)
        self.acted = 0

    def match(self, event: hocket.Event, state: hocket.State) -> bool:
        return self.span.includes(state)

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        self.acted += 1


def trainer(algorithm: Acts, duration: str, endless: bool = False, **more: object) -> hocket.Trainer:
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    data = (batch for _ in range(3)) if endless else [batch] * 3
    return hocket.Trainer(
        model=nn.Linear(2, 1), loss=nn.functional.mse_loss, optimizer="sgd(lr=0.1)", device="cpu", train_data=data,
        duration=duration, algorithms=[algorithm], loggers=[], **more,
    )  # fmt: skip


@pytest.mark.parametrize("duration", ["1ep", "2ep", "3ba", "6ba", "12sp"])
@pytest.mark.parametrize(
    "start", [None, "0.5dur", "1dur", "2dur", "0ep", "1ep", "2ep", "2ba", "3ba", "5ba", "6ba", "8sp", "12sp", "9tok"]
)
def test_a_fit_warns_of_a_span_that_never_opens(start: str | None, duration: str) -> None:
    acts = Acts(start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(acts, duration).fit()
    said = [str(each.message) for each in caught if issubclass(each.category, hocket.NoEffectWarning)]
    assert len(said) == (not acts.acted)
    assert all(f"start='{hocket.Time.parse(start)}'" in each and "\n" not in each for each in said)


def test_data_of_unknown_length_is_judged_after_the_fit() -> None:
    with pytest.warns(hocket.NoEffectWarning, match=r"acts has no effect: .* training ends after 3ba\."):
        trainer(Acts("4ba"), "1ep", endless=True).fit()


def test_a_fit_that_ends_early_warns_of_nothing() -> None:
    made = trainer(Acts("4ba"), "2ep")
    with warnings.catch_warnings():
        warnings.simplefilter("error", hocket.NoEffectWarning)
        made.fit("1ep")
        made.fit("1ep")
    assert made.state.bus.attachments
