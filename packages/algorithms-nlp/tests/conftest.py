"""Tiny models of transformers, made from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

#: Positions that the tiny models have learned.
TRAINED = 32


def build(family: str, implementation: str = "sdpa", heads: int = 6, **options: Any) -> PreTrainedModel:
    """A model of 2 layers, head dimension 4 and 61 tokens in evaluation mode, with attention far from uniform."""
    torch.manual_seed(0)
    width = 4 * heads
    if family == "gpt2":
        size: dict[str, Any] = {"n_positions": TRAINED, "n_embd": width, "n_layer": 2, "n_head": heads}
        config: Any = GPT2Config(vocab_size=61, bos_token_id=0, eos_token_id=0, pad_token_id=0, **size, **options)
        kind: Any = GPT2LMHeadModel
    else:
        made, kind = (BertConfig, BertForMaskedLM) if family == "bert" else (RobertaConfig, RobertaForMaskedLM)
        size = {
            "hidden_size": width,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "intermediate_size": 2 * width,
        }
        rows = TRAINED if family == "bert" else TRAINED + 2  # RoBERTa counts positions from its padding token's 1 on
        config = made(vocab_size=61, max_position_embeddings=rows, **size, **options)
    model = kind._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model.eval()


@pytest.fixture(name="build")
def _build() -> Callable[..., PreTrainedModel]:
    return build


@pytest.fixture(params=["gpt2", "bert", "roberta"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["sdpa", "eager"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two sequences of 10 tokens, none of them a special one."""
    return torch.randint(5, 61, (2, 10), generator=torch.Generator().manual_seed(1))
