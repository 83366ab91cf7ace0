"""The package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hocket_general


def test_importing_the_package_imports_no_torch():
    code = "import sys, hocket_general; assert 'torch' not in sys.modules, 'torch'; assert 'EMA' in dir(hocket_general)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in hocket_general.__all__:
        assert getattr(hocket_general, name).__name__.rpartition(".")[2] == name


def test_a_misspelt_name_is_answered_with_the_right_ones():
    with pytest.raises(AttributeError, match=r"it has .*\bEMA, .*\bSAM\b"):
        hocket_general.Ema  # noqa: B018
