"""Collect the predictions and labels of an evaluation, and compute the user's metrics from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from transformers import EvalPrediction
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size

from hocket_migration.transformers.task import Predicted

#: What padding adds to logits and labels of different lengths.
_PADDING = -100


class Predictions:
    """A metric without values that collects what an evaluation of transformers returns.

    Args:
        keep: the parts to collect: ``"logits"``, ``"labels"``, ``"losses"``, ``"inputs"``.
        main_input: the name of the input to collect.
        preprocess: a function of logits and labels, applied to each batch.
        every: number of batches after which tensors move to the CPU, or None for the end.
        concatenate: whether to return one array for all batches, padded to one length, or a list.
        of_batch: a function of an `EvalPrediction` and ``compute_result``, called for each batch.
        collect: whether batches are collected.
    """

    #: Distinguishes it from metrics of logits and labels.
    collects = True
    _of_batch: Callable[..., Any] | None = None  # also in copies that other ranks sent

    def __init__(
        self,
        keep: Sequence[str],
        main_input: str = "input_ids",
        preprocess: Callable[[Any, Any], Any] | None = None,
        every: int | None = None,
        concatenate: bool = True,
        of_batch: Callable[..., Any] | None = None,
        collect: bool = True,
    ) -> None:
        self._keep, self._main_input, self._preprocess = tuple(keep), main_input, preprocess
        self._every, self._concatenate, self._of_batch = every, concatenate, of_batch
        self._collect = collect
        #: What ``of_batch`` returned last.
        self.metrics: Any = None
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Predictions:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}  # hocket sends metrics of other ranks to be merged; `gathered` sends the batches

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[dict[str, Any]] = []
        self._pending: dict[str, Any] | None = None
        self._samples = 0
        self.metrics = None

    def update(self, outputs: Predicted, batch: Any) -> None:
        """Collect a batch."""
        samples = find_batch_size(batch) or 0
        self._samples += samples
        found: dict[str, Any] = {"labels": outputs.labels, "logits": outputs.logits}
        if outputs.logits is not None and self._preprocess is not None:
            found["logits"] = self._preprocess(outputs.logits, outputs.labels)
        if outputs.loss is not None:
            found["losses"] = outputs.loss.repeat(samples)
        if "inputs" in self._keep:
            found["inputs"] = batch[self._main_input]
        kept = {name: found[name] for name in self._keep if found.get(name) is not None}
        if self._of_batch is not None:
            self._compute_pending(False)
            self._pending = {**kept, **({"inputs": batch} if "inputs" in kept else {})}
        if not self._collect:
            return
        self._batches.append(kept)
        if self._every is not None and len(self._batches) % self._every == 0:
            self._batches = [_on_cpu(each) for each in self._batches]

    def _compute_pending(self, last: bool) -> None:
        pending, self._pending = self._pending, None
        if pending is None or "logits" not in pending or "labels" not in pending:
            return
        assert self._of_batch is not None
        self.metrics = self._of_batch(prediction_of(pending), compute_result=last)

    def merge_state(self, others: Sequence[Predictions]) -> None:
        """Do nothing; see `gathered`."""

    def compute(self) -> dict[str, float]:
        """Compute the metrics of the last batch. Return nothing: metrics of hocket's loop are numbers, predictions are not."""
        if self._of_batch is not None:
            self._compute_pending(True)
        return {}

    def gathered(self, all_gather_object: Callable[[Any], list[Any]]) -> tuple[dict[str, Any], int]:
        """Return the arrays of all ranks by part, and the number of samples. Every rank has to call this.

        Samples are in the order of the data: each of n ranks has every n-th batch.
        """
        ranks = all_gather_object(([_on_cpu(each) for each in self._batches], self._samples))
        batches = [each for turn in zip_longest(*(mine for mine, _ in ranks)) for each in turn if each is not None]
        arrays = {}
        for name in self._keep:
            container = EvalLoopContainer(self._concatenate, padding_index=_PADDING)
            for each in batches:
                if name in each:
                    container.add(each[name])
            arrays[name] = container.get_arrays()
        return arrays, sum(samples for _, samples in ranks)


def prediction_of(parts: dict[str, Any]) -> EvalPrediction:
    """Return the argument of ``compute_metrics`` for collected parts."""
    return EvalPrediction(
        predictions=parts["logits"], label_ids=parts["labels"], inputs=parts.get("inputs"), losses=parts.get("losses")
    )


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _on_cpu(each) for name, each in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_on_cpu(each) for each in tree)
    return tree.cpu() if hasattr(tree, "cpu") else tree
