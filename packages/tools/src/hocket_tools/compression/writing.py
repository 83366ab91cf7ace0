"""Write a compressed model as a graph of `torch.export`, which needs no code of the model, and verify the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket_tools.compression.model_inputs import inputs_of_batches
from hocket_tools.exporting import graphs, manifest, samples
from hocket_tools.exporting.axes import varying
from hocket_tools.exporting.exporter import Exported, written
from hocket_tools.exporting.formats import Subject, TorchExport
from hocket_tools.exporting.portable import Call, PortableModel
from hocket_tools.exporting.preparing import Facts, Options
from hocket_tools.exporting.verification import Sample, check_finite

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer


@torch.no_grad()
def write(
    trainer: Trainer, original: nn.Module, compressed: nn.Module, kind: str, folder: Path, options: Options
) -> Exported:
    """Write ``model.pt2`` as `hocket_tools.export` does, and compare what it computes for 1 and 7 samples with the model.

    Args:
        original: the model that was compressed, whose arguments name the inputs.
        kind: of the compression.
        folder: as `exporter.checked` returns it.
        options: the checkpoint that the weights come from, and whether a model of another run is replaced.

    Raises:
        hocket.errors.Unsupported: it cannot be traced.
        FloatingPointError: the file computes something else; nothing is left.
    """
    state = trainer.state
    batches, given = samples.data_of(state, None)
    few, counts = samples.batches_of(state, batches, given)
    seen = inputs_of_batches(state.task, (state.bus.move_batch(state, each) for each in few), len(few))
    calls = [Call(*each).without_labels(original) for each in seen]
    inputs = [each.tensors(original, "forward") for each in calls]
    model = PortableModel(original, "forward", calls[0])
    model.network = compressed
    program, axes = graphs.traced(model, inputs[0], varying(inputs[0], inputs[1:], counts))
    verified = [Sample(count, each, model.outputs(each)) for count, each in list(zip(counts, inputs, strict=True))[1:]]
    check_finite(verified, verified[0].expected.keys())
    facts = Facts(
        origin={**manifest.origin(state, options.checkpoint, original), "compression": kind},
        preprocessing=manifest.preprocessing(state, given, []),
        classes=manifest.classes(state, given),
        reference=f"the {kind} model",
    )
    subject = Subject(model, inputs[0], axes, program, [], None, False)
    return written(TorchExport(), program, subject, verified, facts, options, folder)
