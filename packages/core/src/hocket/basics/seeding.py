"""Random numbers: a private stream of the global ones for each Trainer, and generators of plug-ins."""

from __future__ import annotations

import operator
import os
import random
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hocket.errors import WrongState, WrongType, WrongValue


def check_seed(given: Any) -> int | None:
    """Return a seed as an int, or None. Raises TypeError for text, ValueError for other numbers than 0 to 2**32 - 1."""
    if given is None:
        return None
    if isinstance(given, str):
        write = (
            f"seed={int(given)}" if given.strip().isdecimal() else "«seed=17», or «None» for the global random numbers"
        )
        raise WrongType(f"«seed={given!r}» is text; a seed is an int. Write {write}.")
    try:
        seed = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        seed = -1
    if not 0 <= seed < 2**32:
        raise WrongValue(
            f"«seed={given!r}» is not a seed, which is an int from 0 to {2**32 - 1}, the largest that NumPy takes. Write "
            "«seed=17», or «None» for the global random numbers."
        )
    return seed


def capture(*, devices: bool = True) -> dict[str, Any]:
    """Return the state of the global generators: Python's, torch's on the CPU and on ``devices``, NumPy's if imported."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    if not devices:
        return state
    started = torch.cuda.is_initialized()
    state["cuda"] = torch.cuda.get_rng_state_all() if started else []
    state["cuda_device"] = torch.cuda.current_device() if started else 0
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    if xla := _xla():
        state["xla"] = xla.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore the state that :func:`capture` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        _restore_cuda(state["cuda"], state.get("cuda_device"))
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    if "xla" in state and (xla := _xla()):
        xla.set_rng_state(state["xla"])


def _restore_cuda(states: list[torch.Tensor], computed_on: int | None) -> None:
    """Restore the CUDA generators.

    Args:
        computed_on: the GPU that the saving process computed on; None for older checkpoints, which do not record it.
    """
    started = torch.cuda.is_initialized()
    if not states and started:
        torch.cuda.manual_seed_all(torch.initial_seed())  # as before their first use
        return
    if computed_on is not None and started and (here := torch.cuda.current_device()) != computed_on:
        torch.cuda.set_rng_state(states[computed_on], here)  # the rank keeps its random numbers on another GPU
        return
    for device, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


def to_tree(state: dict[str, Any]) -> dict[str, Any]:
    """Convert the result of :func:`capture` to tensors, numbers and strings in dicts and lists."""
    version, words, gauss = state["python"]
    tree = {**state, "python": {"version": version, "words": torch.tensor(words), "gauss": gauss}}
    if "numpy" in state:
        name, words, position, has_gauss, cached = state["numpy"]
        tree["numpy"] = {
            "name": name,
            "words": torch.tensor([int(word) for word in words]),
            "position": int(position),
            "gauss": float(cached) if has_gauss else None,
        }
    return tree


def from_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`to_tree`."""
    own = tree["python"]
    state = {**tree, "python": (own["version"], tuple(own["words"].tolist()), own["gauss"])}
    if "numpy" in tree:
        own = tree["numpy"]
        gauss = own["gauss"]
        state["numpy"] = (own["name"], own["words"].tolist(), own["position"], int(gauss is not None), gauss or 0.0)
    return state


def seed_everything(seed: int) -> None:
    """Seed the global generators: Python's, torch's, NumPy's if imported."""
    seed %= 2**32  # NumPy accepts no larger seed
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if xla := _xla():
        xla.set_rng_state(seed)  # torch.manual_seed does not reach it


def _xla() -> Any:
    """Return torch_xla's generator if the XLA runtime is initialized. Calling it earlier would initialize the device."""
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla.core.xla_model if torch_xla and torch_xla._XLAC._xla_runtime_is_initialized() else None


def seed_host(seed: int) -> None:
    """Seed as :func:`seed_everything`, without the devices: worker processes must not initialize them."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed % 2**63)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def preserved(devices: bool = True) -> Iterator[None]:
    """Restore the global generators afterwards; with ``devices=False`` those of the host only."""
    state = capture(devices=devices)
    try:
        yield
    finally:
        restore(state)


#: The process, the thread and the names of the Trainers that compute in it now, the innermost last.
_computing: tuple[int, threading.Thread, list[str]] | None = None
_lock = threading.Lock()


@contextmanager
def only_thread(name: str) -> Iterator[None]:
    """Keep Trainers in other threads from computing inside the context. Raises RuntimeError if one in another thread does."""
    global _computing
    here = threading.current_thread()
    with _lock:
        if _computing is None or _computing[0] != os.getpid() or not _computing[1].is_alive():
            _computing = os.getpid(), here, []
        if _computing[1] is not here:
            other = _computing[2][-1].replace("The", "the", 1)
            raise WrongState(
                f"{name} cannot be made, fitted, evaluated or asked for predictions in thread '{here.name}' while {other} "
                f"computes in thread '{_computing[1].name}': the random numbers of Python, NumPy and torch belong to the "
                "process, so neither run would be reproducible. Wait for that thread, or give each Trainer a process: "
                "multiprocessing.get_context('spawn').Process(target=function).start(). For outputs during a fit call a copy "
                "of the model: copy.deepcopy(trainer.state.model).eval()(inputs)."
            )
        names = _computing[2]
        names.append(name)
    try:
        yield
    finally:
        with _lock:
            names.pop()
            if not names:
                _computing = None


class RandomStream:
    """The global random numbers of one Trainer. Inside ``with stream:`` they continue where the last ``with`` block ended.

    With ``seed=None`` the stream is that of the process, untouched. Otherwise it begins at the seed plus the rank, so that
    dropout differs between ranks, and the caller's generators are restored at the end of the block.
    """

    def __init__(self, seed: int | None, rank: int = 0) -> None:
        self._start = None if seed is None else seed + rank
        self._inside: dict[str, Any] | None = None
        self._outside: dict[str, Any] = {}
        #: Whether the global generators currently yield this stream.
        self._active = self._start is None

    def __enter__(self) -> None:
        if self._start is None:
            return
        self._active = True
        self._outside = capture()
        if self._inside is not None:
            restore(self._inside)
            return
        seed_everything(self._start)

    def __exit__(self, *error: object) -> None:
        if self._start is not None:
            self._inside = capture()
            self._active = False
            restore(self._outside)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the stream's state as a tree (see :func:`to_tree`), or None if it has not begun."""
        state = capture() if self._active else self._inside
        return None if state is None else to_tree(state)

    def load_state_dict(self, tree: Mapping[str, Any] | None) -> None:
        """Undo :meth:`state_dict`: continue a saved stream. With ``seed=None`` that sets the process's global generators."""
        state = None if tree is None else from_tree(tree)
        if not self._active:
            self._inside = state
        elif state is not None:
            restore(state)
        elif self._start is not None:
            seed_everything(self._start)


class Generators:
    """CPU generators of plug-ins by key, created on request and saved in checkpoints.

    Args:
        seed: the run's seed; None for the initial seed of the process's torch generator.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._made: dict[str, torch.Generator] = {}

    def of(self, key: str) -> torch.Generator:
        """Return the generator of this key. Its numbers depend on the seed and the key only."""
        if key not in self._made:
            seed = torch.initial_seed() if self.seed is None else self.seed
            self._made[key] = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(key.encode())) % 2**63)
        return self._made[key]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators afterwards; those created inside are reseeded."""
        states = self.state_dict()
        try:
            yield
        finally:
            for key, generator in self._made.items():
                if key in states:
                    generator.set_state(states[key])
                else:
                    generator.manual_seed(generator.initial_seed())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of each generator of this rank, by key."""
        return {key: generator.get_state() for key, generator in self._made.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Undo :meth:`state_dict`, in place: references to existing generators stay valid."""
        for key, state in states.items():
            self._made.setdefault(key, torch.Generator()).set_state(state)
