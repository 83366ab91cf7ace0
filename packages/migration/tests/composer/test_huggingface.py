"""HuggingFaceModel trains a model of transformers as a plain loop does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("torchmetrics")

import transformers

from hocket_migration.composer import Trainer
from hocket_migration.composer.loggers import InMemoryLogger
from hocket_migration.composer.metrics import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from hocket_migration.composer.models import HuggingFaceModel


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 16, (4, 8), generator=generator) for _ in range(3)]
    return [{"input_ids": each, "labels": each.clone(), "unknown": each} for each in tokens]


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def test_losses_and_metrics_of_a_causal_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net, plain, expected = gpt2(), gpt2().train(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for batch in batches():
        loss = plain(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    metrics = [LanguageCrossEntropy(), LanguagePerplexity(), MaskedAccuracy()]
    model = HuggingFaceModel(net, use_logits=True, metrics=metrics)
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model, train_dataloader=batches(), eval_dataloader=batches(), max_duration="1ep", device="cpu",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01), loggers=[logger], progress_bar=False,
        device_train_microbatch_size=2,
    )  # fmt: skip
    trainer.fit()
    assert logger.get_timeseries("loss/train/total")["loss/train/total"] == pytest.approx(expected, rel=1e-5)
    assert trainer.state.timestamp.token == "96tok"
    with torch.no_grad():
        mean = sum(plain.eval()(input_ids=b["input_ids"], labels=b["labels"]).loss.item() for b in batches()) / 3
    values = trainer.state.eval_metric_values
    assert values["LanguageCrossEntropy"].item() == pytest.approx(mean, rel=1e-5)
    assert values["LanguagePerplexity"] == pytest.approx(values["LanguageCrossEntropy"].exp())
    assert copy.deepcopy(model).val_metrics.keys() == {"LanguageCrossEntropy", "LanguagePerplexity", "MaskedAccuracy"}


def test_batches_that_are_no_mappings() -> None:
    with pytest.raises(TypeError, match="takes batches that are mappings"):
        HuggingFaceModel(gpt2())((torch.ones(1), torch.ones(1)))
