"""Logging of samples with what the model predicts for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.data import items
from hocket.data.nesting import map_tensors
from hocket.errors import WrongType, WrongValue
from hocket.state.batch_part import BatchPart
from hocket.state.state import State
from hocket.state.step import count
from hocket.state.task import SupervisedTask
from hocket_insight.callbacks.periodic_measurement import Measuring

#: Tensors of more elements are shown in a cell as their shape.
_LARGEST_CELL = 16


class SampleVisualizer(Measuring):
    """Log the first samples of an evaluation set, or of a training batch, with targets and predictions.

    The table ``samples/<on>/predictions`` has a row for each sample. Inputs that are images, of shape (N, C, H, W) with 1 or 3
    channels, are logged as ``samples/<on>``, in the same order; floats outside of [0, 1] are scaled to it, each image by
    its own extremes. It logs the samples of rank 0. Samples of training wait on the device for the end of the logging interval.

    Args:
        on: the label of an evaluation set, whose samples are logged in each evaluation; or ``"train"``.
        every: for ``"train"``: number of batches between logged samples.
        samples: their number.
        input_key, target_key: where inputs and targets are in a batch: an index, a key, or a function of the batch; None for
            the Trainer's ``inputs=`` and ``targets=``, or the first and second element.
        predict: a function of the outputs and the batch that returns a prediction for each sample; None for the class with the
            largest output if targets are integers, and the outputs otherwise.
        decode: a function that makes text of one sample's input, such as a tokenizer's ``decode``, for a column ``text``.

    Raises:
        ValueError: an argument is out of its range; when a fit starts: there is no such evaluation set.
        KeyError: the batch has no such part.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.sample_visualizer import SampleVisualizer
        >>> from hocket.loggers.memory import MemoryLogger
        >>> logger, data = MemoryLogger(), [(torch.rand(8, 3, 4, 4), torch.arange(8) % 2)]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)), loss="cross_entropy", device="cpu",
        ...     optimizer="sgd(lr=0.1)", train_data=data, eval_data=data, loggers=[logger],
        ...     callbacks=[SampleVisualizer(samples=2)],
        ... )
        >>> result = trainer.fit("1ep")
        >>> columns, rows = logger.tables["samples/eval/predictions"][0]
        >>> columns, len(rows), len(logger.images["samples/eval"][0])
        (['sample', 'prediction', 'target'], 2, 2)
    """

    def __init__(
        self,
        on: str = "eval",
        every: int = 500,
        samples: int = 8,
        input_key: Any = None,
        target_key: Any = None,
        predict: Callable[[Any, Any], Any] | None = None,
        decode: Callable[[Any], str] | None = None,
    ) -> None:
        if type(samples) is not int or samples < 1:
            raise WrongValue(f"«samples={samples!r}» is not a number of samples; give an int of 1 or more, such as 8.")
        self._on, self._samples = on, samples
        self._inputs = BatchPart("sample-visualizer", "input", input_key)
        self._targets = BatchPart("sample-visualizer", "target", target_key)
        self._predict, self._decode = predict, decode
        #: Inputs, targets and predictions, copied and still on the device.
        self._taken: list[tuple[Any, Any, Any]] = []
        self._complete = False
        super().__init__(every, ("batch_start", "after_forward", "batch_end") if on == "train" else ())
        if on == "train":  # otherwise no step calls them
            self.batch_start, self.after_forward, self.batch_end = self._begin, self._take_more, self._end

    def fit_start(self, state: State) -> None:
        """Check that the evaluation set exists."""
        if self._on != "train" and self._on not in state.eval_sets:
            sets = ", ".join(map(repr, (*state.eval_sets, "train")))
            raise WrongValue(
                f"sample-visualizer was given «on={self._on!r}», and there is no such set. There are: {sets}. "
                f"Write «on={next(iter(state.eval_sets), 'train')!r}»."
            )

    # --- taking samples

    def _begin(self, state: State) -> None:
        self._taken, self._complete = [], False

    def _take_more(self, state: State) -> None:
        if not self._complete:
            self._take(state)

    def _end(self, state: State) -> None:
        self._complete = bool(self._taken)

    def eval_start(self, state: State) -> None:
        """Begin with the first samples of the set."""
        if state.eval_label == self._on:
            self._taken = []

    def eval_after_forward(self, state: State) -> None:
        """Take samples of the set."""
        if state.eval_label == self._on:
            self._take(state)

    def eval_end(self, state: State) -> None:
        """Log the samples of the set."""
        if state.eval_label == self._on:
            self._log(state)

    def log_metrics(self, state: State) -> None:
        """Log the samples of a training batch, at the end of a logging interval."""
        if self._on == "train" and self._complete:
            self._log(state)

    def _take(self, state: State) -> None:
        missing = self._samples - sum(len(inputs) for inputs, _, _ in self._taken)
        if missing <= 0 or state.strategy.rank:
            return
        inputs, targets = self._part(state, self._inputs), self._part(state, self._targets)
        predictions = self._predictions(state, targets)
        first = [
            None if each is None else map_tensors(_copy, each[:missing]) for each in (inputs, targets, predictions)
        ]
        self._taken.append((first[0], first[1], first[2]))

    def _part(self, state: State, part: BatchPart) -> Any:
        key = part.key
        if key is None and isinstance(state.task, SupervisedTask):
            key = getattr(state.task, f"{part.which}s")
        if callable(key):
            return items.part(state.batch, key)
        if part.which == "target" and part.key is None and isinstance(state.batch, Tensor):
            return None  # the batch is its inputs
        return part.of(state)

    def _predictions(self, state: State, targets: Any) -> Any:
        outputs = state.outputs
        if self._predict is not None:
            predictions = self._predict(outputs, state.batch)
            if len(predictions) < (samples := count(state, state.batch).samples):
                raise WrongValue(
                    f"predict of sample-visualizer returned {len(predictions)} predictions for {samples} samples. Return one "
                    "for each sample of the batch."
                )
            return predictions
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits", next(iter(outputs.values()), None))
        elif isinstance(outputs, tuple | list):
            outputs = outputs[0]
        if not isinstance(outputs, Tensor):
            raise WrongType(
                f"sample-visualizer cannot read predictions from outputs that are {type(outputs).__name__}. Pass predict=, a "
                "function of outputs and batch that returns one prediction for each sample."
            )
        classes = isinstance(targets, Tensor) and not targets.is_floating_point() and outputs.ndim == targets.ndim + 1
        return outputs.detach().argmax(1) if classes else outputs.detach()

    # --- logging them

    def _log(self, state: State) -> None:
        taken, self._taken, self._complete = self._taken, [], False
        columns = ["sample", "text", "prediction", "target"]
        rows: list[list[Any]] = []
        images: list[Tensor] = []
        for part in taken:
            inputs, targets, predictions = map_tensors(lambda tensor: tensor.cpu(), part)
            for index, each in enumerate(inputs):
                text = None if self._decode is None else self._decode(each)
                target = None if targets is None else _cell(targets[index])
                rows.append([len(rows), text, _cell(predictions[index]), target])
                if isinstance(each, Tensor) and each.ndim == 3 and each.shape[0] in (1, 3):
                    images.append(_image(each))
        kept = [
            at
            for at, name in enumerate(columns)
            if name in ("sample", "prediction") or any(row[at] is not None for row in rows)
        ]
        if rows:
            name = f"samples/{self._on}"
            state.bus.log_table(
                state, f"{name}/predictions", [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
            )
            if images:
                state.bus.log_images(state, name, images)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _cell(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, str | int | float | bool | None) else str(value)
    if value.numel() > _LARGEST_CELL:
        return f"{str(value.dtype).removeprefix('torch.')} of {' × '.join(map(str, value.shape))}"
    if value.is_floating_point():
        value = (value.double() * 1e4).round() / 1e4
    return value.item() if value.ndim == 0 else str(value.tolist())


def _image(image: Tensor) -> Tensor:
    """Return an image whose floats are in [0, 1]."""
    if not image.is_floating_point():
        return image if image.dtype is torch.uint8 else image.clamp(0, 255).to(torch.uint8)
    image = image.float()
    low, high = image.min(), image.max()
    if low >= 0 and high <= 1:
        return image
    return (image - low) / (high - low).clamp(min=torch.finfo(image.dtype).tiny)
