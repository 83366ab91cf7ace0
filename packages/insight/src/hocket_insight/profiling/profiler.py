"""The plug-in behind ``Trainer(profile=…)``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hocket import hookimpl
from hocket.basics.time import Time, TimeError, Unit
from hocket.errors import WrongValue
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.callback import Callback
from hocket.loop.agreement import ranks_of
from hocket.run import summary
from hocket.state.state import State
from hocket_insight.profiling.window import NAME, WARM_UP, Settings, Window

_FORM = "Write how many batches, and after how much training, such as '5ba after 10ba', '5ba after 1ep' or '5ba'."


class Profiler(Callback):
    """Profile some batches: write where their time goes, the largest causes and what to try against each.

    ``Trainer(profile="5ba after 10ba")`` attaches it. The folder ``profile`` in the folder of the run then has ``summary.txt``
    and ``summary.json`` (`hocket_insight.profiling.summary` describes it), and for each rank a trace of `torch.profiler` that
    https://ui.perfetto.dev opens, ``rank0.json.gz``. The loggers get the summary as the text ``profile``.

    Outside of the batches that are measured, and two before them that warm up, a step costs nothing more. The profile does
    not change results. The time is that of the host; on a CUDA device the summary also says how long the device is busy.

    Args:
        window: the number of batches, and the time after which they begin, counted from the beginning of the first fit in
            this process; a time in ``dur`` is the fraction of the whole duration. A window that training ends in is shorter.
        trace: whether to record with `torch.profiler`. Without, communication within the backward pass and the device's time
            are unknown.
        shapes, stack: whether the trace has the shapes of inputs, and Python's stack, which makes it larger and slower.
        megabytes: the maximum size of the traces of all ranks together. The last batches of a larger one are omitted.

    Raises:
        TimeError: ``window`` is not such a text.

    Example:
        >>> import hocket, json, tempfile, torch
        >>> data = [(torch.ones(8, 4), torch.ones(8, 1))] * 8
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = hocket.Trainer(
        ...         model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...         train_data=data, duration="1ep", profile="3ba after 2ba", folder=folder,
        ...     )
        ...     result = trainer.fit()
        ...     summary = json.loads((result.run_folder / "profile/summary.json").read_text())
        >>> summary["first_batch"], summary["batches"], round(sum(summary["shares"].values()), 6)
        (3, 3, 1.0)
    """

    def __init__(
        self,
        window: str = "10ba after 10ba",
        trace: bool = True,
        shapes: bool = False,
        stack: bool = False,
        megabytes: float = 50,
    ) -> None:
        batches, self._after = parse(window)
        if not megabytes > 0:
            raise WrongValue(
                f"«megabytes={megabytes!r}» is not a size; give a positive number, such as 50, or «trace=False»."
            )
        self._settings = Settings(window, batches, trace, shapes, stack, int(megabytes * 1e6))
        #: The window, once training has come to it.
        self._window: Window | None = None
        #: The number at which training has come to it, in the unit of its beginning; None before the first fit.
        self._due: float | None = None

    def before_fit(self, state: State) -> None:
        """Refuse a fit whose folder belongs to another run."""
        if not self._measured:
            ranks_of(state).agree(state.folder.check)

    def fit_start(self, state: State) -> None:
        """Begin to wait for the window."""
        unit, value = self._after.unit, self._after.value
        if self._due is None:
            begin = 0.0 if unit is Unit.DURATION else float(state.timestamp.count(unit))
            self._due = begin + max(value - (WARM_UP if unit is Unit.BATCH else 0), 0)
        names = {each.name for each in state.bus.attachments if each.kind == "callbacks"}
        if not self._measured and NAME not in names:
            state.bus.attach(Attachment("callbacks", NAME, _Waiting(unit, self._due, self._begin)))

    @hookimpl(trylast=True)
    def fit_end(self, state: State) -> None:
        """Say if no batch was measured; another fit may come to the window."""
        if not self._measured and state.folder.lasting and state.strategy.rank == 0:
            line = (
                f"profile={self._settings.asked!r} has measured nothing: training ended after {state.timestamp.batch} batches, "
                f"and {WARM_UP} warm up; write an earlier one, such as profile='2ba after 2ba', or train longer"
            )
            summary.show_lines(state, [line])

    @property
    def _measured(self) -> bool:
        return self._window is not None and self._window.measured

    def _begin(self, state: State, waiting: Any) -> None:
        """Put the window in the place of the plug-in that waits for it."""
        bus = state.bus
        bus.detach(next(each for each in bus.attachments if each.obj is waiting))
        self._window = Window(self._settings, state)
        bus.attach(Attachment("callbacks", NAME, self._window))


class _Waiting:
    """Begin the window when its time has come."""

    def __init__(self, unit: Unit, due: float, begin: Callable[[State, Any], None]) -> None:
        self._unit, self._due, self._begin = unit, due, begin

    def before_dataloader(self, state: State) -> None:
        """Check the time."""
        if state.completed(self._unit) >= self._due:
            self._begin(state, self)


def parse(window: str) -> tuple[int, Time]:
    """Return the number of batches of a window, and the time after which it begins.

    Example:
        >>> from hocket_insight.profiling.profiler import parse
        >>> parse("5ba after 1ep")
        (5, Time(1, 'ep'))
    """
    match = re.fullmatch(r"\s*(.+?)(?:\s+after\s+(.+?))?\s*", window) if isinstance(window, str) else None
    if match is None:
        raise TimeError(f"«profile={window!r}» is not a window. {_FORM}")
    try:
        length, after = Time.parse(match[1]), Time.parse(match[2] or "10ba")
    except TimeError as error:
        raise TimeError(f"«profile={window!r}»: {error} {_FORM}") from None
    if length.unit is not Unit.BATCH or not length.value:
        raise TimeError(f"«profile={window!r}» is not a number of batches, but {length}. {_FORM}")
    return int(length.value), after
