"""Logging of the energy that training takes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hocket.help import warn
from hocket.hookspecs.ticking import Ticking
from hocket.state.periodic import Periodic
from hocket.state.state import State
from hocket_insight.callbacks import nvml


class EnergyMonitor(Periodic):
    """Log the energy of this host's GPUs and processors in joules, and per sample of the training data.

    ``energy/gpu_joules`` and ``energy/cpu_joules`` are sums since the first fit of this process began, so a resumed run
    counts anew; ``energy/watts`` is the mean power and ``energy/joules_per_sample`` the energy per sample, since the last
    report. They include evaluations and checkpoints, and everything else that uses the hardware.

    The GPUs that the ranks of this host train on, each counted once, are read by NVML: their energy counters, or before
    Volta the integral of their power. Other GPUs of the host do not count.
    Processors are read by Linux's powercap (RAPL), on Intel and AMD: packages and memory, whoever uses them. It is often
    readable by root only. If there is neither, a warning says so and nothing is logged. There is one monitor per host, on
    the first of its ranks; loggers get the values of rank 0's host, per sample of the host's ranks.

    Args:
        every: how often to log; the end of a fit logs too.
        seconds: the pause between two samples, in a thread. The counters of processors wrap around after minutes.
        powercap: the folder of powercap.

    Raises:
        ValueError: ``seconds`` is not above 0.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.energy_monitor import EnergyMonitor
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=[EnergyMonitor(every="1ep")], loggers=["jsonl"], device="cpu")
    """

    def __init__(self, every: str = "50ba", seconds: float = 2.0, powercap: str | Path = "/sys/class/powercap") -> None:
        super().__init__(every)
        self._ticking = Ticking(seconds, self._sample, "energy-monitor")
        self._powercap = Path(powercap)
        #: What returns joules so far, by what uses them.
        self._meters: dict[str, list[Callable[[], float]]] | None = None
        self._zero: dict[str, float] = {}
        #: Time, samples and joules at the latest sample, and at the one that was reported last.
        self._latest: tuple[float, int, dict[str, float]] | None = None
        self._reported: tuple[float, int, dict[str, float]] | None = None
        self._samples: Callable[[], int] = int
        #: The fraction of the global batch that the ranks of this host train on.
        self._share = 1.0

    def fit_start(self, state: State) -> None:
        """Begin to measure, on the first rank of a host; warn if there is nothing to read."""
        super().fit_start(state)
        here = socket.gethostname()
        ranks = state.bus.all_gather_object((here, nvml.used_by(state.model, state.device)))
        of_host = [rank for rank, (host, _) in enumerate(ranks) if host == here]
        self._share = len(of_host) / len(ranks)
        if state.strategy.rank != of_host[0]:
            return
        if self._meters is None:
            self._meters = meters(self._powercap, dict.fromkeys(uuid for rank in of_host for uuid in ranks[rank][1]))
            self._zero = {kind: sum(read() for read in reads) for kind, reads in self._meters.items()}
            if not self._meters:
                warn(
                    f"energy-monitor logs nothing: this process uses no NVIDIA GPU, and {self._powercap} has no energy counter "
                    "that this process may read. On Linux make them readable with: sudo chmod a+r "
                    f"{self._powercap}/*/energy_uj."
                )
        self._samples = lambda: state.timestamp.sample
        self._latest = self._reported = None
        if self._meters:
            self._ticking.start()
            self._reported = self._latest

    def _sample(self) -> None:
        # Joules and samples of one moment, so that the quotient is exact however long ago it is.
        joules = {kind: sum(read() for read in reads) for kind, reads in (self._meters or {}).items()}
        self._latest = time.monotonic(), self._samples(), joules

    def _report(self, state: State) -> None:
        latest, before = self._latest, self._reported
        if latest is None or before is None or latest is before:
            return
        self._reported = latest
        state.log({f"energy/{kind}_joules": joules - self._zero[kind] for kind, joules in latest[2].items()})
        spent = sum(latest[2].values()) - sum(before[2].values())
        if (seconds := latest[0] - before[0]) > 0:
            state.log({"energy/watts": spent / seconds})
        if (samples := (latest[1] - before[1]) * self._share) > 0:
            state.log({"energy/joules_per_sample": spent / samples})

    def fit_end(self, state: State) -> None:
        """Report what remains, and end the thread."""
        super().fit_end(state)
        self._ticking.stop()

    def close(self, state: State) -> None:
        """End the thread."""
        self._ticking.stop()
        self._samples = int  # without the state of the run


def meters(powercap: Path, uuids: Iterable[str]) -> dict[str, list[Callable[[], float]]]:
    """Return functions that return joules so far, by what uses them: ``"gpu"`` and ``"cpu"``, as far as they can be read.

    Args:
        uuids: of the GPUs to read.
    """
    gpu = [each.joules if each.counts_energy else PowerIntegral(each.watts).joules for each in nvml.gpus(uuids)]
    found = {"gpu": gpu, "cpu": [zone.joules for zone in zones(powercap)]}
    return {kind: reads for kind, reads in found.items() if reads}


class PowerIntegral:
    """The energy of what only tells its power, by the trapezoidal rule between two calls.

    Args:
        watts: returns the current power, or None if it is unknown, which counts as the last one known.
        clock: returns seconds.
    """

    def __init__(self, watts: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._watts, self._clock = watts, clock
        self._last = (clock(), watts() or 0.0)
        self._joules = 0.0

    def joules(self) -> float:
        """Return the energy since this object was made."""
        watts = self._watts()
        now = (self._clock(), self._last[1] if watts is None else watts)
        self._joules += (now[0] - self._last[0]) * (now[1] + self._last[1]) / 2
        self._last = now
        return self._joules


class Zone:
    """An energy counter of powercap, which starts again at 0 after ``max_energy_range_uj``.

    See https://docs.kernel.org/power/powercap/powercap.html.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = self._read()
        self._microjoules = 0

    def _read(self) -> int:
        return int(self._file.read_text())

    def joules(self) -> float:
        """Return the energy since this object was made, if it was called at least once in each turn of the counter."""
        now = self._read()
        self._microjoules += now - self._last if now >= self._last else now - self._last + self._range
        self._last = now
        return self._microjoules / 1e6


def zones(powercap: Path) -> list[Zone]:
    """Return the counters of packages and of memory, which add up to the processors' energy, if readable.

    Other zones are parts of a package (core, uncore), contain packages (psys), or read the same counters another way (mmio).
    """
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            if (folder / "name").read_text().strip().startswith(("package", "dram")):
                found.append(Zone(folder))
        except (OSError, ValueError):
            continue
    return found
