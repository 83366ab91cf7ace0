"""Tests of the drop-in for Lightning: collected where it is installed, with `modules.py` on the path, in a temporary folder."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
if find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]
_WARNINGS = ("UserWarning", "DeprecationWarning", "FutureWarning")  # of Lightning


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for each in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{each}"), append=False)


@pytest.fixture(autouse=True)
def _writes_nothing(in_an_empty_folder: None) -> None:
    """Leave files in a temporary folder."""
