"""Tiny models of transformers, made from configurations: nothing is downloaded."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.append(str(Path(__file__).parent))  # of tiny_models.py, which pytest's importlib mode does not find by itself

#: Positions that the tiny models have learned, and the window of Mistral.
TRAINED, WINDOW = 32, 5
#: Classes of models; those up to OPT have learned positions, the others rotary ones.
FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "opt": "OPTForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LEARNED, CAUSAL = ("gpt2", "bert", "roberta", "opt"), tuple(name for name in FAMILIES if "bert" not in name)
#: Fewer heads of keys than of queries.
GROUPED = ("llama", "mistral", "qwen3")


def build(family: str, implementation: str = "sdpa", heads: int = 6, **options: Any) -> PreTrainedModel:
    """A model of 2 layers, head dimension 4 and 61 tokens in evaluation mode, with attention far from uniform."""
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": 61,
        "max_position_embeddings": TRAINED,
        "hidden_size": 4 * heads,
        "intermediate_size": 8 * heads,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if family == "gpt2":
        size["n_inner"] = size.pop("intermediate_size")
    if family == "roberta":  # counts positions from its padding token's 1 on
        size |= {"max_position_embeddings": TRAINED + 2, "pad_token_id": 1}
    if family == "opt":
        size |= {"ffn_dim": size.pop("intermediate_size"), "word_embed_proj_dim": 4 * heads, "dropout": 0.0}
    if family in GROUPED:
        size["num_key_value_heads"] = {6: 2, 8: 4}.get(heads, 1)
    if family == "mistral":
        size["sliding_window"] = WINDOW
    if family == "qwen3":
        size["head_dim"] = 4
    kind = getattr(transformers, FAMILIES[family])
    model: PreTrainedModel = kind._from_config(
        kind.config_class(**{**size, **options}), attn_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model.eval()


def no_dropout(family: str) -> dict[str, float]:
    """Return the options without which a model draws random numbers in training."""
    if family == "gpt2":
        return {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    return {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0} if "bert" in family else {}


@pytest.fixture(name="build")
def _build() -> Callable[..., PreTrainedModel]:
    return build


@pytest.fixture(name="no_dropout")
def _no_dropout() -> Callable[[str], dict[str, float]]:
    return no_dropout


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CAUSAL)
def causal(request: pytest.FixtureRequest) -> str:
    """A family of decoders."""
    return request.param


@pytest.fixture(params=["sdpa", "eager"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two sequences of 10 tokens, none of them a special one."""
    return torch.randint(5, 61, (2, 10), generator=torch.Generator().manual_seed(1))


#: Causal models of other architectures: configuration and class.
_CAUSAL: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
}


def tiny(kind: str, heads: int = 4, **options: Any) -> PreTrainedModel:
    """A model of 2 layers, head dimension 8 and 61 tokens without dropout, in train mode, with random biases and attention far
    from uniform.

    ``kind`` is one of gpt2, bert, roberta, llama, qwen3, neox, opt. Llama and Qwen have half as many heads for keys.
    """
    if kind not in _CAUSAL:
        off = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob")
        names = off[:3] if kind == "gpt2" else off[3:]
        model = build(kind, heads=heads, **dict.fromkeys(names, 0.0), **options).train()
    else:
        configuration, made = _CAUSAL[kind]
        sizes: dict[str, Any] = {"hidden_size": 8 * heads, "num_hidden_layers": 2, "num_attention_heads": heads}
        sizes |= {"vocab_size": 61, "max_position_embeddings": TRAINED, "bos_token_id": 0, "eos_token_id": 0}
        sizes |= {"opt": {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 8 * heads, "pad_token_id": 1}}.get(
            kind, {"intermediate_size": 48}
        )
        sizes |= {"num_key_value_heads": heads // 2, "head_dim": 8} if kind in ("llama", "qwen3") else {}
        torch.manual_seed(0)
        model = made(configuration(**sizes | options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kind in _CAUSAL and parameter.dim() > 1:
                parameter.mul_(10)
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(name="tiny")
def _tiny() -> Callable[..., PreTrainedModel]:
    return tiny


@pytest.fixture
def peak_memory() -> Callable[[Callable[[], Any]], tuple[int, Any]]:
    """Call a function; return the most bytes that torch allocated in it at once, by its profiler, and the result."""

    def measure(function: Callable[[], Any]) -> tuple[int, Any]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = function()
        events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
        held = itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
        return max(held), result

    return measure
