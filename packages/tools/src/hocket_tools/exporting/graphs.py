"""Trace a model by `torch.export`, and name the user's line that cannot be traced."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

import hocket
from hocket.errors import Unsupported
from hocket_tools.exporting.axes import Axes
from hocket_tools.exporting.portable import PortableModel
from hocket_tools.tracing import exported_program, quiet

#: Folders whose lines are not the user's.
_NOT_USERS = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(hocket.__file__).parent, Path(__file__).parents[1])
)


#: Attempts to find the sizes that a model allows.
_ATTEMPTS = 4


def traced(model: PortableModel, inputs: Mapping[str, Tensor], axes: Axes) -> tuple[ExportedProgram, Axes]:
    """Return the graph of a model, and the axes of its inputs that vary in it.

    An axis that was not asked for by name, and that the model has fixed, does not vary.

    Args:
        inputs: example tensors by name.

    Raises:
        hocket.errors.Unsupported: the model cannot be traced, or only for one number of samples; it names the line.
    """
    dims = {label: Dim(label) for varying in axes.values() for label in varying.values()}
    shapes: Any = {name: {axis: dims[label] for axis, label in axes.get(name, {}).items()} for name in inputs}
    named = _with_names(model, list(inputs))
    for attempt in range(_ATTEMPTS):
        try:
            # torch prints its graph when it fails, and the error is shown.
            with quiet("torch", logging.CRITICAL), contextlib.redirect_stderr(io.StringIO()):
                program = exported_program(named, (), inputs, shapes)
            break
        except Exception as error:
            # torch says which sizes the model's code allows, such as those up to its number of positions.
            advice, _, _ = str(error).partition("\n\nThe error above occurred")
            if "Suggested fixes:" not in advice or attempt == _ATTEMPTS - 1:
                raise Unsupported(_refusal(error, model)) from error
            try:
                shapes = refine_dynamic_shapes_from_suggested_fixes(advice, shapes)
            except Exception:
                raise Unsupported(_refusal(error, model)) from error
            _check_batch(shapes, axes, advice, model)
    kept = {
        name: {axis: axes[name][axis] for axis, dim in shapes[name].items() if not isinstance(dim, int | None)}
        for name in axes
    }
    return program, {name: varying for name, varying in kept.items() if varying}


def unused_inputs(program: ExportedProgram) -> list[str]:
    """Return the names of inputs that no operation reads."""
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    return [name for name in program.graph_signature.user_inputs if isinstance(name, str) and name not in used]


def _check_batch(shapes: Mapping[str, Any], axes: Axes, advice: str, model: PortableModel) -> None:
    """Raise Unsupported if the number of samples is fixed, or has a lower bound above 1."""
    for name, varying in axes.items():
        for axis, label in varying.items():
            dim = shapes[name].get(axis)
            if label == "batch" and (isinstance(dim, int | None) or getattr(dim, "min", 0) > 2):
                reason = re.search(r"Not all values of batch.*|You marked batch[^.]*\.", advice)
                raise Unsupported(
                    f"{_named(model)} cannot be exported for any number of samples: its computation depends on the size of "
                    f"axis {axis} of '{name}'. {f'torch says: {reason[0]} ' if reason else ''}Write x.shape[0] in place of "
                    "len(x), which is a constant then, and remove what the code decides by this size. Nothing was written."
                )


def _refusal(error: Exception, model: PortableModel) -> str:
    """Return the message for a model that cannot be traced."""
    if any(type(each).__module__.endswith("quantization_aware_training") for each in model.modules()):
        return (
            f"{_named(model)} was trained with quantization-aware-training, whose rounding torch.export does not write. Write "
            "`hocket compress RUN --to int8-static --out FOLDER`, or --to int8 as it was trained. Nothing was written."
        )
    frame = _user_frame(error)
    where = "" if frame is None else f", at {frame.filename}, line {frame.lineno}, in {frame.name}: `{frame.line}`"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "data-dependent" in reason or "DataDependent" in type(error).__name__:
        return (
            f"{_named(model)} cannot be exported: what it computes depends on the values of tensors{where}. Compute both "
            "results and choose by torch.where, or move the decision out of forward. Nothing was written."
        )
    return f"{_named(model)} cannot be exported: torch.export cannot trace it{where}. {reason} Nothing was written."


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame outside of torch and hocket, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [(each, os.path.realpath(each.filename)) for each in frames]
    users = [each for each, file in files if os.path.isfile(file) and not file.startswith(_NOT_USERS)]
    return users[-1] if users else None


def _named(model: PortableModel) -> str:
    return type(model.network).__name__


def _with_names(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a module whose ``forward`` has parameters of these names: torch names sizes in guards by the signature."""

    def forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.model(**dict(zip(names, args, strict=False)), **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])  # type: ignore[attr-defined]
    named: nn.Module = type("Exported", (nn.Module,), {"forward": forward})()
    named.model = model
    return named
