"""Tiny models of transformers, batches with uneven padding, and a tokenizer: made here, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import hocket

VOCABULARY, LENGTH, SAMPLES = 31, 9, 6
WIDTH: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA: dict[str, Any] = {**WIDTH, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32}


def model(family: str, **options: Any) -> Any:
    """A tiny model without dropout, the same at every call."""
    torch.manual_seed(0)
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **options}
    bert = {**WIDTH, "vocab_size": VOCABULARY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made: Any
    if family == "gpt2":
        size = {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 32, "vocab_size": VOCABULARY}
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **{**drop, **special}))
    elif family == "bert":
        made = transformers.BertForMaskedLM(transformers.BertConfig(**bert, **special))
    elif family == "t5":
        size = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        config = transformers.T5Config(**size, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **options)
        made = transformers.T5ForConditionalGeneration(config)
    elif family == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **special))
    elif family == "neox":
        size = {**WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
        made = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**size, **special))
    elif family == "qwen":
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=4, **special))
    elif family == "classifier":
        made = transformers.BertForSequenceClassification(
            transformers.BertConfig(**{**bert, "num_labels": 3, **special})
        )
    else:
        made = transformers.BertForTokenClassification(transformers.BertConfig(**{**bert, "num_labels": 3, **special}))
    return made.train()


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


FAMILIES = ("gpt2", "bert", "t5", "llama", "qwen", "classifier", "tokens")


def adamw(parameters: Any) -> torch.optim.AdamW:
    """Rounding of gradients near 0 must not become a step: eps is above it."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def trainer(task: Any, data: Any, folder: Any, **more: Any) -> hocket.Trainer:
    return hocket.Trainer(
        model=task, train_data=data, optimizer=adamw, duration="1ep", device="cpu", folder=folder, **more
    )


def tokenizer(size: int = 31) -> transformers.PreTrainedTokenizerFast:
    """Words w3 to w30; 0 ends a text, 1 pads, 2 is unknown."""
    vocabulary = {"<end>": 0, "<pad>": 1, "<unknown>": 2, **{f"w{i}": i for i in range(3, size)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )
