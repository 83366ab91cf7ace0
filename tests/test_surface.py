"""Public names and signatures are those of ``golden/surface.txt``: whoever changes one changes that file, and sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "golden"))

import surface


def test_public_names_and_signatures() -> None:
    pytest.importorskip("sklearn")
    assert surface.surface() == surface.FILE.read_text().splitlines(), "if it is meant: python tests/golden/write.py"
