"""Packing: put several documents into one row of a batch, so that less is computed on padding.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning
from hocket_nlp.argument_checks import whole_number
from hocket_nlp.packed_rows import pack, tokens_of
from hocket_nlp.packing_trial import Layout, language_models, layout_of, passes_on

if TYPE_CHECKING:
    from hocket.state.state import State


class Packing(Algorithm):
    """Pack the documents of each training batch into fewer rows (Krell et al. 2021, arXiv 2107.02027).

    Batches are packed by :func:`~hocket_nlp.functional.pack`.
    Loss and gradients are those of the padded batch; evaluation batches are not changed. Before training, a forward pass over
    ten tokens checks that the model keeps packed documents apart, and finds out whether it is causal; it draws no random
    numbers. In the first batch the arguments of the model's forward are checked too.

    In durations and logs, samples are the loader's documents, and tokens those of packed rows. ``microbatch=`` counts packed
    rows. A loss that weights microbatches by samples, and not by labels, weights rows.

    Args:
        length: the length of the packed rows, in tokens; None for that of the longest row of a batch, at most the padded
            length. A number gives all batches the same length, and may be larger than the padded length.

    Raises:
        ValueError: ``length`` is less than 1; later, a model that does not keep documents apart, or a batch that it
            does not take.
        TypeError: later, there is no model of transformers, or a batch is not a mapping with tokens.

    Warns:
        NoEffectWarning: the first batch has no ``attention_mask``, and its rows are full.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.Packing()], device="cpu")
    """

    events = {Event.INIT, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.EXCEPTION, Event.CLOSE}
    phase = Phase.MODEL  # after changes of sequences, and of the model that is tried
    after = ("alibi", "gated-linear-units", "qk-norm", "rope-scaling", "seq-length-warmup")

    def __init__(self, length: int | None = None) -> None:
        self.length: int | None = whole_number("Packing", "length", length, 512, optional=True)
        self._layout = Layout()
        #: Whether a batch was packed, and whether the model was seen to get what the packed batch holds.
        self._warned = self._seen = False
        self._hooks: list[Any] = []
        self._calls: list[str] = []

    def match(self, event: Event, state: State) -> bool:
        """Return True for the model and for batches; around the first forward pass too."""
        return not self._seen or event in (Event.INIT, Event.AFTER_DATALOADER)

    def apply(self, event: Event, state: State) -> None:
        """Try the model, pack batches, and check the first call of the model."""
        if event is Event.INIT:
            self._layout = layout_of(state.model, pack)
        elif event is Event.AFTER_DATALOADER:
            # Labels from the mask, which packing removes, if the task would make some.
            complete = getattr(state.task, "with_labels", lambda batch: batch)
            state.batch = self._pack(complete(state.batch))
        elif event is Event.BEFORE_FORWARD:
            self._watch(state.model, state.batch)
        else:
            self._unwatch()
            if event is Event.AFTER_LOSS:
                self._check_calls(state)

    def _pack(self, batch: Any) -> Any:
        packed = pack(batch, self.length, causal=self._layout.causal, first_position=self._layout.first_position)
        if not self._warned and batch.get("attention_mask") is None and len(tokens_of(packed)) == len(tokens_of(batch)):
            warn(
                "Packing found nothing to pack in the first batch: it has no 'attention_mask', so all its tokens belong to "
                "documents, and its rows are full. Let the loader give the mask, or set length to that of two rows or more.",
                NoEffectWarning,
            )
        self._warned = True
        return packed

    # --- the first forward pass

    def _watch(self, model: nn.Module, batch: Any) -> None:
        self._unwatch()
        self._calls = []

        @torch.compiler.disable
        def note(module: Any, args: Any, kwargs: Any) -> None:
            self._calls.append(passes_on(module, args, kwargs, batch))

        self._hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in language_models(model)]

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _check_calls(self, state: State) -> None:
        problem = next(filter(None, self._calls), "") if self._calls else "was not called"
        if problem:
            raise WrongValue(
                f"The batch is packed, and the model of {type(state.task).__name__} {problem}, so documents would attend to "
                "each other: let forward(batch) call model(**batch)."
            )
        self._seen = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_hooks": [], "_calls": []}
