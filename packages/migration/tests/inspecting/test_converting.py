"""`hocket migrate convert` moves imports, and leaves everything else as it is, to the character."""

from __future__ import annotations

import json

import pytest

from hocket_migration.inspecting.converting import convert


def moved(tmp_path, text, name="train.py"):
    (tmp_path / name).write_bytes(text.encode())
    changed = convert(tmp_path / name).changed
    return "".join(changed[name]) if changed else text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from transformers import Trainer\n",
            "from hocket_migration.transformers import Trainer\n",
        ),
        (
            "from transformers.trainer import Trainer as T  # é, Trainer\n",
            "from hocket_migration.transformers import Trainer as T  # é, Trainer\n",
        ),
        (
            "def f():\n\tfrom transformers import AutoModel, Trainer, pipeline  # all\n\treturn Trainer\n",
            "def f():\n\tfrom hocket_migration.transformers import Trainer\n"
            "\tfrom transformers import AutoModel, pipeline  # all\n\treturn Trainer\n",
        ),
        (
            "from transformers import (\n    AutoModel,  # the model\n    Trainer,  # the trainer\n    pipeline,\n)\n",
            "from hocket_migration.transformers import Trainer\n"
            "from transformers import (\n    AutoModel,  # the model\n    pipeline,\n)\n",
        ),
        (
            "from transformers import (AutoModel,\n                          Trainer)\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import (AutoModel,\n)\n",
        ),
        (
            "from transformers import (\n    AutoModel,\n    Trainer\n)\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import (\n    AutoModel,\n)\n",
        ),
        (
            "import torch, transformers\nx = 'transformers.Trainer'\nt = transformers.Trainer(transformers.AutoModel)\n",
            "import hocket_migration.transformers\nimport torch, transformers\nx = 'transformers.Trainer'\n"
            "t = hocket_migration.transformers.Trainer(transformers.AutoModel)\n",
        ),
        (
            "import transformers as hf\r\nt = (hf\r\n     .Seq2SeqTrainer)\r\n",
            "import hocket_migration.transformers\r\nimport transformers as hf\r\n"
            "t = (hocket_migration.transformers\r\n     .Seq2SeqTrainer)\r\n",
        ),
        (
            "if True: from transformers import Trainer, AutoModel\n",
            "if True: from hocket_migration.transformers import Trainer; from transformers import AutoModel\n",
        ),
        (
            "from transformers import \\\n    Trainer, \\\n    AutoModel\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import AutoModel\n",
        ),
    ],
)
def test_imports(tmp_path, before, after):
    found = moved(tmp_path, before)
    compile(found, "train.py", "exec")
    assert found == after


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import AutoModel\n",
        "from accelerate import Accelerator\n",
        "from .transformers import Trainer\n",
    ],
)
def test_what_has_no_namespace_stays(tmp_path, text):
    assert moved(tmp_path, text) == text


def test_a_project_is_written_to_a_new_folder_or_in_place(tmp_path, capsys, migrate):
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "sub" / "train.py").write_text("from transformers import Trainer\n")
    (project / "config.yaml").write_text("a: 1\n")
    out = tmp_path / "out"
    assert migrate("convert", project) == 0
    printed = capsys.readouterr().out
    assert "+from hocket_migration.transformers import Trainer" in printed and "Nothing was written" in printed
    assert migrate("convert", project, "--out", out) == 0
    assert (out / "sub" / "train.py").read_text() == "from hocket_migration.transformers import Trainer\n"
    assert (out / "config.yaml").read_text() == "a: 1\n"
    assert (project / "sub" / "train.py").read_text() == "from transformers import Trainer\n"
    with pytest.raises(FileExistsError, match="not an empty folder"):
        migrate("convert", project, "--out", out)
    with pytest.raises(FileExistsError, match="beside it"):
        migrate("convert", project, "--out", project / "new")
    assert migrate("convert", project, "--in-place") == 0
    assert "hocket_migration" in (project / "sub" / "train.py").read_text()


def test_lines_that_imports_do_not_settle_are_listed(tmp_path, capsys, migrate):
    (tmp_path / "a.py").write_text("from accelerate import Accelerator\nAccelerator().prepare(1)\n")
    assert migrate("convert", tmp_path) == 1
    printed = capsys.readouterr().out
    assert "No import has to move." in printed and "a.py:2: maps: Accelerator.prepare: runtime.setup" in printed


def test_a_notebook(tmp_path, migrate, notebook):
    cells = [("code", "%time 1\nfrom transformers import Trainer, pipeline"), ("markdown", "text"), ("code", "Trainer")]
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(*cells)))
    assert migrate("convert", tmp_path, "--out", tmp_path.with_name("out-notebook")) == 0
    made = json.loads((tmp_path.with_name("out-notebook") / "a.ipynb").read_text())
    assert "".join(made["cells"][0]["source"]) == (
        "%time 1\nfrom hocket_migration.transformers import Trainer\nfrom transformers import pipeline"
    )
    assert made["cells"][1:] == notebook(*cells)["cells"][1:]
