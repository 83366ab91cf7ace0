"""The fields of `TrainingArguments` and `Seq2SeqTrainingArguments`, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hocket.errors import WrongValue

Verdict = Literal["maps", "changes", "no counterpart"]


@dataclasses.dataclass(frozen=True)
class Field:
    """What becomes of a field.

    Args:
        verdict: whether hocket has it: by another name or the same (``"maps"``), differently (``"changes"``), or not.
        text: what it becomes, for a project that moves to `hocket.Trainer`.
        argument: the argument of `hocket.Trainer` that ``value`` gives.
        value: its value as a function of all fields; None to omit the argument.
        refused: why the drop-in Trainer refuses a value other than the default, and what to write; empty if it works.
        settled: whether `configuration` may omit the field, because another one's value contains it, or it is about data,
            which is given to hocket.Trainer apart, or about the program around it.
    """

    verdict: Verdict
    text: str
    argument: str = ""
    value: Callable[[Any], Any] = lambda args: None
    refused: str = ""
    settled: bool = False


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))


def _count(number: float) -> str:
    return f"{number:g}dur" if number < 1 else f"{int(number)}ba"


def _interval(args: Any, prefix: str) -> str | None:
    strategy, steps = _name(getattr(args, f"{prefix}_strategy")), getattr(args, f"{prefix}_steps")
    return {"epoch": "1ep", "steps": _count(steps or 1), "best": None, "no": None}[strategy]


def _duration(args: Any) -> str:
    if args.max_steps > 0:
        return f"{args.max_steps}ba"
    return f"{args.num_train_epochs:g}ep" if args.num_train_epochs == int(args.num_train_epochs) else _fraction(args)


def _fraction(args: Any) -> str:
    raise WrongValue(
        f"TrainingArguments(num_train_epochs={args.num_train_epochs}) is a fraction of an epoch. Write max_steps= with the "
        "number of steps."
    )


_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "lion_32bit": "lion",
}


def _optimizer(args: Any) -> dict[str, Any]:
    kind = _name(args.optim)
    if kind not in _OPTIMIZERS:
        raise WrongValue(
            f"TrainingArguments(optim={kind!r}) has no name in hocket. Pass optimizer=lambda parameters: … to hocket.Trainer, "
            "or keep the Trainer of hocket_migration.transformers, which makes this optimizer."
        )
    options: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if kind.startswith("adamw"):
        options |= {"betas": [args.adam_beta1, args.adam_beta2], "eps": args.adam_epsilon}
        if kind.endswith("fused"):
            options["fused"] = True
    if args.weight_decay:
        options["groups"] = [{"match": ["1d", "*.bias"], "weight_decay": 0.0}]
    return {_OPTIMIZERS[kind]: options}


def _schedule(args: Any) -> str:
    kind = _name(args.lr_scheduler_type)
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if kind not in known or args.lr_scheduler_kwargs:
        raise WrongValue(
            f"TrainingArguments(lr_scheduler_type={kind!r}, lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}) has no name in "
            "hocket. Pass schedule=lambda optimizer: transformers.get_scheduler(…), which hocket steps after every step."
        )
    warmup = args.warmup_steps if kind != "constant" else 0
    return f"{known[kind]}(warmup={_count(warmup)})" if warmup else known[kind]


def _checkpoints(args: Any) -> dict[str, Any] | None:
    if _name(args.save_strategy) == "no":
        return None
    found: dict[str, Any] = {"folder": args.output_dir, "every": _interval(args, "save"), "keep": args.save_total_limit}
    if args.save_only_model:
        found["weights_only"] = True
    if args.load_best_model_at_end or _name(args.save_strategy) == "best":
        metric = str(args.metric_for_best_model or "loss").removeprefix("eval_")
        found["best"] = [f"eval/{metric}", "max" if args.greater_is_better else "min", 1]
    return found


def _compile(args: Any) -> Any:
    if not args.torch_compile:
        return None
    chosen = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in chosen.items() if value} or True


def _loggers(args: Any) -> list[str] | None:
    names = [args.report_to] if isinstance(args.report_to, str) else args.report_to
    known = {"tensorboard", "wandb", "mlflow", "trackio"} & set(names)
    return sorted({*known, *(["comet"] if "comet_ml" in names else [])}) or None


def _ddp(args: Any) -> Any:
    given = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "static_graph": args.ddp_static_graph,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return {"ddp": given} if given and args.world_size > 1 else None


def _maps(text: str, argument: str = "", value: Callable[[Any], Any] | None = None, refused: str = "") -> Field:
    return Field("maps", text, argument, value or (lambda args: None), refused, settled=bool(argument))


def _part(text: str) -> Field:
    """Return a field that another field's value contains."""
    return Field("maps", text, settled=True)


def _data(text: str) -> Field:
    """Return a field about the data or the program, which are not arguments of `hocket.Trainer`."""
    return Field("maps", text, settled=True)


def steps_in_backward(optimizer: str) -> bool:
    """Whether an optimizer of ``optim=`` steps inside the backward pass."""
    return "lomo" in optimizer or "layerwise" in optimizer


def _always(text: str) -> Field:
    """Return a field that changes nothing that hocket computes."""
    return Field("changes", text, settled=True)


def _changes(text: str, argument: str = "", value: Callable[[Any], Any] | None = None, refused: str = "") -> Field:
    return Field("changes", text, argument, value or (lambda args: None), refused, settled=bool(argument))


def _gone(text: str, refused: str = "") -> Field:
    return Field("no counterpart", text, refused=refused)


_LOADER = "an argument of the torch DataLoader that you give hocket.Trainer"
_HUB = "nothing in hocket uploads to the Hub: call model.push_to_hub() after fit; the drop-in Trainer still uploads"

#: Name -> what becomes of it, in the order of the documentation.
FIELDS: Mapping[str, Field] = {
    "output_dir": _data("the folder of checkpoints=hocket.Checkpoints(folder)"),
    "per_device_train_batch_size": _data(
        "batch_size of the DataLoader; global_batch= for the samples of all ranks together"
    ),
    "num_train_epochs": _maps("duration='3ep'", "duration", value=_duration),
    "max_steps": _part("duration='1000ba'"),
    "learning_rate": _maps("optimizer='adamw(lr=5e-5)'", "optimizer", value=_optimizer),
    "lr_scheduler_type": _maps("schedule='linear'", "schedule", value=_schedule),
    "lr_scheduler_kwargs": _part("arguments of schedule="),
    "warmup_steps": _part("schedule='linear(warmup=100ba)', or a fraction as 'warmup=0.1dur'"),
    "optim": _part("the name of optimizer="),
    "optim_args": _part("arguments of optimizer="),
    "weight_decay": _part(
        "optimizer={'adamw': {'weight_decay': 0.1, 'groups': [{'match': ['1d', '*.bias'], 'weight_decay': 0}]}}: biases and "
        "norms are exempt in transformers"
    ),
    "adam_beta1": _part("optimizer='adamw(betas=(0.9, 0.999))'"),
    "adam_beta2": _part("optimizer='adamw(betas=(0.9, 0.999))'"),
    "adam_epsilon": _part("optimizer='adamw(eps=1e-8)'"),
    "optim_target_modules": _gone("optimizer=lambda parameters: … with parameter groups of your own"),
    "gradient_accumulation_steps": _maps(
        "accumulate='4ba'",
        "accumulate",
        value=lambda args: f"{args.gradient_accumulation_steps}ba" if args.gradient_accumulation_steps > 1 else None,
    ),
    "average_tokens_across_devices": _always("always: losses are weighted by their tokens over batches and ranks"),
    "max_grad_norm": _maps(
        "clip_gradients=1.0; hocket does not clip by default",
        "clip_gradients",
        value=lambda args: args.max_grad_norm or None,
    ),
    "label_smoothing_factor": _maps("algorithms=['label-smoothing']; the drop-in Trainer smooths as transformers does"),
    "bf16": _maps("precision='bf16'", "precision", value=lambda args: "bf16" if args.bf16 else None),
    "fp16": _maps("precision='fp16'", "precision", value=lambda args: "fp16" if args.fp16 else None),
    "bf16_full_eval": _gone(
        "precision='bf16-true' for training and evaluation",
        "evaluation has the precision of training. Write bf16=True, or hocket={'precision': 'bf16-true'}",
    ),
    "fp16_full_eval": _gone(
        "precision='fp16-true' for training and evaluation",
        "evaluation has the precision of training. Write fp16=True, or hocket={'precision': 'fp16-true'}",
    ),
    "tf32": _maps("precision='tf32'", "precision", value=lambda args: "tf32" if args.tf32 else None),
    "activation_checkpointing": _maps(
        "algorithms=['activation-checkpointing'], or model.gradient_checkpointing_enable()"
    ),
    "activation_checkpointing_kwargs": _part("arguments of either"),
    "gradient_checkpointing": _maps(
        "algorithms=['activation-checkpointing'], or model.gradient_checkpointing_enable()"
    ),
    "gradient_checkpointing_kwargs": _part("arguments of either"),
    "torch_compile": _maps("compile=True", "compile", value=_compile),
    "torch_compile_backend": _part("compile={'backend': 'inductor'}"),
    "torch_compile_mode": _part("compile='reduce-overhead'"),
    "use_liger_kernel": _changes(
        "algorithms=['fused-cross-entropy'] of hocket-algorithms-nlp; the drop-in Trainer still applies the kernels"
    ),
    "liger_kernel_config": _part("see use_liger_kernel"),
    "use_cache": _data("model.config.use_cache"),
    "neftune_noise_alpha": _gone(
        "add noise in a forward hook of the embedding; the drop-in Trainer does it as transformers"
    ),
    "torch_empty_cache_steps": _gone(
        "a callback that calls torch.cuda.empty_cache()",
        "write a TrainerCallback with on_step_end that calls torch.cuda.empty_cache()",
    ),
    "auto_find_batch_size": _changes(
        "microbatch='auto': the batch stays as it is, and the largest microbatch that fits is found before the first step",
        refused="it changes the batch size, and with it the result. Pass hocket={'microbatch': 'auto'}, which does not",
    ),
    "logging_strategy": _maps("log_every='10ba'", "log_every", value=lambda args: _interval(args, "logging")),
    "logging_steps": _part("log_every='10ba'"),
    "logging_first_step": _always("the history has every interval; write log_every='1ba' for every step"),
    "log_on_each_node": _always("rank 0 logs"),
    "logging_nan_inf_filter": _always(
        "nonfinite='raise' stops at a loss that is not finite; 'skip' or 'warn' continue"
    ),
    "include_num_input_tokens_seen": _maps("state.timestamp.token, and duration='1e9tok'"),
    "log_level": _always("logging.getLogger('transformers').setLevel(…)"),
    "log_level_replica": _always("logging.getLogger('transformers').setLevel(…)"),
    "disable_tqdm": _data("loggers=['progress'] shows a bar; none is shown otherwise"),
    "report_to": _maps("loggers=['tensorboard', 'wandb', 'mlflow', 'comet', 'trackio']", "loggers", value=_loggers),
    "run_name": _maps("run_name=", "run_name", value=lambda args: args.run_name),
    "project": _maps("loggers=[{'wandb': {'project': …}}]"),
    "trackio_space_id": _maps("an argument of the logger trackio"),
    "trackio_bucket_id": _maps("an argument of the logger trackio"),
    "trackio_static_space_id": _maps("an argument of the logger trackio"),
    "eval_strategy": _changes(
        "eval_every='500ba' or '1ep'; hocket also evaluates at the end of a fit",
        "eval_every",
        value=lambda args: _interval(args, "eval"),
    ),
    "eval_steps": _part("eval_every='500ba'"),
    "eval_delay": _gone("a hocket.Callback that requests Decision.EVALUATE, with eval_every=None"),
    "per_device_eval_batch_size": _data("batch_size of the DataLoader in eval_data="),
    "prediction_loss_only": _always("metrics=None: only losses are computed; outputs are never kept"),
    "eval_on_start": _maps("trainer.evaluate() before fit"),
    "eval_do_concat_batches": _always("metrics are updated batch by batch; trainer.predict returns a list of batches"),
    "eval_use_gather_object": _always("metrics of ranks are merged"),
    "eval_accumulation_steps": _always("metrics are updated batch by batch, so that no outputs are kept"),
    "include_for_metrics": _data("Task.update_metric(metric, outputs, batch)"),
    "batch_eval_metrics": _always("always: metrics have update, compute and reset"),
    "save_only_model": _part("Checkpoints(weights_only=True)"),
    "save_strategy": _maps("checkpoints=hocket.Checkpoints(folder, every='500ba')", "checkpoints", value=_checkpoints),
    "save_steps": _part("Checkpoints(every='500ba')"),
    "save_on_each_node": _always("every rank writes the shards that it holds, rank 0 the rest"),
    "save_total_limit": _part("Checkpoints(keep=3)"),
    "enable_jit_checkpoint": _changes(
        "Checkpoints writes one when SIGTERM arrives",
        refused="pass hocket={'checkpoints': hocket.Checkpoints(folder)}, which writes one when SIGTERM arrives",
    ),
    "push_to_hub": _gone(_HUB),
    "hub_token": _gone(_HUB),
    "hub_private_repo": _gone(_HUB),
    "hub_model_id": _gone(_HUB),
    "hub_strategy": _gone(_HUB),
    "hub_always_push": _gone(_HUB),
    "hub_revision": _gone(_HUB),
    "load_best_model_at_end": _maps("Checkpoints(best=('eval/accuracy', 'max', 1)), then trainer.evaluate('best')"),
    "metric_for_best_model": _part("Checkpoints(best=('eval/accuracy', 'max', 1))"),
    "greater_is_better": _part("Checkpoints(best=('eval/accuracy', 'max', 1))"),
    "ignore_data_skip": _always("a resumed run continues at the exact sample"),
    "restore_callback_states_from_checkpoint": _always("always: checkpoints hold the state of callbacks"),
    "full_determinism": _maps("deterministic=True", "deterministic", value=lambda args: args.full_determinism or None),
    "seed": _maps("seed=42", "seed", value=lambda args: args.seed),
    "data_seed": _data("the generator of the DataLoader"),
    "use_cpu": _maps("device='cpu'", "device", value=lambda args: "cpu" if args.use_cpu else None),
    "accelerator_config": _changes("strategy=, precision= and the loader"),
    "parallelism_config": _maps(
        "strategy='tensor-parallel' or 'fsdp'",
        refused="pass hocket={'strategy': 'tensor-parallel'} to the Trainer instead",
    ),
    "dataloader_drop_last": _data(_LOADER),
    "dataloader_num_workers": _data(_LOADER),
    "dataloader_pin_memory": _data(_LOADER),
    "dataloader_persistent_workers": _data(_LOADER),
    "dataloader_prefetch_factor": _data(_LOADER),
    "dataloader_multiprocessing_context": _data(_LOADER),
    "dataloader_in_order": _data(_LOADER),
    "remove_unused_columns": _data("hocket_nlp.HuggingFaceTask omits what forward does not take"),
    "label_names": _maps("targets=, or Task.loss"),
    "train_sampling_strategy": _data("the sampler of the DataLoader"),
    "length_column_name": _data("the sampler of the DataLoader"),
    "ddp_find_unused_parameters": _maps("strategy={'ddp': {'find_unused_parameters': True}}", "strategy", value=_ddp),
    "ddp_bucket_cap_mb": _part("strategy={'ddp': {'bucket_cap_mb': 25}}"),
    "ddp_broadcast_buffers": _always("buffers are copied from rank 0"),
    "ddp_static_graph": _part("strategy={'ddp': {'static_graph': True}}"),
    "ddp_backend": _always("chosen by the device: gloo for CPUs, nccl for CUDA"),
    "ddp_timeout": _always("that of torch.distributed"),
    "fsdp": _maps(
        "strategy='fsdp'",
        "strategy",
        value=lambda args: "fsdp" if args.fsdp else None,
        refused="pass hocket={'strategy': 'fsdp'} to the Trainer instead, and start with hocket launch",
    ),
    "fsdp_config": _maps(
        "strategy={'fsdp': {…}}", refused="pass hocket={'strategy': {'fsdp': {…}}} to the Trainer instead"
    ),
    "deepspeed": _maps(
        "strategy={'deepspeed': {…}}",
        "strategy",
        value=lambda args: "deepspeed" if args.deepspeed else None,
        refused="pass hocket={'strategy': 'deepspeed'} to the Trainer instead, and start with hocket launch",
    ),
    "debug": _changes("detect_anomaly=True, and callbacks=['nan-monitor']"),
    "skip_memory_metrics": _data("callbacks=['memory-monitor']"),
    "do_train": _data("call fit"),
    "do_eval": _data("call evaluate"),
    "do_predict": _data("call predict"),
    "resume_from_checkpoint": _maps("resume='auto', or the folder of a checkpoint"),
    "local_rank": _data("state.strategy.rank, set by hocket launch"),
    # Seq2SeqTrainingArguments
    "sortish_sampler": _data("the sampler of the DataLoader"),
    "predict_with_generate": _maps("hocket_nlp.HuggingFaceTask(generate={…}, text_metrics={…})"),
    "generation_max_length": _maps("HuggingFaceTask(generate={'max_length': 128})"),
    "generation_num_beams": _maps("HuggingFaceTask(generate={'num_beams': 4})"),
    "generation_config": _maps("HuggingFaceTask(generate={…})"),
}

#: Arguments of `hocket.Trainer` that the drop-in Trainer makes, and where to write them instead.
ELSEWHERE: Mapping[str, str] = {
    "model": "Pass model= to the Trainer itself.",
    "train_data": "Pass train_dataset=, or override get_train_dataloader.",
    "eval_data": "Pass eval_dataset=, or override get_eval_dataloader.",
    "data": "Pass train_dataset= and eval_dataset=.",
    "loss": "Pass compute_loss_func=, or override compute_loss.",
    "loss_reduction": "Set loss_is_scaled_for_ga of the Trainer.",
    "inputs": "Batches are the keyword arguments of the model; change them in data_collator.",
    "targets": "Name them in TrainingArguments(label_names=[…]).",
    "outputs": "Pass preprocess_logits_for_metrics=.",
    "optimizer": "Pass optimizers=(optimizer, scheduler), or override create_optimizer.",
    "schedule": "Pass optimizers=(optimizer, scheduler), or override create_scheduler.",
    "schedule_every": "A scheduler is stepped after every step.",
    "duration": "Write TrainingArguments(num_train_epochs=…) or max_steps=.",
    "min_duration": "Write TrainingArguments(max_steps=…).",
    "accumulate": "Write TrainingArguments(gradient_accumulation_steps=…).",
    "eval_every": "Write TrainingArguments(eval_strategy=…, eval_steps=…).",
    "limit_train": "Write TrainingArguments(max_steps=…).",
    "seed": "Write TrainingArguments(seed=…).",
}
