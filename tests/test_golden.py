"""Resume the checkpoints that earlier versions wrote. The final results are bitwise identical to those recorded then."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "golden"))

import recipes


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_result_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchdata" if name.startswith("torchdata") else "torch")
    stored = recipes.FOLDER / name
    shutil.copytree(stored / recipes.NAME, tmp_path / "checkpoints" / recipes.NAME)

    def run() -> Any:
        trainer = recipes.make(name, tmp_path, resume="auto")
        assert trainer.state.timestamp.batch == 5
        trainer.fit()
        return recipes.outcome(trainer)

    assert recipes.of_ranks(name, run) == json.loads((stored / "outcome.json").read_text())
