"""Methods of other libraries, tasks, checkpoints, the Runtime and surgery."""

from __future__ import annotations

from typing import Any

import torch
from newcomers import INPUTS, Mistake, fit, loader, model, nothing, of_library, trainer
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket import surgery


def method(owner: str, name: str, write: str, listed: bool = False) -> Mistake:
    """An attribute that other libraries' objects have."""
    makers = {"Trainer": trainer, "Result": fit}
    allowed = {"Trainer": "evaluate, fit", "Result": "metrics", "State": "batch"}[owner]
    make = (lambda: fit(callbacks=[Reads(name)])) if owner == "State" else (lambda: getattr(makers[owner](), name))
    return Mistake(f"{owner}.{name}", make, f"{owner} has no {name!r}", allowed, write, listed)


def of_runtime(name: str, write: str) -> Mistake:
    """Read a name of Accelerate or Lightning Fabric from a Runtime."""
    return Mistake(
        f"Runtime.{name}", lambda: getattr(runtime(), name), f"Runtime has no {name!r}", "accumulate, all_gather", write
    )


class Reads(hocket.Callback):
    """Reads an attribute of the state that other libraries have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def batch_end(self, state: hocket.State) -> None:
        getattr(state, self._name)


class Task(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = model()


class Good(Task):
    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


class ForwardOfInputs(Good):
    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        return self.layer(inputs)


class WithoutLoss(Task):
    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])


class WithoutForward(Task):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()


class LossOfSwapped(hocket.Task):
    def forward(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, batch: Any, outputs: Any) -> Any:  # type: ignore[override]
        return outputs.mean()


class MetricOfSwapped(hocket.Task):
    def forward(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean()

    def update_metric(self, metric: Any, batch: Any, outputs: Any) -> None:  # type: ignore[override]
        metric.update(outputs, batch[1])


class ReturnsNone(Good):
    def loss(self, outputs: Any, batch: Any) -> Any:
        F.cross_entropy(outputs, batch[1])


class LossOfBatch(Good):
    def loss(self, batch: Any) -> Any:
        return self(batch).mean()


class ForwardOfOneInput(Good):
    def forward(self, x: Any) -> Any:
        return self.layer(x)


class ForwardThatDivides(Good):
    def forward(self, x: Any) -> Any:
        return self.layer(x / 255)


class LossOfTargets(Good):
    def loss(self, outputs: Any, targets: Any) -> Any:
        return F.cross_entropy(outputs, targets)


class LossOfDifference(Good):
    def loss(self, outputs: Any, targets: Any) -> Any:
        return (outputs - targets).square().mean()


class MetricsOfNothing(Good):
    def metrics(self) -> Any:  # type: ignore[override]
        return {}


class CountsNothing(Good):
    def count(self) -> int:  # type: ignore[override]
        return 1


class LossIsNone(Good):
    loss = None  # type: ignore[assignment]


class MetricsOfNone(Good):
    def metrics(self, split: str) -> Any:
        pass


def steps(train_batch: Any) -> Any:
    """Train a Task with this ``train_batch(self, batch, step)``."""
    return fit(model=type("Steps", (Good,), {"train_batch": train_batch})(), loss=None)


class ForgetsSuper(hocket.Task):
    def __init__(self) -> None:
        self.layer = model()


class TrainingStep(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.layer(batch[0]), batch[1])


class Logs(Good):
    """Log in the loss as ``how`` says."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.how(self, outputs)
        return super().loss(outputs, batch)


def logs(how: Any) -> Any:
    return fit(model=Logs(how), loss=None)


class ReadsEpoch(Good):
    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0]) * self.current_epoch


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = model()


def lightning_module() -> Any:
    kind = of_library("lightning.pytorch.core.module", "LightningModule", nn.Module, training_step=nothing)
    return type("Net", (kind,), {"__module__": "mine"})()


def keras_model() -> Any:
    return of_library("keras.src.models", "Sequential", fit=nothing, compile=nothing)()


def checkpointed(folder: str = "runs/a") -> None:
    trainer(checkpoints=hocket.Checkpoints(folder)).fit()


def file(name: str) -> str:
    torch.save({"state_dict": model().state_dict()}, name)
    return name


def other_model() -> Any:
    checkpointed()
    return trainer(model=model(outputs=5), resume="runs/a/ep1-ba2")


def weights(**changes: Any) -> Any:
    return trainer().load_weights(model(outputs=5).state_dict(), **changes)


def runtime() -> hocket.Runtime:
    return hocket.Runtime(device="cpu")


def second_run() -> Any:
    checkpointed()
    return trainer(checkpoints=hocket.Checkpoints("runs/a"))


def other_optimizer() -> Any:
    """Resume a run of SGD with AdamW."""
    fit(checkpoints=hocket.Checkpoints("runs/optimizer", overwrite=True))
    return trainer(optimizer="adamw(lr=0.1)", resume="runs/optimizer/ep1-ba2")


MISTAKES = [
    method("Trainer", "save", "trainer.model_state_dict()", listed=True),
    method("Trainer", "train", "Write trainer.fit()"),
    method("Trainer", "test", "trainer.evaluate({'test': data})"),
    method("Trainer", "validate", "trainer.evaluate(data)"),
    method("Trainer", "save_checkpoint", "checkpoints='runs/a'"),
    method("Trainer", "save_model", "trainer.model_state_dict()"),
    method("Trainer", "load_checkpoint", "trainer.load_weights('model.pt')"),
    method("Trainer", "model", "Write trainer.state.model"),
    method("Trainer", "optimizer", "trainer.state.optimizers[0]"),
    method("Trainer", "current_epoch", "trainer.state.timestamp.epoch"),
    method("Trainer", "global_step", "trainer.state.timestamp.batch"),
    method("Trainer", "callback_metrics", "result.metrics"),
    method("Trainer", "log", "state.log({'name': value})"),
    method("Trainer", "push_to_hub", "huggingface_hub"),
    method("Trainer", "compile", "compile=True in the Trainer"),
    method("Trainer", "history", "result.metrics"),
    method("Trainer", "add_callback", "callbacks=[…] in the Trainer"),
    method("Trainer", "summary", "print(trainer.plan())"),
    method("Trainer", "lr_find", "once for each learning rate"),
    method("Trainer", "predct", "Did you mean 'predict'?"),
    method("State", "epoch", "state.timestamp.epoch"),
    method("State", "trainer", "state itself"),
    method("State", "should_stop", "state.request(hocket.Decision.STOP"),
    method("State", "optimizer", "state.optimizers[0]"),
    method("Result", "best_model_path", "result.checkpoints"),
    Mistake("Runtime.prepare(model, optimizer)", lambda: runtime().prepare(net := model(), torch.optim.SGD(net.parameters(), 0.1)), "prepare was given SGD", "a sequence of torch.optim.Optimizer", "runtime.setup(model, optimizer)"),
    of_runtime("prepare_data_loader", "data = runtime.setup_data(loader)"),
    of_runtime("clip_grad_norm_", "runtime.clip_gradients(model, optimizer, norm=1.0)"),
    of_runtime("autocast", "with runtime.precision.forward_context()"),
    of_runtime("is_main_process", "if runtime.rank == 0"),
    of_runtime("fit", "hocket.Trainer(…).fit()"),
    Mistake("hocket.LightningModule", lambda: hocket.LightningModule, "'LightningModule'", "it has Algorithm", "hocket.Task"),
    Mistake("hocket.ModelCheckpoint", lambda: hocket.ModelCheckpoint, "'ModelCheckpoint'", "it has Algorithm", "checkpoints='runs/a'"),
    Mistake("hocket.seed_everything", lambda: hocket.seed_everything, "'seed_everything'", "it has Algorithm", "hocket.Trainer(seed=17)"),
    Mistake("hocket.Traner", lambda: hocket.Traner, "'Traner'", "it has Algorithm", "Did you mean 'Trainer'?"),
    # models and tasks
    Mistake("a LightningModule", lambda: trainer(model=lightning_module(), loss=None), "Net has training_step()", "Lightning", "loss(self, outputs, batch)", listed=True),
    Mistake("a Task with training_step", lambda: trainer(model=TrainingStep(), loss=None), "TrainingStep has training_step()", "Lightning", "loss(self, outputs, batch)"),
    Mistake("a Keras model", lambda: trainer(model=keras_model()), "Sequential", "torch.nn.Module", "hocket.Task"),
    Mistake("a module without forward", lambda: fit(model=Plain()), "inputs: float32 of shape (8, 4)", "forward", "def forward(self, inputs)"),
    Mistake("a Task and a loss", lambda: trainer(model=Good()), "Good is a Task", "defines its own loss", "Omit loss="),
    Mistake("a Task whose forward takes inputs", lambda: fit(model=ForwardOfInputs(), loss=None), "batch: list of 2", "gets the whole batch", "def forward(self, batch)"),
    Mistake("a Task without loss", lambda: fit(model=WithoutLoss(), loss=None), "WithoutLoss needs a loss", "loss(outputs, batch)", "def loss(self, outputs, batch)"),
    Mistake("a Task without forward", lambda: fit(model=WithoutForward(), loss=None), "WithoutForward needs a forward", "the outputs for a batch", "def forward(self, batch)"),
    Mistake("a Task whose loss returns None", lambda: fit(model=ReturnsNone(), loss=None), "returned NoneType", "a scalar tensor", "return loss"),
    Mistake("a Task with loss(batch, outputs)", lambda: trainer(model=LossOfSwapped(), loss=None), "takes (batch, outputs)", "called with (outputs, batch)", "def loss(self, outputs, batch)"),
    Mistake("a Task with update_metric(metric, batch, outputs)", lambda: trainer(model=MetricOfSwapped(), loss=None), "takes (batch, outputs)", "called with (metric, outputs, batch)", "def update_metric(self, metric, outputs, batch)"),
    Mistake("a Task whose loss takes a batch", lambda: fit(model=LossOfBatch(), loss=None), "batch: list of 2", "gets (self, outputs, batch)", "def loss(self, outputs, batch)"),
    Mistake("a Task whose forward takes one input", lambda: fit(model=ForwardOfOneInput(), loss=None), "batch: list of 2", "get the whole batch, a list of 2", "write inputs, targets = batch"),
    Mistake("a Task whose forward divides the batch", lambda: fit(model=ForwardThatDivides(), loss=None), "batch: list of 2", "get the whole batch, a list of 2", "write inputs, targets = batch"),
    Mistake("a Task whose forward takes one entry", lambda: fit(model=ForwardOfOneInput(), loss=None, train_data=[{"x": INPUTS}]), "batch: dict", "get the whole batch, a dict of 1", "write inputs = batch['x']"),
    Mistake("a Task whose loss takes targets", lambda: fit(model=LossOfTargets(), loss=None), "batch: list of 2", "get the whole batch, a list of 2", "write inputs, targets = batch"),
    Mistake("a Task whose loss subtracts the batch", lambda: fit(model=LossOfDifference(), loss=None), "batch: list of 2", "get the whole batch, a list of 2", "write inputs, targets = batch"),
    Mistake("metrics(self) of a Task", lambda: trainer(model=MetricsOfNothing(), loss=None), "metrics of MetricsOfNothing", "other arguments than (split)", "def metrics(self, split)"),
    Mistake("count(self) of a Task", lambda: trainer(model=CountsNothing(), loss=None), "count of CountsNothing", "other arguments than (batch)", "def count(self, batch)"),
    Mistake("loss = None in a Task", lambda: trainer(model=LossIsNone(), loss=None), "LossIsNone.loss is None", "has to be a method", "def loss(self, outputs, batch)"),
    Mistake("metrics(self, split) that returns None", lambda: fit(model=MetricsOfNone(), loss=None, eval_data=loader()), "of MetricsOfNone returned None", "metrics by name", "{} for none"),
    Mistake("step(self.loss, batch)", lambda: steps(lambda self, batch, step: step(self.loss, batch)), "Good.loss", "calls its loss function with (batch)", "step(self.loss_of, batch)"),
    Mistake("step(self.loss_of(batch))", lambda: steps(lambda self, batch, step: step(self.loss_of(batch))), "not given a batch", "the function itself", "step(self.loss_of, batch)"),
    Mistake("step(…, optimizer='g')", lambda: steps(lambda self, batch, step: step(self.loss_of, batch, optimizer="g")), "'optimizer'", "by position", "step(loss_function, batch, 'generator')"),
    Mistake("step(…).item()", lambda: steps(lambda self, batch, step: step(self.loss_of, batch).item()), "'item'", "loss, losses, gradient_norm", "step(…).loss"),
    Mistake("step(…)['loss']", lambda: steps(lambda self, batch, step: step(self.loss_of, batch)["loss"]), "not str", "loss, losses, gradient_norm", "step(…).loss"),
    Mistake("a Task without super().__init__()", lambda: ForgetsSuper(), "self.layer of ForgetsSuper", "torch.nn.Module has set it up", "super().__init__()"),
    Mistake("self.log(on_epoch=)", lambda: logs(lambda task, out: task.log("x", 1.0, on_step=False, on_epoch=True)), "on_step=, on_epoch=", "reduce=, over= and weight=", "over='epoch'"),
    Mistake("self.log(sync_dist=, prog_bar=)", lambda: logs(lambda task, out: task.log("x", 1.0, sync_dist=True, prog_bar=True)), "sync_dist=, prog_bar=", "reduce=", "a reduction such as reduce='mean' is over all ranks"),
    Mistake("self.log(batch_size=)", lambda: logs(lambda task, out: task.log("x", 1.0, batch_size=4)), "batch_size=", "reduce=", "weight="),
    Mistake("self.log(nonsense=)", lambda: logs(lambda task, out: task.log("x", 1.0, colour="red")), "colour=", "reduce=, over= and weight=", "unknown"),
    Mistake("self.log_dict", lambda: logs(lambda task, out: task.log_dict({"x": 1.0})), "'log_dict' belongs to Lightning", None, "self.log({'name': value})"),
    Mistake("self.log of a batch", lambda: logs(lambda task, out: task.log("scores", out)), "a tensor of shape (8, 3)", "one number", "mean()"),
    Mistake("self.log of a text", lambda: logs(lambda task, out: task.log("phase", "warm-up")), "'warm-up'", "numbers", "Log numbers"),
    Mistake("self.log without a value", lambda: logs(lambda task, out: task.log("accuracy")), "no value", None, "self.log('accuracy', value)"),
    Mistake("self.log(reduce='avg')", lambda: logs(lambda task, out: task.log("x", 1.0, reduce="avg")), "reduce='avg'", "'mean', 'sum', 'min', 'max', 'last'", "reduce='mean'"),
    Mistake("self.log(over='step')", lambda: logs(lambda task, out: task.log("x", 1.0, over="step")), "over='step'", "'interval'", "over='interval'"),
    Mistake("self.log(reduce='sum', weight=)", lambda: logs(lambda task, out: task.log("x", 1.0, reduce="sum", weight=2)), "reduce='sum'", "only a mean", "omit weight="),
    Mistake("self.log('loss')", lambda: logs(lambda task, out: task.log("loss", 1.0)), "'train/loss' is the loss of training", None, "'train/my_loss'"),
    Mistake("self.log in two ways", lambda: logs(lambda task, out: (task.log("x", 1.0), task.log("x", 1.0, reduce="sum"))), "reduce='mean' before", "reduce='sum'", "'train/my_x'"),
    Mistake("self.current_epoch in a Task", lambda: fit(model=ReadsEpoch(), loss=None), "'current_epoch' belongs to Lightning", "a callback", "state.timestamp.epoch"),
    # checkpoints
    Mistake("resume='auto' without checkpoints", lambda: trainer(resume="auto"), "resume='auto'", "checkpoints=", "hocket.Checkpoints('runs/a')"),
    Mistake("a .ckpt file", lambda: trainer(resume=file("last.ckpt")), "resume='last.ckpt' is a file", "a folder such as", "trainer.load_weights('last.ckpt')", listed=True),
    Mistake("a .pt file", lambda: trainer(resume=file("model.pt")), "resume='model.pt' is a file", "a folder such as", "trainer.load_weights('model.pt')"),
    Mistake("a missing checkpoint", lambda: trainer(resume="runs/nope"), "has no checkpoint 'nope'", "it has none", "resume='auto' with checkpoints="),
    Mistake("resume= with another optimizer", other_optimizer, "SGD", "resume= loads all parts", "runs/optimizer/ep1-ba2')"),
    Mistake("resume=3", lambda: trainer(resume=3), "resume=3", "'auto' for the newest", "'runs/a/ep3-ba18'"),
    Mistake("a checkpoint of another model", other_model, "[3, 4], the module has [5, 4]", "the model that was trained", "ignore="),
    Mistake("checkpoints=3", lambda: trainer(checkpoints=3), "checkpoints=3", "hocket.Checkpoints", "checkpoints='runs/a'"),
    Mistake("Checkpoints, the class", lambda: trainer(checkpoints=hocket.Checkpoints), "checkpoints=Checkpoints", "neither a folder", "checkpoints='runs/a'"),
    Mistake("Checkpoints among callbacks, as a class", lambda: trainer(callbacks=[hocket.Checkpoints]), "Checkpoints is not one of the callbacks", "an argument of the Trainer", "checkpoints='runs/a'"),
    Mistake("evaluate() of a set's name", lambda: trainer(eval_data={"test": loader()}).evaluate("test"), "'test' is an evaluation set", "'best', 'latest', or a path", "evaluate({'test': loader})"),
    Mistake("evaluate() of set names", lambda: trainer(eval_data={"test": loader()}).evaluate(["test"]), "['test']", "has no batches", "evaluate({'test': loader})"),
    Mistake("evaluate() of no checkpoint", lambda: trainer(eval_data=loader()).evaluate("nope"), "no checkpoint 'nope'", "the path of one", "checkpoint='best' or 'latest'"),
    Mistake("resume='latest'", lambda: trainer(checkpoints="runs/late", resume="latest"), "resume='latest'", "a path such as", "resume='auto'"),
    Mistake("Checkpoints(every=500)", lambda: hocket.Checkpoints("a", every=500), "'500' has no unit", "batches", "'500ba'"),
    Mistake("Checkpoints(save_top_k=3)", lambda: hocket.Checkpoints("a", save_top_k=3), "save_top_k=3", "keep", "keep=3"),
    Mistake("Checkpoints(monitor=…)", lambda: hocket.Checkpoints("a", monitor="val_loss"), "monitor='val_loss'", "folder, every, keep", "best=('eval/loss', 'min', 1)"),
    Mistake("best='val_loss'", lambda: hocket.Checkpoints("a", best="val_loss"), "'val_loss'", "how many checkpoints", "best=('val_loss', 'min', 1)"),
    Mistake("a second run in one folder", second_run, "runs/a", "another", "resume='auto'", listed=True),
    Mistake("weights of another shape", weights, "weight ([5, 4]", "the module has [3, 4]", "ignore="),
    Mistake("weights with other names", lambda: trainer().load_weights({"fc.weight": torch.ones(3, 4)}), "fc.weight", "weight", "remap="),
    Mistake("weights that are missing", lambda: trainer().load_weights("nope.pt"), "no nope.pt", "the path of a file or of a checkpoint's folder", "'model.pt'"),
    # the Runtime
    Mistake("Runtime(mixed_precision=…)", lambda: hocket.Runtime(mixed_precision="bf16"), "mixed_precision='bf16'", "one plug-in each", "precision='bf16'"),
    Mistake("Runtime(gradient_accumulation_steps=…)", lambda: hocket.Runtime(gradient_accumulation_steps=4), "gradient_accumulation_steps=4", "runtime.accumulate", "with runtime.accumulate(model, last="),
    Mistake("backward of a vector", lambda: runtime().backward(model()(INPUTS)), "(16, 3)", "a scalar", ".mean()"),
    Mistake("backward of a number", lambda: runtime().backward(0.5), "float", "a scalar tensor", "without .item()"),
    Mistake("step before backward", lambda: runtime().step(torch.optim.SGD(model().parameters(), 0.1)), "SGD holds 2 of 2 parameters", "a model that was set up", "set up all modules that hold them"),
    Mistake("setup(optimizer)", lambda: runtime().setup(torch.optim.SGD(model().parameters(), 0.1)), "SGD holds 2 of 2 parameters", "a model that was set up", "model, loss, optimizer = runtime.setup("),
    Mistake("setup(model, loader)", lambda: runtime().setup(model(), loader()), "DataLoader", "torch.optim.Optimizer", "runtime.setup_data(loader)"),
    Mistake("setup with an optimizer of another model", lambda: runtime().setup(model(), torch.optim.SGD(model().parameters(), 0.1)), "SGD holds 2 of 2 parameters", "not in the model", "Make it from this model's parameters"),
    Mistake("setup with an optimizer of two models", lambda: runtime().setup(net := model(), torch.optim.SGD([*net.parameters(), *model().parameters()], 0.1)), "SGD holds 2 of 4 parameters", "not in the model", "model, loss, optimizer = runtime.setup("),
    # surgery
    Mistake("replace_modules(model, list)", lambda: surgery.replace_modules(nn.Sequential(nn.ReLU()), [nn.ReLU]), "list", "by class", "{torch.nn.ReLU: "),
    Mistake("replace_modules by name", lambda: surgery.replace_modules(nn.Sequential(nn.ReLU()), {"ReLU": lambda old, i: nn.GELU()}), "'ReLU'", "by class", "torch.nn.ReLU"),
    Mistake("a module as policy", lambda: surgery.replace_modules(nn.Sequential(nn.ReLU()), {nn.ReLU: nn.GELU()}), "GELU", "a function of (module, index)", "lambda old, index:"),
    Mistake("a class as policy", lambda: surgery.replace_modules(nn.Sequential(nn.ReLU()), {nn.ReLU: nn.GELU}), "GELU", "a function of (module, index)", "lambda old, index:"),
]  # fmt: skip
