"""The package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hocket_strategies


def test_importing_the_package_imports_no_torch():
    code = "import sys, hocket_strategies; assert 'torch' not in sys.modules, 'torch'; assert 'DDP' in dir(hocket_strategies)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in hocket_strategies.__all__:
        assert getattr(hocket_strategies, name).__name__ == name


def test_a_misspelt_name_is_answered_with_the_right_ones():
    with pytest.raises(AttributeError, match="it has BF16True, DDP, DeepSpeed"):
        hocket_strategies.Ddp  # noqa: B018
