"""The formats of exports: what each refuses before anything is written, what it writes, and how its files are run."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from hocket.errors import Unsupported
from hocket_tools.compression.libraries import imported
from hocket_tools.exporting.adapters import adapter_names
from hocket_tools.exporting.axes import Axes
from hocket_tools.exporting.portable import PortableModel

#: Compute outputs by name for inputs by name.
Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass
class Subject:
    """The model to export: on the CPU, in evaluation mode, with the weights of evaluation."""

    model: PortableModel
    inputs: dict[str, Tensor]
    axes: Axes
    #: The graph, for formats that have one.
    program: Any
    #: The names of modules that surgery replaced, and the tokenizer, if there is one.
    replaced: list[str]
    tokenizer: Any
    #: Whether adapters are kept apart.
    apart: bool


class Format(Protocol):
    """One format."""

    #: What is written is a graph and not weights only.
    graph: bool

    def check(self, subject: Subject) -> None:
        """Raise Unsupported for what cannot be written."""

    def build(self, subject: Subject) -> Any:
        """Return what is written, in memory. Raises Unsupported."""

    def write(self, built: Any, subject: Subject, folder: Path) -> None:
        """Write it to an existing folder."""

    def load(self, subject: Subject, folder: Path) -> Run:
        """Read the files, and return the function that they hold."""


class TorchExport:
    """``model.pt2``: the graph of torch.export, which ``torch.export.load`` reads without the code of the model."""

    graph = True

    def check(self, subject: Subject) -> None:
        """Accept everything: tracing refuses."""

    def build(self, subject: Subject) -> Any:
        """Return the graph."""
        return subject.program

    def write(self, built: Any, subject: Subject, folder: Path) -> None:
        """Write the graph; torch ends the process where the disk is full, so it writes to memory."""
        content = io.BytesIO()
        torch.export.save(built, content)
        (folder / "model.pt2").write_bytes(content.getbuffer())

    def load(self, subject: Subject, folder: Path) -> Run:
        """Return the module of the file."""
        module = torch.export.load(folder / "model.pt2").module()
        return lambda inputs: _by_name(module(**inputs))


class Onnx:
    """``model.onnx``, run by onnxruntime. Weights above 1.5 GB are in ``model.onnx.data`` beside it."""

    graph = True

    def check(self, subject: Subject) -> None:
        """Raise MissingPackage without the libraries of the extra."""
        for library in ("onnx", "onnxscript", "onnxruntime"):
            imported(library, "onnx")

    def build(self, subject: Subject) -> Any:
        """Return the converted graph."""
        names, axes = list(_by_name(subject.model(**subject.inputs))), {**dict.fromkeys(subject.inputs), **subject.axes}
        try:
            return torch.onnx.export(
                subject.program,
                (),
                dynamo=True,
                verbose=False,
                input_names=list(subject.inputs),
                output_names=names,
                dynamic_shapes=axes,
            )
        except Exception as error:
            reason = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
            raise Unsupported(
                f"{type(subject.model.network).__name__} cannot be written as ONNX: {' '.join(reason[:2])} Write "
                "to='torch-export', or replace this operation in the model. Nothing was written."
            ) from error

    def write(self, built: Any, subject: Subject, folder: Path) -> None:
        """Write the model."""
        size = sum(tensor.nbytes for tensor in subject.model.state_dict().values())
        built.save(folder / "model.onnx", external_data=size > 1.5e9)

    def load(self, subject: Subject, folder: Path) -> Run:
        """Return a function that runs the file on the CPU."""
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        taken = {each.name for each in session.get_inputs()}

        def run(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            given = {name: tensor.numpy() for name, tensor in inputs.items() if name in taken}
            outputs = session.run(names, given)
            return {name: torch.from_numpy(output) for name, output in zip(names, outputs, strict=True)}

        return run


class Safetensors:
    """``model.safetensors``: the weights by the model's own names, which need its code.

    Adapters that are kept apart are in ``adapters.safetensors``.
    """

    graph = False

    def check(self, subject: Subject) -> None:
        """Raise Unsupported for tensors that safetensors does not hold."""
        weights = _weights(subject.model.network)
        odd = [name for name, each in weights.items() if each.layout is not torch.strided or each.is_quantized]
        if odd:
            raise Unsupported(
                f"{type(subject.model.network).__name__} cannot be written as safetensors: {odd[0]} is sparse or quantized. "
                "Write to='torch-export'. Nothing was written."
            )

    def build(self, subject: Subject) -> Any:
        """Return the weights by file."""
        weights = _weights(subject.model.network)
        if not subject.apart:
            return {"model.safetensors": weights}
        adapters = adapter_names(subject.model.network)
        return {
            "model.safetensors": {name: each for name, each in weights.items() if name not in adapters},
            "adapters.safetensors": {name: each for name, each in weights.items() if name in adapters},
        }

    def write(self, built: Any, subject: Subject, folder: Path) -> None:
        """Write copies: tied weights share memory, which safetensors does not support."""
        from hocket_checkpoints.weights import write_tensors

        for file, weights in built.items():
            copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
            write_tensors(copies, folder / file, {"format": "pt"})

    def load(self, subject: Subject, folder: Path) -> Run:
        """Return a model that has nothing but these weights: all others are NaN, or the lowest integer."""
        from safetensors.torch import load_file

        model = copy.deepcopy(subject.model)
        own = _weights(model.network)
        for tensor in own.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file)
        if weights.keys() != own.keys():
            raise Unsupported(f"The files lack or have more than {sorted(weights.keys() ^ own.keys())[:3]}.")
        model.network.load_state_dict(weights, strict=False)
        return model.outputs


class HuggingFace:
    """A folder that ``from_pretrained`` of transformers reads, with the tokenizer; or one of adapters for peft."""

    graph = False

    def check(self, subject: Subject) -> None:
        """Raise Unsupported for models of other libraries, and models that from_pretrained would make differently."""
        network = subject.model.network
        if not hasattr(network, "save_pretrained"):
            raise Unsupported(
                f"{type(network).__name__} is not a model of transformers, and cannot be written as a folder of Hugging Face. "
                "Write to='torch-export', 'onnx' or 'safetensors'. Nothing was written."
            )
        if subject.replaced:
            raise Unsupported(
                f"Surgery replaced {', '.join(subject.replaced[:3])} of {type(network).__name__}, and from_pretrained would "
                "make it without that. Write to='torch-export' or 'onnx', which have the graph, or to='safetensors', whose "
                "weights are loaded after the same surgery. Nothing was written."
            )

    def build(self, subject: Subject) -> Any:
        """Return the model."""
        return subject.model.network

    def write(self, built: Any, subject: Subject, folder: Path) -> None:
        """Call ``save_pretrained`` of model and tokenizer."""
        built.save_pretrained(folder)
        if subject.tokenizer is not None:
            subject.tokenizer.save_pretrained(folder)

    def load(self, subject: Subject, folder: Path) -> Run:
        """Return the model that ``from_pretrained`` makes; adapters are loaded beside the weights of the base."""
        network: Any = subject.model.network
        model = copy.deepcopy(subject.model)
        if subject.apart:
            import peft

            base = copy.deepcopy(network).unload()
            model.network = peft.PeftModel.from_pretrained(base, folder).eval()
        else:
            model.network = type(network).from_pretrained(folder, dtype=network.dtype).eval()
        return model.outputs


#: The names of the formats, and how adapters are exported.
To = Literal["torch-export", "onnx", "safetensors", "huggingface"]
HowAdapters = Literal["merged", "apart"]
FORMATS: Mapping[str, type[Format]] = {
    "torch-export": TorchExport, "onnx": Onnx, "safetensors": Safetensors, "huggingface": HuggingFace,
}  # fmt: skip


def _weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in network.state_dict().items() if isinstance(each, Tensor)}


def _by_name(output: Any) -> dict[str, Tensor]:
    return {"output": output} if isinstance(output, Tensor) else dict(output)
