"""HuggingFaceTask against plain transformers: one step on the whole batch, however hocket divides it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from language import FAMILIES, LLAMA, SAMPLES, adamw, batch, model, trainer
from torch import Tensor
from torch.nn import functional as F

import hocket
from hocket.checkpoints import load_weights, read_weights
from hocket.testkit import run_ranks
from hocket_nlp import HuggingFaceTask


def by_transformers(family: str) -> dict[str, Tensor]:
    """One step of plain transformers on the whole batch."""
    plain = model(family)
    optimizer = adamw(plain.parameters())
    plain(**batch(family)).loss.backward()
    optimizer.step()
    return plain.state_dict()


def by_hocket(family: str, microbatch: int | None, ranks: int, folder: Any, wrapped: bool = True) -> dict[str, Tensor]:
    def train(rank: int) -> dict[str, Tensor]:
        plain = model(family)
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


@pytest.mark.parametrize("microbatch", [1, 3, None])
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_the_task_is_weighted_alike(family: str, tmp_path: Any) -> None:
    weights = by_hocket(family, 1, 1, tmp_path, wrapped=False)
    torch.testing.assert_close(weights, by_transformers(family), rtol=0, atol=1e-6)


def evaluated(family: str, batches: list[Any], folder: Any, **more: Any) -> dict[str, float]:
    return trainer(HuggingFaceTask(model(family)), [batch(family)], folder, **more).evaluate(batches)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "llama"])
def test_metrics_are_over_the_labels_that_count(family: str, tmp_path: Any) -> None:
    whole = batch(family)
    parts = [{name: value[part] for name, value in whole.items()} for part in (slice(0, 1), slice(1, 6))]
    found = evaluated(family, parts, tmp_path)
    with torch.no_grad():
        logits = model(family).eval()(**whole).logits.double()
    labels = whole["labels"]
    if family in ("gpt2", "llama"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    count = labels != -100
    loss = F.cross_entropy(logits[count], labels[count])
    assert found["eval/loss"] == pytest.approx(float(loss), rel=1e-6)
    assert found["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["eval/accuracy"] == pytest.approx(float((logits[count].argmax(-1) == labels[count]).double().mean()))


def test_other_metrics_get_shifted_logits_and_labels(tmp_path: Any) -> None:
    text = pytest.importorskip("torchmetrics.text")
    found = evaluated("gpt2", [batch("gpt2")], tmp_path, metrics={"other": text.Perplexity(ignore_index=-100)})
    assert found["eval/other"] == pytest.approx(found["eval/perplexity"], rel=1e-5)


def test_a_metric_by_name(tmp_path: Any) -> None:
    found = evaluated("classifier", [batch("classifier")], tmp_path, metrics="accuracy")
    with torch.no_grad():
        whole = batch("classifier")
        right = model("classifier").eval()(**whole).logits.argmax(-1) == whole["labels"]
    assert found["eval/accuracy"] == pytest.approx(float(right.double().mean()))


def test_tokens_are_those_that_are_not_padding(tmp_path: Any) -> None:
    made = trainer(HuggingFaceTask(model("gpt2")), [batch("gpt2")] * 2, tmp_path)
    made.fit()
    assert made.state.timestamp.token == 2 * (9 + 2 + 5 + 1 + 8 + 3)
    assert made.state.timestamp.sample == 2 * SAMPLES


def test_causal_models_without_labels_predict_their_inputs(tmp_path: Any, capsys: Any) -> None:
    whole = batch("gpt2")
    without = {name: value for name, value in whole.items() if name != "labels"}
    one, other = HuggingFaceTask(model("gpt2")), HuggingFaceTask(model("gpt2"))
    trainer(one, [without] * 2, tmp_path / "a", microbatch=1).fit()
    trainer(other, [whole] * 2, tmp_path / "b", microbatch=1).fit()
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert capsys.readouterr().err.count("no 'labels'; those of GPT2LMHeadModel are") == 1


def test_entries_that_the_model_does_not_take_are_omitted(tmp_path: Any, capsys: Any) -> None:
    made = trainer(HuggingFaceTask(model("gpt2")), [{**batch("gpt2"), "length": torch.ones(SAMPLES)}] * 2, tmp_path)
    made.fit()
    assert capsys.readouterr().err.count("'length', which GPT2LMHeadModel does not take") == 1


def test_tensors_and_batch_encodings_are_batches(tmp_path: Any) -> None:
    whole = batch("gpt2")
    trainer(HuggingFaceTask(model("gpt2")), [transformers.BatchEncoding(whole)], tmp_path / "a", microbatch=4).fit()
    trainer(HuggingFaceTask(model("gpt2")), [whole["input_ids"]], tmp_path / "b", microbatch=4).fit()


def test_tied_weights_stay_tied(tmp_path: Any) -> None:
    plain = model("gpt2")
    trainer(HuggingFaceTask(plain), [batch("gpt2")], tmp_path).fit()
    assert plain.lm_head.weight is plain.transformer.wte.weight


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing_changes_nothing(family: str, tmp_path: Any) -> None:
    checkpointed, plain = model(family), model(family)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each, name in ((checkpointed, "a"), (plain, "b")):
        trainer(HuggingFaceTask(each), [batch(family)] * 2, tmp_path / name, microbatch=2).fit()
    torch.testing.assert_close(checkpointed.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


# --- what is refused


def test_a_model_without_a_head() -> None:
    with pytest.raises(TypeError, match=r"GPT2Model\.forward takes none.*GPT2ForSequenceClassification"):
        HuggingFaceTask(model("gpt2").transformer)


def test_a_tokenizer_with_more_tokens_than_embeddings() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(40)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(
        ValueError, match=r"40 tokens, and GPT2LMHeadModel has embeddings for 31.*resize_token_embeddings"
    ):
        HuggingFaceTask(model("gpt2"), tokenizer)


def test_a_batch_without_labels(tmp_path: Any) -> None:
    without = {name: value for name, value in batch("bert").items() if name != "labels"}
    with pytest.raises(
        ValueError, match=r"'input_ids', 'attention_mask', and no labels.*DataCollatorForLanguageModeling"
    ):
        trainer(HuggingFaceTask(model("bert")), [without], tmp_path).fit()


def test_a_batch_that_is_no_mapping(tmp_path: Any) -> None:
    tokens = batch("gpt2")["input_ids"]
    with pytest.raises(TypeError, match=r"batch of list.*\{'input_ids': …"):
        trainer(HuggingFaceTask(model("gpt2")), [[tokens, tokens]], tmp_path).fit()


def mixture_of_experts() -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, **experts, pad_token_id=0)).train()


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
    made = trainer(HuggingFaceTask(model("gpt2")), [batch("gpt2")] * 2, tmp_path, checkpoints=str(tmp_path / "saved"))
    made.fit()
    made.close()
    plain = model("gpt2")
    load_weights(plain, read_weights(tmp_path / "saved" / "latest"))
    torch.testing.assert_close(plain.state_dict(), made.model_state_dict(), rtol=0, atol=0)
