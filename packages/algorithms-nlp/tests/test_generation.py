"""Generation in evaluation and as a callback, against transformers' own generate, one row at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from language import SAMPLES, adamw, batch, tiny, tokenizer, trainer
from torch.utils.data import DataLoader

import hocket
from hocket.loggers.memory import MemoryLogger
from hocket_nlp import Generate, HuggingFaceTask
from hocket_nlp.generation import prompts_of
from hocket_testkit import run_ranks

GREEDY = {"max_new_tokens": 5, "do_sample": False}


def answers() -> dict[str, torch.Tensor]:
    """Prompts of different lengths and what is to be answered; the last row is padded."""
    whole = batch("gpt2")
    tokens = whole["input_ids"].clamp(min=3)
    mask = torch.ones_like(tokens)
    mask[-1, 7:] = 0
    labels = tokens.where(torch.arange(9) >= torch.tensor([1, 2, 3, 4, 5, 6])[:, None], -100).where(mask.bool(), -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def alone(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers generates for one prompt without padding."""
    return model.generate(tokens[None], attention_mask=torch.ones_like(tokens[None]), pad_token_id=1, **GREEDY)[0]


class Texts:
    """Collects what a metric of texts is given."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def update(self, predictions: list[str], references: list[str]) -> None:
        self.seen += zip(predictions, references, strict=True)

    def compute(self) -> float:
        return float(len(self.seen))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_causal_models_continue_the_prompt_of_each_row(family: str, tmp_path: Any) -> None:
    words = tokenizer()
    task = HuggingFaceTask(tiny(family), words, generate=GREEDY, text_metrics={"texts": Texts()})
    made = trainer(task, [answers()], tmp_path)
    found = made.evaluate([answers()])
    assert found["eval/texts"] == SAMPLES and {"eval/loss", "eval/perplexity"} <= set(found)
    task.eval()
    outputs, whole = task.eval_forward(answers()), answers()
    for row, (tokens, length) in enumerate(zip(whole["input_ids"], [1, 2, 3, 4, 5, 6], strict=True)):
        want = alone(task.network, tokens[:length])[length:]
        got = outputs["generated"][row]
        assert torch.equal(got[: len(want)], want) and (got[len(want) :] == 1).all()
    metric = Texts()
    metric._of_texts = True
    task.update_metric(metric, outputs, whole)
    assert metric.seen[0][1] == words.decode(whole["input_ids"][0, 1:], skip_special_tokens=True)


def test_encoder_decoders_answer_the_input(tmp_path: Any) -> None:
    task = HuggingFaceTask(tiny("t5"), tokenizer(), generate=GREEDY)
    task.eval()
    whole = batch("t5")
    found = task.eval_forward(whole)["generated"]
    for row, length in enumerate([9, 2, 5, 1, 8, 3]):
        want = alone(task.network, whole["input_ids"][row, :length])
        assert torch.equal(found[row, : len(want)], want)


def test_metrics_of_torchmetrics(tmp_path: Any) -> None:
    text = pytest.importorskip("torchmetrics.text")
    task = HuggingFaceTask(tiny("gpt2"), tokenizer(), generate=GREEDY, text_metrics={"errors": text.WordErrorRate()})
    found = trainer(task, [answers()], tmp_path).evaluate([answers()])
    assert found["eval/errors"] > 0


def test_prompts_end_before_the_first_label() -> None:
    tokens = torch.tensor([[0, 5, 6, 7, 8], [9, 3, 4, 5, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    labels = torch.tensor([[-100, -100, -100, 7, 8], [-100, 3, -100, 5, -100]])
    found = prompts_of(tokens, mask, labels, padding=1)
    assert found.tokens.tolist() == [[5, 6], [1, 9]]
    assert found.mask.tolist() == [[1, 1], [0, 1]]


def test_a_row_without_a_prompt() -> None:
    with pytest.raises(ValueError, match="no prompt to continue"):
        prompts_of(torch.ones(1, 3, dtype=torch.int64), None, torch.tensor([[1, 1, 1]]), 0)


def test_the_callback_logs_texts_and_leaves_training_alone(tmp_path: Any, capsys: Any) -> None:
    sampled = {"generate": {"prompts": ["w3 w4", "w5"], "every": "1ba", "max_new_tokens": 4, "do_sample": True}}
    runs, tables = [], []
    for callbacks in ([sampled], []):
        logger = MemoryLogger()
        plain = tiny("gpt2", resid_pdrop=0.5)
        task = HuggingFaceTask(plain, tokenizer())
        made = trainer(
            task, [batch("gpt2")] * 2, tmp_path / str(len(runs)), callbacks=callbacks, loggers=[logger], seed=3
        )
        made.fit()
        runs.append(plain.state_dict())
        tables.append(logger.tables)
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    lines = [line for line in capsys.readouterr().err.splitlines() if "after batch" in line]
    assert len(lines) == 4 and json.dumps("w3 w4") in lines[0]
    assert tables[0]["generated"] and not tables[1]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), {"fsdp": {"wrap": ["GPT2Block"]}}])
def test_two_ranks_generate_what_one_does(strategy: Any, tmp_path: Any) -> None:
    pytest.importorskip("hocket_strategies")

    def evaluate(rank: int) -> list[Any]:
        task = HuggingFaceTask(tiny("gpt2"), tokenizer(), generate=GREEDY)
        whole = answers()
        samples: Any = [{name: value[i] for name, value in whole.items()} for i in range(SAMPLES)]
        made = hocket.Trainer(
            model=task,
            optimizer=adamw,
            strategy=strategy,
            device="cpu",
            folder=tmp_path,
            train_data=DataLoader(samples, 3),
        )
        texts = made.predict(DataLoader(samples, 3))
        callback = Generate(["w3 w4", "w5"], every="1ba", **GREEDY)
        other = hocket.Trainer(
            model=HuggingFaceTask(tiny("gpt2"), tokenizer()), optimizer=adamw, strategy=strategy, device="cpu",
            folder=tmp_path, train_data=DataLoader(samples, 3), callbacks=[callback], duration="1ba",
        )  # fmt: skip
        other.fit()
        return [each["generated"].tolist() for each in texts]

    first, _ = run_ranks(evaluate, 2)
    task = HuggingFaceTask(tiny("gpt2"), tokenizer(), generate=GREEDY).eval()
    whole = task.eval_forward({name: value[:3] for name, value in answers().items()})["generated"]
    assert first[0][: len(whole)] == whole.tolist()[: len(first[0])] or len(first[0]) < len(whole)


def test_the_callback_generates_with_the_averages_of_ema(tmp_path: Any) -> None:
    pytest.importorskip("hocket_general")
    task = HuggingFaceTask(tiny("llama"), tokenizer())
    logger = MemoryLogger()
    made = trainer(
        task, [batch("llama")] * 12, tmp_path, algorithms=[{"ema": {"half_life": "100ba"}}], loggers=[logger],
        callbacks=[Generate(["w3 w4"], every="12ba", **GREEDY)],
    )  # fmt: skip
    made.fit()
    averaged = tiny("llama").eval()
    averaged.load_state_dict(made.model_state_dict(evaluated=True))
    words = tokenizer()
    want, raw = (
        words.decode(alone(each, torch.tensor([3, 4]))[2:], skip_special_tokens=True)
        for each in (averaged, task.network.eval())
    )
    assert want != raw and want in str(logger.tables["generated"])


def test_texts_of_labels_have_no_token_for_what_does_not_count() -> None:
    words = tokenizer()
    words.pad_token = words.eos_token = None
    task = HuggingFaceTask(tiny("gpt2"), words)
    assert task._decoded(torch.tensor([[-100, 7, -100, 8, -100]])) == ["w7 w8"]


def test_other_inputs_reach_generate(tmp_path: Any) -> None:
    """A model that reads images and writes text."""
    import transformers

    torch.manual_seed(0)
    encoder = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    decoder = tiny("gpt2").config
    decoder.is_decoder = decoder.add_cross_attention = True
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    both = transformers.VisionEncoderDecoderModel(config).eval()
    both.config.decoder_start_token_id = both.generation_config.decoder_start_token_id = 0
    both.config.pad_token_id = 1
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.mul_(4)
    task = HuggingFaceTask(both, tokenizer(), generate=GREEDY).eval()
    images = torch.rand(2, 3, 8, 8)
    found = task.eval_forward({"pixel_values": images, "labels": torch.tensor([[3, 4], [5, 6]])})
    assert torch.equal(found["generated"], both.generate(pixel_values=images, pad_token_id=1, **GREEDY))


# --- what is refused


def test_a_model_that_cannot_generate() -> None:
    with pytest.raises(TypeError, match=r"generate= generates text, and BertForSequenceClassification cannot"):
        HuggingFaceTask(tiny("classifier"), tokenizer(), generate=GREEDY)


@pytest.mark.parametrize("options", [{"num_return_sequences": 2, "do_sample": True}, {"return_dict_in_generate": True}])
def test_options_with_other_results(options: Any) -> None:
    with pytest.raises(ValueError, match="gives one text for each row"):
        HuggingFaceTask(tiny("gpt2"), tokenizer(), generate=options)


def test_a_length_is_not_replaced() -> None:
    assert "max_new_tokens" not in Generate(["w3"], max_length=9)._options


def test_text_metrics_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer to decode them. Pass tokenizer="):
        HuggingFaceTask(tiny("gpt2"), text_metrics={"texts": Texts()})


def test_the_callback_without_a_tokenizer(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"needs a tokenizer, and the model is HuggingFaceTask"):
        trainer(HuggingFaceTask(tiny("gpt2")), [batch("gpt2")], tmp_path, callbacks=[Generate(["w3"])])


@pytest.mark.parametrize("prompts, error", [("w3", TypeError), ([], ValueError), ([""], ValueError)])
def test_prompts_that_are_none(prompts: Any, error: Any) -> None:
    with pytest.raises(error, match="Generate was given"):
        Generate(prompts)
