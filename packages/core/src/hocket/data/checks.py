"""Refuse data that does not consist of batches, before a sample is mistaken for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from hocket.data.adapters import CombinedLoaders, serves_itself
from hocket.errors import WrongType
from hocket.help import optional_packages

#: The modes of `hocket.data.Several`: what each yields, and when its epoch ends.
MODES: Mapping[str, str] = {
    "cycle": "a batch of each; the others begin again until the longest has ended",
    "shortest": "a batch of each until the shortest has ended, as zip does",
    "in turn": "a batch of one after the other until all have ended",
    "weighted": "a batch of one, drawn at random by weights=",
}


def check_batches(data: object, argument: str) -> None:
    """Raise TypeError unless ``data`` may be an iterable of batches; nothing is read from it.

    Data sets, tensors, arrays and tables hold samples; a DataLoader makes batches of them.
    """
    if isinstance(data, CombinedLoaders):
        for name, loader in data.loaders.items():
            check_batches(loader, f"{argument}[{name!r}]")
        return
    if isinstance(data, DataLoader) or serves_itself(data):
        if isinstance(data, DataLoader) and _yields_samples(data):
            raise WrongType(
                f"{argument} is a DataLoader with «batch_size=None» over a data set (TensorDataset), whose items are single "
                f"samples and not batches. Write {_loader(argument)}; None is for data sets whose items are batches."
            )
        return
    kind = type(data).__name__
    if text := optional_packages.ask("failures.data.described", data, argument):
        raise WrongType(f"{argument} is {text} {_loader(argument)}.")
    libraries = {base.__module__.partition(".")[0] for base in type(data).__mro__}
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        pass
    elif "datasets" in libraries:
        kind += " of Hugging Face"
    elif isinstance(data, torch.Tensor) or "numpy" in libraries:
        raise WrongType(
            f"{argument} is one {kind}, and not batches. Give a loader: "
            f"{_loader(argument, 'TensorDataset(inputs, targets)')}, or [(inputs, targets)] for one batch."
        )
    elif libraries & {"pandas", "polars", "pyarrow"}:
        raise WrongType(
            f"{argument} is a table ({kind}), and not batches. Make tensors of its columns, and a loader: "
            f"{_loader(argument, 'TensorDataset(inputs, targets)')}."
        )
    elif isinstance(data, Mapping) and any(
        isinstance(loader, DataLoader) or serves_itself(loader) for loader in data.values()
    ):
        several = f"hocket.data.Several({{{', '.join(f'{name!r}: …' for name in data)}}}, mode)"
        modes = "; ".join(f"{mode!r}: {meaning}" for mode, meaning in MODES.items())
        raise WrongType(
            f"{argument} is a {kind} of loaders. Say how to combine them into an iterable of batches: "
            f"{_given(argument, several)}, with a mode of {modes}."
        )
    elif isinstance(data, Mapping | str | bytes):
        given = f"{kind} {data!r}" if isinstance(data, str) and len(data) < 60 else kind
        if isinstance(data, str) and data[:1].isdigit():
            raise WrongType(
                f"{argument} is the text {data!r}, and not an iterable of batches. Write a duration by name: "
                f"«duration={data!r}»."
            )
        stream = f"hocket_streaming.stream({data!r})" if isinstance(data, str) else "[(inputs, targets)]"
        raise WrongType(
            f"{argument} is a {given}, whose items are not batches. Give an iterable of batches: "
            f"{_loader(argument)}, or {stream}."
        )
    elif isinstance(data, list | tuple):
        _check_list(data, argument)
        return
    elif not hasattr(type(data), "__iter__"):
        if not hasattr(type(data), "__getitem__"):
            raise WrongType(
                f"{argument} is {kind}, which cannot be iterated. Give an iterable of batches: {_loader(argument)}."
            )
    else:
        return
    raise WrongType(
        f"{argument} is a data set ({kind}), which has samples and not batches. Wrap it in a loader: "
        f"{_loader(argument, 'data')}, or «batch_size=None» if its items are batches."
    )


def _yields_samples(loader: DataLoader[Any]) -> bool:
    """Whether a loader yields the items of a TensorDataset as they are, and these cannot be batches."""
    single = loader.batch_sampler is None and type(loader.sampler) in (SequentialSampler, RandomSampler)
    if not single or type(loader.dataset) is not TensorDataset:
        return False
    sizes = {tensor.shape[1:2] for tensor in loader.dataset.tensors}
    return len(sizes) > 1 or not all(sizes)


def _loader(argument: str, data: str = "dataset") -> str:
    """Return how to give a DataLoader for an argument."""
    call = f"torch.utils.data.DataLoader({data}, batch_size=32)"
    plain = {"torch.utils.data:DataLoader": {"dataset": f"module:{data.partition('(')[0]}", "batch_size": 32}}
    if argument.isidentifier():
        return f"«{argument}={call}¦{argument}={plain}»"
    return _given(argument, f"«{call}¦`{str(plain).replace(chr(39), '')}`»")


def _given(argument: str, value: str) -> str:
    """Return how to give a value for an argument, such as ``train_data``, ``predict(data)`` or ``train() of «data=…»``."""
    if "() of «data=" in argument:
        return f"return {value}"
    call, _, inside = argument.partition("(")
    return f"{call}({value})" if inside else f"{argument}={value}"


def whose_module(given: object) -> str:
    """Return the library of a data module or its class: "hocket", "lightning" (by its methods), or "" for other objects."""
    cls = given if isinstance(given, type) else type(given)
    if any(base.__module__ == "hocket_data.data_module" for base in cls.__mro__):
        return "hocket"
    has_loaders = callable(getattr(cls, "train_dataloader", None)) and not issubclass(cls, torch.nn.Module)
    return "lightning" if has_loaders else ""


def _check_list(data: Any, argument: str) -> None:
    """Raise TypeError for a list of loaders, of tensors that belong together, or of samples, rather than of batches."""
    if any(isinstance(item, DataLoader) for item in data):
        raise WrongType(
            f"{argument} is a {type(data).__name__} of {len(data)} loaders, and should be one iterable of batches. Evaluation "
            "sets are given by name: «eval_data={'first': loader, 'second': other}¦eval_data={'first': 'module:loader', "
            "'second': 'module:other'}». Training data is combined by «train_data=hocket.data.Several({'first': …, "
            f"'second': …}}, {next(iter(MODES))!r})»; its modes are {', '.join(map(repr, MODES))}."
        )
    arrays = [item for item in data if isinstance(item, torch.Tensor) or type(item).__module__ == "numpy"]
    if arrays and len(arrays) == len(data):
        kinds = {(str(item.dtype), tuple(item.shape[1:]), len(item.shape)) for item in arrays}
        columns = len(arrays) == 2 and arrays[0].shape[:1] == arrays[1].shape[:1] and not argument.startswith("predict")
        scalars = not all(item.shape for item in arrays)
        if isinstance(data, tuple) or len(kinds) > 1 or columns or scalars or not isinstance(arrays[0], torch.Tensor):
            raise WrongType(
                f"{argument} is a {type(data).__name__} of {len(data)} tensors or arrays, which is not a list of batches. If "
                "they are inputs and targets, write "
                f"{_given(argument, 'DataLoader(TensorDataset(inputs, targets), batch_size=32)')} with torch.utils.data; if "
                "each is a batch, DataLoader(batches, batch_size=None)."
            )
        return
    first: Any = data[0] if data else None
    if type(first) in (tuple, list) and len(first) == 2 and isinstance(first[0], torch.Tensor) and first[0].dim():
        label = first[1]
        if isinstance(label, int | float) or (isinstance(label, torch.Tensor) and not label.dim()):
            raise WrongType(
                f"{argument} is a list of samples: the target of the first is one number. Wrap it in a loader: "
                f"{_loader(argument, 'data')}."
            )


def check_sets(data: object, argument: str) -> None:
    """Apply `check_batches` to evaluation data: one set, or several by label."""
    for label, eval_set in data.items() if isinstance(data, Mapping) else [("", data)]:
        given = getattr(eval_set, "data", None) if type(eval_set).__name__ == "EvalSet" else eval_set
        if given is not None:
            check_batches(given, f"{argument}[{label!r}]" if label else argument)
