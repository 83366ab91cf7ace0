"""Tests of this folder share ``browser.py``, which pytest's importlib mode does not find by itself."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
