"""The lines that `inspect` says to break in the drop-in namespace are those that raise there."""

from __future__ import annotations

import pytest

from hocket_migration.inspecting.project import inspect

pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")

#: Lines of a project of Composer's; each runs alone, after the first ones.
FIRST = """\
import torch
import composer
import composer.functional as cf
from composer import Callback, Event, Time, Trainer
from composer.models import ComposerClassifier
model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
trainer = Trainer(model=model, device="cpu", progress_bar=False)
"""
LINES = """\
from composer.utils import ensure_tuple, get_device
from composer.utils import get_save_filename
from composer.core import JSON, Precision, ensure_time
from composer.core import AlgorithmPass
from composer.profiler import Profiler
from composer.loss import DiceLoss
from composer.metrics import CrossEntropy
from composer import Engine; Engine(None)
from composer.loggers import SlackLogger; SlackLogger()
from composer.algorithms import EMA; EMA()
from composer.algorithms import NoOpModel; NoOpModel()
cf.freeze_layers(model, [], 0.5)
cf.compute_ema(model, model)
composer.Time(1, "ep").value
composer.functional.smooth_labels(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))
composer.utils.dist.get_world_size()
composer.__version__
Event.FIT_END.value
Trainer(model=model, algorithm_passes=[print])
Trainer(model=model, algorithm_passes=None, progress_bar=False)
Trainer(model=model, grad_accum=2)
Trainer(model=model, train_dataloader=[], progress_bar=False)
trainer.fit(duration="1ep", reset_time=True)
trainer.state.timestamp.batch; trainer.logger; trainer.hocket
trainer.engine
trainer.export_for_inference()
trainer.state.schedulers; trainer.state.state_dict()
trainer.state.fsdp_config
trainer.mine = 3; trainer.mine
""".splitlines()


def test_of_composer(tmp_path):
    text = FIRST + "\n".join(LINES)
    (tmp_path / "train.py").write_text(text)
    begin = FIRST.count("\n") + 1
    marked = {each.line - begin for each in inspect(tmp_path).findings if each.breaks}
    names: dict = {}
    exec(FIRST.replace("import composer\n", "import hocket_migration.composer as composer\n").replace(
        "import composer.functional as cf", "from hocket_migration.composer import functional as cf"
    ).replace("from composer", "from hocket_migration.composer"), names)  # fmt: skip
    for number, line in enumerate(LINES):
        try:
            exec(line.replace("from composer", "from hocket_migration.composer"), names)
            raised = None
        except (ImportError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raised = error
        assert (number in marked) == (raised is not None), (line, raised)


def test_of_transformers(tmp_path, capsys, migrate):
    (tmp_path / "train.py").write_text(
        "from transformers import Trainer, TrainingArguments\n"
        "class Mine(Trainer):\n"
        "    def training_step(self, model, inputs): pass\n"
        "    def compute_loss(self, model, inputs): pass\n"
        "TrainingArguments(auto_find_batch_size=True)\n"
        "TrainingArguments(auto_find_batch_size=False, learning_rate=1e-3)\n"
    )
    assert {each.line for each in inspect(tmp_path).findings if each.breaks} == {3, 5}
    assert migrate("inspect", tmp_path) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "2 lines would break in the drop-in namespace: those that end with [breaks in the drop-in]."
    assert sum(line.endswith("[breaks in the drop-in]") for line in printed) == 2
