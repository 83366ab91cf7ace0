"""Packed batches against the padded ones: rows, masks, losses and gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from language import gradients, tiny
from torch import Tensor, nn
from transformers import BatchEncoding

import hocket
from hocket.surgery import NoEffectWarning
from hocket_nlp import Packing, packing_trial
from hocket_nlp.functional import alibi, pack
from hocket_nlp.packed_rows import first_fit_decreasing
from hocket_nlp.packing_trial import Layout, layout_of
from hocket_testkit import run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
LENGTHS = (7, 2, 9, 4, 1, 3, 5)


def padded(lengths: tuple[int, ...] = LENGTHS, side: str = "right", width: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Documents of 5 to 60, padded with 0; the labels of the first two tokens of long ones are ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch = {name: torch.zeros(len(lengths), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(width - length, width)
        tokens = torch.randint(5, 61, (length,), generator=generator)
        batch["input_ids"][row, place], batch["attention_mask"][row, place] = tokens, 1
        ignored = 2 if length > 4 else int(side == "left")  # a token after padding would be predicted from it
        batch["labels"][row, place] = torch.where(torch.arange(length) < ignored, -100, tokens)
    return batch


# --- the batch


def documents_of(packed: dict[str, Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Read documents back by their positions alone: tokens and labels."""
    for tokens, labels, positions in zip(packed["input_ids"], packed["labels"], packed["position_ids"], strict=True):
        starts = [place for place, position in enumerate(positions.tolist()) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            assert positions[start:stop].tolist() == list(range(stop - start))
            yield tokens[start:stop].tolist(), labels[start:stop].tolist()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.sampled_from(["left", "right"]),
    st.integers(0, 9),
)
def test_every_document_is_in_one_row_and_its_first_label_does_not_count(lengths, side, extra) -> None:
    batch = padded(tuple(lengths), side)
    packed = pack(batch, 9 + extra)
    assert packed["input_ids"].shape[1] == 9 + extra
    found = [
        each for each in documents_of(packed) if any(label != -100 for label in each[1][1:]) or len(each[0]) < 9 + extra
    ]
    for row, length in enumerate(lengths):
        if length:
            visible = batch["attention_mask"][row].bool()
            tokens, labels = batch["input_ids"][row][visible].tolist(), batch["labels"][row][visible].tolist()
            assert (tokens, [-100, *labels[1:]]) in found or length == 9 + extra
    counted = (packed["labels"] != -100).sum()
    starts = batch["attention_mask"].int().argmax(1)
    assert counted == (batch["labels"] != -100).sum() - (batch["labels"].gather(1, starts[:, None]) != -100).sum()


@given(st.lists(st.integers(0, 16), max_size=40))
def test_first_fit_decreasing_by_the_definition(lengths) -> None:
    rows = first_fit_decreasing(lengths, 16)
    assert sorted(index for row in rows for index in row) == [i for i, length in enumerate(lengths) if length]
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)
    bins: list[list[int]] = []  # again, naively
    for length, index in sorted(((-length, index) for index, length in enumerate(lengths) if length)):
        for each in bins:
            if sum(lengths[other] for other in each) - length <= 16:
                each.append(index)
                break
        else:
            bins.append([index])
    assert sorted(map(sorted, bins)) == rows
    filled = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > 16  # no two rows would fit into one


def test_an_example_by_hand() -> None:
    batch = padded((3, 2, 4), width=5)
    batch["weights"] = torch.arange(15.0).view(3, 5)
    batch["scale"] = torch.tensor(2.0)
    packed = pack(batch | {"note": 1})
    first, second, third = (row[:length] for row, length in zip(batch["input_ids"], (3, 2, 4), strict=True))
    assert packed["input_ids"].tolist() == [[*first.tolist(), *second.tolist()], [*third.tolist(), int(third[-1])]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert packed["labels"].tolist() == [
        [-100, *first[1:].tolist(), -100, *second[1:].tolist()],
        [-100, *third[1:].tolist(), -100],
    ]
    assert packed["weights"].tolist() == [[0, 1, 2, 5, 6], [10, 11, 12, 13, 0]]
    assert packed["use_cache"] is False and "attention_mask" not in packed
    assert packed["note"] == 1 and packed["scale"] is batch["scale"]
    assert pack(batch, 8)["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert list(batch) == ["input_ids", "attention_mask", "labels", "weights", "scale"]


def test_bidirectional_batches_get_a_mask_of_pairs() -> None:
    packed = pack(padded((3, 2, 4), width=5), causal=False, first_position=2)
    assert packed["position_ids"].tolist() == [[2, 3, 4, 2, 3], [2, 3, 4, 5, 2]]
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)), torch.block_diag(torch.ones(4, 4), torch.ones(1, 1))
    assert torch.equal(packed["attention_mask"], torch.stack(blocks)[:, None].bool())
    assert (packed["labels"] != -100).sum() == 3 + 2 + 4 and "use_cache" not in packed


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_mappings_keep_their_kind(kind) -> None:
    packed = pack(kind(padded()))
    assert type(packed) is kind and packed["input_ids"].shape == (4, 9)


def test_rows_without_a_mask_are_documents() -> None:
    tokens = torch.arange(12).view(3, 4)
    assert pack({"input_ids": tokens})["input_ids"].tolist() == tokens.tolist()
    packed = pack({"input_ids": tokens, "labels": tokens}, 8)
    assert packed["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 11, 11, 11, 11]]
    assert packed["labels"][0].tolist() == [-100, 1, 2, 3, -100, 5, 6, 7]
    assert pack({"inputs_embeds": torch.ones(3, 4, 2)}, 12)["inputs_embeds"].shape == (1, 12, 2)


@pytest.mark.parametrize(
    ("change", "length", "error"),
    [
        ({"position_ids": torch.zeros(7, 9)}, None, "packed already"),
        ({"attention_mask": torch.ones(7, 1, 9, 9)}, None, r"shape \(7, 1, 9, 9\), and packing needs \(7, 9\)"),
        ({"attention_mask": torch.tensor([[1, 0, 1]]).expand(7, 3).repeat(1, 3)}, None, "Row 0 .*zeros between ones"),
        ({"attention_mask": torch.zeros(7, 9)}, None, "no document to pack|labels of padding"),
        ({"labels": torch.ones(7, 9).long()}, None, r"32 labels of padding are not -100.*set labels to -100"),
        (
            {"labels": torch.ones(7).long()},
            None,
            r"'labels' of shape \(7,\) cannot be packed.*Labels of whole sequences",
        ),
        ({}, 8, "A document of 9 tokens does not fit into rows of length=8"),
    ],
)
def test_what_cannot_be_packed_is_named(change, length, error) -> None:
    with pytest.raises(ValueError, match=error):
        pack(padded() | change, length)


def test_batches_without_tokens_are_named() -> None:
    with pytest.raises(TypeError, match="this tuple is not a mapping"):
        pack((torch.zeros(2, 3), torch.zeros(2)))
    with pytest.raises(TypeError, match="this dict with 'tokens'"):
        pack({"tokens": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="no document"):
        pack({name: value for name, value in padded((0, 0)).items() if name != "labels"})


# --- what models compute


def compare(family: str, implementation: str, side: str = "right", length: int | None = None, **changes: Any) -> None:
    """Loss and gradients of the packed batch are those of the padded one."""
    plain = tiny(family, implementation).train()
    packing = changes.pop("prepare", lambda model: model)(copy.deepcopy(plain))
    plain = changes.pop("both", lambda model: model)(plain)
    layout = layout_of(packing, pack)
    batch = padded(side=side)
    packed = pack(batch, length, **layout._asdict())
    assert len(packed["input_ids"]) < len(batch["input_ids"]) and len(packed["input_ids"]) > 1
    losses = [plain(**batch).loss, packing(**packed).loss]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    ours, theirs = gradients(packing), gradients(plain)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma3", "neox"])
def test_causal_models_compute_the_loss_and_gradients_of_the_padded_batch(family, implementation) -> None:
    compare(family, implementation)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_bidirectional_models_too(family) -> None:
    compare(family, "sdpa")


def test_left_padding_and_longer_rows() -> None:
    compare("llama", "sdpa", side="left")  # rotary positions are relative
    compare("gpt2", "sdpa", length=12)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing() -> None:
    def checkpointed(model: Any) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    compare("llama", "sdpa", prepare=checkpointed)


def test_linear_biases_are_by_distance_within_documents(implementation) -> None:
    def biased(model: Any) -> Any:
        return alibi(model, 64)[0]

    compare("gpt2", implementation, prepare=biased, both=biased)


def test_without_use_cache_false_a_model_would_mix_documents() -> None:
    """Why a packed batch says use_cache=False: with caches transformers does not look at positions."""
    model = tiny("gpt2").train()
    packed = pack(padded())
    apart = model(**packed).logits
    del packed["use_cache"]
    assert (model(**packed).logits - apart).abs().max() > 1e-3


# --- the trial


@pytest.mark.parametrize(
    ("family", "implementation", "layout"),
    [
        ("gpt2", "sdpa", Layout(True, 0)),
        ("GPT2DoubleHeadsModel", "eager", Layout(True, 0)),
        ("mixtral", "sdpa", Layout(True, 0)),
        ("cohere", "eager", Layout(True, 0)),
        ("bert", "sdpa", Layout(False, 0)),
        ("roberta", "sdpa", Layout(False, 2)),
    ],
)
def test_the_layout_is_found_in_any_dtype(family, implementation, layout) -> None:
    model = tiny(family, implementation).train()
    assert layout_of(model, pack) == layout == layout_of(model.bfloat16(), pack)
    assert model.training and not gradients(model) and not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize(
    ("family", "implementation", "why"),
    [
        ("opt", "sdpa", "documents in a row attend to each other"),
        ("bert", "eager", "documents in a row attend to each other"),
        ("bert decoder", "sdpa", "documents in a row attend to each other"),
        ("mamba", "eager", "documents in a row attend to each other"),
        ("t5", "eager", "is an encoder-decoder"),
        ("GPT2ForSequenceClassification", "sdpa", "does not return one output for each token"),
    ],
)
def test_models_that_would_mix_documents_are_refused(family, implementation, why) -> None:
    with pytest.raises(
        ValueError, match=rf"Packing cannot be used with .*{why}.*supports .*GPT-2, Llama.*remove packing"
    ):
        layout_of(tiny(family, implementation), pack)


def test_other_trials_that_fail() -> None:
    with pytest.raises(TypeError, match="no model of transformers in Linear"):
        layout_of(nn.Linear(2, 2), pack)
    with pytest.raises(ValueError, match="meta device"):
        layout_of(tiny("gpt2").to("meta"), pack)
    with pytest.raises(ValueError, match=r"failed \(IndexError"):
        layout_of(tiny("gpt2", max_position_embeddings=2), pack)
    pair = nn.ModuleList([tiny("gpt2"), tiny("bert")])
    with pytest.raises(ValueError, match="packed in different ways"):
        layout_of(pair, pack)
    assert layout_of(nn.ModuleList([tiny("gpt2"), tiny("llama")]), pack) == Layout(True, 0)


def test_an_output_layer_of_zeros_and_states_of_zeros() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert layout_of(model, pack) == Layout(True, 0)
        model.model.norm.weight.zero_()
    with pytest.raises(ValueError, match="do not depend on its input tokens, so the trial shows nothing"):
        layout_of(model, pack)


def test_positions_that_are_wrong_are_noticed() -> None:
    def unrestarted(batch: Any, length: int, **options: Any) -> Any:
        packed = pack(batch, length, **options)
        packed["position_ids"] = packed["position_ids"] + 7
        return packed

    with pytest.raises(ValueError, match="other positions than separate ones"):
        layout_of(tiny("gpt2"), unrestarted)


def test_the_trial_draws_no_random_numbers() -> None:
    model = tiny("gpt2", resid_pdrop=0.5).train()
    state = torch.get_rng_state()
    layout_of(model, pack)
    assert torch.equal(torch.get_rng_state(), state)


# --- in a Trainer


def run(algorithms: Any, family: str = "llama", **changes: Any) -> hocket.Trainer:
    arguments = {
        "model": tiny(family).train(), "train_data": [padded(), padded((1, 9, 3, 3, 3, 2, 8), seed=1)], "duration": "1ep",
        "optimizer": "sgd(lr=1.0)", "device": "cpu", "seed": 1, "algorithms": algorithms,
    }  # fmt: skip
    trainer = hocket.Trainer(**{**arguments, **changes})
    trainer.fit()
    trainer.close()
    return trainer


def assert_same_weights(ours: Any, theirs: Any) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_steps_are_those_of_padded_batches(family, microbatch) -> None:
    rows: list[int] = []

    class Rows(hocket.Callback):
        def before_forward(self, state: hocket.State) -> None:
            rows.append(len(state.batch["input_ids"]))

    plain = run([], family)
    packed = run(["packing"], family, microbatch=microbatch, callbacks=[Rows()])
    assert_same_weights(packed.model_state_dict(), plain.model_state_dict())
    torch.testing.assert_close(packed.state.loss, plain.state.loss)
    assert packed.state.timestamp.sample == plain.state.timestamp.sample == 14
    assert packed.state.timestamp.token == 72 < plain.state.timestamp.token == 14 * 9  # 8 rows of 9 tokens
    assert rows == {None: [4, 4], 1: [1] * 8, 3: [3, 1, 3, 1]}[microbatch]
    evaluated = [padded(seed=2)]
    assert packed.evaluate(evaluated)["eval/loss"] == pytest.approx(plain.evaluate(evaluated)["eval/loss"], abs=1e-5)


def test_fused_cross_entropy_and_packing_together() -> None:
    both = run(["packing", "fused-cross-entropy"], microbatch=1)
    assert_same_weights(both.model_state_dict(), run([]).model_state_dict())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_pack_their_own_rows(strategy) -> None:
    pytest.importorskip("hocket_strategies")
    plain = {
        name: value.clone()
        for name, value in run([], train_data=[padded((7, 2, 9, 4, 1, 3))]).model_state_dict().items()
    }

    def rank_main(rank: int) -> Any:
        warnings.filterwarnings("ignore", "Every rank reads all")
        data = [padded((7, 2, 9, 4, 1, 3))]
        return run(["packing"], train_data=data, strategy=strategy, microbatch=1, global_batch=6).model_state_dict()

    for found in run_ranks(rank_main, 2):
        assert_same_weights(found, plain)


def test_a_task_that_passes_on_too_little_is_an_error(monkeypatch) -> None:
    class Language(hocket.Task):
        def __init__(self, *names: str, **more: Any) -> None:
            super().__init__()
            self.lm, self.names, self.more = tiny("gpt2").train(), names, more

        def forward(self, batch: Any) -> Any:
            return self.lm(**{name: batch[name] for name in self.names}, **self.more)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.loss

    tokens = "input_ids", "labels"
    for task, why in [
        (Language(*tokens), "did not get its position_ids"),
        (Language(*tokens, "position_ids"), "did not get use_cache=False"),
        (Language(*tokens, "position_ids", "use_cache", attention_mask=torch.ones(4, 9)), "got an attention_mask"),
    ]:
        with pytest.raises(ValueError, match=rf"the model of Language {why}.*let forward\(batch\) call model"):
            run(["packing"], model=task)
        assert not any(module._forward_pre_hooks for module in task.modules())
    looked: list[Any] = []
    real = packing_trial.passes_on
    monkeypatch.setattr("hocket_nlp.packing.passes_on", lambda *args: looked.append(args) or real(*args))
    run(["packing"], model=Language(*tokens, "position_ids", "use_cache"))
    assert len(looked) == 1  # in the first of two batches


def test_nothing_to_pack_warns_once() -> None:
    data = [{name: value[:2] for name, value in padded((9, 9)).items() if name != "attention_mask"}] * 2
    with pytest.warns(NoEffectWarning, match=r"no 'attention_mask'.*set length") as caught:
        run([Packing()], train_data=data)
    assert sum("nothing to pack" in str(each.message) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        run([Packing(18)], train_data=data)
        run([Packing()])
