"""What may change the numbers of a run besides its data: software, hardware, kernels, settings and the project's own code."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hocket
from hocket.basics import safe_files
from hocket_tools.reproducing import digests

if TYPE_CHECKING:
    from hocket.state.state import State

#: Beginnings of environment variables that choose kernels, threads or algorithms.
_VARIABLES = (
    "ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "KMP_", "MKL_", "NCCL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PYTHONHASHSEED", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
)  # fmt: skip
#: Ends of those that name a place.
_PLACES = ("_DIR", "_HOME", "_PATH", "_ROOT", "_VISIBLE_DEVICES")
#: Bytes of the largest source file, and of the largest tensors of a data set, that are read.
_LARGEST_SOURCE, _LARGEST_DATA = 1 << 20, 1 << 30
#: Keys of a configuration that do not change a number.
_NAMES = ("run_name", "folder", "checkpoints", "resume", "loggers", "log_every")


def environment(state: State) -> dict[str, Any]:
    """Return the record of a run's environment, as nested mappings of names to numbers and texts."""
    variables = [each for each in sorted(os.environ) if each.startswith(_VARIABLES) and not each.endswith(_PLACES)]
    return {
        "versions": versions()
        | {each.dist: each.version for each in state.bus.attachments if each.dist and each.version},
        "hardware": _hardware(state),
        "threads": {"intra-op": torch.get_num_threads(), "inter-op": torch.get_num_interop_threads()},
        "kernels": _kernels(),
        "variables": {name: os.environ[name] for name in variables},
        "settings": _settings(state),
        "configuration": _configuration(state.identity.config),
        "data": data_of(state.train_data),
        "code": {"commit": _commit(), **code()},
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of torch's libraries, and of all packages that are imported, by name."""
    here = {"python": platform.python_version(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    here["hocket"] = hocket.__version__
    for name, module in sorted(sys.modules.items()):
        version = vars(module).get("__version__") if "." not in name and name not in sys.stdlib_module_names else None
        if isinstance(version, str) and not name.startswith("_"):
            here[name] = str(version)
    return {name: str(version) for name, version in here.items() if version is not None}


def _hardware(state: State) -> dict[str, Any]:
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    found = {"processor": processor, "machine": platform.machine(), "device": state.device.type}
    if state.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(state.device)
    return found


def _kernels() -> dict[str, Any]:
    """Return the switches of torch that choose kernels."""
    backends = torch.backends
    return {
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "oneDNN": backends.mkldnn.is_available() and bool(backends.mkldnn.enabled),
        "oneDNN deterministic": bool(getattr(backends.mkldnn, "deterministic", False)),
        "MKL": backends.mkl.is_available(),
        "NNPACK": bool(torch._C._get_nnpack_enabled()),
        "cuDNN": bool(backends.cudnn.enabled),
        "cuDNN benchmark": bool(backends.cudnn.benchmark),
        "cuDNN deterministic": bool(backends.cudnn.deterministic),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cuDNN TF32": bool(backends.cudnn.allow_tf32),
        "flash attention": torch._C._get_flash_sdp_enabled(),
        "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled(),
        "math attention": torch._C._get_math_sdp_enabled(),
        "flush denormal": torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item() == 0.0,
        "default dtype": str(torch.get_default_dtype()),
    }


def _settings(state: State) -> dict[str, Any]:
    """Return settings of the Trainer, which a run without a configuration file has too."""
    found: dict[str, Any] = {
        "seed": state.seed,
        "ranks": state.strategy.world_size,
        "microbatch": state.microbatch,
        "clipping": state.clipping and list(state.clipping),
        "model dtype": sorted({str(parameter.dtype) for parameter in state.task.parameters()}),
    }
    for each in state.bus.attachments:
        if each.kind not in ("callbacks", "loggers", "devices"):
            found[each.kind] = [*found.get(each.kind, ()), each.name]
            config = {} if state.identity.config else each.config  # which has all defaults in a repetition
            found |= {
                f"{each.name} {key}": value for key, value in config.items() if isinstance(value, int | float | str)
            }
    for name, optimizer in zip(state.optimizer_names, state.optimizers, strict=True):
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "lr")}
            options["lr"] = group.get("initial_lr", group["lr"])
            at = f"{type(optimizer).__name__} {name}{f' group {number}' if number else ''}"
            found |= {f"{at} {key}": _plain(value) for key, value in options.items()}
    return found


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _configuration(text: str | None) -> dict[str, Any]:
    """Return the values of a recorded configuration by path, such as ``optimizer.adamw.lr``; without names of places."""
    if text is None:
        return {}
    from hocket_cli.document import parse
    from hocket_cli.recorded_config import KEY

    plain = parse(text, "config.yaml").plain()
    return dict(_flat({key: value for key, value in plain.items() if key not in (*_NAMES, KEY, "callbacks")}, ""))


def _flat(value: Any, at: str) -> Any:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield at, _plain(value) if not isinstance(value, Mapping) else {}
        return
    for key, item in items:
        yield from _flat(item, f"{at}.{key}" if at else str(key))


def data_of(data: Any) -> dict[str, Any]:
    """Return what identifies training data without reading samples; of tensors in memory their contents too."""
    dataset = getattr(data, "dataset", data)
    found: dict[str, Any] = {"type": type(dataset).__qualname__, "loader": type(data).__qualname__}
    with suppress(TypeError, NotImplementedError):
        found["samples" if dataset is not data else "batches"] = len(dataset)
    for name in ("batch_size", "num_workers", "drop_last"):
        if (value := getattr(data, name, None)) is not None:
            found[name] = value
    for name in ("sampler", "batch_sampler"):
        if (sampler := getattr(data, name, None)) is not None:
            found[name] = type(sampler).__qualname__
            if (order := getattr(sampler, "fingerprint", None)) is not None:
                found["order"] = str(order)
    if (fingerprint := getattr(dataset, "_fingerprint", None)) is not None:  # of Hugging Face's datasets
        found["fingerprint"] = str(fingerprint)
    tensors = list(getattr(dataset, "tensors", None) or ())
    if tensors and all(isinstance(tensor, torch.Tensor) and tensor.nbytes <= _LARGEST_DATA for tensor in tensors):
        found["contents"] = digests.digest(tensors)
    return found


def sources() -> dict[str, Path]:
    """Return the files of imported modules that are neither installed nor hocket's own, by path from the working folder."""
    places = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    places |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    installed = tuple(f"{each}{os.sep}" for path in places for each in {path, os.path.realpath(path)})
    found: dict[str, Path] = {}
    for name, module in sorted(sys.modules.items()):
        given = getattr(module, "__file__", None)
        own = name.partition(".")[0].startswith("hocket")
        if own or not isinstance(given, str) or not given.endswith(".py") or given.startswith(installed):
            continue
        file = os.path.realpath(given)
        if os.path.isfile(file) and not file.startswith(installed):
            found[os.path.relpath(file)] = Path(file)
    return found


def code() -> dict[str, str]:
    """Return the digests of `sources`."""
    return {name: _digest(file) for name, file in sources().items()}


def text(file: Path) -> str | None:
    """Return the text of a source file, or None for one that is too large or no text."""
    try:
        return safe_files.text(file, _LARGEST_SOURCE)
    except (OSError, UnicodeDecodeError):
        return None


def _digest(file: Path) -> str:
    with suppress(OSError):
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return "unreadable"


def _commit() -> str | None:
    """Return the commit that is checked out in the working folder, or None."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
