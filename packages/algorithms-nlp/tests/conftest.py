"""Fixtures of tests of surgery: tiny models of each family and attention implementation, tokens, and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import language
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

FAMILIES = ("gpt2", "bert", "roberta", "opt", "neox", "llama", "mistral", "qwen3")


@pytest.fixture
def build() -> Callable[..., Any]:
    """Return models with a number of heads that is no power of two."""
    return lambda family, implementation="sdpa", heads=6, **options: language.tiny(
        family, implementation, heads, **{"head_dim": 4, "scale": 10, "embeddings": 10, **options}
    )


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return lambda *args, **options: language.tiny(*args, **{"head_dim": 8, "scale": 10, "embeddings": 10, **options})


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[name for name in FAMILIES if "bert" not in name])
def causal(request: pytest.FixtureRequest) -> str:
    """A family of decoders."""
    return request.param


@pytest.fixture(params=["sdpa", "eager"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two sequences of 10 tokens, none of them a special one."""
    return torch.randint(5, 61, (2, 10), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def peak_memory() -> Callable[[Callable[[], Any]], tuple[int, Any]]:
    """Call a function; return the most bytes that torch allocated in it at once, by its profiler, and the result."""

    def measure(function: Callable[[], Any]) -> tuple[int, Any]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = function()
        events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
        held = itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
        return max(held), result

    return measure
