"""Without transformers only the drop-in Trainer is missing, and the error says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_the_error_says_what_to_install(missing, tmp_path):
    (tmp_path / "train.py").write_text("from transformers import Trainer\n")
    program = f"""
import sys
sys.modules[{missing!r}] = None
import hocket_migration.transformers
from hocket_migration.inspecting.converting import convert
assert convert({str(tmp_path / "train.py")!r}).changed
for name in ("Trainer", "configuration"):
    try:
        getattr(hocket_migration.transformers, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    # without transformers itself, accelerate is not looked for
    assert len(lines) == 2 and all("pip install 'transformers>=" in line for line in lines), done.stdout


def test_a_name_that_it_does_not_have_is_said():
    import hocket_migration.transformers

    with pytest.raises(AttributeError, match="it has Seq2SeqTrainer, Trainer, configuration"):
        hocket_migration.transformers.Nothing  # noqa: B018
