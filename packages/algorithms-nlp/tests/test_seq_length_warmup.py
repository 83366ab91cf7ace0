"""Sequence-length warm-up: the line of the paper, written out; batches cut and joined; durations, ranks and resuming."""

from __future__ import annotations

import warnings
from collections import UserDict
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import BatchEncoding, T5Config, T5ForConditionalGeneration

import hocket
from hocket.loggers import MemoryLogger
from hocket_nlp import SeqLengthWarmup
from hocket_nlp.functional import reshape_sequences, truncate_sequences, warmup_sequence_length

# --- the schedule


@given(st.integers(0, 60), st.integers(1, 50), st.integers(2, 40), st.integers(1, 80), st.integers(1, 20))
def test_the_length_is_the_line_rounded_down_to_steps(done: int, total: int, low: int, more: int, step: int) -> None:
    """Li et al. 2022, in exact fractions: min + (max - min) * t / T, less its remainder by the step."""
    high = low + more
    line = low + more * min(Fraction(done, total), Fraction(1))
    expected = high if done >= total else low + (line - low) // step * step
    assert warmup_sequence_length(done / total, high, low, step) == expected


def test_the_lengths_of_the_paper_are_multiples_of_eight() -> None:
    lengths = [warmup_sequence_length(batch / 100, 1024, 64, 8) for batch in range(101)]
    assert all(length % 8 == 0 for length in lengths) and lengths == sorted(lengths)
    assert (lengths[0], lengths[50], lengths[99], lengths[100]) == (64, 544, 1008, 1024)


@pytest.mark.parametrize("arguments", [(-0.1, 8), (float("nan"), 8), (0.5, 0), (0.5, 8, 0), (0.5, 8, 2, 0)])
def test_lengths_that_mean_nothing_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"of at least 0|1 or more"):
        warmup_sequence_length(*arguments)


# --- truncation

RIGHT = torch.tensor([[5, 6, 7, 8, 9, 2], [3, 4, 2, 0, 0, 0]])
LEFT = torch.tensor([[5, 6, 7, 8, 9, 2], [0, 0, 0, 3, 4, 2]])


def batch_of(tokens: torch.Tensor) -> dict[str, Any]:
    mask = (tokens > 0).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def test_the_beginning_is_kept() -> None:
    short = truncate_sequences(batch_of(RIGHT), 4)
    assert short["input_ids"].tolist() == [[5, 6, 7, 8], [3, 4, 2, 0]]
    assert short["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert short["labels"].tolist() == [[5, 6, 7, 8], [3, 4, 2, -100]]


def test_the_beginning_of_a_sequence_that_is_padded_on_the_left_is_not_its_padding() -> None:
    short = truncate_sequences(batch_of(LEFT), 4)
    assert short["input_ids"].tolist() == [[5, 6, 7, 8], [0, 3, 4, 2]]
    assert short["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert truncate_sequences(batch_of(LEFT), 2)["input_ids"].tolist() == [[5, 6], [3, 4]]


@pytest.mark.parametrize(("tokens", "expected"), [(RIGHT, [[5, 6, 2], [3, 4, 2]]), (LEFT, [[5, 6, 2], [3, 4, 2]])])
def test_the_end_can_be_kept(tokens: torch.Tensor, expected: list[list[int]]) -> None:
    short = truncate_sequences(batch_of(tokens), 3, preserve_end_of_sequence=True)
    assert short["input_ids"].tolist() == short["labels"].tolist() == expected
    assert short["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    longer = truncate_sequences(batch_of(tokens), 4, preserve_end_of_sequence=True)["input_ids"].tolist()
    assert longer == [[5, 6, 7, 2], [3, 4, 2, 0] if tokens is RIGHT else [0, 3, 4, 2]]


def test_without_a_mask_the_end_is_the_last_token() -> None:
    ids = torch.arange(12).reshape(2, 6)
    short = truncate_sequences({"input_ids": ids}, 3, preserve_end_of_sequence=True)
    assert short["input_ids"].tolist() == [[0, 1, 5], [6, 7, 11]]


@pytest.mark.parametrize("kind", [dict, BatchEncoding, UserDict])
@pytest.mark.parametrize("masked", [False, True])
def test_all_tensors_of_tokens_follow_and_others_stay(kind: Any, masked: bool) -> None:
    tokens = torch.arange(1, 25).reshape(4, 6)
    vectors = torch.randn(4, 6, 3)
    batch = kind({"text": {"input_ids": tokens, "type": vectors}, "label": torch.arange(4), "scale": torch.tensor(2.0)})
    if masked:
        batch["text"]["attention_mask"] = torch.ones_like(tokens)
    short = truncate_sequences(batch, 2)
    assert type(short) is kind and batch["text"]["input_ids"].shape == (4, 6)
    assert torch.equal(short["text"]["input_ids"], tokens[:, :2]) and short["text"]["input_ids"].is_contiguous()
    assert torch.equal(short["text"]["type"], vectors[:, :2])
    assert short["label"] is batch["label"] and short["scale"] is batch["scale"]


def test_labels_of_shape_b_by_k_are_not_sequences() -> None:
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, 9)}
    assert truncate_sequences(batch, 3)["labels"] is batch["labels"]


def test_pairs_and_objects_go_by_their_first_sequences() -> None:
    inputs, targets = truncate_sequences((torch.zeros(4, 6), torch.ones(4, 6)), 2)
    assert inputs.shape == targets.shape == (4, 2)
    assert truncate_sequences(SimpleNamespace(input_ids=torch.zeros(4, 6)), 2).input_ids.shape == (4, 2)


@pytest.mark.parametrize("function", [truncate_sequences, reshape_sequences])
@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({"input_ids": torch.zeros(2, 4, 8)}, r"input_ids of \(2, 4, 8\).* one shape \(B, L\)"),
        ({"a": {"input_ids": torch.zeros(2, 8)}, "b": {"input_ids": torch.zeros(2, 9)}}, r"\(2, 8\) and \(2, 9\)"),
        ({"input_ids": torch.zeros(2, 8), "mask": torch.zeros(2, 8, 8)}, "every pair of 8 tokens"),
        ([torch.zeros(4)], r"no tensor of shape \(B, L\)"),
    ],
)
def test_what_cannot_be_shortened_is_named(function: Any, batch: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        function(batch, 4)


def test_masks_of_pairs_are_refused() -> None:
    batch = {"input_ids": torch.zeros(2, 8), "attention_mask": torch.zeros(2, 1, 8, 8)}
    with pytest.raises(ValueError, match=r"every pair of 8 tokens.*shape \(B, L\)"):
        truncate_sequences(batch, 4)


@pytest.mark.parametrize("length", [0, -1, 1.5])
@pytest.mark.parametrize("function", [truncate_sequences, reshape_sequences])
def test_a_length_is_a_number_of_tokens(function: Any, length: Any) -> None:
    with pytest.raises(ValueError, match="whole number, at least 1"):
        function(batch_of(RIGHT), length)


@pytest.mark.parametrize("length", [6, 7])
def test_short_batches_are_returned_as_they_are(length: int) -> None:
    batch = batch_of(RIGHT)
    assert truncate_sequences(batch, length) is batch
    again, dropped = reshape_sequences(batch, length)
    assert again is batch and dropped == 0


# --- reshaping


@given(st.integers(1, 5), st.integers(2, 9), st.data())
def test_reshaping_keeps_the_tokens_in_order(samples: int, now: int, data: Any) -> None:
    length = data.draw(st.integers(1, now))
    tokens = torch.arange(samples * now)
    batch = {"input_ids": tokens.reshape(samples, now), "vectors": torch.randn(samples, now, 11), "n": torch.tensor(1)}
    short, dropped = reshape_sequences(batch, length)
    kept = len(tokens) - dropped
    assert dropped == (len(tokens) % length if length < now else 0)
    assert short["input_ids"].shape == (kept // length, length if length < now else now) and short["n"] is batch["n"]
    assert torch.equal(short["input_ids"].flatten(), tokens[:kept])
    assert torch.equal(short["vectors"].flatten(0, 1), batch["vectors"].flatten(0, 1)[:kept])


def test_composers_example() -> None:
    """2 x 12 tokens in sequences of 7: Composer drops 3 and says nothing."""
    short, dropped = reshape_sequences({"input_ids": torch.arange(24).reshape(2, 12)}, 7)
    assert short["input_ids"].shape == (3, 7) and dropped == 3


@pytest.mark.parametrize("tokens", [RIGHT, LEFT])
def test_reshaping_drops_padding_and_pads_the_last_sequence(tokens: torch.Tensor) -> None:
    batch = batch_of(tokens) | {"position_ids": torch.arange(6).expand(2, 6)}
    short, dropped = reshape_sequences(batch, 4)
    assert dropped == 0
    assert short["input_ids"].tolist() == [[5, 6, 7, 8], [9, 2, 3, 4], [2, 0, 0, 0]]
    assert short["labels"].tolist() == [[5, 6, 7, 8], [9, 2, 3, 4], [2, -100, -100, -100]]
    assert short["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert short["position_ids"].shape == (3, 4)
    few = {name: value[1:] for name, value in batch.items()}  # 3 tokens, fewer than one sequence
    assert reshape_sequences(few, 5)[0]["input_ids"].tolist() == [[3, 4, 2, 0, 0]]


def test_without_labels_nothing_says_that_padding_does_not_count() -> None:
    batch = batch_of(RIGHT)
    del batch["labels"]
    short, dropped = reshape_sequences(batch, 4)
    assert short["input_ids"].tolist() == [[5, 6, 7, 8], [9, 2, 3, 4]] and dropped == 1
    few = {name: value[1:] for name, value in batch.items()}  # but a batch is never empty, and its mask hides padding
    short, dropped = reshape_sequences(few, 4)
    assert short["input_ids"].tolist() == [[3, 4, 2, 0]] and short["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert dropped == 0


def test_a_batch_of_padding_alone_stays() -> None:
    batch = batch_of(torch.zeros(2, 6, dtype=torch.long))
    assert reshape_sequences(batch, 4) == (batch, 0)


def test_labels_of_sequences_cannot_be_reshaped() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) cannot follow .*truncate=True"):
        reshape_sequences(batch_of(RIGHT) | {"label": torch.zeros(2)}, 4)


# --- in training


def trainer_of(build: Any, algorithm: Any, batches: int = 12, **changes: Any) -> tuple[hocket.Trainer, list[Any]]:
    """A Trainer on batches of 4 sequences of 20 tokens, and the shapes of its training batches, with modes."""
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model, seen = build("gpt2", heads=1, **drop).train(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((module.training, tuple(kwargs["input_ids"].shape))), with_kwargs=True
    )
    tokens = torch.randint(5, 61, (batches, 4, 20), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": each, "labels": each} for each in tokens]
    arguments = {"optimizer": "sgd(lr=0.1)", "duration": "1ep", "device": "cpu", "seed": 1, "train_data": data}
    return hocket.Trainer(model=model, algorithms=[algorithm], **arguments | changes), seen


@pytest.mark.parametrize(
    ("warmup", "duration"), [("0.5dur", "1ep"), ("0.5dur", "12ba"), ("6ba", "1ep"), ("24sp", "48sp"), ("1ep", "2ep")]
)
def test_sequences_grow_by_batch_whatever_the_unit(build: Any, warmup: str, duration: str) -> None:
    batches = 6 if duration == "2ep" else 12
    trainer, seen = trainer_of(build, SeqLengthWarmup(20, 4, 4, warmup), batches, duration=duration)
    result = trainer.fit()
    lengths = [4, 4, 8, 12, 12, 16, *[20] * 6]  # 4 + 4 * floor(16 / 4 * t / 6)
    assert seen == [(True, (4, length)) for length in lengths]
    assert (result.timestamp.sample, result.timestamp.token) == (48, 4 * sum(lengths))


def test_a_warmup_in_tokens_is_in_tokens_that_are_trained_on(build: Any) -> None:
    trainer, seen = trainer_of(build, SeqLengthWarmup(20, 4, 4, "160tok"), duration="300tok")
    done, lengths = 0, []
    while done < 300:
        lengths.append(warmup_sequence_length(done / 160, 20, 4, 4))
        done += 4 * lengths[-1]
    assert trainer.fit().timestamp.token == done
    assert [length for _, (_, length) in seen] == lengths and lengths[-1] == 20


def test_a_warmup_shorter_than_its_steps_skips_lengths(build: Any) -> None:
    """Composer divides by zero here."""
    trainer, seen = trainer_of(build, SeqLengthWarmup(20, 2, 1, "2ba"), batches=3)
    trainer.fit()
    assert [length for _, (_, length) in seen] == [2, 11, 20]


def test_without_a_maximum_the_loader_decides(build: Any) -> None:
    trainer, seen = trainer_of(build, SeqLengthWarmup(min_seq_length=4, step_size=4, warmup="4ba"), batches=5)
    trainer.fit()
    assert [length for _, (_, length) in seen] == [4, 8, 12, 16, 20]


def test_the_length_that_is_logged_is_that_of_the_batch(build: Any) -> None:
    log = MemoryLogger()
    trainer, seen = trainer_of(build, SeqLengthWarmup(64, 8, 8, "4ba"), 5, loggers=[log], log_every="1ba")
    trainer.fit()
    logged = [value for _, value in log.metrics["seq-length-warmup/length"]]
    assert logged == [length for _, (_, length) in seen] == [8, 16, 20, 20, 20]


def test_the_maximum_holds_after_the_warmup(build: Any) -> None:
    trainer, seen = trainer_of(build, SeqLengthWarmup(12, 4, 4, "2ba"), batches=4)
    trainer.fit()
    assert [length for _, (_, length) in seen] == [4, 8, 12, 12]


def test_reshaped_batches_count_all_tokens_that_are_kept_and_say_what_is_dropped(build: Any) -> None:
    log = MemoryLogger()
    algorithm = SeqLengthWarmup(20, 6, 6, "3ba", truncate=False)
    trainer, seen = trainer_of(build, algorithm, 4, loggers=[log], log_every="1ba")
    with pytest.warns(
        UserWarning, match=r"dropped 2 tokens of the first batch.* sequence of 6\..*attention_mask"
    ) as caught:
        result = trainer.fit()
    assert len(caught) == 1
    assert seen == [(True, shape) for shape in [(13, 6), (13, 6), (6, 12), (4, 20)]]
    assert [value for _, value in log.metrics["seq-length-warmup/length"]] == [6, 6, 12, 20]
    assert [value for _, value in log.metrics["seq-length-warmup/dropped"]] == [2, 2, 8, 0]
    assert (result.timestamp.sample, result.timestamp.token) == (16, 320 - 12)


def test_windows_count_tokens_in_the_same_way(build: Any) -> None:
    trainer, seen = trainer_of(build, SeqLengthWarmup(20, 4, 8, "2ba"), 6, accumulate="2ba")
    assert trainer.fit().timestamp.token == sum(rows * length for _, (rows, length) in seen) == 8 * (4 + 12 + 20)


def test_evaluation_sees_full_sequences(build: Any) -> None:
    trainer, seen = trainer_of(build, SeqLengthWarmup(20, 4, 4, "1dur"), 1)
    trainer.evaluate(trainer.state.train_data)
    trainer.fit()
    assert seen == [(False, (4, 20)), (True, (4, 4))]


def test_a_resumed_run_continues_with_the_length_of_its_time(build: Any) -> None:
    whole, seen = trainer_of(build, SeqLengthWarmup(20, 4, 4, "8ba"))
    first, _ = trainer_of(build, SeqLengthWarmup(20, 4, 4, "8ba"))
    first.fit("5ba")
    second, rest = trainer_of(build, SeqLengthWarmup(20, 4, 4, "8ba"))
    second.load_state_dict(first.state_dict())
    whole.fit(), second.fit()
    assert rest == seen[5:]
    for name, value in whole.model_state_dict().items():
        assert torch.equal(value, second.model_state_dict()[name])


# --- errors and warnings


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_seq_length": 8}, "min_seq_length < max_seq_length"),
        ({"warmup": "10min"}, "not a positive time that all ranks reach"),
        ({"warmup": "0ba"}, "not a positive time"),
        ({"truncate": False, "preserve_end_of_sequence": True}, "leave one of them out"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SeqLengthWarmup(**settings)


def test_sequences_that_are_short_already_are_a_warning(build: Any) -> None:
    trainer, _ = trainer_of(build, SeqLengthWarmup(64, 32), 1)
    with pytest.warns(hocket.NoEffectWarning, match="sequences of 20 tokens as they are.*min_seq_length=32"):
        trainer.fit()


def test_a_batch_whose_labels_are_all_cut_off_is_an_error(build: Any) -> None:
    labels = torch.full((4, 20), -100)
    labels[:, 10:] = 5
    batch = {"input_ids": torch.full((4, 20), 7), "labels": labels}
    trainer, _ = trainer_of(build, SeqLengthWarmup(20, 8, 4), train_data=[batch])
    with pytest.raises(ValueError, match=r"No label is left in the first 8 tokens.*min_seq_length"):
        trainer.fit()
    trainer, _ = trainer_of(build, SeqLengthWarmup(20, 12, 4), train_data=[batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit()


def test_models_with_two_kinds_of_sequences_are_refused() -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    tokens = torch.randint(16, (2, 12))
    trainer = hocket.Trainer(
        model=model, train_data=[{"input_ids": tokens, "labels": tokens}], optimizer="sgd(lr=0.1)", duration="1ep",
        algorithms=[SeqLengthWarmup(12, 4)], device="cpu",
    )  # fmt: skip
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        trainer.fit()
