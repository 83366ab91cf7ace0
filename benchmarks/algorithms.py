"""What every algorithm takes of a step, from the accounting, on its reference model (6)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from harness import Series, table
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import plugins
from hocket_vision.models import small_resnet

#: Arguments that an algorithm needs, and those whose reference model is a language model.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "alibi": {"max_sequence_length": 64},
    "distillation": {"teacher": partial(small_resnet, in_channels=3)},
    "gradient-clipping": {"kind": "norm", "threshold": 1.0},
    "packing": {"length": 128},
    "rope-scaling": {"factor": 4},
}
LANGUAGE = {
    "alibi", "fused-cross-entropy", "gated-linear-units", "packing", "qk-norm", "rope-scaling", "seq-length-warmup",
}  # fmt: skip
ROTARY = {"rope-scaling"}
STEPS = 30


def run(repeats: int) -> dict[str, Any]:
    """Microseconds that an algorithm's own code took per step, and the whole step with it over the step without."""
    rows = [["", "own code, µs per step", "step with it ÷ step without"]]
    values: dict[str, Any] = {}
    for name in plugins.names("algorithms"):
        own, ratio = Series(), Series()
        for _ in range(repeats):
            plain = _fit(name, [])
            result = _fit(name, [{name: ARGUMENTS.get(name, {})}])
            own.values.append(sum(cost.seconds for cost in result.costs.values()) / STEPS * 1e6)
            ratio.values.append(result.timestamp.seconds / plain.timestamp.seconds)
        values[name] = {"own_us": own.values, "ratio": ratio.values}
        rows.append([name, str(own), str(ratio)])
    return {"values": values, "table": table(rows)}


def _fit(name: str, algorithms: list[Any]) -> hocket.Result:
    torch.manual_seed(0)
    reference = _language(name in ROTARY) if name in LANGUAGE else _images()
    return hocket.Trainer(
        **reference,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        duration=f"{STEPS}ba",
        algorithms=algorithms,
        seed=0,
        device="cpu",
        profile_plugins=True,
    ).fit()


def _images() -> dict[str, Any]:
    samples = TensorDataset(torch.rand(32 * STEPS, 3, 32, 32), torch.randint(10, (32 * STEPS,)))
    return {
        "model": small_resnet(in_channels=3),
        "loss": torch.nn.functional.cross_entropy,
        "train_data": DataLoader(samples, 32),  # for those that work on samples
    }


def _language(rotary: bool) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 256}
    if rotary:
        model: Any = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=256, max_position_embeddings=64))
    else:
        model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    tokens = [torch.randint(256, (8, 64)) for _ in range(STEPS)]
    return {"model": model, "train_data": [{"input_ids": t, "labels": t} for t in tokens]}
