"""Export the model during a fit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.basics.time import Interval
from hocket.errors import ExistingFile
from hocket.hookspecs.callback import Callback
from hocket.loop.predict import predict
from hocket.state.interval_due import Due
from hocket.state.state import State
from hocket_tools.arguments import checked
from hocket_tools.exporting.axes import Dynamic
from hocket_tools.exporting.exporter import check_folder, export_state
from hocket_tools.exporting.formats import HowAdapters, To
from hocket_tools.exporting.preparing import Options, prepare
from hocket_tools.progress import say


class Export(Callback):
    """Export the model with the weights of evaluation, at an interval and at the end of a fit; see `hocket_tools.export`.

    When a fit starts, the model is traced once, so that a model that cannot be exported is refused before it is trained. Each
    export is verified on samples of the first evaluation set, or of the training data, and replaces the one before.

    Args:
        to: ``"torch-export"``, ``"onnx"``, ``"safetensors"`` or ``"huggingface"``.
        every: the interval, such as ``"1ep"`` or ``"500ba"``; None for the end of a fit only.
        out: the folder to write; by default ``exports/<to>`` in the folder of the run.
        adapters: ``"merged"`` into the weights, or ``"apart"``.
        dynamic: further axes that vary, by input: ``{"x": [2, 3]}``.
        overwrite: whether to replace an export of another run in the folder.

    Raises:
        hocket.errors.Unsupported: when a fit starts: the model cannot be exported; the message names the line.
        OSError: when a fit starts: the folder cannot be written, or has something else than an export of this run.
        FloatingPointError: the files compute something else than the run.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep",
        ...     callbacks=[{"export": {"to": "safetensors"}}],
        ... )
        >>> (trainer.fit().run_folder / "exports/safetensors/model.safetensors").exists()
        True
    """

    @checked
    def __init__(
        self,
        to: To = "torch-export",
        every: str | Interval | None = "1ep",
        out: str | Path | None = None,
        adapters: HowAdapters = "merged",
        dynamic: Dynamic | None = None,
        overwrite: bool = False,
    ) -> None:
        self._options = Options(to, adapters, dynamic or {}, overwrite=overwrite)
        self._due = Due(every)
        self._out = out
        self._exported: int | None = None

    def fit_start(self, state: State) -> None:
        """Check that the model can be exported, and the folder written."""
        self._due.fit_start(state)
        self._exported = None
        if state.folder.lasting:
            self._check_others(state, check_folder(state, self._options, self._out))
        format, subject, *_ = prepare(state, _predict(state), self._options)
        format.build(subject)

    def _check_others(self, state: State, folder: Path) -> None:
        """Raise ExistingFile for another callback that writes other files into the folder."""
        others = [each.obj for each in state.bus.attachments if isinstance(each.obj, Export) and each.obj._out]
        for each in others:
            if each._options != self._options and check_folder(state, each._options, each._out) == folder:
                raise ExistingFile(
                    f"Two export callbacks, to {self._options.to} and to {each._options.to}, write into {folder}, where one "
                    f"would replace the other. Give one another folder, such as out={folder}-{each._options.to}."
                )

    def batch_checkpoint(self, state: State) -> None:
        """Export if the interval is due."""
        if self._due(state):
            self._export(state)

    def epoch_checkpoint(self, state: State) -> None:
        """Export if the interval is due."""
        self.batch_checkpoint(state)

    def fit_end(self, state: State) -> None:
        """Export, unless that was done after the same batch."""
        if self._exported != state.timestamp.batch:
            self._export(state)

    def _export(self, state: State) -> None:
        self._exported = state.timestamp.batch
        if not state.folder.lasting:
            return
        exported = export_state(state, _predict(state), self._options, self._out)
        if state.strategy.rank == 0:
            say(f"exported to {exported.folder}; {exported.worst}.")
            state.bus.log_artifact(state, "export", exported.folder)


def _predict(state: State) -> Any:
    """Return a function that predicts batches during a fit, each on every rank."""

    def predicted(batches: Sequence[Any]) -> list[Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Every rank reads all")  # which is meant
            return predict(state, [batch for batch in batches for _ in range(state.strategy.data_ranks)])

    return predicted
