"""Modules that tests of streaming share are beside them; pytest's importlib mode does not find those by itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
