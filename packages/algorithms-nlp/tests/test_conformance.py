"""Every algorithm of this package passes the suite that authors of plug-ins inherit."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hocket.testkit import AlgorithmConformance
from hocket_nlp import ALiBi


class TestALiBi(AlgorithmConformance):
    heavy = {"transformers"}

    def make(self):
        return ALiBi(max_sequence_length=16)

    def model(self):
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 13}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def data(self):
        tokens = torch.arange(29 * 12).reshape(29, 12) % 13
        return [{"input_ids": part, "labels": part} for part in tokens.split(8)]

    def loss(self):
        return None
