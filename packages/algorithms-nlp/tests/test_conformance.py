"""Every algorithm of this package passes the suite that authors of plug-ins inherit."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hocket_nlp import (
    ALiBi,
    FusedCrossEntropy,
    GatedLinearUnits,
    Packing,
    QKNorm,
    RoPEScaling,
    SeqLengthWarmup,
    ZLoss,
)
from hocket_testkit import AlgorithmConformance


class LanguageConformance(AlgorithmConformance):
    """With a tiny GPT-2 that computes its loss, and sequences of 12 tokens."""

    heavy = {"transformers"}

    def model(self):
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 13}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def data(self):
        tokens = torch.arange(29 * 12).reshape(29, 12) % 13
        return [{"input_ids": part, "labels": part} for part in tokens.split(8)]

    def loss(self):
        return None


class TestALiBi(LanguageConformance):
    def make(self):
        return ALiBi(max_sequence_length=16)


class TestFusedCrossEntropy(LanguageConformance):
    def make(self):
        return FusedCrossEntropy(chunk_rows=3)


class TestGatedLinearUnits(LanguageConformance):
    def make(self):
        return GatedLinearUnits("silu", init="normal")


class TestPacking(LanguageConformance):
    def make(self):
        return Packing()

    def data(self):
        batches = super().data()
        for batch in batches:
            lengths = 12 - torch.arange(len(batch["input_ids"])) * 5 % 11
            mask = (torch.arange(12) < lengths[:, None]).long()
            batch.update(attention_mask=mask, labels=batch["labels"].where(mask > 0, -100))
        return batches


class TestQKNorm(LanguageConformance):
    def make(self):
        return QKNorm()


class TestRoPEScaling(LanguageConformance):
    def make(self):
        return RoPEScaling(factor=4)

    def model(self):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=13, max_position_embeddings=16))


class TestSeqLengthWarmup(LanguageConformance):
    def make(self):
        return SeqLengthWarmup(12, min_seq_length=4, step_size=4, warmup="0.75dur")


class TestZLoss(LanguageConformance):
    def make(self):
        return ZLoss(0.1)
