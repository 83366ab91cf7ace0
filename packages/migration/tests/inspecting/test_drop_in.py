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


LIGHTNING = """\
import torch
import lightning as L
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks as cb, plugins, profilers, strategies
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer = Trainer(accelerator="cpu", max_epochs=0, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(BoringModel())
"""
LIGHTNING_LINES = """\
Trainer(max_epochs=3, strategy="ddp", precision="bf16-mixed", devices=[0], gradient_clip_val=0.5)
Trainer(strategy="deepspeed_stage_2")
Trainer(strategy=strategies.DDPStrategy(find_unused_parameters=True))
Trainer(accelerator="auto", plugins=None, barebones=False, num_nodes=1, reload_dataloaders_every_n_epochs=0)
Trainer(plugins=[])
Trainer(plugins=plugins.TorchCheckpointIO())
Trainer(barebones=True)
Trainer(num_nodes=2)
Trainer(reload_dataloaders_every_n_epochs=1)
Trainer(sync_batchnorm=True)
Trainer(model_registry="owner/name")
Trainer(precision="transformer-engine")
Trainer(precision=16)
Trainer(accelerator="hpu")
Trainer(devices="1, 3")
Trainer(devices=[1, 3])
Trainer(deterministic="warn")
Trainer(deterministic=True)
Trainer(profiler="simple")
Trainer(profiler=profilers.SimpleProfiler())
Trainer(overfit_batches=0.1)
Trainer(overfit_batches=2)
Trainer(max_time="00:01:00:00", min_epochs=1, min_steps=3)
Trainer(max_time="1h")
Trainer(gradient_clip_algorithm="l1")
Trainer(val_check_interval=1.5)
Trainer(gpus=1)
L.Trainer(callbacks=[cb.EarlyStopping("loss"), cb.ModelCheckpoint(), cb.LearningRateMonitor(), cb.ModelSummary()])
L.Trainer(callbacks=[cb.StochasticWeightAveraging(0.1)])
L.Trainer(callbacks=[cb.GradientAccumulationScheduler({0: 2})])
L.Trainer(callbacks=cb.DeviceStatsMonitor())
Tuner(Trainer(logger=False)).lr_find(BoringModel(), attr_name="lr")
trainer.fit(BoringModel(), ckpt_path=None)
trainer.fit(BoringModel(), ckpt_path="hpc")
trainer.callback_metrics; trainer.current_epoch; trainer.global_step; trainer.is_global_zero; trainer.should_stop
trainer.limit_val_batches; trainer.state; trainer.strategy; trainer.loggers; trainer.estimated_stepping_batches
trainer.scaler
trainer.init_module()
trainer.mine = 3; trainer.mine
class Mine(LightningModule): training_step = lambda self, batch, batch_idx: None
class Own(LightningModule): on_train_batch_start = lambda self, batch, batch_idx: None
""".splitlines()


def test_of_lightning(tmp_path, monkeypatch):
    pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LIGHTNING + "\n".join(LIGHTNING_LINES))
    begin = LIGHTNING.count("\n") + 1
    marked = {each.line - begin for each in inspect(tmp_path / "train.py").findings if each.breaks}
    names: dict = {}
    exec(LIGHTNING, {})  # the lines before are Lightning's own
    text = LIGHTNING.replace(
        "LightningModule, Trainer\n", "LightningModule\nfrom hocket_migration.lightning import Trainer\n"
    )
    exec(text, names)
    for number, line in enumerate(LIGHTNING_LINES):
        try:
            exec(line.replace("L.Trainer", "Trainer"), names)
            raised = None
        except (AttributeError, TypeError, ValueError) as error:
            raised = error
        assert (number in marked) == (raised is not None), (line, raised)


def test_every_refusal_of_lightnings_callbacks_and_attributes_is_the_drop_ins(tmp_path, monkeypatch):
    pl = pytest.importorskip("lightning.pytorch")
    from hocket_migration.inspecting import drop_in
    from hocket_migration.inspecting.names import Symbol
    from hocket_migration.inspecting.tables import sources
    from hocket_migration.lightning import Trainer, callbacks

    monkeypatch.chdir(tmp_path)
    source, refused = sources()["lightning"], []
    for name in pl.callbacks.__all__:
        cls = getattr(pl.callbacks, name)
        try:
            callbacks.refuse([cls.__new__(cls)])
        except TypeError:
            refused.append(name)
        assert drop_in.refuses(Symbol(source, name, "lightning.pytorch.callbacks")) == (name in refused), name
    assert len(refused) > 5
    trainer, kind = Trainer(logger=False), source.kinds["Trainer"]
    for name in kind.members:
        assert drop_in.lacks_member(kind, name) == (not hasattr(trainer, name)), name
    (tmp_path / "steps.py").write_text(
        "import lightning as L\nclass A(L.LightningModule):\n"
        "    def training_step(self, dataloader_iter): pass\n    def validation_step(self, batch): pass\n"
    )
    assert {each.line for each in inspect(tmp_path / "steps.py").findings if each.breaks} == {3}


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
    assert printed[-1] == "The drop-in namespace refuses 2 lines, marked [breaks in the drop-in]."
    assert sum(line.endswith("[breaks in the drop-in]") for line in printed) == 2
