"""Tiny models of transformers, batches with uneven padding, and a tokenizer: made here, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import hocket

VOCABULARY, LENGTH, SAMPLES = 61, 9, 6
#: Positions that the models have learned, and the window of Mistral.
TRAINED, WINDOW = 32, 5

#: Classes by the names that tests use; `tiny` takes others by the name of the class.
CLASSES = {
    "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "opt": "OPTForCausalLM",
    "neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "cohere": "CohereForCausalLM", "granite": "GraniteForCausalLM",
    "mamba": "MambaForCausalLM", "t5": "T5ForConditionalGeneration", "bert decoder": "BertLMHeadModel",
    "classifier": "BertForSequenceClassification", "tokens": "BertForTokenClassification",
}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "bert decoder": {"is_decoder": True}, "mixtral": {"output_router_logits": True}, "qwen2": {"tie_word_embeddings": True},
    "classifier": {"num_labels": 3}, "tokens": {"num_labels": 3},
}  # fmt: skip
_NO_DROPOUT = dict.fromkeys((
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "dropout_rate",
), 0.0)  # fmt: skip


def _sizes(kind: str, width: int, heads: int) -> dict[str, Any]:
    """Return the arguments that configurations of a ``model_type`` name in their own way."""
    if kind == "t5":
        return {"d_kv": width // heads, "d_ff": 32, "num_layers": 2, "decoder_start_token_id": 0}
    if kind in ("gpt2", "opt", "roberta"):
        # RoBERTa counts positions from its padding token's 1 on.
        own = {"gpt2": {"n_inner": 32}, "opt": {"ffn_dim": 32, "word_embed_proj_dim": width}}
        return own.get(kind, {"max_position_embeddings": TRAINED + 2, "pad_token_id": 1})
    if kind in ("bert", "gpt_neox", "mamba"):
        return {}
    window = {"sliding_window": WINDOW} if kind in ("mistral", "gemma3_text") else {}
    return {"head_dim": width // heads, "num_key_value_heads": 1 if heads % 2 else heads // 2, **window}


def tiny(
    family: str, implementation: str | None = None, heads: int = 4, *,
    head_dim: int = 6, scale: float = 3, embeddings: float = 1, **options: Any,
) -> Any:  # fmt: skip
    """Return a model of 2 layers, the same at every call, in evaluation mode; llamas have half as many heads for keys.

    Args:
        family: one of `CLASSES`, or the name of a class of transformers.
        implementation: of attention; None for the one that transformers chooses.
        scale: a factor of the weights of layers, so that attention is far from uniform; with 1 biases stay 0, too.
        embeddings: a factor of embeddings and the output layer, so that logits are far from each other.
        options: of the configuration; without any there is no dropout.
    """
    kind = getattr(transformers, CLASSES.get(family, family))
    width, configuration = heads * head_dim, kind.config_class if family != "gemma3" else transformers.Gemma3TextConfig
    size = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": heads, "max_position_embeddings": TRAINED, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 0, **_NO_DROPOUT, **_sizes(configuration.model_type, width, heads),
        **_OPTIONS.get(family, {}), **options,
    }  # fmt: skip
    torch.manual_seed(0)
    attention = {} if implementation is None else {"attn_implementation": implementation}
    model = kind._from_config(configuration(**size), **attention).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if scale != 1 and name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() > 1 and family != "t5":  # whose weights are large
                outer = any(part in name for part in ("lm_head", "embed", "wte", "wpe"))
                parameter.mul_(embeddings if outer else scale)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model's parameters by name."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


TOKENS = torch.randint(5, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
#: Labels of TOKENS: a row without its beginning, one without its end.
LABELS = TOKENS.clone()
LABELS[0, :4] = LABELS[2, 6:] = -100


def batch(family: str) -> dict[str, Tensor]:
    """Rows of very different lengths; in one no label counts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([9, 2, 5, 1, 8, 3])[:, None]).long()
    labels = tokens.where(mask.bool(), -100)
    if family == "classifier":
        labels = torch.tensor([0, 1, 2, 2, 1, 0])
    elif family == "bert":
        labels = labels.where(torch.rand(labels.shape, generator=generator) < 0.4, -100)
        labels[2] = -100
    elif family == "t5":
        labels = labels[:, :6].clone()
    elif family == "tokens":
        labels = (labels % 3).where(mask.bool(), -100)
    return {"input_ids": tokens.where(mask.bool(), 0), "attention_mask": mask, "labels": labels}


FAMILIES = ("gpt2", "bert", "t5", "llama", "qwen3", "classifier", "tokens")


def adamw(parameters: Any) -> torch.optim.AdamW:
    """Rounding of gradients near 0 must not become a step: eps is above it."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def trainer(task: Any, data: Any, folder: Any, **more: Any) -> hocket.Trainer:
    return hocket.Trainer(
        model=task, train_data=data, optimizer=adamw, duration="1ep", device="cpu", folder=folder, **more
    )


def tokenizer(size: int = VOCABULARY) -> transformers.PreTrainedTokenizerFast:
    """Words w3, w4 and so on; 0 ends a text, 1 pads, 2 is unknown."""
    vocabulary = {"<end>": 0, "<pad>": 1, "<unknown>": 2, **{f"w{i}": i for i in range(3, size)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )
