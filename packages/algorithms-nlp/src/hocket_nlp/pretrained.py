"""Save a model as a Hugging Face folder, which ``from_pretrained`` and other tools read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.basics.display import listed
from hocket.basics.time import interval_of
from hocket.errors import ExistingFile, WrongType, WrongValue
from hocket.hookspecs.callback import Callback
from hocket.state.interval_due import Due
from hocket.state.state import State


def save_pretrained(
    model: Any, tokenizer: Any, folder: Path | str, weights: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a model, and its tokenizer unless it is None, to a folder that appears complete; an earlier one is replaced.

    Args:
        model: a transformers model, or one of peft, whose adapters alone are written.
        weights: the full weights by name; None for those of ``model``.

    Raises:
        FileExistsError: there is something else than an earlier Hugging Face folder.
        ValueError: ``weights`` are not those of the model.
    """
    folder = checked(folder)
    if weights is not None and (other := set(weights) ^ set(model.state_dict())):
        raise WrongValue(
            f"The weights are not those of {type(model).__name__}, which has or lacks {listed(sorted(other), 3)}. Pass "
            "all of trainer.model_state_dict(), or omit weights= to save those of the model."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}")
    try:
        model.save_pretrained(temporary, **({} if weights is None else {"state_dict": dict(weights)}))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def checked(folder: Path | str) -> Path:
    """Return a folder as an absolute path. Raises FileExistsError if something else is there than an earlier one."""
    path = Path(folder).expanduser().resolve()
    if path.is_dir() and (not any(path.iterdir()) or any((path / name).is_file() for name in _CONFIGURATIONS)):
        if not any(each.is_dir() for each in path.iterdir()):
            return path
    elif not path.exists():
        return path
    raise ExistingFile(
        f"{path} is there, and is not an earlier Hugging Face folder, which would be replaced. Give another folder, or "
        "remove it."
    )


#: One of these is in each Hugging Face folder.
_CONFIGURATIONS = ("config.json", "adapter_config.json")


class SavePretrained(Callback):
    """Write a `hocket_nlp.HuggingFaceTask` as a Hugging Face folder at the end of a fit: weights, configuration, tokenizer.

    Of a model with adapters (peft) only these are written. Sharded weights are gathered. The weights are those that
    evaluation uses, such as the averages of EMA.

    Args:
        folder: where to write; by default ``huggingface`` in the folder of the run. An earlier one is replaced.
        every: also write at this interval, such as ``"1ep"``.

    Raises:
        TypeError: when a Trainer is made, its model is not one of transformers.
        FileExistsError: then, or when writing, ``folder`` is something else than an earlier Hugging Face folder.

    Example:
        >>> from hocket_nlp import SavePretrained
        >>> callback = SavePretrained("models/mine", every="1ep")
    """

    def __init__(self, folder: str | Path | None = None, every: str | None = None) -> None:
        self._folder = folder
        self._due = Due(interval_of(every, "every"))
        self._saved: int | None = None

    def init(self, state: State) -> None:
        """Check that the model can be saved."""
        if not hasattr(state.model, "save_pretrained"):
            raise WrongType(
                f"The callback 'save-pretrained' writes models of transformers, and this is {type(state.model).__name__}. Give "
                "the Trainer model=hocket_nlp.HuggingFaceTask(model, tokenizer); other models are in the checkpoints."
            )

        if self._folder is not None:
            checked(self._folder)

    def fit_start(self, state: State) -> None:
        """Begin to watch the interval."""
        self._saved = None
        self._due.fit_start(state)

    def batch_end(self, state: State) -> None:
        """Write if the interval is due."""
        if self._due(state):
            self._save(state)

    def epoch_end(self, state: State) -> None:
        """Write if the interval is due."""
        self.batch_end(state)

    def fit_end(self, state: State) -> None:
        """Write, unless that was done after the same batch."""
        if self._saved != state.timestamp.batch:
            self._save(state)

    def _save(self, state: State) -> None:
        state.bus.predict_start(state)  # algorithms that evaluate other weights put them in place
        try:
            named = state.bus.model_state(state.prepared)
            prefix = state.model_prefix
            weights = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
            if state.strategy.rank == 0:
                folder = state.run_folder / "huggingface" if self._folder is None else Path(self._folder)
                save_pretrained(state.model, getattr(state.task, "tokenizer", None), folder, weights)
                self._tell(state, folder)
                state.bus.log_artifact(state, "huggingface", folder)
        finally:
            state.bus.predict_end(state)
        self._saved = state.timestamp.batch

    def _tell(self, state: State, folder: Path) -> None:
        advice = ""
        if replaced := listed([each.name for each in state.replacements]):
            advice = (
                f" Surgery replaced {replaced}, which from_pretrained undoes: apply the same algorithms again then."
            )
        print(f"hocket: wrote {type(state.model).__name__} to {folder}.{advice}", file=sys.stderr, flush=True)
