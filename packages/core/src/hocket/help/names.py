"""Names that other libraries give to plug-ins and hooks, which are looked up before the spelling is compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: Names of this library by kind, each with those of others, in lower case and without punctuation.
_OTHERS: Mapping[str, Mapping[str, str]] = {
    "precisions": {
        "fp32": "32 32true float32 float single no none full highest amp0",
        "fp16": "16 16mixed float16 half fp16mixed ampfp16 amp mixed mixedfloat16 mixedprecision",
        "bf16": "bf16mixed bfloat16 bfloat16mixed ampbf16 bfloat mixedbfloat16",
        "fp16-true": "16true purefp16",
        "bf16-true": "purebf16 bfloat16true",
        "fp64": "64 64true float64 double",
        "tf32": "high tensorfloat32",
        "fp8": "ampfp8 transformerengine transformerenginefloat16 float8",
        "int8": "bnbint8 8bit",
    },
    "devices": {
        "cuda": "gpu nvidia rocm hip amd",
        "xla": "tpu",
        "mps": "metal apple m1",
    },
    "strategies": {
        "single": "no none singledevice",
        "ddp": "dp ddpspawn ddpfork ddpnotebook ddpfindunusedparameterstrue ddpfindunusedparametersfalse dataparallel "
        "distributeddataparallel multigpu mirrored mirroredstrategy horovod",
        "fsdp": "fsdp2 fsdpnative fullyshardeddataparallel fullshard shardgradop fullyshard",
        "deepspeed": "deepspeedstage1 deepspeedstage2 deepspeedstage3 deepspeedstage2offload deepspeedstage3offload zero "
        "zero1 zero2 zero3",
        "tensor-parallel": "tp modelparallel",
        "local-sgd": "diloco postlocalsgd",
    },
    "optimizers": {
        "adamw": "adamwtorch adamwtorchfused adamwhf adamw8bit pagedadamw decoupledadamw fusedadamw",
        "sgd": "momentum nesterov decoupledsgdw sgdw",
        "rmsprop": "rmspropoptimizer",
    },
    "schedules": {
        "cosine": "cosineannealing cosineannealinglr cosinedecay cosinelr cosinewithwarmup cosineannealingwithwarmup "
        "getcosineschedulewithwarmup warmupcosine onecycle onecyclelr",
        "cosine-restarts": "cosineannealingwarmrestarts cosinewithrestarts cosinedecayrestarts sgdr",
        "linear": "linearlr linearwithwarmup linearwarmup getlinearschedulewithwarmup lineardecay lineardecaywithwarmup",
        "constant": "constantlr constantwithwarmup getconstantschedulewithwarmup",
        "step": "steplr stepdecay piecewise",
        "multistep": "multisteplr piecewiseconstantdecay",
        "exponential": "exponentiallr exponentialdecay",
        "polynomial": "polynomiallr polynomialdecay poly",
        "wsd": "warmupstabledecay",
    },
    "callbacks": {
        "early-stopping": "earlystopper earlystoppingcallback stopearly",
        "lr-monitor": "learningratemonitor lrlogger",
        "memory-monitor": "devicestatsmonitor gpustatsmonitor",
        "speed-monitor": "throughputmonitor speedlogger stepspersecond timer",
        "nan-monitor": "terminateonnan nandetector",
        "runtime-estimator": "eta",
    },
    "loggers": {
        "jsonl": "csv csvlogger json filelogger",
        "tensorboard": "tensorboardlogger tb tensorboardcallback",
        "progress": "tqdm progressbar tqdmprogressbar richprogressbar progresscallback bar",
        "console": "print printercallback stdout consolelogging",
        "memory": "inmemory inmemorylogger history dictlogger",
    },
    "algorithms": {
        "ema": "exponentialmovingaverage swa stochasticweightaveraging weightaveraging emaweightaveraging modelema",
        "gradient-clipping": "clip gradclip gradientclip clipgradnorm clipgradients",
        "label-smoothing": "smoothing labelsmooth",
    },
}  # fmt: skip
#: What belongs to another argument, by kind and name.
_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "callbacks": {
        "modelcheckpoint checkpoint checkpointing checkpointsaver savemodelcallback": "Checkpoints are an argument of the "
        "Trainer: checkpoints='runs/a', or hocket.Checkpoints('runs/a', best=('eval/loss', 'min', 1))",
        "tqdmprogressbar richprogressbar progressbar tqdm progbarlogger": "It is a logger here: loggers=['progress']",
        "tensorboard": "It is a logger here: loggers=['tensorboard']",
        "ema swa stochasticweightaveraging weightaveraging": "It is an algorithm here: algorithms=['ema']",
        "gradientaccumulationscheduler": "Microbatches are an argument of the Trainer: microbatch=8 computes a batch in parts "
        "of 8 samples",
        "learningratescheduler reducelronplateau": "Schedules are an argument of the Trainer: schedule='cosine(warmup=0.05dur)'",
        "csvlogger": "It is a logger here: loggers=['jsonl']",
    },
    "schedules": {
        "reducelronplateau plateau": "It needs a metric: make the torch scheduler from your optimizer, and step it in a "
        "callback's eval_end(state) with state.metrics['eval/loss']; or use schedule='cosine'",
    },
    "strategies": {
        "auto": "Write strategy='auto', without arguments",
    },
}  # fmt: skip
#: Hooks of Lightning, transformers, Keras and fastai, by ours.
_HOOKS = {
    "fit_start": "train_begin train_start fit_begin before_fit sanity_check_start",
    "fit_end": "train_end after_fit",
    "epoch_start": "epoch_begin train_epoch_start epoch_start before_epoch",
    "epoch_end": "train_epoch_end epoch_end after_epoch",
    "batch_start": "batch_begin train_batch_start train_batch_begin step_begin batch_start before_batch",
    "batch_end": "train_batch_end step_end batch_end after_batch train_step_end",
    "eval_start": "validation_start validation_epoch_start test_start test_begin evaluate_begin before_validate",
    "eval_end": "validation_end validation_epoch_end test_end test_epoch_end evaluate evaluate_end after_validate",
    "eval_batch_end": "validation_batch_end test_batch_end prediction_step",
    "eval_batch_start": "validation_batch_start test_batch_start",
    "predict_batch_end": "predict_batch_end",
    "before_backward": "before_backward",
    "after_backward": "after_backward",
    "after_train_batch": "before_optimizer_step pre_optimizer_step",
    "zero_grad": "before_zero_grad",
    "batch_checkpoint": "save save_checkpoint",
    "log_metrics": "log",
    "exception": "exception",
    "close": "teardown",
    "init": "setup init_end",
}  # fmt: skip


def plain(name: str) -> str:
    """Return a name in lower case and without punctuation, so that different conventions compare equal."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def alias(kind: str, name: str, there: Iterable[str]) -> str | None:
    """Return this library's name for what another one calls ``name``, or None.

    A name in another case or with other punctuation comes first. ``there`` are the names that exist.
    """
    wanted = plain(name)
    same = [each for each in there if plain(each) == wanted]
    if same:
        return same[0]
    if kind == "devices":  # "cuda:0"
        wanted = plain(name.partition(":")[0])
        if wanted in there:
            return wanted
    return next((ours for ours, others in _OTHERS.get(kind, {}).items() if wanted in others.split()), None)


def elsewhere(kind: str, name: str) -> str | None:
    """Return where to give what another library has among the plug-ins of this kind, or None."""
    wanted = plain(name)
    return next((text for others, text in _ELSEWHERE.get(kind, {}).items() if wanted in others.split()), None)


def hook(name: str) -> str | None:
    """Return the hook of this library that corresponds to another library's, such as ``on_train_batch_end``, or None."""
    wanted = name.casefold().removeprefix("on_")
    return next((ours for ours, others in _HOOKS.items() if wanted in others.split()), None)


#: Libraries whose objects people pass, by the first part of a module's name.
_LIBRARIES = {
    "lightning": "Lightning", "pytorch_lightning": "Lightning", "lightning_fabric": "Lightning", "transformers": "transformers",
    "composer": "Composer", "keras": "Keras", "tensorflow": "TensorFlow", "fastai": "fastai", "accelerate": "Accelerate",
    "ignite": "Ignite", "wandb": "Weights & Biases", "mlflow": "MLflow", "comet_ml": "Comet", "datasets": "datasets",
}  # fmt: skip


def library(obj: object) -> str | None:
    """Return the library that an object, or a class, comes from or inherits from, or None for other libraries."""
    cls = obj if isinstance(obj, type) else type(obj)
    found = (_LIBRARIES.get(base.__module__.partition(".")[0]) for base in cls.__mro__)
    return next((each for each in found if each), None)
