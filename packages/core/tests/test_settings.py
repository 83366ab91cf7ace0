"""Arguments of the Trainer are checked once, before anything is built, and nothing changes them afterwards."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.basics.time import Time, TimeError
from hocket.loop.settings import Settings

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Untouched(hocket.Strategy):
    """A strategy that has to stay unused."""

    def __init__(self) -> None:
        raise AssertionError("something was built before the arguments were checked")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"duration": "0.5dur"}, "a fraction of itself"),
        ({"duration": "10"}, "no unit"),
        ({"duration": ["2ep", "0.5dur"]}, "a fraction of itself"),
        ({"duration": []}, "has no duration"),
        ({"duration": "2ep", "min_duration": "3ep"}, "min_duration='3ep' is longer than the duration of 2ep"),
        ({"duration": "2ep", "min_duration": "1.5dur"}, "is longer than"),
        ({"limit_train": 0}, "limit_train=0 is not a number of batches"),
        ({"limit_eval": 2.0}, "limit_eval=2.0 is not"),
        ({"limit_predict": -1}, "limit_predict=-1 is not"),
        ({"limit_train": 1.5}, "the fraction of all batches as a float above 0.0 and up to 1.0"),
        ({"limit_train": 0.0}, "limit_train=0.0 is not"),
        ({"limit_train": True}, "limit_train=True is not"),
        ({"seed": True}, "seed=True is not a seed, which is an int from 0 to 4294967295"),
        ({"seed": -1}, "seed=-1 is not"),
        ({"seed": 2**32}, "seed=4294967296 is not"),
        ({"seed": "1"}, "seed='1' is text"),
        ({"seed": 1.0}, "seed=1.0 is not"),
        ({"overfit": True}, "overfit=True is not"),
        ({"fast_dev_run": 0}, "fast_dev_run=0 is not"),
        ({"sanity_eval": -1}, "sanity_eval=-1 is not.* an int of 1 or more, such as 10. To evaluate nothing .* give 0"),
        ({"eval_every": "often"}, "often"),
        ({"log_every": 3}, "3"),
        ({"microbatch": 0}, "microbatch=0 is not a number of samples"),
        ({"clip_gradients": -1.0}, "clip_gradients=-1.0 is neither"),
        ({"clip_gradients": ("most", 1.0)}, "is neither a positive norm"),
        ({"loss_reduction": "max"}, "loss_reduction='max' is neither 'mean' nor 'sum'"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not a policy; use 'raise', 'skip' or 'warn'"),
        ({"run_name": "a/b"}, "run_name='a/b' is a path"),
        ({"folder": "s3://bucket/runs"}, "folder='s3://bucket/runs' is a URL.*'artifacts'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_understood_fails_before_anything_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, TimeError), match=message):
        hocket.Trainer(model=nn.Linear(1, 1), strategy=Untouched, device="cpu", **options)


def test_a_switch_is_true_or_false() -> None:
    switches = [
        name for name, each in inspect.signature(hocket.Trainer).parameters.items() if each.annotation == "bool"
    ]
    assert {"deterministic", "summary"} <= set(switches)
    for name in switches:
        for given, meant in (("yes", True), ("off", False)):
            with pytest.raises(TypeError, match=f"{name}='{given}' is a switch, .* Write {name}={meant}"):
                hocket.Trainer(model=nn.Linear(1, 1), strategy=Untouched, device="cpu", **{name: given})
        for given in (np.True_, np.False_, None):
            hocket.Trainer(model=nn.Linear(1, 1), device="cpu", **{name: given})
    with pytest.raises(TypeError, match="summary='yes' is a switch"):  # and not the argument of the same value
        hocket.Trainer(model=nn.Linear(1, 1), device="cpu", run_name="yes", summary="yes")


def settings(**options: Any) -> Settings:
    return hocket.Trainer(model=nn.Linear(1, 1), device="cpu", **options).settings


def test_settings_are_in_the_form_that_a_run_uses() -> None:
    found = settings(
        duration="2ep", clip_gradients=1, compile=True, eval_every=None, folder="here", seed=3, limit_eval=4,
    )  # fmt: skip
    assert found.duration == Time.parse("2ep") and found.clip_gradients == ("norm", 1.0) and found.compile == {}
    assert not found.eval_every and found.log_every and found.folder.name == "here"
    assert (found.seed, found.limit_train, found.limit_eval, found.fast, found.lasting) == (3, None, 4, False, True)
    assert settings().compile is None


def test_a_test_run_is_one_epoch_of_so_many_batches_and_leaves_nothing(tmp_path: Any) -> None:
    checkpoints = hocket.Checkpoints(tmp_path / "ck")
    found = settings(fast_dev_run=2, duration="90ep", limit_train=7, checkpoints=checkpoints, resume="auto")
    assert (found.limit_train, found.limit_eval, found.limit_predict) == (2, 2, 2)
    assert found.duration == Time.parse("1ep") and not found.lasting
    assert found.checkpoints is None and found.resume is None
    assert found.given["duration"] == "90ep"  # as it was written, for hyperparameters
    assert not settings(overfit=1, checkpoints=hocket.Checkpoints(tmp_path / "ck")).lasting


def test_nothing_changes_them() -> None:
    found = settings(seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seed = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.given["seed"] = 2  # type: ignore[index]


def test_every_argument_is_a_hyperparameter_or_a_part() -> None:
    """Arguments that are neither compared over ranks nor exempt would be forgotten; a new one is compared."""
    found = settings(optimizer=torch.optim.SGD)
    arguments = set(inspect.signature(hocket.Trainer.__init__).parameters) - {"self", "model"}
    assert set(found.given) == arguments
    shown = set(found.hyperparameters([]))
    assert arguments - shown == {
        "train_data", "eval_data", "data", "algorithms", "callbacks", "loggers", "strategy", "precision", "actions",
        "profile",
    }  # fmt: skip
    assert set(found.of_all_ranks()) == {
        "loss_reduction", "inputs", "targets", "outputs", "accumulate", "global_batch", "schedule", "schedule_every",
        "duration", "min_duration", "eval_every", "log_every", "clip_gradients", "nonfinite", "seed", "deterministic",
        "compile", "run_name", "limit_train", "limit_eval", "limit_predict", "fast_dev_run", "overfit", "sanity_eval",
        "summary",
    }  # fmt: skip
    assert found.hyperparameters([])["optimizer"] == "SGD"
