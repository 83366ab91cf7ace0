"""A report of what holds memory: when memory runs out, or on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.basics import safe_files
from hocket.basics.dtensors import local
from hocket.basics.time import batches
from hocket.data.nesting import map_tensors
from hocket.devices.memory import is_out_of_memory
from hocket.help import warn
from hocket.hookspecs.callback import Callback
from hocket.state.state import State
from hocket_insight.callbacks.memory_monitor import resident_peak


class MemoryReport(Callback):
    """When memory runs out, write a report of what the tensors on the device hold and what to try; on CUDA a snapshot too.

    The files are ``out-of-memory-rank0.txt`` and ``out-of-memory-rank0.pickle`` in the run's folder, with the number of each
    rank that ran out of memory, and the exception gets a note that names the first. The report lists parameters, buffers,
    gradients, optimizer states, the batch and outputs, with the largest tensor of each. Snapshots open in
    https://pytorch.org/memory_viz; without ``record`` they show which blocks of memory are in use, but not which line of code
    allocated them. :meth:`write` and ``at`` write the same for a moment in which memory suffices.

    Args:
        at: write ``memory-rank0.txt`` (and on CUDA ``.pickle``) after this batch of the run, counted from 1.
        record: on CUDA, record each allocation with its stack trace. An allocation takes some microseconds longer.
        entries: number of the latest allocations and releases to keep, at some KB each.

    Raises:
        ValueError: ``at`` or ``entries`` is not a positive int.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.memory_report import MemoryReport
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="adamw(lr=0.1)", device="cpu", folder="runs",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 3, callbacks=[MemoryReport(at=2)],
        ... )
        >>> result = trainer.fit("1ep")
        >>> print((result.run_folder / "memory-rank0.txt").read_text().splitlines()[2].split("  ")[0])
        parameters
    """

    once = "Both would write one memory-rank0.txt. Remove one."

    def __init__(self, at: int | None = None, record: bool = False, entries: int = 100_000) -> None:
        self._at = None if at is None else batches(at, "at")
        self._record, self._entries = record, batches(entries, "entries")
        self._recording = False
        self._evaluating: str | None = None
        if at is not None:  # otherwise no step calls it
            self.batch_end = self._write_at

    def fit_start(self, state: State) -> None:
        """Begin to record, on CUDA."""
        if self._record and state.device.type == "cuda" and not self._recording:
            torch.cuda.memory._record_memory_history(max_entries=self._entries, stacks="python")
            self._recording = True

    def _write_at(self, state: State) -> None:
        if self._at == state.timestamp.batch:
            self._written(state)

    def _written(self, state: State, name: str = "memory") -> Path | None:
        try:
            return self.write(state, name)
        except (OSError, MemoryError, RuntimeError, ValueError) as problem:  # neither end the run nor hide its error
            warn(f"memory-report could not write its report: {type(problem).__name__}: {problem}.")
            return None

    def write(self, state: State, name: str = "memory") -> Path:
        """Write the report, and on CUDA a snapshot, into the run's folder; return the path of the report."""
        path = state.run_folder / f"{name}-rank{state.strategy.rank}.txt"
        lines = [_where(state, self._evaluating), "", *_table(state), *_allocator(state)]
        if state.exception is not None:
            said = f"{type(state.exception).__name__}: {state.exception}"
            lines += ["", said, "", *advice(state, self._evaluating is None)]
        safe_files.replace(path, "\n".join(lines) + "\n")
        if state.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        state.bus.log_text(state, f"memory/{name}", "```\n" + "\n".join(lines) + "\n```")
        return path

    def eval_start(self, state: State) -> None:
        """Note the set; when the exception arrives here, the state is that of training again."""
        self._evaluating = state.eval_label

    def eval_end(self, state: State) -> None:
        """Note that the evaluation is over."""
        self._evaluating = None

    def exception(self, state: State) -> None:
        """Write the report if memory ran out; otherwise do nothing."""
        error = state.exception
        if error is None or not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            return
        if (path := self._written(state, "out-of-memory")) is not None:
            error.add_note(f"What held memory, and what to try, is in {path}.")

    def close(self, state: State) -> None:
        """End the recording."""
        if self._recording:
            self._recording = False
            torch.cuda.memory._record_memory_history(enabled=None)


def _where(state: State, evaluating: str | None) -> str:
    now = state.timestamp
    what = f"evaluation of '{evaluating}' after batch {now.batch}" if evaluating else f"batch {now.batch}"
    return (
        f"Run {state.run.name}, {what} of epoch {now.epoch}, rank {state.strategy.rank} of {state.strategy.world_size}, on "
        f"{state.device}."
    )


def held(state: State) -> dict[str, dict[str, Tensor]]:
    """Return the tensors on the state's device by kind and name; of shards, this rank's part. Each storage is there once."""
    kinds: dict[str, Iterable[tuple[str, Tensor | None]]] = {
        "parameters": state.task.named_parameters(),
        "buffers": state.task.named_buffers(),
        "gradients": [(name, parameter.grad) for name, parameter in state.task.named_parameters()],
        "optimizer states": _optimizer_states(state),
        "batch": _nested(state.batch),
        "outputs": _nested(state.outputs),
    }
    found: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    for kind, tensors in kinds.items():
        found[kind] = {}
        for name, tensor in tensors:
            if tensor is None or tensor.layout is not torch.strided:
                continue
            part = local(tensor.detach())
            address = part.untyped_storage().data_ptr()
            if part.device.type == state.device.type and address and address not in seen:
                seen.add(address)
                found[kind][name] = part
    return found


def _optimizer_states(state: State) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in state.task.named_parameters()}
    for optimizer in state.optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield f"{key} of {names.get(id(parameter), '?')}", value


def _nested(batch: Any) -> list[tuple[str, Tensor]]:
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return [(f"tensor {index}", tensor) for index, tensor in enumerate(tensors)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _table(state: State) -> list[str]:
    lines = []
    for kind, tensors in held(state).items():
        line = f"{kind:<17}{_size(_bytes(tensors.values())):>10}  {len(tensors):>6} tensors"
        if tensors:
            name, largest = max(tensors.items(), key=lambda each: each[1].untyped_storage().nbytes())
            shape, dtype = " × ".join(map(str, largest.shape)) or "scalar", str(largest.dtype).removeprefix("torch.")
            line += f"  largest: {_size(_bytes([largest]))} {name} ({shape}, {dtype})"
        lines.append(line)
    return lines


def _allocator(state: State) -> list[str]:
    if state.device.type != "cuda":
        peak = resident_peak().get("resident_peak")
        used = "" if peak is None else f" This process has used at most {_size(peak)} of the host's memory."
        return ["", f"Activations and other tensors are not listed: the device does not know what they are.{used}"]
    allocated, peak = torch.cuda.memory_allocated(state.device), torch.cuda.max_memory_allocated(state.device)
    free, total = torch.cuda.mem_get_info(state.device)
    return [
        f"{'other':<17}{_size(max(0, allocated - _known(state))):>10}  activations for backward, tensors of plug-ins, others",
        "",
        f"Allocated {_size(allocated)}, at most {_size(peak)} so far; reserved by torch "
        f"{_size(torch.cuda.memory_reserved(state.device))}; free {_size(free)} of {_size(total)}.",
    ]


def _known(state: State) -> int:
    return sum(_bytes(tensors.values()) for tensors in held(state).values())


def advice(state: State, training: bool) -> list[str]:
    """Return what to try, most promising first, if memory ran out in training or in an evaluation."""
    sizes = {kind: _bytes(tensors.values()) for kind, tensors in held(state).items()}
    tips = []
    if state.microbatch is None:
        tips.append(
            "Trainer(microbatch='auto') finds the number of samples that fit at once; loss and gradient stay the same."
        )
    elif state.microbatch > 1:
        tips.append(f"Trainer(microbatch={state.microbatch // 2}) halves the samples that are computed at once.")
    if training:
        tips.append(
            "algorithms=['activation-checkpointing'] keeps fewer activations for backward, and computes them again."
        )
    if state.precision.compute_dtype is torch.float32 and state.device.type != "cpu":
        tips.append("precision='bf16' halves most activations.")
    if sizes["optimizer states"] > sizes["parameters"] > 0:
        tips.append(
            f"The optimizer's states take {sizes['optimizer states'] / sizes['parameters']:.1f} times the memory of the "
            "parameters; optimizer='adafactor' or 'sgd' takes less."
        )
    if state.strategy.world_size > 1 and not any(local(p) is not p for p in state.task.parameters()):
        tips.append("strategy='fsdp' divides parameters, gradients and optimizer states among the ranks.")
    if state.device.type == "cuda":
        unused = torch.cuda.memory_reserved(state.device) - torch.cuda.memory_allocated(state.device)
        if unused > 0.2 * torch.cuda.memory_reserved(state.device):
            tips.append(
                f"{_size(unused)} are reserved and not in use: the environment variable "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation."
            )
    return ["What to try:", *(f"{number}. {tip}" for number, tip in enumerate(tips, 1))]


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1000
    raise AssertionError
