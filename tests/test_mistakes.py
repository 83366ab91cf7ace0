"""Newcomers who know another library are told what they gave, what is allowed and what to type; or they are understood.

The tables stand in ``mistakes/``. A mistake that is ``listed`` was found by an earlier review; the goal for all others is a
mean grade of 2.7 of 3, and none at 0. A grade cannot be claimed: each part of an answer is a text that has to be in it.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest
from support import same

sys.path.append(str(Path(__file__).parent / "mistakes"))

import accepted
import of_a_first_day
import with_arguments
import with_configurations
import with_data
import with_losses
import with_methods
import with_other_values
import with_plugins
import with_runtime
import with_steps
from newcomers import Accepted, Mistake, model

ANSWERED = [
    each
    for module in (
        of_a_first_day,
        with_arguments,
        with_configurations,
        with_data,
        with_losses,
        with_methods,
        with_plugins,
        with_steps,
        with_other_values,
        with_runtime,
    )
    for each in module.MISTAKES
]
ALL = [*ANSWERED, *accepted.MISTAKES]


@pytest.mark.parametrize("mistake", ANSWERED, ids=[each.name for each in ANSWERED])
def test_the_answer_says_what_was_given_what_is_allowed_and_what_to_type(mistake: Mistake) -> None:
    answer = mistake.answer()
    missing = [
        part for part in (mistake.given, mistake.allowed, mistake.write) if part is not None and part not in answer
    ]
    assert not missing, f"{missing} not in: {answer}"


@pytest.mark.parametrize("mistake", accepted.MISTAKES, ids=[each.name for each in accepted.MISTAKES])
def test_it_is_understood(mistake: Accepted) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = mistake.make()
    said = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    assert [mistake.said in text for text in said] == [True] * bool(mistake.said), said
    assert all("\n" not in text for text in said), "a guess is said in one line"
    explicit = mistake.explicit()
    assert made.state.timestamp.batch and made.state.timestamp.batch == explicit.state.timestamp.batch
    assert not same(made.model_state_dict(), model(outputs=made.state.model.out_features).state_dict()), "it trains"
    assert same(made.model_state_dict(), explicit.model_state_dict())
    assert same(made.state.metrics, explicit.state.metrics)


def test_the_grades(capsys: pytest.CaptureFixture[str]) -> None:
    assert len({each.name for each in ALL}) == len(ALL), "each name once"
    for listed in (True, False):
        grades = [each.grade for each in ALL if each.listed is listed]
        mean = sum(grades) / len(grades)
        with capsys.disabled():
            print(f"\n{len(grades)} mistakes {'of the list' if listed else 'beyond the list'}: mean grade {mean:.2f}")
        assert mean >= 2.7 and min(grades) > 0
        assert listed or len(grades) >= 130


PAGE = Path(__file__).parents[1] / "docs/reference/errors.md"
#: The mistakes that are answered by the texts of docs/reference/errors.md, in its order.
QUOTED = """max_epochs= | duration=10 | precision='16-mixed' | Trainer.save | on_train_batch_end | Lightning's EarlyStopping
device='cuda:1' | lr as text | fit() without an optimizer | fit() without a duration
an optimizer of another model | a LightningModule | a Dataset | (X, Y)
a generator for several epochs | samples that cannot be counted | dict batches to a plain model | a model with two inputs
a Task whose forward takes one input | the wrong width | uint8 inputs | images, channels last
labels out of range | float labels | (N, 1) and (N,) in MSE
NLL of logits | BCE of logits | a tuple of outputs | a detached loss | a vector as loss | a .ckpt file
a checkpoint of another model | load_state_dict(weights)"""


def test_the_page_quotes_what_is_raised() -> None:
    tables = PAGE.read_text().partition("## Accepted")[0]
    texts = re.findall(r"^\| `(.*?)` \|", tables, re.MULTILINE)
    names = re.split(r" \| |\n", QUOTED)
    assert len(texts) == len(names)
    answers = {each.name: each for each in ANSWERED}
    for text, name in zip(texts, names, strict=True):
        assert text in answers[name].answer(), (text, name)


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(program, {})
    first, second, note, accuracy = capsys.readouterr().out.splitlines()
    assert first.startswith("Trainer has no argument max_epochs=2. Write duration='2ep'.")
    assert "mat1 and mat2" in second and "float32 of shape (16, 8)" in note
    assert 0 <= float(accuracy) <= 1
