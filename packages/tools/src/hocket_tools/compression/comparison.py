"""Compare compressed models with the original: quality with an interval, bytes on disk, and latency measured here."""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hocket.data import batches as nested
from hocket.data.source import empty
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.help.raised import raised
from hocket.state.task import Task
from hocket_tools.arguments import check_least, checked
from hocket_tools.beside import batches_of, noted
from hocket_tools.compression.model_inputs import Inputs, inputs_of_batches
from hocket_tools.judging.recording import nonfinite
from hocket_tools.resampling import Estimate, Statistic, bootstrap

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket.state.state import State
    from hocket_tools.resampling import Floats

ORIGINAL = "original"


@dataclass(frozen=True, slots=True)
class Row:
    """One model of a comparison.

    Example:
        >>> import hocket_tools
        >>> row = hocket_tools.Row("int8", "test/accuracy", 0.98, (0.97, 0.99), -0.001, (-0.003, 0.001), 90_000, 1.2, 64, 1)
        >>> row.bytes
        90000
    """

    name: str
    #: The metric, as ``label/name``, its value, and the 95 % interval over resampled samples.
    metric: str
    quality: float
    quality_interval: tuple[float, float]
    #: Quality minus that of the original, and its interval, paired by sample; 0 for the original.
    change: float
    change_interval: tuple[float, float]
    #: Bytes of a safetensors file with the parameters and buffers.
    bytes: int
    #: Median milliseconds of a call, for this many samples and threads.
    latency_ms: float
    batch: int
    threads: int
    #: How many samples have outputs with NaN or infinity, which a metric of classes counts as some class.
    nonfinite: int = 0


#: Called with the number of steps that are done.
Count = Callable[[int], None]


@checked
def compare_compressed(
    trainer: Trainer, models: Mapping[str, nn.Module], *, metric: str | None = None, repeats: int = 50, resamples: int = 1000,
    compile: bool = False, progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Row]:  # fmt: skip
    """Measure the trainer's model, with the weights that it evaluates, and compressed models, in one table.

    Quality is a metric of an evaluation set of the trainer. Its intervals come from a bootstrap over samples (Efron 1979,
    percentiles): all models are measured on the same resampled sets, so that changes are paired. Bytes are those of a
    safetensors file. Latency is the median over calls with the set's first batch on this machine; the models take turns.

    Args:
        trainer: with ``eval_data=`` and ``metrics=``, on one rank.
        models: compressed models by name, which are called as the trainer's model is.
        metric: ``label/name``, such as ``"test/accuracy"``; None for the first one.
        repeats: calls of each model that are timed.
        resamples: of the bootstrap (`hocket_tools.bootstrap`), 100 or more; 0 for no intervals.
        compile: measure all models compiled by `torch.compile`, with frozen weights; needs a C++ compiler.
        progress: called with what is done, the number of its steps and of all.

    Returns:
        A row for the original, which is named "original", and for each model.

    Raises:
        ValueError: there are several ranks, there is no such metric, or the set is empty.
        TypeError: ``models`` are not modules by name.

    Example:
        >>> import hocket, hocket_tools, torch
        >>> inputs = torch.randn(64, 32)
        >>> batches = [(inputs, inputs.argmax(1) % 4)]
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        >>> trainer = hocket.Trainer(
        ...     model=model, loss="cross_entropy", eval_data={"test": batches}, metrics=["accuracy"], device="cpu"
        ... )
        >>> small = hocket_tools.quantize(model, "int8")
        >>> rows = hocket_tools.compare_compressed(trainer, {"int8": small}, repeats=5, resamples=100)
        >>> [row.name for row in rows], rows[1].bytes < rows[0].bytes
        (['original', 'int8'], True)
    """
    if ORIGINAL in models:
        raise WrongValue("A model is named 'original', as the trainer's own. Give it another name, such as 'int8'.")
    state = trainer.state
    if state.strategy.world_size > 1:
        raise WrongValue("Models are compared in one process. Make the Trainer without «devices=» and a launcher.")
    label, name = _metric_of(state, metric)
    original = evaluated_model(trainer)
    every = {ORIGINAL: original, **models}
    evaluated = state.eval_sets[label]
    batches = [state.bus.move_batch(state, each) for each in batches_of(evaluated.source, evaluated.limit)]
    if not any(nested.count(batch).samples for batch in batches):
        raise empty(evaluated.data, f"The evaluation set '{label}'", "eval_data", "sample")
    measured = {}
    for number, (key, model) in enumerate(every.items(), 1):
        try:
            measured[key] = _outputs(state.task, model, batches)
        except Exception as error:
            if key == ORIGINAL or isinstance(error, torch.OutOfMemoryError):  # the data, or the machine
                raise
            advice = "Give models that take what the trainer's model takes."
            raise WrongValue(raised(f"compare_compressed with the model {key!r}", error, advice)) from error
        shapes, expected = (
            [each.shape for each in tree_leaves(measured[name]) if isinstance(each, Tensor)] for name in (key, ORIGINAL)
        )
        if shapes != expected:
            raise WrongValue(
                f"The model {key!r} has outputs of shapes {[*map(tuple, shapes)]}, and the trainer's model of "
                f"{[*map(tuple, expected)]}. Give models with the same outputs."
            )
        progress("evaluating models", number, len(every))
    joined = nested.join(batches)
    broken = {key: int(nonfinite(outputs, nested.count(joined).samples).sum()) for key, outputs in measured.items()}
    if any(broken.values()):
        listed = ", ".join(f"{key} ({number})" for key, number in broken.items() if number)
        warn(
            f"Outputs with NaN or infinity, by model and number of samples: {listed}. A metric of classes counts them as a "
            "class, so their quality says nothing."
        )
    sets = len(every) * (resamples + 1)
    estimates = _estimates(
        state, label, name, measured, joined, resamples, lambda done: progress("resampling", done, sets)
    )
    with _model_of(state.task, original):
        (inputs,) = inputs_of_batches(state.task, batches[:1], 1)
    times = _latencies(every, inputs, repeats, compile, lambda done: progress("timing", done, repeats))
    samples, threads = nested.count(batches[0]).samples, torch.get_num_threads()
    return [
        Row(
            key, f"{label}/{name}", quality.value, (quality.low, quality.high), change.value, (change.low, change.high),
            bytes_on_disk(every[key]), times[key] * 1e3, samples, threads, broken[key],
        )
        for key, (quality, change) in estimates.items()
    ]  # fmt: skip


def evaluated_model(trainer: Trainer) -> nn.Module:
    """Return a copy of the trainer's model in eval mode, with the weights that evaluation uses, such as the averages of EMA."""
    weights = trainer.model_state_dict(evaluated=True)
    model = copy.deepcopy(trainer.state.model).eval()
    model.load_state_dict(weights)
    return model


def bytes_on_disk(model: nn.Module) -> int:
    """Return the size of a safetensors file with the parameters and buffers; quantized weights by their integers and scales.

    Example:
        >>> import torch
        >>> from hocket_tools.compression.comparison import bytes_on_disk
        >>> bytes_on_disk(torch.nn.Linear(100, 10)) // 1000  # 1,010 floats
        4
    """
    from hocket_checkpoints.weights import write_tensors

    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:  # tied weights are written once
            seen.add(id(value))
            tensors.update(_plain(name, value.detach()))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        write_tensors({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file)
        return file.stat().st_size


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a quantized one consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        if isinstance(inner := getattr(tensor, part), Tensor):
            yield from _plain(f"{name}.{part}", inner)


def _interval(ends: tuple[float, float], sign: str) -> str:
    return "" if math.isnan(ends[0]) else f" [{ends[0]:{sign}.4f}, {ends[1]:{sign}.4f}]"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, with a line that says what was measured."""
    first = rows[0]
    heads = ("model", f"{first.metric} [95 %]", "change [95 %]", "size", "÷", "latency", "×")
    cells = [heads] + [
        (
            row.name, f"{row.quality:.4f}{_interval(row.quality_interval, '')}",
            f"{row.change:+.4f}{_interval(row.change_interval, '+')}" if row is not first else "",
            f"{row.bytes / 1000:,.1f} kB", f"{row.bytes / first.bytes:.2f}",
            f"{row.latency_ms:.3f} ms", f"{first.latency_ms / row.latency_ms:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    threads = f"{first.threads} thread{'s' if first.threads > 1 else ''}"
    lines.append(f"÷: of the original's bytes; ×: times faster. Latency: median, batch of {first.batch}, {threads}.")
    return "\n".join(lines)


# --- quality


def _metric_of(state: State, metric: str | None) -> tuple[str, str]:
    known = [f"{label}/{name}" for label, each in state.eval_sets.items() for name in sorted(each.metrics.names)]
    if not known:
        raise WrongValue(
            "There is no metric to compare models by. Give the Trainer «eval_data={'test': …}» and «metrics=»."
        )
    if metric is not None and metric not in known:
        raise WrongValue(f"There is no metric '{metric}'. Give one of {', '.join(known)}.")
    label, _, name = (metric or known[0]).partition("/")
    return label, name


@contextmanager
def _model_of(task: Task, model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Let another model take the place of the task's; yield the function that computes outputs for a batch."""
    if task.model is task:
        yield model
        return
    before = task.model
    task.model = model
    try:
        yield task.eval_forward
    finally:
        task.model = before


def _outputs(task: Task, model: nn.Module, batches: Sequence[Any]) -> Any:
    outputs = []
    with torch.no_grad(), _model_of(task, model) as forward:
        for batch in batches:
            with noted(task, batch):
                outputs.append(forward(batch))
    return nested.join(outputs)


def _estimates(
    state: State, label: str, name: str, outputs: Mapping[str, Any], batch: Any, resamples: int, progress: Count
) -> dict[str, tuple[Estimate, Estimate]]:
    """Return the metric of each model, and its change from the original, on the same resampled sets."""
    samples, metrics, done = nested.count(batch).samples, state.eval_sets[label].metrics, 0
    known: dict[tuple[str, bytes], Floats] = {}

    def values(key: str, weights: Floats) -> Floats:
        """Return the metric of a model on sets, which are computed once."""
        nonlocal done
        drawn = key, hashlib.sha256(weights.tobytes()).digest()
        if drawn not in known:
            found = []
            for each in weights.astype(np.int64):
                indices = torch.from_numpy(np.repeat(np.arange(samples), each))
                metrics.reset()
                metrics.update(
                    nested.take_samples(outputs[key], indices, samples), nested.take_samples(batch, indices, samples)
                )
                found.append(_value(metrics.compute(), f"{label}/{name}"))
                done += 1
                progress(done)
            known[drawn] = np.array(found)
        return known[drawn]

    def estimate(value: Callable[[Floats], Floats]) -> Estimate:
        if not resamples:
            return Estimate(float(value(np.ones((1, samples)))[0]), float("nan"), float("nan"))
        of_set = Statistic(name, np.arange(samples), value)
        return bootstrap(of_set, resamples=resamples, method="percentile")

    def change(key: str, weights: Floats) -> Floats:
        return values(key, weights) - values(ORIGINAL, weights)

    estimates = {key: (estimate(partial(values, key)), estimate(partial(change, key))) for key in outputs}
    metrics.reset()
    return estimates


def _value(computed: Mapping[str, float], name: str) -> float:
    if name not in computed:
        raise WrongValue(f"'{name}' has several values: {', '.join(computed)}. Give a metric that returns one number.")
    return computed[name]


# --- latency


def _latencies(
    models: Mapping[str, nn.Module], inputs: Inputs, repeats: int, compile: bool, progress: Count
) -> dict[str, float]:
    """Return the median seconds of a call of each model; they take turns, so that all meet the same load of the machine."""
    check_least(1, 50, repeats=repeats)
    calls: dict[str, Callable[..., Any]] = {
        name: torch.compile(model) if compile else model for name, model in models.items()
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    # Weights are constants, as int8 kernels need. As an option of torch.compile this fails: torch 2.15 runs qconv_prepack on
    # fake tensors then.
    constants = import_module("torch._inductor.config").patch(freezing=True) if compile else nullcontext()
    with torch.no_grad(), constants:
        for call in calls.values():
            for _ in range(3):  # compiles, and fills caches
                call(*inputs.args, **inputs.kwargs)
        for number in range(repeats):
            for name, call in calls.items():
                _wait()
                start = time.perf_counter()
                call(*inputs.args, **inputs.kwargs)
                _wait()
                times[name].append(time.perf_counter() - start)
            progress(number + 1)
    return {name: statistics.median(measured) for name, measured in times.items()}


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
