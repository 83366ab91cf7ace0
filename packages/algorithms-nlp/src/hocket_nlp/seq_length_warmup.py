"""Sequence-length warm-up: short training sequences at the beginning, full ones later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hocket.basics.time import Time, Unit
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning
from hocket_nlp.argument_checks import number, switch, whole_number
from hocket_nlp.sequence_length import IGNORED, batch_and_length, reshape_sequences, tensors_named, truncate_sequences

if TYPE_CHECKING:
    from hocket.state.state import State


def warmup_sequence_length(done: float, max_seq_length: int, min_seq_length: int = 8, step_size: int = 8) -> int:
    """Return the length of sequences during a linear warm-up, in tokens.

    ``min + step * floor((max - min) * done / step)``: a line from ``min_seq_length`` to ``max_seq_length``, rounded down to
    whole steps, as in Li, Zhang and He 2022, "The Stability-Efficiency Dilemma", section 4 (arXiv 2108.06084). The last step
    may be shorter than the others.

    Args:
        done: the fraction of the warm-up that is over, 0 or more; 1 or more for none left.
        max_seq_length: the length after the warm-up, and before it if that is below ``min_seq_length``.

    Raises:
        TypeError, ValueError: ``done`` is not a number of at least 0, or a length or the step is not a positive whole number.

    Example:
        >>> from hocket_nlp.functional import warmup_sequence_length
        >>> [warmup_sequence_length(done / 4, max_seq_length=32) for done in range(6)]
        [8, 8, 16, 24, 32, 32]
    """
    who = "warmup_sequence_length"
    done = number(who, "done", done, 0.5, least=0)
    max_seq_length = whole_number(who, "max_seq_length", max_seq_length, 1024)
    min_seq_length = whole_number(who, "min_seq_length", min_seq_length, 8)
    step_size = whole_number(who, "step_size", step_size, 8)
    if done >= 1 or max_seq_length <= min_seq_length:
        return max_seq_length
    steps = math.floor((max_seq_length - min_seq_length) * done / step_size + 1e-9)
    return min_seq_length + steps * step_size


class SeqLengthWarmup(Algorithm):
    """Train on short sequences first, and on full ones after a warm-up (Li, Zhang and He 2022, arXiv 2108.06084).

    Each training batch is shortened as it comes from the loader, by :func:`truncate_sequences` or :func:`reshape_sequences`;
    the length is that of :func:`warmup_sequence_length`. It depends only on the time, so a resumed run continues exactly and
    all ranks agree. Evaluation batches are not changed. Tokens that truncation cuts off are not counted: a duration in tokens
    is in tokens that are trained on. Logs ``seq-length-warmup/length``, and the ``/dropped`` tokens of reshaped batches.

    Args:
        max_seq_length: the longest sequences, in tokens, also after the warm-up. None: those of the loader.
        min_seq_length: the length at the beginning.
        step_size: sequences grow by this many tokens at a time; multiples of 8 are fast on accelerators.
        warmup: the time until sequences are full: a fraction of the duration such as ``"0.3dur"``, or a time in ep, ba, sp or
            tok. Fractions and epochs advance by batch.
        truncate: whether the rest of long sequences is cut off, or else becomes sequences of its own in the same batch.
        preserve_end_of_sequence: keep the last token of truncated sequences.

    Raises:
        ValueError: a length or step is out of range, ``warmup`` is in seconds or not positive,
            ``preserve_end_of_sequence`` is given with ``truncate=False``, or, later, a batch cannot be shortened.

    Example:
        >>> import hocket, hocket_nlp, torch, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> tokens = torch.randint(16, (4, 32))
        >>> trainer = hocket.Trainer(
        ...     model=transformers.GPT2LMHeadModel(config), train_data=[{"input_ids": tokens, "labels": tokens}] * 10,
        ...     optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     algorithms=[hocket_nlp.SeqLengthWarmup(max_seq_length=32, warmup="0.5dur")],
        ... )
        >>> trainer.fit().timestamp.token  # instead of 1280: 4 sequences each of 8, 8, 16, 16, 24 and 5 times 32 tokens
        928
    """

    events = {Event.AFTER_DATALOADER}
    phase = Phase.DATA
    before = ("packing",)  # which joins sequences

    def __init__(
        self,
        max_seq_length: int | None = None,
        min_seq_length: int = 8,
        step_size: int = 8,
        warmup: str | Time = "0.3dur",
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        who = "SeqLengthWarmup"
        self.min_seq_length: int = whole_number(who, "min_seq_length", min_seq_length, 8, least=2)
        self.step_size: int = whole_number(who, "step_size", step_size, 8)
        self.max_seq_length: int | None = whole_number(who, "max_seq_length", max_seq_length, 1024, optional=True)
        if self.max_seq_length is not None and self.max_seq_length <= self.min_seq_length:
            raise WrongValue(
                f"SeqLengthWarmup was given «min_seq_length={min_seq_length}» and «max_seq_length={max_seq_length}», but "
                "sequences grow: give min_seq_length < max_seq_length, such as 8 and 1024, or no max_seq_length for the "
                "loader's."
            )
        self.truncate = switch(who, "truncate", truncate)
        self.preserve_end_of_sequence = switch(who, "preserve_end_of_sequence", preserve_end_of_sequence)
        if preserve_end_of_sequence and not truncate:
            raise WrongValue(
                "SeqLengthWarmup was given «preserve_end_of_sequence=True» and «truncate=False», which cuts no ends off: leave "
                "one of them out."
            )
        self.warmup = Time.parse(warmup)
        if self.warmup.unit is Unit.SECOND or not self.warmup.value > 0:
            raise WrongValue(
                f"SeqLengthWarmup was given «warmup='{warmup}'», which is not a positive time that all ranks reach at the same "
                "batch: give a fraction of the duration such as '0.3dur', or epochs, batches, samples or tokens."
            )
        self._checked = False

    def apply(self, event: Event, state: State) -> None:
        """Shorten the sequences of the batch to the current length."""
        done = state.completed(self.warmup.unit) / self.warmup.value
        now = batch_and_length(state.batch)[1]
        full = now if self.max_seq_length is None else self.max_seq_length
        length = min(now, warmup_sequence_length(done, full, self.min_seq_length, self.step_size))
        if not self._checked:
            self._check_first(state, done, now)
        values = {"seq-length-warmup/length": length}
        if self.truncate:
            state.batch = truncate_sequences(state.batch, length, self.preserve_end_of_sequence)
        else:
            state.batch, values["seq-length-warmup/dropped"] = reshape_sequences(state.batch, length)
        if not self._checked and length < now:
            self._check_shortened(state.batch, length, values.get("seq-length-warmup/dropped", 0))
        self._checked = True
        state.log(values)

    def _check_first(self, state: State, done: float, now: int) -> None:
        for module in state.model.modules():
            if getattr(getattr(module, "config", None), "is_encoder_decoder", False) is True:
                raise WrongValue(
                    f"SeqLengthWarmup changes the length of one kind of sequence, and {type(module).__name__} has an encoder "
                    "and a decoder with sequences of their own: remove it, or shorten both in the data's collate function."
                )
        if done < 1 and now <= self.min_seq_length:
            warn(
                f"SeqLengthWarmup leaves sequences of {now} tokens as they are, since they begin with "
                f"«min_seq_length={self.min_seq_length}». Give a smaller min_seq_length, or remove it.",
                NoEffectWarning,
            )

    def _check_shortened(self, batch: Any, length: int, dropped: int) -> None:
        labels = [each for each in tensors_named(batch, "labels") if each.dim() > 1 and not each.is_floating_point()]
        if labels and not any(bool((each != IGNORED).any()) for each in labels):
            raise WrongValue(
                f"No label is left in the first {length} tokens of each sequence of the first batch: labels of prompts are "
                "-100, and answers come later. Give a min_seq_length that includes them, or «truncate=False»."
            )
        if dropped:
            warn(
                f"SeqLengthWarmup dropped {dropped} tokens of the first batch, which are fewer than a sequence of {length}. "
                "The number for each batch is logged as seq-length-warmup/dropped. To keep them, let batches have "
                "attention_mask and labels, with which they are padded."
            )
