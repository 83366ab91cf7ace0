"""Arguments of other libraries: what to write here instead. Arguments whose meaning is plain are converted."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import DataLoader

from hocket.help import objects
from hocket.time import Time

P = ParamSpec("P")
R = TypeVar("R")

#: What to write instead of an argument of another library. ``{0}`` is the value that was given, ``{name}`` its argument.
_INSTEAD: Mapping[str, str] = {
    # how long
    "max_epochs epochs num_epochs num_train_epochs n_epochs n_epoch num_epoch": "duration='{0}ep'",
    "max_steps num_steps max_train_steps steps total_steps iterations max_iters": "duration='{0}ba'",
    "max_time max_duration train_time time_limit": "duration='…', such as '10ep', '1000ba' or '90min'",
    "min_epochs min_steps": "duration='10ep' without early stopping before it: callbacks=[{{'early-stopping': {{…}}}}] has patience=",
    "steps_per_epoch limit_train_batches": "limit_train=100, a number of batches",
    "limit_val_batches limit_test_batches validation_steps eval_subset_num_batches": "limit_eval=100, a number of batches",
    "limit_predict_batches": "limit_predict=100, a number of batches",
    "overfit_batches": "overfit=10, a number of batches",
    "initial_epoch": "resume='auto', which continues after the last epoch of checkpoints=",
    # data
    "dataset data train_dataset training_data train_loader train_dl train_ds train_dataloader train_dataloaders loader dataloader "
    "trainloader": "train_data=loader, such as torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)",
    "datamodule dls dataloaders data_module": "train_data=datamodule.train_dataloader(), eval_data=datamodule.val_dataloader()",
    "x y X Y x_train y_train train_x train_y": "train_data=torch.utils.data.DataLoader(TensorDataset(x, y), batch_size=32, "
    "shuffle=True)",
    "validation_data val_data valid_data eval_dataset val_dataset val_dataloader val_dataloaders eval_dataloader valid_loader "
    "val_loader test_data test_loader dev_data valid_dl test_dataloader test_dataloaders validation_split validation_loader":
    "eval_data=loader, or eval_data={{'val': loader}}, such as torch.utils.data.DataLoader(dataset, batch_size=32)",
    "batch_size per_device_train_batch_size train_batch_size bs": "train_data=torch.utils.data.DataLoader(dataset, "
    "batch_size={0}); global_batch={0} sets the size over all ranks",
    "per_device_eval_batch_size eval_batch_size validation_batch_size": "eval_data=torch.utils.data.DataLoader(dataset, "
    "batch_size={0})",
    "shuffle num_workers dataloader_num_workers drop_last dataloader_drop_last collate_fn data_collator pin_memory "
    "dataloader_pin_memory sampler": "train_data=torch.utils.data.DataLoader(dataset, batch_size=32, {name}=…)",
    "use_distributed_sampler replace_sampler_ddp split_batches": "global_batch=256, which divides batches over ranks; without "
    "it each rank takes its own batches of train_data",
    "label_names label_column": "targets='{0}'",
    # the model and its loss
    "module net network pl_module learner": "model=…",
    "criterion loss_fn loss_func loss_function objective compute_loss_func": "loss={0}",
    "args training_args config trainer_config": "each setting by its name, such as hocket.Trainer(model=model, duration='3ep', "
    "optimizer='adamw(lr=5e-5)')",
    "tokenizer processing_class": "a collate_fn of the DataLoader, which tokenizes: train_data=DataLoader(dataset, "
    "batch_size=32, collate_fn=tokenize)",
    "model_init": "model=model_init()",
    "compute_metrics eval_metrics metric": "metrics={{'accuracy': metric}}, an object with update, compute and reset, or "
    "metrics='accuracy'",
    # the optimizer
    "lr learning_rate": "optimizer='adamw(lr={0})'",
    "weight_decay wd": "optimizer='adamw(lr=1e-3, weight_decay={0})'",
    "momentum": "optimizer='sgd(lr=0.1, momentum={0})'",
    "opt optim optimizers opt_func optimizer_cls optimizer_class": "optimizer='adamw(lr=1e-3)', an optimizer of torch, or "
    "lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
    "optimizer_params optimizer_kwargs adam_beta1 adam_beta2 adam_epsilon": "optimizer='adamw(lr=1e-3, betas=(0.9, 0.999))'",
    "scheduler schedulers lr_scheduler lr_scheduler_type lr_schedule lr_schedulers": "schedule='cosine(warmup=0.05dur)'",
    "warmup_steps num_warmup_steps warmup": "schedule='cosine(warmup={0}ba)'",
    "warmup_ratio": "schedule='cosine(warmup={0}dur)'",
    "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps accumulate_steps grad_accumulation": "a "
    "larger batch_size in the DataLoader, and microbatch=8 (samples per forward pass) or microbatch='auto': one step is taken "
    "for each batch, computed in parts",
    "device_train_microbatch_size micro_batch_size microbatch_size": "microbatch={0!r}",
    "gradient_clip_val max_grad_norm grad_clip clip_grad_norm gradient_clipping grad_norm_clip clipnorm clip_grad gradient_clip": "clip_gradients={0}",
    "gradient_clip_algorithm clipvalue clip_value": "clip_gradients=('value', 0.5), or ('norm', 1.0)",
    # hardware
    "accelerator": "device={0!r}, such as 'cuda', 'mps', 'cpu' or 'auto'",
    "gpus num_gpus tpu_cores n_gpu num_processes num_devices nproc_per_node": "devices=2, the number of processes on this machine; "
    "device='cuda' chooses their kind",
    "num_nodes": "nothing, and start each machine's processes: torchrun --nnodes={0} --nproc-per-node=8 train.py; "
    "strategy='auto' joins them",
    "use_cpu no_cuda cpu": "device='cpu'",
    "fp16 use_fp16 amp use_amp half fp16_full_eval": "precision='fp16', or 'bf16'",
    "bf16": "precision='bf16'",
    "tf32": "precision='tf32'",
    "mixed_precision amp_backend torch_dtype dtype": "precision='bf16', 'fp16' or 'fp32'",
    "distributed distributed_backend backend parallelism_config deepspeed deepspeed_config fsdp fsdp_config fsdp_plugin "
    "deepspeed_plugin dist_strategy": "strategy='ddp', 'fsdp' or another of `hocket plugins list --kind strategies`",
    "sync_batchnorm": "model=torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "auto_scale_batch_size auto_find_batch_size": "microbatch='auto', which finds the number of samples that fits in memory",
    "gradient_checkpointing": "torch.utils.checkpoint.checkpoint in the model's forward; microbatch='auto' also saves memory",
    # evaluation and logging
    "val_check_interval eval_steps eval_interval evaluation_steps": "eval_every='500ba', or '1ep'",
    "check_val_every_n_epoch validation_freq": "eval_every='{0}ep'",
    "evaluation_strategy eval_strategy do_eval": "eval_every='1ep', '500ba' or None",
    "num_sanity_val_steps": "sanity_eval=2, a number of batches",
    "logger log_with report_to": "loggers=['progress', 'jsonl']",
    "log_every_n_steps logging_steps log_interval logging_interval log_freq": "log_every='{0}ba'",
    "enable_progress_bar progress_bar disable_tqdm show_progress_bar verbose progbar": "loggers=['progress'] to show a bar, "
    "loggers=[] to show none",
    "enable_model_summary": "print(trainer.plan())",
    "profiler profile": "profile_plugins=True, which measures each plug-in",
    # files
    "default_root_dir output_dir save_dir project_dir logdir log_dir dirpath root_dir": "folder={0!r} for the files of loggers, and "
    "checkpoints={0!r} for checkpoints",
    "enable_checkpointing checkpoint_callback checkpoint checkpointing": "checkpoints='runs/a', or nothing for no checkpoints",
    "save_folder checkpoint_dir": "checkpoints={0!r}",
    "save_steps save_interval save_strategy save_every": "checkpoints=hocket.Checkpoints('runs/a', every='500ba')",
    "save_total_limit save_top_k save_num_checkpoints_to_keep": "checkpoints=hocket.Checkpoints('runs/a', keep={0})",
    "load_best_model_at_end metric_for_best_model save_best_only monitor": "checkpoints=hocket.Checkpoints('runs/a', "
    "best=('eval/loss', 'min', 1))",
    "ckpt_path resume_from_checkpoint load_path resume_from autoresume": "resume={0!r} in the Trainer, a checkpoint such as "
    "'runs/a/ep3-ba18', or resume='auto' with checkpoints=",
    "weights weights_path pretrained": "trainer.load_weights({0!r}) after making the Trainer",
    "name experiment_name": "run_name={0!r}",
    "push_to_hub hub_model_id": "nothing, and publish the files after training: trainer.model_state_dict() has the weights",
    # other
    "callback cbs plugins_list": "callbacks=[{0!r}]",
    "algorithm": "algorithms=[{0!r}]",
    "random_state seed_everything data_seed": "seed={0}",
    "benchmark": "torch.backends.cudnn.benchmark = True, before making the Trainer",
    "inference_mode": "nothing: evaluation runs without gradients",
    "reload_dataloaders_every_n_epochs": "train_data= with a data set that defines set_epoch(epoch)",
    "torch_compile use_compile jit_compile jit compile_model": "compile=True",
    "compile_config torch_compile_mode torch_compile_backend": "compile={{'mode': 'reduce-overhead'}}",
    "debug run_eagerly": "fast_dev_run=2, a number of batches",
    "class_weight sample_weight": "loss=torch.nn.CrossEntropyLoss(weight=…); for weights of samples, a hocket.Task whose loss "
    "returns (mean, weight)",
    "label_smoothing_factor label_smoothing": "algorithms=[{{'label-smoothing': {{'smoothing': {0}}}}}]",
    "barebones sync_timeout ddp_find_unused_parameters find_unused_parameters": "strategy={{'ddp': {{…}}}}; `hocket plugins info "
    "ddp` lists its arguments",
    "log_level": "logging.getLogger('hocket').setLevel(…)",
}  # fmt: skip


#: The signatures of decorated functions by qualified name.
_SIGNATURES: dict[str, inspect.Signature] = {}


def understood(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the public interface: explain arguments of other libraries, and convert plain ones.

    Raises TypeError for an argument that does not exist, is missing or is one too many; the message says what to write.
    """
    signature = _SIGNATURES[function.__qualname__] = inspect.signature(function)
    conversions = {name: convert for name, convert in objects.CONVERSIONS.items() if name in signature.parameters}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_explain(function, signature, args, kwargs) or str(error)) from None
        for name, value in bound.arguments.items():
            if name in conversions:
                bound.arguments[name] = conversions[name](value, bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call


def _explain(function: Any, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with a call and what to write, or empty if it is not known."""
    owner, _, method = function.__qualname__.rpartition(".")
    what = owner if method == "__init__" else f"{owner}.{method}"
    known = {name: each for name, each in signature.parameters.items() if name != "self"}
    if unknown := [name for name in kwargs if name not in known]:
        return " ".join(_unknown(what, known, name, kwargs[name]) for name in unknown)
    positional = [name for name, each in known.items() if each.kind is not each.KEYWORD_ONLY]
    given = args[1:]  # without self
    if len(given) > len(positional):
        named = ", ".join(f"{name}=…" if name in known else repr(name) for name in map(_role, given[len(positional) :]))
        return (
            f"{what} takes {_words(positional)} by position, and was given {len(given)} values: "
            f"{', '.join(objects.short(each) for each in given)}. Give the others by name, such as {named}."
        )
    if twice := [name for name in positional[: len(given)] if name in kwargs]:
        here = objects.short(given[positional.index(twice[0])])
        return f"{what} was given {twice[0]} twice, {here} and by name. Write each by its name: {twice[0]}=…, duration='10ep'."
    missing = [n for n, each in known.items() if each.default is each.empty and n not in (*kwargs, *positional[: len(given)])]
    if missing:
        about = _about(missing[0])
        return f"{what} was not given {missing[0]}{f' ({about})' if about else ''}. Write {what}({missing[0]}=…)."
    return ""


def _unknown(what: str, known: Mapping[str, Any], name: str, value: Any) -> str:
    given = f"{what} has no argument {name}={objects.short(value)}."
    trainer = _SIGNATURES.get("Trainer.__init__")
    instead = next((text for others, text in _INSTEAD.items() if name in others.split()), None)
    if instead is not None:
        text = instead.format(_Shown(value), name=name)
        target = text.partition("=")[0]
        where = "" if target in known or trainer is None or target not in trainer.parameters else "to the Trainer "
        about = _about(target)
        return f"{given} Write {where}{text}.{f' {target}: {about}.' if about else ''}"
    near = difflib.get_close_matches(name, known, 1, 0.6)
    if near:
        about = _about(near[0])
        return f"{given} Did you mean {near[0]}?{f' {near[0]}: {about}.' if about else ''} Write {near[0]}={objects.short(value)}."
    if trainer is not None and name in trainer.parameters:
        return f"{given} It is one of hocket.Trainer({name}=…). Here the arguments are {', '.join(known)}."
    return f"{given} Its arguments are {', '.join(known)}. Remove {name}, or write one of them."


def _about(argument: str) -> str:
    """Return the first sentence of the Trainer's documentation of an argument, or empty."""
    trainer = getattr(sys.modules.get("hocket.trainer"), "Trainer", None)
    for names, text in re.findall(r"^    ([\w, ]+): ((?:.|\n     )*)", inspect.getdoc(trainer) or "", re.MULTILINE):
        if argument in names.split(", "):
            return " ".join(text.split()).partition(". ")[0].rstrip(".")
    return ""


def _role(value: Any) -> str:
    """Return the argument that a value given by position is probably meant for."""
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, DataLoader):
        return "eval_data"
    if isinstance(value, str | Time):
        return "duration"
    return "loss" if callable(value) else "eval_data" if hasattr(value, "__iter__") else "name"


def _words(names: Sequence[str]) -> str:
    return " and ".join(names) if names else "no argument"


class _Shown:
    """A value within a suggestion: itself if that is short, else an ellipsis."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        plain = isinstance(self._value, str | int | float)
        return repr(self._value) if plain else objects.short(self._value) if callable(self._value) else "…"

    def __str__(self) -> str:
        return self._value if isinstance(self._value, str) else repr(self)
