"""``export.json``: what an export takes and returns, where it comes from, and what has to be done to its inputs before."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hocket.basics.short_repr import short
from hocket.state.state import State
from hocket_tools.exporting.axes import Axes

#: Distributions whose versions are recorded, if they are installed.
_DISTRIBUTIONS = (
    "hocket", "hocket-tools", "torch", "onnx", "onnxscript", "onnxruntime", "transformers", "peft", "safetensors"
)  # fmt: skip


def tensors_as_json(tensors: Mapping[str, Tensor], axes: Axes) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each tensor; axes that vary have names in place of sizes."""
    return [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": [axes.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)],
        }
        for name, tensor in tensors.items()
    ]


def output_axes(outputs: Sequence[Mapping[str, Tensor]], sizes: Sequence[Mapping[str, int]]) -> Axes:
    """Return the axes of outputs that vary, by the name of the input's axis of the same sizes, as observed.

    Args:
        outputs: of several batches.
        sizes: by name, of the axes of the inputs that vary, for the same batches.
    """
    axes: Axes = {}
    for name, first in outputs[0].items():
        for axis in range(first.dim()):
            observed = [each[name].shape[axis] for each in outputs]
            if len(set(observed)) > 1:
                own = axes.setdefault(name, {})
                same = [label for label in sizes[0] if [each.get(label) for each in sizes] == observed]
                own[axis] = next((label for label in same if label not in own.values()), f"{name}_{axis}")
    return axes


def origin(state: State, checkpoint: str | None, network: nn.Module) -> dict[str, Any]:
    """Return the run, its position if this process trained the weights, and a checksum of the weights that were exported."""
    now = state.timestamp
    position = {"epoch": now.epoch, "batch": now.batch, "sample": now.sample} if now.batch and not checkpoint else None
    return {
        "run": state.run_name, "id": state.run.id, "checkpoint": checkpoint, "position": position,
        "weights_sha256": checksum(network), "precision": type(state.precision).__name__,
        "algorithms": [each.name for each in state.bus.attachments if each.kind == "algorithms"],
        "surgery": [str(each) for each in state.replacements],
    }  # fmt: skip


def checksum(network: nn.Module) -> str:
    """Return the SHA-256 of the weights: their names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_quantized:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of what computes and reads exports."""
    known = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known


def preprocessing(state: State, data: Any, inside: list[str]) -> list[dict[str, str]]:
    """Return what is done to a sample before the exported model gets it, in order, as far as objects say it.

    Args:
        data: the evaluation data.
        inside: attributes of the task that the export computes itself, such as ``"inputs"``.
    """
    steps: list[dict[str, str]] = []

    def add(where: str, what: object) -> None:
        steps.append({"where": where, "what": what if isinstance(what, str) else short(what)})

    dataset = getattr(data, "dataset", data)
    while dataset is not None:
        for name in ("transforms", "transform"):
            if getattr(dataset, name, None) is not None:
                add(f"{type(dataset).__name__}.{name}", repr(getattr(dataset, name)))
                break
        dataset = getattr(dataset, "dataset", None)
    collate = getattr(data, "collate_fn", None)
    if collate is not None and getattr(collate, "__name__", "") != "default_collate":
        add("collate_fn", collate)
    events = ("predict_batch_start", "predict_before_forward")
    changing = {plugin.name for event in events for plugin in state.bus.listeners(event)}
    for each in state.bus.attachments:
        if each.name == "batch-transform":
            for function in each.obj._eval:
                add("batch_transform", repr(function) if isinstance(function, nn.Module) else function)
        elif each.kind == "algorithms" and each.name in changing:
            add(f"algorithm '{each.name}'", "changes batches of evaluation; see its card")
    for name in ("inputs", "outputs"):
        if name not in inside and (where := getattr(state.task, name, None)) is not None:
            add(f"Trainer({name}=)", where)
    if (tokenizer := getattr(state.task, "tokenizer", None)) is not None:
        add(
            "tokenizer", f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')}, {len(tokenizer)} tokens"
        )
    return steps


def classes(state: State, data: Any) -> list[str] | None:
    """Return the names of classes that the data set or the model knows, or None."""
    dataset = getattr(data, "dataset", data)
    names = getattr(dataset, "classes", None) or getattr(getattr(state.model, "config", None), "id2label", None)
    if isinstance(names, Mapping):
        names = [names[key] for key in sorted(names)]
    return [str(name) for name in names] if isinstance(names, list | tuple) else None
