"""Tiny models of transformers by family, without dropout, and a batch for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

TOKENS = torch.randint(5, 61, (3, 9), generator=torch.Generator().manual_seed(3))
#: Labels of TOKENS: a row without its beginning, one without its end.
LABELS = TOKENS.clone()
LABELS[0, :4] = LABELS[2, 6:] = -100

_LLAMA = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "n_layer": 2, "n_head": 4, "n_embd": 24, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_BERT: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_OPT = {
    "hidden_size": 24, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 24,
    "dropout": 0.0,
}  # fmt: skip
_T5 = {
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, _GPT2),
    "double heads": (hf.GPT2DoubleHeadsModel, hf.GPT2Config, _GPT2),
    "gpt2 classifier": (hf.GPT2ForSequenceClassification, hf.GPT2Config, {**_GPT2, "pad_token_id": 0, "num_labels": 3}),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, _LLAMA),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {**_LLAMA, "tie_word_embeddings": True}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, _LLAMA),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, _LLAMA),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, _LLAMA),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**_LLAMA, "sliding_window": 4}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**_LLAMA, "sliding_window": 3}),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**_LLAMA, "output_router_logits": True}),
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig, _LLAMA),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig, _LLAMA),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, _OPT),
    "neox": (
        hf.GPTNeoXForCausalLM,
        hf.GPTNeoXConfig,
        {key: value for key, value in _BERT.items() if "dropout" not in key},
    ),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig, {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 4}),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, _BERT),
    "bert classifier": (hf.BertForSequenceClassification, hf.BertConfig, {**_BERT, "num_labels": 3}),
    "bert decoder": (hf.BertLMHeadModel, hf.BertConfig, {**_BERT, "is_decoder": True}),
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig, _BERT),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, _T5),
}


def tiny(family: str, implementation: str | None = None, **options: Any) -> Any:
    """A model of 2 layers, width 24 and 61 tokens, the same each time; in evaluation mode."""
    kind, configuration, size = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind._from_config(
            configuration(**{"vocab_size": 61, **size, **options}),
            **({} if implementation is None else {"attn_implementation": implementation}),
        )
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "lm_head" not in name and "embed" not in name and "wte" not in name:
                with torch.no_grad():
                    parameter.mul_(3)  # so that attention is far from uniform
    return model.eval()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters by name."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
