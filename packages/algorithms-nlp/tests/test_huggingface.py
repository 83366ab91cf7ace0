"""HuggingFaceTask against plain transformers: one step on the whole batch, however hocket divides it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from language import FAMILIES, SAMPLES, VOCABULARY, adamw, batch, tiny, trainer
from torch import Tensor
from torch.nn import functional as F

import hocket
from hocket.checkpoints import load_weights, read_weights
from hocket_nlp import HuggingFaceTask
from hocket_testkit import run_ranks


def by_transformers(family: str) -> dict[str, Tensor]:
    """One step of plain transformers on the whole batch."""
    plain = tiny(family)
    optimizer = adamw(plain.parameters())
    plain(**batch(family)).loss.backward()
    optimizer.step()
    return plain.state_dict()


def by_hocket(family: str, microbatch: int | None, ranks: int, folder: Any, wrapped: bool = True) -> dict[str, Tensor]:
    def train(rank: int) -> dict[str, Tensor]:
        plain = tiny(family)
        whole = batch(family)
        samples: Any = [{name: value[i] for name, value in whole.items()} for i in range(SAMPLES)]
        hocket.Trainer(
            model=HuggingFaceTask(plain) if wrapped else plain,
            train_data=torch.utils.data.DataLoader(samples, SAMPLES),
            global_batch=SAMPLES,
            optimizer=adamw,
            microbatch=microbatch,
            strategy="ddp" if ranks > 1 else "single",
            duration="1ba",
            device="cpu",
            folder=folder,
        ).fit()
        return plain.state_dict()

    return run_ranks(train, ranks)[0] if ranks > 1 else train(0)


@pytest.mark.parametrize(
    "microbatch", [1, pytest.param(3, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_the_whole_batch(family: str, ranks: int, microbatch: int | None, tmp_path: Any) -> None:
    if ranks > 1:
        pytest.importorskip("hocket_strategies")
    weights = by_hocket(family, microbatch, ranks, tmp_path)
    torch.testing.assert_close(weights, by_transformers(family), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_undivided_step_is_bitwise_that_of_transformers(family: str, tmp_path: Any) -> None:
    weights = by_hocket(family, None, 1, tmp_path)
    torch.testing.assert_close(weights, by_transformers(family), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.* was in eval mode")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_the_task_is_weighted_alike(family: str, tmp_path: Any) -> None:
    weights = by_hocket(family, 1, 1, tmp_path, wrapped=False)
    torch.testing.assert_close(weights, by_transformers(family), rtol=0, atol=1e-6)


def evaluated(family: str, batches: list[Any], folder: Any, **more: Any) -> dict[str, float]:
    return trainer(HuggingFaceTask(tiny(family)), [batch(family)], folder, **more).evaluate(batches)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "llama"])
def test_metrics_are_over_the_labels_that_count(family: str, tmp_path: Any) -> None:
    whole = batch(family)
    parts = [{name: value[part] for name, value in whole.items()} for part in (slice(0, 1), slice(1, 6))]
    found = evaluated(family, parts, tmp_path)
    with torch.no_grad():
        logits = tiny(family).eval()(**whole).logits.double()
    labels = whole["labels"]
    if family in ("gpt2", "llama"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    count = labels != -100
    loss = F.cross_entropy(logits[count], labels[count])
    assert found["eval/loss"] == pytest.approx(float(loss), rel=1e-6)
    assert found["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["eval/accuracy"] == pytest.approx(float((logits[count].argmax(-1) == labels[count]).double().mean()))


def test_other_metrics_get_the_labels_that_count_shifted(tmp_path: Any) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    metric = classification.MulticlassAccuracy(VOCABULARY, top_k=5, average="micro")
    found = evaluated("gpt2", [batch("gpt2")], tmp_path, metrics={"top5": metric})
    with torch.no_grad():
        logits = tiny("gpt2").eval()(**batch("gpt2")).logits[:, :-1]
    labels = batch("gpt2")["labels"][:, 1:]
    count = labels != -100
    right = (logits.topk(5).indices == labels[..., None]).any(-1)[count]
    assert found["eval/top5"] == pytest.approx(float(right.double().mean()))


def test_as_many_classes_as_tokens(tmp_path: Any) -> None:
    """Dimension 1 of the logits is the sequence, of whatever length."""
    whole = batch("tokens")
    whole["labels"] = torch.arange(SAMPLES * 9).reshape(SAMPLES, 9) % 9
    task = HuggingFaceTask(tiny("tokens", num_labels=9))
    found = trainer(task, [whole], tmp_path, metrics={"named": "accuracy"}).evaluate([whole])
    with torch.no_grad():
        right = tiny("tokens", num_labels=9).eval()(**whole).logits.argmax(-1) == whole["labels"]
    assert found["eval/accuracy"] == pytest.approx(float(right.double().mean()))


def test_a_metric_by_name(tmp_path: Any) -> None:
    found = evaluated("classifier", [batch("classifier")], tmp_path, metrics="accuracy")
    with torch.no_grad():
        whole = batch("classifier")
        right = tiny("classifier").eval()(**whole).logits.argmax(-1) == whole["labels"]
    assert found["eval/accuracy"] == pytest.approx(float(right.double().mean()))


def test_tokens_are_those_that_are_not_padding(tmp_path: Any) -> None:
    made = trainer(HuggingFaceTask(tiny("gpt2")), [batch("gpt2")] * 2, tmp_path)
    made.fit()
    assert made.state.timestamp.token == 2 * (9 + 2 + 5 + 1 + 8 + 3)
    assert made.state.timestamp.sample == 2 * SAMPLES


def test_causal_models_without_labels_predict_their_inputs(tmp_path: Any, capsys: Any) -> None:
    whole = batch("gpt2")
    without = {name: value for name, value in whole.items() if name != "labels"}
    one, other = HuggingFaceTask(tiny("gpt2")), HuggingFaceTask(tiny("gpt2"))
    trainer(one, [without] * 2, tmp_path / "a", microbatch=1).fit()
    trainer(other, [whole] * 2, tmp_path / "b", microbatch=1).fit()
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert capsys.readouterr().err.count("no 'labels'; those of GPT2LMHeadModel are") == 1


def test_entries_that_the_model_does_not_take_are_omitted(tmp_path: Any, capsys: Any) -> None:
    made = trainer(HuggingFaceTask(tiny("gpt2")), [{**batch("gpt2"), "length": torch.ones(SAMPLES)}] * 2, tmp_path)
    made.fit()
    assert capsys.readouterr().err.count("'length', which GPT2LMHeadModel does not take") == 1


def test_tensors_and_batch_encodings_are_batches(tmp_path: Any) -> None:
    whole = batch("gpt2")
    trainer(HuggingFaceTask(tiny("gpt2")), [transformers.BatchEncoding(whole)], tmp_path / "a", microbatch=4).fit()
    trainer(HuggingFaceTask(tiny("gpt2")), [whole["input_ids"]], tmp_path / "b", microbatch=4).fit()


def test_a_model_of_from_pretrained_is_put_into_train_mode_and_frozen_parts_are_not(tmp_path: Any) -> None:
    task = HuggingFaceTask(tiny("gpt2").eval())
    trainer(task, [batch("gpt2")], tmp_path).fit()  # without the warning about eval mode
    assert task.network.training
    kept = tiny("gpt2").train()
    kept.transformer.h[0].eval()
    assert not HuggingFaceTask(kept).network.transformer.h[0].training


def test_tied_weights_stay_tied(tmp_path: Any) -> None:
    plain = tiny("gpt2")
    trainer(HuggingFaceTask(plain), [batch("gpt2")], tmp_path).fit()
    assert plain.lm_head.weight is plain.transformer.wte.weight


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing_changes_nothing(family: str, tmp_path: Any) -> None:
    checkpointed, plain = tiny(family), tiny(family)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each, name in ((checkpointed, "a"), (plain, "b")):
        trainer(HuggingFaceTask(each), [batch(family)] * 2, tmp_path / name, microbatch=2).fit()
    torch.testing.assert_close(checkpointed.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


# --- what is refused


def test_a_model_without_a_head() -> None:
    with pytest.raises(TypeError, match=r"GPT2Model\.forward takes none.*GPT2ForSequenceClassification"):
        HuggingFaceTask(tiny("gpt2").transformer)


def test_a_tokenizer_with_more_tokens_than_embeddings() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(70)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(
        ValueError, match=r"70 tokens, and GPT2LMHeadModel has embeddings for 61.*resize_token_embeddings"
    ):
        HuggingFaceTask(tiny("gpt2"), tokenizer)


def test_a_batch_without_labels(tmp_path: Any) -> None:
    without = {name: value for name, value in batch("bert").items() if name != "labels"}
    with pytest.raises(
        ValueError, match=r"'input_ids', 'attention_mask', and no 'labels'.*DataCollatorForLanguageModeling"
    ):
        trainer(HuggingFaceTask(tiny("bert")), [without], tmp_path).fit()


def test_a_batch_that_is_no_mapping(tmp_path: Any) -> None:
    tokens = batch("gpt2")["input_ids"]
    with pytest.raises(TypeError, match=r"batch of list.*\{'input_ids': …"):
        trainer(HuggingFaceTask(tiny("gpt2")), [[tokens, tokens]], tmp_path).fit()


def mixture_of_experts() -> Any:
    return tiny("mixtral", num_local_experts=2, num_experts_per_tok=1)


@pytest.mark.filterwarnings("ignore:.* was in eval mode")
def test_a_loss_that_is_more_than_a_mean_over_labels_is_not_divided(tmp_path: Any) -> None:
    """Mixtures of experts add a term over all tokens of the batch, which is no mean."""
    trainer(HuggingFaceTask(mixture_of_experts()), [batch("llama")], tmp_path / "a").fit()
    with pytest.raises(ValueError, match=r"not certain what that is a mean over.*loss_reduction='mean'"):
        trainer(HuggingFaceTask(mixture_of_experts()), [batch("llama")], tmp_path / "b", microbatch=2).fit()
    with pytest.raises(ValueError, match=r"hocket_nlp\.HuggingFaceTask"):
        trainer(mixture_of_experts(), [batch("llama")], tmp_path / "c", microbatch=2).fit()
    said = {"loss_reduction": "mean", "microbatch": 2}
    trainer(HuggingFaceTask(mixture_of_experts()), [batch("llama")], tmp_path / "d", **said).fit()


def test_checkpoints_hold_the_weights_under_the_names_of_the_model(tmp_path: Any) -> None:
    made = trainer(HuggingFaceTask(tiny("gpt2")), [batch("gpt2")] * 2, tmp_path, checkpoints=str(tmp_path / "saved"))
    made.fit()
    made.close()
    plain = tiny("gpt2")
    load_weights(plain, read_weights(tmp_path / "saved" / "latest"))
    torch.testing.assert_close(plain.state_dict(), made.model_state_dict(), rtol=0, atol=0)


# --- kinds of models


def inputs() -> dict[str, Tensor]:
    return {name: value for name, value in batch("bert").items() if name != "labels"}


def divided_like_whole(make: Any, whole: Any, folder: Any, **more: Any) -> None:
    """A step with microbatches of one sample is that of the whole batch."""
    weights = []
    for microbatch in (None, 1):
        task = HuggingFaceTask(make())
        trainer(task, [whole], folder / str(microbatch), microbatch=microbatch, **more).fit()
        weights.append(task.network.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


def test_answers_to_questions_are_counted(tmp_path: Any) -> None:
    """One row has its answer beyond the text, which does not count."""
    whole = {
        **inputs(),
        "start_positions": torch.tensor([1, 0, 2, 9, 3, 1]),
        "end_positions": torch.tensor([2, 1, 3, 9, 4, 2]),
    }
    divided_like_whole(lambda: tiny("BertForQuestionAnswering"), whole, tmp_path)


def test_an_answer_with_one_end_outside_of_the_text_is_refused(tmp_path: Any) -> None:
    """Start and end are means over different numbers of answers, so that the gradient would depend on microbatches."""
    positions = {
        "start_positions": torch.tensor([1, 0, 2, 6, 3, 1]),
        "end_positions": torch.tensor([2, 1, 3, 9, 4, 2]),
    }
    task = HuggingFaceTask(tiny("BertForQuestionAnswering"))
    with pytest.raises(ValueError, match=r"Row 3 .* from 6 to 9, of which one end is outside of the 9 tokens"):
        trainer(task, [{**inputs(), **positions}], tmp_path).fit()


@pytest.mark.parametrize("labels", [torch.rand(SAMPLES, 1), torch.rand(SAMPLES)])
def test_regression_has_no_accuracy(labels: Tensor, tmp_path: Any) -> None:
    make = lambda: tiny("BertForSequenceClassification", num_labels=1)  # noqa: E731
    divided_like_whole(make, {**inputs(), "labels": labels}, tmp_path)
    found = trainer(HuggingFaceTask(make()), [inputs()], tmp_path).evaluate([{**inputs(), "labels": labels}])
    assert set(found) == {"eval/loss"}


def test_several_classes_at_once(tmp_path: Any) -> None:
    make = lambda: tiny("BertForSequenceClassification", num_labels=3)  # noqa: E731
    whole = {**inputs(), "labels": (torch.arange(SAMPLES * 3).reshape(SAMPLES, 3) % 2).float()}
    divided_like_whole(make, whole, tmp_path)
    found = trainer(HuggingFaceTask(make()), [whole], tmp_path).evaluate([whole])
    with torch.no_grad():
        right = (make().eval()(**whole).logits > 0) == whole["labels"].bool()
    assert found["eval/accuracy"] == pytest.approx(float(right.double().mean()))


def test_a_causal_model_that_does_not_shift_needs_labels(tmp_path: Any) -> None:
    """Without them it would learn to repeat its input."""

    def make() -> Any:
        torch.manual_seed(0)
        size = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
        return transformers.BartForCausalLM(transformers.BartConfig(vocab_size=VOCABULARY, dropout=0.0, **size))

    with pytest.raises(ValueError, match=r"learn to repeat 'input_ids'\. Add labels of the next tokens"):
        trainer(HuggingFaceTask(make()), [inputs()], tmp_path).fit()
    divided_like_whole(make, batch("gpt2"), tmp_path)


def test_perplexity_of_a_mixture_of_experts_is_that_of_the_next_tokens(tmp_path: Any) -> None:
    found = trainer(HuggingFaceTask(mixture_of_experts()), [batch("llama")], tmp_path, loss_reduction="mean").evaluate(
        [batch("llama")]
    )
    with torch.no_grad():
        logits = mixture_of_experts().eval()(**batch("llama")).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), batch("llama")["labels"][:, 1:].flatten())
    assert found["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_16_bits_are_divided(family: str, tmp_path: Any) -> None:
    pytest.importorskip("hocket_strategies")
    trainer(HuggingFaceTask(tiny(family)), [batch(family)], tmp_path, microbatch=2, precision="bf16-true").fit()


def test_names_of_a_class_are_those_of_its_bases() -> None:
    class Mine(transformers.GPT2LMHeadModel):
        pass

    assert set(HuggingFaceTask(Mine(tiny("gpt2").config)).metrics("eval")) == {"perplexity", "accuracy"}


def test_tokens_of_several_choices(tmp_path: Any) -> None:
    tokens = torch.ones(2, 3, 9, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    mask[..., :4] = 1
    counts = HuggingFaceTask(tiny("BertForMultipleChoice")).count({"input_ids": tokens, "attention_mask": mask})
    assert counts == (2, 24)


@pytest.mark.parametrize(
    "given, match",
    [
        ("gpt2", r"'gpt2', which is not a model\. Give a model of transformers"),
        (transformers.GPT2LMHeadModel, r"which is not a model"),
        (torch.nn.Linear(2, 2), r"Linear\.forward takes none"),
    ],
)
def test_what_is_no_model(given: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        HuggingFaceTask(given)


def test_a_wrapped_model() -> None:
    with pytest.raises(TypeError, match=r"OptimizedModule, which wraps a model.*compile="):
        HuggingFaceTask(torch.compile(tiny("gpt2")))
    with pytest.raises(TypeError, match=r"HuggingFaceTask, which wraps a model"):
        HuggingFaceTask(HuggingFaceTask(tiny("gpt2")))


def test_what_is_no_tokenizer() -> None:
    with pytest.raises(TypeError, match=r"tokenizer='gpt2' is not a tokenizer"):
        HuggingFaceTask(tiny("gpt2"), "gpt2")


def test_a_label_under_another_name(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"Rename 'label' to 'labels'"):
        trainer(
            HuggingFaceTask(tiny("classifier")), [{**inputs(), "label": torch.zeros(6, dtype=torch.int64)}], tmp_path
        ).fit()
