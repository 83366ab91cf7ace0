"""The package's front door."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys

import pytest

import hocket_general
from hocket_general import functional


def test_importing_the_package_imports_no_torch():
    code = "import sys, hocket_general; assert 'torch' not in sys.modules, 'torch'; assert 'EMA' in dir(hocket_general)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in hocket_general.__all__:
        assert getattr(hocket_general, name).__name__.rpartition(".")[2] == name


def test_no_module_hides_a_public_name():
    """Importing a module binds its name in the package, as the plug-in system does for every plug-in it loads."""
    found = [each.name for each in pkgutil.iter_modules(hocket_general.__path__)]
    assert set(found) & set(hocket_general.__all__) == {"functional"}


def test_a_misspelt_name_is_answered_with_the_right_ones():
    with pytest.raises(AttributeError, match=r"it has .*\bEMA, .*\bSAM\b"):
        hocket_general.Ema  # noqa: B018


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ActivationCheckpointing", "checkpoint_activations"),
        ("BatchSizeWarmup", "batch_size_steps"),
        ("Distillation", "distillation_loss"),
        ("Factorize", "factorize"),
        ("GhostBatchNorm", "ghost_batchnorm"),
        ("GradientClipping", "clip_gradients"),
        ("GyroDropout", "GyroSchedule"),
        ("GyroDropout", "gyro_dropout"),
        ("LabelSmoothing", "smooth_labels"),
        ("SAM", "sam_perturbation"),
        ("SelectiveBackprop", "select_using_loss"),
        ("SelectiveBackprop", "should_select"),
        ("WeightStandardization", "weight_standardization"),
    ],
)
def test_class_and_function_have_one_set_of_defaults(name, function):
    """Composer's Factorize and its function replace different layers."""
    of_class, of_function = (
        inspect.signature(each).parameters for each in (getattr(hocket_general, name), getattr(functional, function))
    )
    common = of_class.keys() & of_function.keys()
    # A switch and the weights; an axis that the task may know; labels that the loss may ignore.
    differ = {"SAM": {"adaptive"}, "Distillation": {"class_dim", "ignore_index"}, "LabelSmoothing": {"ignore_index"}}
    common -= differ.get(name, set())
    assert common
    for each in common:
        first, second = of_class[each].default, of_function[each].default
        assert first == second or first == f"{second}dur", each
