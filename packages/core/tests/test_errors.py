"""Errors that explain themselves: data for other spellings, in texts that read as before in Python."""

from __future__ import annotations

import pickle
import warnings

import pytest

from hocket.basics.safe_files import UnsafeFileError
from hocket.errors import CheckpointError, Mistake, Setting, WrongType, WrongValue, rendered
from hocket.help import warn
from hocket.plugins import PluginConfigError


def test_an_error_carries_its_settings_as_data() -> None:
    error = WrongValue("«seed='x'» is not an int. Write «seed=17», or «trainer.fit()¦`hocket train`»«, or nothing¦».")
    assert str(error) == "seed='x' is not an int. Write seed=17, or trainer.fit(), or nothing."
    assert error.settings == (Setting("seed", "'x'"), Setting("seed", "17")) and error.about == "seed"
    said = rendered(error.marked, lambda setting: f"<{setting.name}: {setting.value}>")
    assert said == "<seed: 'x'> is not an int. Write <seed: 17>, or `hocket train`."
    assert isinstance(error, ValueError) and isinstance(error, Mistake)
    error = WrongValue("Give an int or «None».")
    assert str(error) == "Give an int or None." and not error.settings
    assert rendered(error.marked, lambda setting: {"None": "null"}[setting.value]) == "Give an int or null."


def test_another_spelling_of_a_setting() -> None:
    error = WrongType("model is 3. Write «model=Net()¦model='module:Net'».")
    assert str(error) == "model is 3. Write model=Net()." and error.about == "model"
    assert error.settings == (Setting("model", "'module:Net'"),)


@pytest.mark.parametrize("text", ["run_name='«Étude»' is long.", "nothing", "match='a|b' matches nothing"])
def test_text_of_the_user_stays(text: str) -> None:
    assert str(WrongValue(text)) == text and not WrongValue(text).settings


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PluginConfigError("«lr=3» is large.", about="optimizer")))
    assert (str(error), error.marked, error.about) == ("lr=3 is large.", "«lr=3» is large.", "optimizer")
    assert pickle.loads(pickle.dumps(UnsafeFileError(2, "it is a pipe", "f"))).filename == "f"
    assert isinstance(CheckpointError("x"), RuntimeError)


def test_warnings_have_marks_too() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("Write «duration='3ep'».")
    (one,) = caught
    assert str(one.message) == "Write duration='3ep'." and one.message.marked == "Write «duration='3ep'»."  # type: ignore[union-attr]
