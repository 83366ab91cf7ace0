"""Names and objects of plug-ins: precision, device, strategy, optimizer, schedule, algorithms, callbacks, loggers."""

from __future__ import annotations

from typing import Any

import torch
from newcomers import INPUTS, LABELS, Mistake, classify, fit, loader, model, nothing, of_library, regress, trainer
from torch import nn

import hocket


def name(argument: str, value: Any, write: str, allowed: str = "nstalled", listed: bool = False) -> Mistake:
    """A name that is not ours, in one argument of the Trainer."""
    given = [value] if argument in ("algorithms", "callbacks", "loggers") else value
    return Mistake(f"{argument}={value!r}", lambda: fit(**{argument: given}), repr(value), allowed, write, listed)


class Callback(hocket.Callback):
    """A callback with one method of any name."""


def callback(method: str) -> Any:
    return type("Mine", (hocket.Callback,), {method: lambda self, state: None, "__module__": "mine"})()


def lightning(name: str, package: str = "callbacks") -> Any:
    return of_library(f"lightning.pytorch.{package}", name, on_train_end=nothing, state_dict=nothing)()


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def empty() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    optimizer.param_groups[0]["params"].clear()
    return optimizer


class OnlyApply(hocket.Algorithm):
    def apply(self, event: Any, state: Any) -> None:
        print("x")


class OnlyLog(hocket.Logger):
    def log(self, metrics: Any, step: Any) -> None:
        print(metrics)


class Needy(hocket.Callback):
    def __init__(self, every: Any) -> None:
        self.every = every

    def batch_end(self, state: Any) -> None: ...


MISTAKES = [
    name("precision", "32-true", "'fp32'", listed=True),
    name("precision", "16-mixed", "'fp16'", "hocket", listed=True),
    name("precision", "bf16-mixed", "'bf16'", listed=True),
    name("precision", "32", "'fp32'", listed=True),
    name("device", "gpu", "'cuda'", listed=True),
    name("optimizer", "AdamW", "'adamw'", listed=True),
    name("precision", "float32", "'fp32'"),
    name("precision", "amp_bf16", "'bf16'"),
    name("precision", "FP32", "'fp32'"),
    name("precision", "64-true", "'fp64'", "hocket"),
    name("precision", "no", "'fp32'"),
    name("precision", "mixed_bfloat16", "'bf16'"),
    Mistake("precision=32", lambda: trainer(precision=32), "32 is not one of", "bf16", "such as 'fp32'"),
    Mistake("precision=16", lambda: trainer(precision=16), "16 is not one of", "bf16", "such as 'fp16'"),
    Mistake("precision=torch.int8", lambda: trainer(precision=torch.int8), "precision=torch.int8", "'fp32', 'bf16'", "Write one of 'fp32'"),
    Mistake("precision=None", lambda: trainer(precision=None), "None is not one of", "bf16", "such as 'fp32'"),
    name("device", "GPU", "'cuda'"),
    name("device", "tpu", "'xla'"),
    name("device", "CPU", "'cpu'"),
    Mistake("device='cuda:1'", lambda: trainer(device="cuda:1"), "device='cuda:1'", "the first that is visible", "CUDA_VISIBLE_DEVICES=1"),
    Mistake("device=torch.device('cuda:1')", lambda: trainer(device=torch.device("cuda:1")), "device='cuda:1'", "the first that is visible", "CUDA_VISIBLE_DEVICES=1"),
    Mistake("device=0", lambda: trainer(device=0), "0 is not one of the devices", "cpu, cuda", "such as 'c"),
    name("strategy", "dp", "'ddp'", "hocket"),
    name("strategy", "ddp_find_unused_parameters_true", "'ddp'", "hocket"),
    name("strategy", "DistributedDataParallel", "'ddp'", "hocket"),
    name("strategy", "deepspeed_stage_2", "'deepspeed'", "hocket"),
    name("strategy", "single_device", "'single'"),
    Mistake("strategy=DataParallel class", lambda: trainer(strategy=nn.DataParallel), "DataParallel", "strategies", "'ddp'"),
    Mistake("strategy=None", lambda: trainer(strategy=None), "None is not one of", "single", "such as 'single'"),
    # optimizers
    name("optimizer", "Adam", "'adam'"),
    name("optimizer", "adamw_torch", "'adamw'"),
    name("optimizer", "adma", "'adam'"),
    name("optimizer", "prodigy", "Write one of the installed"),
    Mistake("lr as text", lambda: trainer(optimizer={"adamw": {"lr": "1e-3"}}), "lr='1e-3', which is str", "float", "Write lr=0.001", listed=True),
    Mistake("a negative lr", lambda: trainer(optimizer="sgd(lr=-1.0)"), "-1.0", "Its signature is sgd(", "write {'sgd': {…}}"),
    Mistake("a misspelt argument", lambda: trainer(optimizer="adamw(learning_rate=1e-3)"), "'learning_rate'", "Its signature is adamw(", "'lr'"),
    Mistake("'adamw, lr=1e-3'", lambda: trainer(optimizer="adamw, lr=1e-3"), "'adamw, lr=1e-3'", "a name with arguments", "'name(key=value)'"),
    Mistake("warmup_steps of cosine", lambda: trainer(schedule={"cosine": {"warmup_steps": 100}}), "'warmup_steps'", "Its signature is", "Write warmup='100ba'"),
    Mistake("metrics=['acuracy']", lambda: trainer(metrics=["acuracy"]), "'acuracy'", "accuracy, mae, mse", "Write metrics=['accuracy']"),
    Mistake("'adamw 1e-3'", lambda: trainer(optimizer="adamw(1e-3)"), "'1e-3'", "key=value", "'adamw(key=value, …)'"),
    Mistake("a dict with type", lambda: trainer(optimizer={"type": "AdamW", "lr": 1e-3}), "'type'", "submodule", "{'adamw': {'lr': 0.001}}"),
    Mistake("(class, kwargs)", lambda: trainer(optimizer=(torch.optim.AdamW, {"lr": 1e-3})), "lr", "one of the optimizers", "Write {'adamw': {'lr': 0.001}}"),
    Mistake("an lr", lambda: trainer(optimizer=1e-3), "optimizer=0.001", "a function of the parameters", "'adamw(lr=1e-3)'"),
    Mistake("an optimizer of another model", lambda: trainer(optimizer=torch.optim.SGD(model().parameters(), 0.1)), "2 of 2 parameters that are not in the model", "this model's parameters", "optimizer=lambda parameters: torch.optim.SGD"),
    Mistake("an optimizer without parameters", lambda: trainer(optimizer=empty()), "SGD holds no parameters", "the model's", "torch.optim.SGD(model.parameters())"),
    Mistake("a frozen model", lambda: trainer(model=frozen()), "Linear has no parameter that requires a gradient", "Omit optimizer=", "set requires_grad on the parameters"),
    Mistake("the parameters", lambda: trainer(optimizer=model().parameters()), "generator", "a function of the", "'adamw(lr=1e-3)'"),
    # schedules
    name("schedule", "CosineAnnealingLR", "'cosine'"),
    name("schedule", "get_linear_schedule_with_warmup", "'linear'"),
    name("schedule", "cosine_with_restarts", "'cosine-restarts'"),
    name("schedule", "StepLR", "'step'"),
    name("schedule", "cosin", "'cosine'"),
    name("schedule", "ReduceLROnPlateau", "plateau"),
    Mistake("LambdaLR's function of an epoch", lambda: trainer(schedule=lambda epoch: 0.95**epoch), "called with the optimizer", "schedule=lambda clock: ", "torch.optim.lr_scheduler.LambdaLR(optimizer, "),
    Mistake("an optimizer's function of the model", lambda: trainer(optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1)), "no attribute 'parameters'", "called with the list of parameters", "optimizer=lambda parameters: "),
    Mistake("a torch scheduler class", lambda: trainer(schedule=torch.optim.lr_scheduler.CosineAnnealingLR), "CosineAnnealingLR", "a function of the optimizer", "schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer"),
    Mistake("a torch scheduler", lambda: trainer(schedule=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model().parameters(), 0.1), 10)), "StepLR", "a function of the optimizer", "schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer"),
    Mistake("monitor='val_loss'", lambda: fit(eval_data=loader(), callbacks=[{"early-stopping": {"monitor": "val_loss"}}]), "'val_loss'", "'label/name'", "Write 'eval/loss'"),
    Mistake("best='accuracy'", lambda: fit(eval_data={"a": loader(), "b": loader()}, metrics="accuracy", checkpoints=hocket.Checkpoints("runs/best", best=("accuracy", "max", 1))), "'accuracy'", "'label/name'", "Write 'a/accuracy' or 'b/accuracy'"),
    Mistake("monitor='eval/acc'", lambda: fit(callbacks=["early-stopping(monitor='eval/acc')"], eval_data=loader()), "'eval/acc'", "measures only 'eval/loss'", "metrics='accuracy'"),
    Mistake("warmup=100", lambda: fit(schedule="cosine(warmup=100)"), "warmup=100", "100 has no unit", "warmup='100ba'"),
    Mistake("warmup=0.1", lambda: fit(schedule="cosine(warmup=0.1)"), "warmup=0.1", "0.1 has no unit", "write warmup='0.1dur'"),
    Mistake("warmup='0.5ba'", lambda: fit(schedule="cosine(warmup=0.5ba)"), "0.5ba is not", "a whole number of batches", "'0.1dur'"),
    Mistake("schedule=0.1", lambda: trainer(schedule=0.1), "0.1", "cosine", "'cosine(warmup=0.05dur)'"),
    # algorithms
    name("algorithms", "EMA", "'ema'"),
    name("algorithms", "label_smoothing", "'label-smoothing'"),
    Mistake("label smoothing of numbers", lambda: regress(algorithms=["label-smoothing"]), "targets of shape (16, 1)", "classification only", "remove label-smoothing"),
    Mistake("label smoothing of several numbers", lambda: regress(targets=INPUTS, model=model(outputs=4), algorithms=["label-smoothing"]), "targets of shape (16, 4)", "0 or more, and sum to 1", "remove label-smoothing"),
    Mistake("label smoothing without a name of targets", lambda: fit(train_data=[{"x": INPUTS, "y": LABELS}], inputs="x", targets=lambda batch: batch["y"], loss=lambda outputs, y: nn.functional.cross_entropy(outputs, y), algorithms=["label-smoothing"]), "a dict with 'x', 'y'", "target_key", "{'label-smoothing': {'target_key': 'y'}}"),
    Mistake("label smoothing of nll_loss", lambda: classify(loss=nn.NLLLoss(), model=nn.Sequential(model(), nn.LogSoftmax(1)), algorithms=["label-smoothing"]), "label-smoothing gives the loss class probabilities of shape (16, 3) in place of the class indices of shape (16,)", "takes indices only", "loss=torch.nn.functional.cross_entropy"),
    Mistake("an algorithm for images on vectors", lambda: classify(algorithms=["colout"]), "inputs of shape (16, 4)", "(B, C, H, W)", "Remove colout"),
    name("algorithms", "labelsmothing", "'label-smoothing'"),
    name("algorithms", "mix_up", "'mixup'"),
    name("algorithms", "token-dropping", "Write one of the installed"),
    Mistake("an algorithm's argument", lambda: trainer(algorithms=[{"ema": {"decay": 0.99}}]), "'decay'", "Its signature is ema(", "half_life"),
    Mistake("algorithms=['early-stopping']", lambda: trainer(algorithms=["early-stopping"]), "no algorithm 'early-stopping'", "one of the callbacks", "callbacks=['early-stopping']"),
    Mistake("only apply()", lambda: trainer(algorithms=[OnlyApply()]), "defines apply()", "declares no events", "events = {hocket.Event."),
    Mistake("a logger with log()", lambda: trainer(loggers=[OnlyLog()]), "defines log and no hook", "`hocket plugins hooks`", "log_metrics(self, state, metrics)"),
    Mistake("a callback class with arguments", lambda: trainer(callbacks=[Needy]), "needs every", "Its signature", "Needy(every='1ep')"),
    Mistake("early-stopping without monitor", lambda: trainer(callbacks=["early-stopping"]), "needs monitor", "Its signature", "{'early-stopping': {'monitor': 'eval/loss'}}"),
    Mistake("ema with decay", lambda: trainer(algorithms=[{"ema": {"decay": 0.99}}]), "no argument 'decay'", "Its signature", "'smoothing'"),
    Mistake("a callback as algorithm", lambda: trainer(algorithms=[Callback()]), "Callback is not an algorithm", "hocket.Algorithm", "callbacks=[…]"),
    Mistake("a Composer algorithm", lambda: trainer(algorithms=[of_library("composer.algorithms", "EMA", apply=nothing, match=nothing)()]), "EMA", "of Composer", "Write 'ema'"),
    # callbacks
    Mistake("Lightning's EarlyStopping", lambda: trainer(callbacks=[lightning("EarlyStopping")]), "EarlyStopping", "of Lightning", "Write 'early-stopping'", listed=True),
    Mistake("Lightning's ModelCheckpoint", lambda: trainer(callbacks=[lightning("ModelCheckpoint")]), "ModelCheckpoint", "of Lightning", "checkpoints='runs/a'", listed=True),
    Mistake("Lightning's logger", lambda: trainer(loggers=[lightning("TensorBoardLogger", "loggers")]), "TensorBoardLogger", "of Lightning", "Write 'tensorboard'", listed=True),
    Mistake("Lightning's LearningRateMonitor", lambda: trainer(callbacks=[lightning("LearningRateMonitor")]), "LearningRateMonitor", "of Lightning", "Write 'lr-monitor'"),
    Mistake("Lightning's CSVLogger", lambda: trainer(loggers=[lightning("CSVLogger", "loggers")]), "CSVLogger", "of Lightning", "Write 'jsonl'"),
    Mistake("transformers' EarlyStoppingCallback", lambda: trainer(callbacks=[of_library("transformers.trainer_callback", "EarlyStoppingCallback")()]), "EarlyStoppingCallback", "of transformers", "Write 'early-stopping'"),
    Mistake("Keras' ReduceLROnPlateau", lambda: trainer(callbacks=[of_library("keras.src.callbacks", "ReduceLROnPlateau")()]), "ReduceLROnPlateau", "of Keras", "schedule="),
    name("callbacks", "EarlyStopping", "'early-stopping'"),
    name("callbacks", "early_stopping", "'early-stopping'"),
    name("callbacks", "ModelCheckpoint", "checkpoints='runs/a'", "argument of the Trainer"),
    name("callbacks", "tqdm", "loggers=['progress']", "a logger here"),
    name("callbacks", "LearningRateMonitor", "'lr-monitor'"),
    Mistake("a function as callback", lambda: trainer(callbacks=[print]), "print", "methods such as batch_end(self, state)", "class Mine(hocket.Callback)"),
    Mistake("early-stopping without a metric", lambda: trainer(callbacks=["early-stopping"]), "early-stopping", "signature is early-stopping(", "write {'early-stopping': {"),
    Mistake("on_train_batch_end", lambda: trainer(callbacks=[callback("on_train_batch_end")]), "on_train_batch_end()", "not a hook", "'batch_end'"),
    Mistake("on_validation_epoch_end", lambda: trainer(callbacks=[callback("on_validation_epoch_end")]), "on_validation_epoch_end()", "not a hook", "'eval_end'"),
    Mistake("on_epoch_begin", lambda: trainer(callbacks=[callback("on_epoch_begin")]), "on_epoch_begin()", "not a hook", "'epoch_start'"),
    Mistake("on_step_end", lambda: trainer(callbacks=[callback("on_step_end")]), "on_step_end()", "not a hook", "'batch_end'"),
    Mistake("epoch_ends", lambda: trainer(callbacks=[callback("epoch_ends")]), "epoch_ends()", "not a hook", "'epoch_end'"),
    Mistake("a hook with other arguments", lambda: trainer(callbacks=[type("Mine", (hocket.Callback,), {"batch_end": lambda self, trainer, module: None})()]), "'trainer'", "the hook has (state)", "Use only these names"),
    # loggers
    Mistake("loggers=True", lambda: trainer(loggers=True), "loggers=True", "a list of names", "loggers=['"),
    name("loggers", "tqdm", "'progress'"),
    name("loggers", "json", "'jsonl'"),
    name("loggers", "TensorBoard", "'tensorboard'"),
    name("loggers", "neptune", "Write one of the installed"),
    Mistake("a file as logger", lambda: trainer(loggers=[of_library("wandb.sdk.wandb_run", "Run", log=nothing)()]), "Run", "Weights & Biases", "hocket.Logger"),
    # events and phases
    Mistake("Event.TRAIN_BATCH_END", lambda: hocket.Event.TRAIN_BATCH_END, "'TRAIN_BATCH_END'", "The members are INIT", "Event.BATCH_END"),
    Mistake("Event('on_epoch_end')", lambda: hocket.Event("on_epoch_end"), "'on_epoch_end'", "The members are INIT", "Event.EPOCH_END"),
    Mistake("Event['VALIDATION_END']", lambda: hocket.Event["VALIDATION_END"], "'VALIDATION_END'", "The members are INIT", "Event.EVAL_END"),
    Mistake("Phase.AUGMENTATION", lambda: hocket.Phase.AUGMENTATION, "'AUGMENTATION'", "The members are SELECT", "Phase."),
    Mistake("Phase.OPTIMISER", lambda: hocket.Phase.OPTIMISER, "'OPTIMISER'", "The members are SELECT", "Phase.OPTIMIZER"),
]  # fmt: skip
