"""Digests of tensors, of modules, of batches and of random-number generators."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.basics import seeding
from hocket.basics.dtensors import local
from hocket.basics.sparse_quantized import taken_apart
from hocket.data import map_tensors

#: Most groups of modules whose weights have a digest each; and most samples of a batch that have one.
GROUPS, SAMPLES = 32, 1024


def digest(*values: Any) -> str:
    """Return 16 hexadecimal digits that depend on all bits of values: tensors, numbers, texts, and containers of them.

    Of a sharded tensor the shard of this rank counts. Dtypes and shapes count, and so does the order of a mapping.

    Example:
        >>> import torch
        >>> from hocket_tools.reproducing.digests import digest
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(torch.tensor([0.0, -0.0]))
        (True, False)
    """
    hashed = hashlib.blake2b(digest_size=8)
    for value in values:
        _update(hashed, value)
    return hashed.hexdigest()


def _update(hashed: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor = local(value.detach())
        if (parts := taken_apart(tensor)) is not None:
            return _update(hashed, parts)
        hashed.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        host = _on_host(tensor)
        hashed.update(_memory(host, 0, host.nbytes))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            hashed.update(f"{key!r}:".encode())
            _update(hashed, item)
    elif isinstance(value, list | tuple):
        hashed.update(f"{len(value)},".encode())
        for item in value:
            _update(hashed, item)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        hashed.update(repr(value).encode())
    else:  # a container of batches, of which the tensors count
        tensors: list[Tensor] = []
        map_tensors(tensors.append, value)
        hashed.update(type(value).__qualname__.encode())
        for tensor in tensors:
            if tensor is not value:
                _update(hashed, tensor)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def _memory(host: Tensor, start: int, size: int) -> Any:
    """Return bytes of a contiguous tensor without a copy; it has to be kept while they are read."""
    return (ctypes.c_char * size).from_address(host.data_ptr() + start) if size else b""


def by_module(module: nn.Module, prefix: str = "") -> dict[str, str]:
    """Return a digest of the parameters and buffers of each part of a model, by its name without ``prefix``.

    The parts are its modules at the greatest depth at which there are at most `GROUPS`.

    Example:
        >>> import torch
        >>> from hocket_tools.reproducing.digests import by_module
        >>> list(by_module(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))))
        ['0', '2']
    """
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    parts = {name: name.split(".")[:-1] or [name] for name in tensors}
    deepest = max(map(len, parts.values()), default=0)
    fitting = [depth for depth in range(1, deepest + 1) if len({tuple(p[:depth]) for p in parts.values()}) <= GROUPS]
    groups: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        group = ".".join(parts[name][: max(fitting)]) if fitting else ""
        groups.setdefault(group, []).append((name, tensor))
    return {name: digest(group) for name, group in groups.items()}


def of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return a digest of what optimizers keep of each parameter, such as momentum; not of learning rates."""
    groups = ((optimizer.state, group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
    return digest([[sorted(state.get(each, {}).items()) for each in parameters] for state, parameters in groups])


def of_batch(batch: Any) -> str:
    """Return the 8-digit checksum of each sample of a batch, joined; or one digest of the batch, where that is not possible.

    It is possible for tensors of the same number of rows, at most `SAMPLES`.
    """
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    samples = _rows(tensors[0]) if tensors else 0
    if not 0 < samples <= SAMPLES or not _of_tensors(batch) or any(samples != _rows(tensor) for tensor in tensors):
        return digest(batch)
    checksums = [0] * samples
    for tensor in map(_on_host, tensors):
        size = tensor.nbytes // samples
        for row in range(samples):
            checksums[row] = zlib.crc32(_memory(tensor, row * size, size), checksums[row])
    return "".join(f"{checksum:08x}" for checksum in checksums)


def _of_tensors(batch: Any) -> bool:
    """Whether the batch is a tensor, or a sequence or mapping of tensors, and nothing else counts."""
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    return all(type(item) is Tensor and item.layout is torch.strided and not item.is_quantized for item in items)


def _rows(tensor: Tensor) -> int:
    return tensor.size(0) if tensor.dim() else -1


def of_indices(indices: Sequence[Any] | None) -> str | None:
    """Return the 8-digit checksum of the indices of a batch in the data set, or None if they are unknown."""
    return None if indices is None else f"{zlib.crc32(repr(indices).encode()):08x}"


def of_generators(private: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each global generator, by its library, and of all generators of plug-ins."""
    state = seeding.capture()
    state.pop("cuda_device", None)
    random: dict[str, Any] = {name: value for name, value in state.items() if name != "cuda" or value}
    random["python"] = repr(random["python"])
    if "numpy" in random:
        kind, words, *rest = random["numpy"]
        random["numpy"] = (kind, words.tobytes(), *map(float, rest))
    if private:
        random["plug-ins"] = dict(sorted(private.items()))
    return {name: digest(value) for name, value in random.items()}
