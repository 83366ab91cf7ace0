"""Numbers and switches of every algorithm: what is no number, or out of range, is refused by name in the constructor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hocket_nlp
from hocket_nlp import ALiBi, FusedCrossEntropy, GatedLinearUnits, Packing, QKNorm, RoPEScaling, SeqLengthWarmup, ZLoss

#: Each number: the algorithm, its other arguments, the name, whether it is whole, whether None is allowed.
NUMBERS: list[tuple[Any, dict[str, Any], str, bool, bool]] = [
    (ALiBi, {}, "max_sequence_length", True, False),
    (ALiBi, {"max_sequence_length": 8}, "max_bias_memory", False, False),
    (FusedCrossEntropy, {}, "chunk_rows", True, True),
    (Packing, {}, "length", True, True),
    (QKNorm, {}, "eps", False, False),
    (RoPEScaling, {}, "factor", False, False),
    (RoPEScaling, {"factor": 2}, "original_max_position_embeddings", True, True),
    (RoPEScaling, {"factor": 2}, "beta_fast", False, False),
    (RoPEScaling, {"factor": 2}, "beta_slow", False, False),
    (RoPEScaling, {"factor": 2}, "attention_factor", False, True),
    (SeqLengthWarmup, {}, "min_seq_length", True, False),
    (SeqLengthWarmup, {}, "max_seq_length", True, True),
    (SeqLengthWarmup, {}, "step_size", True, False),
    (ZLoss, {}, "coefficient", False, False),
]  # fmt: skip
SWITCHES: list[tuple[Any, str]] = [
    (GatedLinearUnits, "bias"), (GatedLinearUnits, "gate_bias"), (SeqLengthWarmup, "truncate"),
    (SeqLengthWarmup, "preserve_end_of_sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "others", "name", "whole", "optional"), NUMBERS, ids=lambda each: str(each)[:40])
def test_numbers(algorithm: Any, others: dict[str, Any], name: str, whole: bool, optional: bool) -> None:
    of_type = (
        f"^{algorithm.__name__} was given {name}=.*: give a {'whole' if whole else 'finite'} number .*Write .*{name}="
    )
    wrong: Any
    for wrong in (
        "16",
        "much",
        True,
        [16],
        {},
        1j,
        *([16.0, math.nan] if whole else []),
        *([] if optional else [None]),
    ):
        with pytest.raises(TypeError, match=of_type) as raised:
            algorithm(**others, **{name: wrong})
        assert "\n" not in str(raised.value)
        if wrong == "16":
            assert str(raised.value).endswith((f"{name}=16.", f"{name}=16.0."))
    for wrong in (-1, *([0] if whole else [math.nan, math.inf, -math.inf])):
        with pytest.raises(ValueError, match=of_type):
            algorithm(**others, **{name: wrong})
    given = np.int64(16) if whole else np.float32(16)
    assert type(getattr(algorithm(**others, **{name: given}), name, 16)) in (int, float)  # which JSON holds


@pytest.mark.parametrize(("algorithm", "name"), SWITCHES)
def test_switches(algorithm: Any, name: str) -> None:
    for wrong in ("no", 0, None):
        with pytest.raises(TypeError, match=rf"^{algorithm.__name__} was given {name}=.*give True or False"):
            algorithm(**{name: wrong})


@pytest.mark.parametrize("wrong", [["silu"], 1.0, hocket_nlp.ALiBi])
def test_activations(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^GatedLinearUnits was given activation=.*activation='silu'"):
        GatedLinearUnits(wrong)
