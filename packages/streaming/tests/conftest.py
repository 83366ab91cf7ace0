"""Modules that tests of streaming share are beside them; pytest's importlib mode does not find those by itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
#: Files whose long tests wait for faults of stores, kill many processes or need libraries of others.
_PATIENT = ("test_ahead", "test_cache_stress", "test_chunks", "test_files", "test_formats", "test_formats_remote")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "STREAMING_PYTHONS" in os.environ:
        return
    for item in items:
        if item.path.stem in _PATIENT and item.path.parent == Path(__file__).parent and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: nox -s streaming"))
