"""Logging of the load of the host and its GPUs."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

from hocket.errors import MissingPackage
from hocket.help import installing
from hocket.hookspecs.ticking import Ticking
from hocket.state.periodic import Periodic
from hocket.state.state import State
from hocket_insight.callbacks import nvml

#: The list of child processes is refreshed in every so many samples, because it reads an entry of each process of the host.
_CHILDREN_EVERY = 12


class SystemMonitor(Periodic):
    """Log the load of this host, sampled in a thread: the mean since the last report, and the largest value as ``…_max``.

    * ``system/cpu_percent``: of all processors of the host, 0 to 100
    * ``system/memory_percent``: used memory of the host, 0 to 100
    * ``system/process_memory``, ``system/workers_memory``: resident bytes of this process, and of its child processes
    * ``system/disk_free``: free bytes where the run writes; the smallest value, without ``…_max``
    * ``system/disk_read``, ``system/disk_written``: bytes per second, all disks
    * ``system/network_received``, ``system/network_sent``: bytes per second, all interfaces
    * ``system/gpu0_percent``: share of the time in which the GPU computed, 0 to 100; each visible NVIDIA GPU has a number
    * ``system/gpu0_memory``, ``system/gpu0_temperature``, ``system/gpu0_power``: bytes in use, °C and watts

    There is one monitor per host, on its local rank 0; loggers get the values of rank 0's host. Pages that processes share
    count in each of them. If no sample was taken since the last report, nothing is logged.

    Args:
        every: how often to log; the end of a fit logs too.
        seconds: the pause between two samples.

    Raises:
        ModuleNotFoundError: the package psutil is not installed.
        ValueError: ``seconds`` is not above 0.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.system_monitor import SystemMonitor
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 10, callbacks=[SystemMonitor()],  # or "system-monitor"
        ... )
        >>> result = trainer.fit("1ep")
        >>> "system/process_memory" in result.history
        True
    """

    def __init__(self, every: str = "50ba", seconds: float = 5.0) -> None:
        super().__init__(every)
        if importlib.util.find_spec("psutil") is None:
            raise MissingPackage(
                "The callback 'system-monitor' needs the package psutil, which is not installed. Type: "
                f"{installing.command('monitors')}.",
                name="psutil",
            )
        self._ticking = Ticking(seconds, self._sample, "system-monitor")
        self._samples: deque[dict[str, float]] = deque()  # its operations are atomic
        self._source: _Host | None = None

    def fit_start(self, state: State) -> None:
        """Start the thread, on local rank 0."""
        super().fit_start(state)
        if state.strategy.local_rank == 0:
            if self._source is None:
                self._source = _Host(str(state.folder.path))
            self._ticking.start()

    def _sample(self) -> None:
        assert self._source is not None
        self._samples.append(self._source.sample())

    def _report(self, state: State) -> None:
        samples = [self._samples.popleft() for _ in range(len(self._samples))]
        for name in dict.fromkeys(name for sample in samples for name in sample):
            values = [sample[name] for sample in samples if name in sample]
            if name == "disk_free":
                state.log({f"system/{name}": min(values)})
            else:
                state.log({f"system/{name}": sum(values) / len(values), f"system/{name}_max": max(values)})

    def fit_end(self, state: State) -> None:
        """Report what remains, and end the thread."""
        super().fit_end(state)
        self._ticking.stop()

    def close(self, state: State) -> None:
        """End the thread."""
        self._ticking.stop()


class _Host:
    """Reads the load of this host and its GPUs."""

    def __init__(self, folder: str) -> None:
        import psutil

        self._psutil: Any = psutil
        self._folder = folder
        self._process = psutil.Process()
        self._children: list[Any] = []
        self._taken = 0
        self._counters: tuple[float, dict[str, float]] = (time.monotonic(), self._transferred())
        psutil.cpu_percent(interval=None)  # a later call returns the mean since this one
        self._gpus = nvml.gpus()

    def sample(self) -> dict[str, float]:
        psutil = self._psutil
        if self._taken % _CHILDREN_EVERY == 0:
            self._children = self._process.children(recursive=True)
        self._taken += 1
        sample = {
            "memory_percent": psutil.virtual_memory().percent,
            "process_memory": float(self._process.memory_info().rss),
            "workers_memory": float(sum(map(self._resident, self._children))),
            "disk_free": float(self._free()),
        }
        now, before = (time.monotonic(), self._transferred()), self._counters
        if now[0] - before[0] > 0.1:  # else the differences say nothing
            self._counters = now
            sample["cpu_percent"] = psutil.cpu_percent(interval=None)
            sample |= {
                name: max(0.0, now[1][name] - before[1][name]) / (now[0] - before[0])
                for name in now[1].keys() & before[1]
            }
        for index, gpu in enumerate(self._gpus):
            sample |= {f"gpu{index}_{name}": value for name, value in gpu.load().items()}
        return sample

    def _resident(self, process: Any) -> int:
        try:
            return int(process.memory_info().rss)
        except self._psutil.Error:  # it has ended
            return 0

    def _free(self) -> int:
        folder = Path(self._folder).absolute()
        return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free

    def _transferred(self) -> dict[str, float]:
        disk, network = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        counted: dict[str, float] = {}
        if disk is not None:
            counted |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
        if network is not None:
            counted |= {"network_received": network.bytes_recv, "network_sent": network.bytes_sent}
        return counted
