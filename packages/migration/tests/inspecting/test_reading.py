"""What cannot be read is said: nothing crashes, and nothing is executed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hocket.errors import MissingFile
from hocket_migration.inspecting.project import inspect


def found_in(tmp_path, text, name="train.py"):
    (tmp_path / name).write_text(text)
    return [(each.line, each.name, each.verdict) for each in inspect(tmp_path / name).findings]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"print 'hello'\n", "this is Python 2"),
        (b"try:\n    pass\nexcept ValueError, error:\n    pass\n", "this is Python 2"),
        (b"def f(:\n", "the syntax is not that of Python 3"),
        (b"name = '\xff\xfe'\n", "cannot be decoded"),
        (b"# coding: martian\n", "is not that of Python 3|cannot be decoded"),
        (b"a = 1\0\n", "cannot be parsed|is not that of Python 3"),
        (b"x = " + b"(" * 4000 + b")" * 4000, "cannot be parsed|is not that of Python 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_said_beside_those_that_can(tmp_path, content, said, migrate):
    (tmp_path / "bad.py").write_bytes(content)
    (tmp_path / "good.py").write_text("import lightning\n")
    inspection = inspect(tmp_path)
    assert len(inspection.problems) == 1 and inspection.problems[0].file == "bad.py"
    assert any(part in inspection.problems[0].text for part in said.split("|")), inspection.problems
    assert [each.file for each in inspection.findings] == ["good.py"]
    assert migrate("inspect", tmp_path) == 1


def test_numbers_that_the_program_writes_are_in_the_texts(tmp_path):
    (tmp_path / "train.py").write_text(
        "import lightning as L\nL.Trainer(max_epochs=7, accumulate_grad_batches=16, gradient_clip_val=0.5, max_steps=-1,\n"
        "    val_check_interval=0.25, fast_dev_run=True, devices='2', check_val_every_n_epoch=every)\n"
        "import composer\ncomposer.Trainer(max_duration='20ba', eval_interval=2)\n"
    )
    texts = {each.name: each.text.partition(": ")[0] for each in inspect(tmp_path).findings if each.name.endswith("=)")}
    assert texts == {
        "Trainer(max_epochs=)": "duration='7ep'",
        "Trainer(accumulate_grad_batches=)": "accumulate='16ba'",
        "Trainer(gradient_clip_val=)": "clip_gradients=0.5",
        "Trainer(max_steps=)": "duration='1000ba'",  # -1 is no number of steps: these are examples
        "Trainer(val_check_interval=)": "eval_every='500ba'",
        "Trainer(fast_dev_run=)": "fast_dev_run=1",
        "Trainer(devices=)": "devices=4, one process for each",
        "Trainer(check_val_every_n_epoch=)": "eval_every='2ep'",
        "Trainer(max_duration=)": "duration='20ba'",
        "Trainer(eval_interval=)": "eval_every='2ep'",
    }


def test_expressions_without_end_are_said(tmp_path):
    (tmp_path / "deep.py").write_text("import lightning\nx = 1" + " + 1" * 3000 + "\ndef f(a: '\\ud800'): pass\n")
    (tmp_path / "good.py").write_text("import lightning\ndef f(a: '\\ud800', b: 'not python'): pass\n")
    inspection = inspect(tmp_path)
    assert [each.file for each in inspection.findings] == ["good.py"]
    assert "nested too deeply" in inspection.problems[0].text or "cannot be parsed" in inspection.problems[0].text


def test_nothing_to_read(tmp_path, capsys, migrate):
    for action in ("inspect", "convert"):
        with pytest.raises(MissingFile, match=rf"missing.py does not exist. Write hocket migrate {action} PATH"):
            migrate(action, tmp_path / "missing.py")
    assert migrate("inspect", tmp_path) == 2
    assert "there are no Python files or notebooks in this folder" in capsys.readouterr().out
    (tmp_path / "bad.py").write_text("def")
    assert migrate("inspect", tmp_path) == 2
    (tmp_path / "plain.py").write_text("import torch\n")
    assert migrate("inspect", tmp_path / "plain.py") == 0
    assert "Nothing here uses Lightning" in capsys.readouterr().out


def test_other_encodings_are_honoured(tmp_path):
    (tmp_path / "old.py").write_bytes("# -*- coding: latin-1 -*-\nimport lightning  # é\n".encode("latin-1"))
    assert [each.line for each in inspect(tmp_path).findings] == [2]


def test_environments_and_caches_are_skipped(tmp_path):
    for folder in ("env/lib", "__pycache__", ".hidden", "node_modules/x"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("import lightning\n")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "b.py").write_text("import lightning\n")
    assert inspect(tmp_path).files == 1


def test_a_notebook_has_cells(tmp_path, notebook):
    cells = [
        ("markdown", "import lightning"),
        ("code", "%pip install lightning\nimport lightning as L"),
        ("code", "!ls\nfor i in range(2):\n    !echo\ntrainer = L.Trainer(max_epochs=i)"),
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(*cells)))
    assert [(each.place, each.name) for each in inspect(tmp_path).findings] == [
        ("a.ipynb:cell 2:2", "import lightning"),
        ("a.ipynb:cell 3:4", "L.Trainer"),
        ("a.ipynb:cell 3:4", "Trainer(max_epochs=)"),
    ]
    (tmp_path / "b.ipynb").write_text('{"cells": 3}')
    assert inspect(tmp_path / "b.ipynb").problems[0].text.startswith("this is not a notebook")


def test_a_cell_that_cannot_be_read_is_said_beside_those_that_can(tmp_path, capsys, migrate, notebook):
    cells = [
        ("code", "%%bash\nfor i in 1; do echo; done"),
        ("code", "import lightning\n\ndef f(:"),
        ("code", ""),
        ("code", "import lightning as L"),
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(*cells)))
    assert migrate("inspect", tmp_path) == 1
    printed = capsys.readouterr().out
    assert "a.ipynb:cell 4:1: maps: import lightning" in printed
    assert "a.ipynb:cell 2:3: not read: the syntax is not that of Python 3" in printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "this is not a notebook: it has no list of cells"),
        ('{"worksheets": [], "nbformat": 3}', "it has format 3. Write it anew with `jupyter nbconvert --to notebook`"),
        ('{"cells": [{"cell_type": "code"}]}', "cell 1 has no source"),
        ("", "this is not a notebook"),
    ],
)
def test_what_is_no_notebook_is_said(tmp_path, content, said):
    (tmp_path / "a.ipynb").write_text(content)
    assert said in inspect(tmp_path).problems[0].text


@pytest.mark.parametrize(
    "given",
    ['**{**B, "max_steps": 3}', '**{"max_steps": 3}, **B', "**dict(B, max_steps=3)", '**(B | {"max_steps": 3})'],
)
def test_names_in_literal_mappings_are_read(tmp_path, given):
    found = found_in(tmp_path, f"from transformers import TrainingArguments\nTrainingArguments({given})\n")
    assert sorted(each[1:] for each in found[2:]) == [
        ("TrainingArguments(**…)", "not readable"),
        ("TrainingArguments(max_steps=)", "maps"),
    ]


def test_long_expressions_are_shortened(tmp_path):
    found = inspect_text(tmp_path, f"import lightning\nlightning.Trainer(**make({'1, ' * 100}))\n")
    assert "1, 1…" in found[-1].text and len(found[-1].text) < 120


def test_a_star_import_is_followed(tmp_path):
    assert found_in(tmp_path, "from lightning.pytorch import *\nTrainer(max_steps=1).fit(1)\n") == [
        (1, "from lightning.pytorch import *", "changes"),
        (2, "Trainer", "maps"),
        (2, "Trainer(max_steps=)", "maps"),
        (2, "Trainer.fit", "maps"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from accelerate import Accelerator\ndef f(thing):\n    thing.backward(1)\nf(Accelerator())\n",
        "from accelerate import Accelerator\ndef make():\n    return Accelerator()\na = make()\na.backward(1)\n",
        "import accelerate\nwith accelerate.Accelerator() as a:\n    a.backward(1)\n",
        "import accelerate as x\nclass C:\n    def __init__(self):\n        self.a = x.Accelerator()\n"
        "    def f(self):\n        self.a.backward(1)\n",
        "import accelerate.accelerator\n(a := accelerate.accelerator.Accelerator()).backward(1)\na.device\n",
        "from typing import Optional\nfrom accelerate import Accelerator\ndef f(a: Optional[Accelerator] = None):\n"
        "    (lambda: a.backward(1))()\n",
        "from accelerate import Accelerator as A\nasync def f(*, a: 'A'):\n    b = c = a\n    c.backward(1)\n",
        "from accelerate import Accelerator\na = {'x': Accelerator()}\na['x'].backward(1)\n",
        "from accelerate import Accelerator\nfor a in [Accelerator() for _ in range(2)]:\n    a.backward(1)\n",
        "import accelerate as x\nclass C:\n    def make(self):\n        return x.Accelerator()\n"
        "    def f(self):\n        self.g(self.make())\n    def g(self, it):\n        it.backward(1)\n",
        "def f():\n    import accelerate\n    def g():\n        return accelerate.Accelerator().backward(1)\n",
    ],
)
def test_an_accelerator_is_followed_however_it_is_named(tmp_path, text):
    assert "Accelerator.backward" in [name for _, name, _ in found_in(tmp_path, text)]


def test_names_of_transformers_4_are_said(tmp_path):
    text = (
        "from transformers import Trainer, TrainingArguments\n"
        "args = TrainingArguments(evaluation_strategy='epoch', warmup_ratio=0.1, no_cuda=True)\n"
        "Trainer(args=args, tokenizer=1)\n"
    )
    changed = {each.name: each.text for each in inspect_text(tmp_path, text) if each.verdict == "changes"}
    assert "eval_strategy=" in changed["TrainingArguments(evaluation_strategy=)"]
    assert "warmup_steps=" in changed["TrainingArguments(warmup_ratio=)"]
    assert "use_cpu=" in changed["TrainingArguments(no_cuda=)"]
    assert "processing_class=" in changed["Trainer(tokenizer=)"]


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import Trainer, TrainingArguments\nclass W(Trainer):\n"
        "    def __init__(self, *args, weights=None, **kw):\n        self.weights = weights\n"
        "    def f(self):\n        self.weights.to(1)\nW(TrainingArguments('a'), TrainingArguments('b'))\n",
        "from transformers import Trainer\ndef f(a, b, c): c.anything()\nf(*x, 1, Trainer())\n",
        "from composer import Callback\nclass C(Callback):\n    def run_event(self, event, state, logger):\n"
        "        state.timestamp, logger.log_metrics({})\n",
        "from composer import Callback\nclass C(Callback):\n    def load_state_dict(self, state): state.items()\n",
        "from composer.core import Callback\nclass C(Callback):\n    def log_metrics(self, metrics, step): metrics.items()\n",
        "import lightning as L\ndef f(t): t.anything()\nf(L.Trainer())\nf(object())\n",
        "import lightning as L\nt = make()\nt.anything()\nt = L.Trainer()\n",
        "import lightning as L\nt = L.Trainer() if a else Other()\nt.anything()\n",
        "import lightning as L\nfor t in [L.Trainer(), Other()]:\n    t.anything()\n",
        "import lightning as L\ndef g(t: L.Trainer | Other): t.anything()\n",
        "import lightning as L\ndef g():\n    if a: return L.Trainer()\n    return Other()\ng().anything()\n",
        "import lightning as L\nclass A(L.LightningModule):\n    def f(self):\n        self.t = L.Trainer()\n"
        "        self.t = Other()\n        self.t.anything()\n",
        "from lightning import Callback\nclass C(Callback):\n    def load_state_dict(self, state): state.items()\n",
    ],
)
def test_what_only_might_be_of_a_framework_has_no_verdict(tmp_path, text):
    assert "not in the tables" not in str([each.text for each in inspect_text(tmp_path, text)])


@pytest.mark.parametrize(
    "text",
    [
        "import lightning as L\nt = None\nt = L.Trainer()\nt.anything()\n",
        "import lightning as L\ndef f(t: L.Trainer | None = None): t.anything()\n",
        "import lightning as L\nclass C(L.Callback):\n    def on_train_end(self, trainer, pl): trainer.anything()\n",
    ],
)
def test_unknown_members_are_said_where_the_class_is_certain(tmp_path, text):
    assert "anything of Lightning is not in the tables" in str([each.text for each in inspect_text(tmp_path, text)])


def inspect_text(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    return inspect(tmp_path / "train.py").findings


def test_names_that_only_look_like_a_framework_are_left_alone(tmp_path):
    (tmp_path / "composer.py").write_text("class Trainer: pass\n")
    (tmp_path / "train.py").write_text(
        "from composer import Trainer\nTrainer(max_duration=1)\nlightning = 1\nlightning.x\n"
    )
    assert not inspect(tmp_path).findings


def test_classes_are_followed_over_files(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from .base import Base\n")
    (package / "base.py").write_text("import lightning as L\n\n\nclass Base(L.LightningModule):\n    pass\n")
    (tmp_path / "train.py").write_text(
        "from pkg import Base\n\n\nclass Mine(Base):\n    def training_step(self): pass\n"
    )
    names = {(each.file, each.line, each.name) for each in inspect(tmp_path).findings}
    assert ("train.py", 5, "LightningModule.training_step") in names
    assert ("train.py", 4, "Base") in names


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("def f(t=L.Trainer()): t.fit(net)", ["L.Trainer", "Trainer.fit"]),
        ("def f(*, kind=L.Trainer): kind(max_epochs=3)", ["L.Trainer", "kind", "Trainer(max_epochs=)"]),
        ("f = lambda t=L.Trainer(): t.fit(net)", ["L.Trainer", "Trainer.fit"]),
        ("[t.fit(net) for t in [L.Trainer()]]", ["L.Trainer", "Trainer.fit"]),
        ("{t: t.fit(net) for t in [L.Trainer()] if t.loggers}", ["L.Trainer", "Trainer.loggers", "Trainer.fit"]),
        ("Plain(gpus=2, max_epochs=1)", ["Plain(gpus=)", "Plain(max_epochs=)"]),
        ("Own(gpus=2, max_epochs=1)", ["Own(max_epochs=)"]),
        ("Mixed(gpus=2)", []),
        ("Net.load_from_checkpoint('a.ckpt')", ["Net.load_from_checkpoint"]),
        ("Net.own()", []),
    ],
)
def test_defaults_comprehensions_and_subclasses_are_followed(tmp_path, line, names):
    head = [
        "import lightning as L",
        "class Net(L.LightningModule):",
        "    def own(): ...",
        "class Plain(L.Trainer): ...",
        "class Own(L.Trainer):",
        "    def __init__(self, gpus, **others): ...",
        "class Mixed(Other, L.Trainer): ...",
        "net = Net()",
    ]
    (tmp_path / "a.py").write_text("\n".join([*head, line]) + "\n")
    found = [each for each in inspect(tmp_path).findings if each.line == len(head) + 1]
    assert sorted(each.name for each in found) == sorted(names)
    assert [each.breaks for each in found if "gpus" in each.name] == [True] * ("Plain(gpus=)" in names)


def test_a_decision_that_the_drop_in_refuses_is_marked(tmp_path):
    lines = [
        "from transformers import TrainerCallback",
        "class Stops(TrainerCallback):",
        "    def on_step_end(self, args, state, control, **kwargs):",
        "        control.should_epoch_stop = True",
        "        control.should_training_stop = True",
    ]
    (tmp_path / "a.py").write_text("\n".join(lines) + "\n")
    assert {each.line: each.breaks for each in inspect(tmp_path).findings if each.line > 3} == {4: True, 5: False}


def test_methods_of_earlier_versions_of_lightning_are_marked(tmp_path):
    lines = [
        "import lightning as L",
        "class Net(L.LightningModule):",
        "    def validation_epoch_end(self, outputs): ...",
    ]
    found = inspect_text(tmp_path, "\n".join(lines) + "\n")
    assert [each.breaks for each in found if each.line == 3] == [True]


def test_json_holds_everything(tmp_path, capsys, migrate):
    (tmp_path / "a.py").write_text("import lightning as L\nL.Trainer(**x, unknown=1)\n")
    assert migrate("inspect", "--json", tmp_path) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == 1 and found["counts"] == {"maps": 2, "changes": 0, "no counterpart": 1, "not readable": 1}
    assert {"file", "line", "column", "source", "name", "verdict", "text", "cell", "breaks"} == found["findings"][
        0
    ].keys()


def test_nothing_of_the_project_or_of_a_framework_is_imported(tmp_path):
    (tmp_path / "train.py").write_text("import canary\nimport lightning as L\nL.Trainer()\n")
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')\n")
    code = (
        "import sys\nfrom hocket_migration.inspecting.project import inspect\n"
        f"assert inspect({str(tmp_path)!r}).findings\n"
        "for name in ('canary', 'lightning', 'pytorch_lightning', 'transformers', 'accelerate', 'composer', 'torch'):\n"
        "    assert name not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_and_questions_in_a_notebook_are_no_python(tmp_path, notebook):
    cell = "files = !ls\nt.rate = %env RATE\nTrainer?\nt.fit??\nfrom composer import Trainer\nx = y != 3\n"
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(("code", cell))))
    found = inspect(tmp_path)
    assert not found.problems
    assert [each.name for each in found.findings] == ["import Trainer"]
