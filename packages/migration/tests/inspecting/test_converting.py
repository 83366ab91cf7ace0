"""`hocket migrate convert` moves imports, and leaves everything else as it is, to the character."""

from __future__ import annotations

import json
import os

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
            "from hocket_migration.transformers import Trainer  # the trainer\n"
            "from transformers import (\n    AutoModel,  # the model\n    pipeline,\n)\n",
        ),
        (
            "from transformers import (AutoModel,\n                          Trainer)\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import (AutoModel)\n",
        ),
        (
            "from transformers import (\n    AutoModel,\n    Trainer\n)\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import (\n    AutoModel\n)\n",
        ),
        (
            "import torch, transformers\nx = 'transformers.Trainer'\nt = transformers.Trainer(transformers.AutoModel)\n",
            "import hocket_migration.transformers\nimport torch, transformers\nx = 'transformers.Trainer'\n"
            "t = hocket_migration.transformers.Trainer(transformers.AutoModel)\n",
        ),
        (
            "import transformers as hf\r\nt = (hf\r\n     .Seq2SeqTrainer)\r\n",
            "import hocket_migration.transformers as hf\r\nt = (hf\r\n     .Seq2SeqTrainer)\r\n",
        ),
        (
            "if True: from transformers import Trainer, AutoModel\n",
            "if True: from hocket_migration.transformers import Trainer; from transformers import AutoModel\n",
        ),
        (
            "from transformers import \\\n    Trainer, \\\n    AutoModel\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import \\\n    AutoModel\n",
        ),
        (
            "from transformers import \\\n    AutoModel, \\\n    Trainer\n",
            "from hocket_migration.transformers import Trainer\nfrom transformers import \\\n    AutoModel\n",
        ),
        (
            "from transformers import (\n    AutoModel,  # model\n    # for training\n    Trainer,  # é\n"
            "    Seq2SeqTrainer, # both\n)\n",
            "from hocket_migration.transformers import Trainer, Seq2SeqTrainer  # é; both\n"
            "from transformers import (\n    AutoModel,  # model\n    # for training\n)\n",
        ),
        (
            "from transformers import (\n    AutoModel,\n    Trainer,  # é\n    # end\n)\n",
            "from hocket_migration.transformers import Trainer  # é\n"
            "from transformers import (\n    AutoModel,\n    # end\n)\n",
        ),
        (
            "from transformers import (\n    AutoModel,  # model\n    Trainer,); x = 1\n",
            "from hocket_migration.transformers import Trainer\n"
            "from transformers import (\n    AutoModel,  # model\n); x = 1\n",
        ),
        (
            "from transformers import (\n    AutoModel,\n    Trainer,\n    # both\n    Seq2SeqTrainer\n)\n",
            "from hocket_migration.transformers import Trainer, Seq2SeqTrainer\n"
            "from transformers import (\n    AutoModel,\n    # both\n)\n",
        ),
        (
            "from transformers import (  # training\n    Trainer,\n    # models\n    AutoModel,\n)\n",
            "from hocket_migration.transformers import Trainer\n"
            "from transformers import (  # training\n    # models\n    AutoModel,\n)\n",
        ),
        (
            "import os\n\x0c\nx = '\u2028\x1c'\nfrom transformers import Trainer, AutoModel\n",
            "import os\n\x0c\nx = '\u2028\x1c'\nfrom hocket_migration.transformers import Trainer\n"
            "from transformers import AutoModel\n",
        ),
        # transformers: modules, stars, and imports of which no use is left
        (
            "import transformers.trainer\nclass A(transformers.trainer.Trainer): pass\n",
            "import hocket_migration.transformers\nclass A(hocket_migration.transformers.Trainer): pass\n",
        ),
        (
            "from transformers import *\nTrainer(AutoModel)\n",
            "from transformers import *\nfrom hocket_migration.transformers import Trainer\nTrainer(AutoModel)\n",
        ),
        (
            "try:\n    import lightning.pytorch as pl\nexcept ImportError:\n    import pytorch_lightning as pl\n"
            "pl.Trainer()\npl.Callback()\n",
            "try:\n    import hocket_migration.lightning\n    import lightning.pytorch as pl\nexcept ImportError:\n"
            "    import hocket_migration.lightning\n    import pytorch_lightning as pl\n"
            "hocket_migration.lightning.Trainer()\npl.Callback()\n",
        ),
        (
            "from lightning import pytorch as pl, Fabric\npl.Trainer()\n",
            "import hocket_migration.lightning\nfrom lightning import Fabric\nhocket_migration.lightning.Trainer()\n",
        ),
        # Composer, whose namespace replaces the package
        (
            "from composer.utils import dist, ensure_tuple, reproducibility as r\nr.seed_all(1)\n",
            "from hocket_migration.composer.utils import dist, ensure_tuple, reproducibility as r\nr.seed_all(1)\n",
        ),
        (
            "from composer.utils.dist import get_sampler\n",
            "from hocket_migration.composer.utils.dist import get_sampler\n",
        ),
        (
            "import composer.functional as cf\nimport composer.optim as co\ncf.apply_blurpool(co)\n",
            "import hocket_migration.composer.functional as cf\nimport hocket_migration.composer.optim as co\n"
            "cf.apply_blurpool(co)\n",
        ),
        (
            "import composer\nfrom composer import optim, algorithms as alg, functional as CF\n"
            "composer.Trainer(optim.DecoupledAdamW, alg.BlurPool(), CF)\n",
            "import hocket_migration.composer as composer\n"
            "from hocket_migration.composer import optim, algorithms as alg, functional as CF\n"
            "composer.Trainer(optim.DecoupledAdamW, alg.BlurPool(), CF)\n",
        ),
        (
            "import os, composer.utils\ncomposer.utils.dist.get_rank()\ncomposer.algorithms.blurpool.BlurPool()\n",
            "import hocket_migration.composer.algorithms\nimport os, hocket_migration.composer as composer\n"
            "composer.utils.dist.get_rank()\nhocket_migration.composer.algorithms.BlurPool()\n",
        ),
        ("import composer\n", "import hocket_migration.composer as composer\n"),
        (
            "from composer.algorithms.blurpool import BlurPool\nfrom composer.callbacks.early_stopper import EarlyStopper\n"
            "from composer.trainer.trainer import Trainer\nfrom composer.utils.iter_helpers import ensure_tuple\n",
            "from hocket_migration.composer.algorithms import BlurPool\n"
            "from hocket_migration.composer.callbacks import EarlyStopper\n"
            "from hocket_migration.composer import Trainer\nfrom hocket_migration.composer.utils import ensure_tuple\n",
        ),
        (
            "from composer.algorithms import blurpool, MixUp\nblurpool.BlurPool()\n",
            "import hocket_migration.composer.algorithms\nfrom hocket_migration.composer.algorithms import MixUp\n"
            "hocket_migration.composer.algorithms.BlurPool()\n",
        ),
    ],
)
def test_imports(tmp_path, before, after):
    found = moved(tmp_path, before)
    compile(found, "train.py", "exec")
    assert found == after


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("from composer.utils import dist, get_file\n", "a.py:1: no counterpart: import get_file"),
        ("import composer.datasets.utils as u\n", "a.py:1: no counterpart: import composer.datasets.utils"),
        ("import composer\ncomposer.utils.get_file()\n", "a.py:2: no counterpart: composer.utils.get_file"),
        (
            "from composer import Profiler\n",
            "no counterpart: import Profiler: hocket_migration.composer does not have it",
        ),
        ("from composer import *\nTrainer()\n", "a.py:1: no counterpart: from composer import *"),
        ("import lightning\npl = lightning.pytorch\npl.Trainer()\n", "a.py:3: no counterpart: pl.Trainer"),
    ],
)
def test_what_does_not_move_is_left(tmp_path, capsys, migrate, text, left):
    (tmp_path / "a.py").write_text(text)
    assert migrate("convert", tmp_path) == 1
    assert left in capsys.readouterr().out.partition("Left for you:")[2]


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


def test_nothing_is_left_of_a_module_that_moved(tmp_path, capsys, migrate):
    (tmp_path / "a.py").write_text(
        "import lightning as L\nimport composer.algorithms.blurpool as b\nL.Trainer(b.BlurPool())\n"
    )
    assert migrate("convert", tmp_path) == 0, capsys.readouterr().out
    assert "Left" not in capsys.readouterr().out


def test_only_regular_files_are_read_and_links_stay_links(tmp_path, capsys, migrate):
    project, out = tmp_path / "project", tmp_path / "out"
    (project / ".venv" / "lib").mkdir(parents=True)
    (project / "env").mkdir()
    (project / "env" / "pyvenv.cfg").touch()
    (project / ".venv" / "lib" / "a.py").write_text("import composer\n")
    (project / "a.py").write_text("import composer\n")
    (project / "same.py").symlink_to("a.py")
    (project / "loop").symlink_to(".")
    (project / "gone").symlink_to("missing")
    secret = tmp_path / "secret.py"
    secret.write_text("import composer\n")
    (project / "data").symlink_to(secret)
    assert migrate("convert", project, "--out", out) == 0
    assert "without caches, hidden folders and virtual environments" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["a.py", "data", "gone", "loop", "same.py"]
    assert all((out / name).is_symlink() for name in ("same.py", "loop", "gone", "data"))
    os.mkfifo(project / "pipe.py")
    (project / "other.py").symlink_to(secret)
    for action in ("inspect", "convert"):
        assert migrate(action, project) == 1
        printed = capsys.readouterr().out
        assert "pipe.py: not read: it is a pipe and not a regular file." in printed
        assert "other.py: not read: this is a link to a file that is not in the folder." in printed
    assert migrate("convert", project, "--in-place") == 1
    assert secret.read_text() == "import composer\n"
    assert migrate("convert", project, "--out", tmp_path / "again") == 1
    assert not (tmp_path / "again" / "pipe.py").exists()
    capsys.readouterr()
    assert migrate("inspect", project / "pipe.py") == 2


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


@pytest.mark.parametrize("kind", ["code", "markdown"])
def test_half_of_a_surrogate_pair_in_a_notebook_stays(tmp_path, capsys, migrate, notebook, kind):
    cells = [("code", "from transformers import Trainer"), (kind, "'\ud800 é'")]
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(*cells)))
    migrate("convert", tmp_path, "--in-place")
    migrate("inspect", tmp_path, "--json")
    made = json.loads((tmp_path / "a.ipynb").read_text(encoding="utf-8"))
    assert made["cells"][1:] == notebook(*cells)["cells"][1:]
    assert "a.ipynb" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_said(tmp_path, migrate):
    (tmp_path / "a.py").write_text("from composer import Trainer\n")
    (tmp_path / "file").write_text("")
    for out in ("file/out", "file/deeper/out"):
        with pytest.raises(OSError, match=r"file/.*out cannot be written: .*file is not a folder"):
            migrate("convert", tmp_path / "a.py", "--out", tmp_path / out)


def test_a_hard_link_outside_of_the_project_keeps_what_it_had(tmp_path, migrate):
    outside, project = tmp_path / "outside.py", tmp_path / "p"
    project.mkdir()
    outside.write_text("import lightning as L\nL.Trainer()\n")
    outside.chmod(0o750)
    os.link(outside, project / "m.py")
    assert migrate("convert", str(project), "--in-place") in (0, None)
    assert outside.read_text().startswith("import lightning as L")
    assert (project / "m.py").read_text().startswith("import hocket_migration.lightning as L")
    assert (project / "m.py").stat().st_mode & 0o777 == 0o750 and sorted(os.listdir(project)) == ["m.py"]
