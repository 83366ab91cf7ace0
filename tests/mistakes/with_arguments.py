"""Arguments of the Trainer that other libraries have, and values that ours do not take."""

from __future__ import annotations

from typing import Any

import torch
from newcomers import INPUTS, LABELS, Mistake, fit, loader, model, trainer
from torch import nn

import hocket


def argument(name: str, value: Any, allowed: str, write: str, listed: bool = False) -> Mistake:
    """An argument that the Trainer does not have."""
    given = f"{name}={value!r}" if isinstance(value, str | int | float) else f"{name}="
    return Mistake(f"{name}=", lambda: trainer(**{name: value}), given, allowed, write, listed)


class Net(nn.Module):
    pass


MISTAKES = [
    argument("max_epochs", 10, "length of training", "duration='10ep'", listed=True),
    argument("lr", 0.01, "a function of the parameters", "optimizer='adamw(lr=0.01)'", listed=True),
    argument("accumulate_grad_batches", 4, "accumulate", "accumulate='4ba'", listed=True),
    argument("gradient_clip_val", 1.0, "the largest norm", "clip_gradients=1.0", listed=True),
    argument("overfit_batches", 1, "train only on the first", "overfit=10", listed=True),
    argument("num_train_epochs", 3, "length of training", "duration='3ep'"),
    argument("epochs", 3, "length of training", "duration='3ep'"),
    argument("num_epochs", 3, "length of training", "duration='3ep'"),
    argument("max_steps", 500, "length of training", "duration='500ba'"),
    argument("max_duration", "10ep", "length of training", "duration='…'"),
    argument("max_time", "00:12:00:00", "'90min'", "duration='…', such as '10ep'"),
    argument("learning_rate", 3e-4, "a function of the parameters", "optimizer='adamw(lr=0.0003)'"),
    argument("weight_decay", 0.1, "a function of the parameters", "weight_decay=0.1)'"),
    argument("warmup_steps", 100, "a name such as", "schedule='cosine(warmup=100ba)'"),
    argument("warmup_ratio", 0.1, "a name such as", "schedule='cosine(warmup=0.1dur)'"),
    argument("lr_scheduler", "cosine", "a name such as", "schedule='cosine(warmup=0.05dur)'"),
    argument("gradient_accumulation_steps", 8, "accumulate", "accumulate='8ba'"),
    argument("max_grad_norm", 1.0, "the largest norm", "clip_gradients=1.0"),
    argument("clipnorm", 1.0, "the largest norm", "clip_gradients=1.0"),
    argument("limit_train_batches", 0.1, "maximum number of batches", "limit_train=100"),
    argument("limit_val_batches", 10, "maximum number of batches", "limit_eval=100"),
    argument("val_check_interval", 0.25, "interval of evaluation", "eval_every='500ba'"),
    argument("check_val_every_n_epoch", 5, "interval of evaluation", "eval_every='5ep'"),
    argument("evaluation_strategy", "epoch", "interval of evaluation", "eval_every='1ep'"),
    argument("num_sanity_val_steps", 2, "before training", "sanity_eval=2"),
    argument("accelerator", "gpu", "'cuda', 'mps', 'cpu'", "device='gpu'"),
    argument("gpus", 2, "number of processes", "devices=2"),
    argument("num_nodes", 2, "strategy='auto' joins", "torchrun --nnodes=2"),
    argument("logger", True, "names, ", "loggers=['progress', 'jsonl']"),
    argument("log_every_n_steps", 50, "interval at which", "log_every='50ba'"),
    argument("enable_checkpointing", False, "the folder of checkpoints", "checkpoints='runs/a'"),
    argument("default_root_dir", "out", "loggers", "folder='out'"),
    argument("output_dir", "out", "checkpoints", "folder='out'"),
    argument("ckpt_path", "last", "the folder of a checkpoint", "resume='auto'"),
    argument("resume_from_checkpoint", True, "the folder of a checkpoint", "resume='auto'"),
    argument("fp16", True, "one plug-in each", "precision='fp16'"),
    argument("bf16", True, "one plug-in each", "precision='bf16'"),
    argument("mixed_precision", "fp16", "one plug-in each", "precision='bf16', 'fp16'"),
    argument("per_device_train_batch_size", 8, "global_batch=8", "batch_size=8)"),
    argument("batch_size", 32, "any iterable of batches", "DataLoader(dataset, batch_size=32)"),
    argument("validation_data", (INPUTS, LABELS), "one such iterable", "eval_data={'val': loader}"),
    argument("validation_split", 0.2, "one such iterable", "eval_data=loader"),
    argument("val_dataloaders", loader(), "one such iterable", "eval_data={'val': loader}"),
    argument("train_dataloader", loader(), "any iterable of batches", "train_data=loader"),
    argument("train_dataset", [], "any iterable of batches", "train_data=loader"),
    argument("datamodule", object(), "any iterable of batches", "train_data=datamodule.train_dataloader()"),
    argument("x", INPUTS, "any iterable of batches", "DataLoader(TensorDataset(x, y)"),
    argument("criterion", nn.MSELoss(), "(outputs, targets)", "loss=MSELoss(…)"),
    argument("loss_fn", "mse", "(outputs, targets)", "loss=mse"),
    argument("compute_metrics", len, "with update, compute and reset", "metrics='accuracy'"),
    argument("args", object(), "each setting by its name", "hocket.Trainer(model=model, duration='3ep'"),
    argument("tokenizer", object(), "collate_fn of the DataLoader", "collate_fn=tokenize)"),
    argument("verbose", 1, "loggers=[] to show none", "loggers=['progress']"),
    argument("save_top_k", 3, "the folder of checkpoints", "hocket.Checkpoints('runs/a', keep=3)"),
    argument("save_steps", 500, "the folder of checkpoints", "every='500ba')"),
    argument("sync_batchnorm", True, "model=", "convert_sync_batchnorm(model)"),
    argument("auto_scale_batch_size", True, "number of samples that fits", "microbatch='auto'"),
    argument("torch_compile", True, "a mode of", "compile=True"),
    argument("maxEpochs", 10, "length of training", "duration='10ep'"),
    argument("num_epoch_total", 10, "Its arguments are model", "Remove num_epoch_total"),
    argument("acumulate_grad_batches", 4, "accumulate='4ba'", "microbatch=8"),
    argument("early_stopping_patience", 3, "configurations or instances", "'patience': 3"),
    argument("duraton", "3ep", "length of training", "Write duration='3ep'"),
    argument("optimiser", "sgd", "a function of the parameters", "Write optimizer='sgd'"),
    argument("colour", "blue", "Its arguments are model, train_data", "write one of them"),
    Mistake(
        "Trainer() without a model", lambda: hocket.Trainer(), "not given model", "`nn.Module`", "Trainer(model=…)"
    ),
    Mistake(
        "Trainer(model, loss, optimizer, loader)",
        lambda: hocket.Trainer(model(), nn.CrossEntropyLoss(), torch.optim.SGD(model().parameters(), 0.1), loader()),
        "was given 4 values: Linear(…), CrossEntropyLoss(…)",
        "takes model and train_data by position",
        "optimizer=…, eval_data=…",
    ),
    Mistake(
        "Trainer(model, loss)",
        lambda: hocket.Trainer(model(), nn.CrossEntropyLoss(), device="cpu"),
        "a model (CrossEntropyLoss)",
        "an iterable of batches",
        "train_data=torch.utils.data.DataLoader(dataset, batch_size=32)",
    ),
    Mistake(
        "Trainer(model, lambda as loss)",
        lambda: hocket.Trainer(model(), lambda outputs, targets: outputs.mean(), device="cpu"),
        "the function <lambda>",
        "an iterable of batches",
        "train_data=torch.utils.data.DataLoader(dataset, batch_size=32)",
    ),
    Mistake(
        "Trainer(model, train_data, model=…)",
        lambda: hocket.Trainer(model(), model=model()),
        "model twice, Linear(…)",
        "each by its name",
        "model=…",
    ),
    Mistake(
        "fit(model, loader)",
        lambda: trainer().fit(model(), loader()),
        "a model (Linear)",
        "an iterable of batches",
        "hocket.Trainer(model, train_data).fit()",
        listed=True,
    ),
    Mistake("fit(10)", lambda: trainer().fit(10), "the number 10", "an iterable of batches", "duration='10ep'"),
    Mistake(
        "fit(epochs=3)", lambda: trainer().fit(epochs=3), "Trainer.fit has no argument epochs=3", "length of training", "duration='3ep'"
    ),
    Mistake(
        "fit(x=…, y=…)",
        lambda: trainer().fit(x=INPUTS, y=LABELS),
        "x=a tensor of shape (16, 4)",
        "any iterable of batches",
        "train_data=torch.utils.data.DataLoader(TensorDataset(x, y)",
    ),
    Mistake(
        "fit(ckpt_path=…)",
        lambda: trainer().fit(ckpt_path="last"),
        "ckpt_path='last'",
        "the folder of a checkpoint",
        "Write in the Trainer resume='last', a checkpoint such as",
    ),
    Mistake(
        "fit(optimizer=…)",
        lambda: trainer().fit(optimizer="sgd"),
        "no argument optimizer='sgd'",
        "train_data, eval_data, duration",
        "hocket.Trainer(optimizer=…)",
    ),
    Mistake(
        "evaluate(batch_size=…)",
        lambda: trainer().evaluate(loader(), batch_size=8),
        "Trainer.evaluate has no argument batch_size=8",
        "any iterable of batches",
        "DataLoader(dataset, batch_size=8)",
    ),
    Mistake(
        "predict() without data",
        lambda: trainer().predict(),
        "Trainer.predict was not given data",
        "Trainer.predict(data=…)",
        "data=…",
    ),
    Mistake("seed='17'", lambda: trainer(seed="17"), "seed='17' is text", "a seed is an int", "seed=17", listed=True),
    Mistake("seed=True", lambda: trainer(seed=True), "seed=True is not a seed", "an int from 0 to 4294967295", "seed=17"),
    Mistake(
        "compile='fast'", lambda: trainer(compile="fast"), "compile='fast'", "'reduce-overhead', 'max-autotune'", "compile=True"
    ),
    Mistake("compile=torch.compile", lambda: trainer(compile=torch.compile), "compile=compile", "neither True nor arguments", "compile=True"),
    Mistake("devices=-1", lambda: trainer(devices=-1), "devices=-1", "a positive int", "such as 2"),
    Mistake("devices='auto'", lambda: trainer(devices="auto"), "devices='auto'", "a positive int", "such as 2"),
    Mistake("devices=[0, 1]", lambda: trainer(devices=[0, 1]), "devices=[0, 1]", "a positive int", "such as 2"),
    Mistake("microbatch='8'", lambda: trainer(microbatch="8"), "microbatch='8'", "a positive int, 'auto' or None", "give"),
    Mistake("clip_gradients='1.0'", lambda: trainer(clip_gradients="1.0"), "clip_gradients='1.0'", "a kind and a threshold", "such as 1.0"),
    Mistake("nonfinite='ignore'", lambda: trainer(nonfinite="ignore"), "'ignore'", "'raise', 'skip' or 'warn'", "use 'raise'"),
    Mistake("limit_train=1.5", lambda: trainer(limit_train=1.5), "limit_train=1.5", "up to 1.0", "such as 0.1"),
    Mistake("overfit=True", lambda: trainer(overfit=True), "overfit=True", "an int of 1 or more", "such as 10"),
    Mistake("run_name=3", lambda: trainer(run_name=3), "run_name=3", "text", "such as 'baseline-1'"),
    # durations and intervals
    Mistake("duration=10", lambda: trainer(duration=10), "'10' has no unit", "epochs", "'10ep'"),
    Mistake("duration='10'", lambda: trainer(duration="10"), "'10' has no unit", "epochs", "'10ep'"),
    Mistake("duration='10 epochs'", lambda: trainer(duration="10 epochs"), "'10 epochs'", "ba (batches)", "Write '10ep'"),
    Mistake("duration='1000 steps'", lambda: trainer(duration="1000 steps"), "'1000 steps'", "ba (batches)", "Write '1000ba'"),
    Mistake("duration='1000it'", lambda: trainer(duration="1000it"), "'1000it'", "ba (batches)", "Write '1000ba'"),
    Mistake("duration=2.5", lambda: trainer(duration=2.5), "'2.5' has no unit", "epochs", "'2.5ep'"),
    Mistake("duration='0.5ep'", lambda: trainer(duration="0.5ep"), "0.5ep", "a whole number", "batches ('ba')"),
    Mistake("duration=-3", lambda: trainer(duration=-3), "-3", "a number and a unit", "'10ep'"),
    Mistake("eval_every=100", lambda: trainer(eval_every=100), "'100' has no unit", "epochs", "'100ba'"),
    Mistake("eval_every='epoch'", lambda: trainer(eval_every="epoch"), "'epoch'", "a number and a unit", "'10ep'"),
    Mistake("log_every=10", lambda: trainer(log_every=10), "'10' has no unit", "batches", "'10ba'"),
    Mistake("fit() without a duration", lambda: fit(duration=None), "no duration", "the Trainer or to fit", "duration='10ep'"),
    Mistake("fit() without data", lambda: fit(train_data=None), "nothing to train on", "the Trainer or to fit", "train_data="),
    Mistake("fit() without an optimizer", lambda: fit(optimizer=None), "no optimizer", "configure_optimizers()", "torch.optim.AdamW(parameters, lr=1e-3)"),
    Mistake("fit() without a loss", lambda: fit(loss=None), "returned Tensor without a loss", "a hocket.Task as the model", "loss=torch.nn.functional.cross_entropy"),
    Mistake("evaluate() without data", lambda: trainer().evaluate(), "nothing to evaluate on", "eval_data= to the Trainer", "Pass data to evaluate()"),
    Mistake("a model class", lambda: trainer(model=Net), "Net", "torch.nn.Module", "model=Net()"),
    Mistake("model='resnet18'", lambda: trainer(model="resnet18"), "model='resnet18'", "torch.nn.Module", "give a torch.nn.Module"),
    Mistake("model=None", lambda: trainer(model=None), "model=None", "torch.nn.Module", "give a torch.nn.Module"),
    Mistake("model=a list of modules", lambda: trainer(model=[nn.Linear(4, 3)]), "list", "torch.nn.Module", "torch.nn.Sequential("),
    Mistake("a state_dict as model", lambda: trainer(model=model().state_dict()), "OrderedDict", "torch.nn.Module", "trainer.load_weights("),
]  # fmt: skip
