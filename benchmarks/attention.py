"""A forward pass with linear biases (ALiBi), compared with the model's own ``sdpa``: ``attention.py [FAMILY ...]``.

Ends with exit code 1 if it takes more than 1.1 of the time or 1.2 of the memory.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from harness import median_interval, table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: With linear biases divided by without, at most.
TIME, MEMORY = 1.1, 1.2
LENGTH, BATCH, HEADS, WIDTH, LAYERS, REPEATS = 512, 2, 12, 768, 3, 15
FAMILIES = ("GPT2", "Bert", "Llama")


def model_of(family: str) -> Any:
    """Return a transformer of a few layers, each as wide as those of GPT-2 small."""
    import transformers

    kind = getattr(transformers, f"{family}Model")
    names = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    options: dict[str, Any] = {**names, **special, "vocab_size": 1000, "max_position_embeddings": LENGTH}
    if family == "Llama":
        options |= {"intermediate_size": 4 * WIDTH, "num_key_value_heads": HEADS // 3}
    return kind._from_config(kind.config_class(**options), attn_implementation="sdpa").eval()


def seconds(model: nn.Module, tokens: Tensor, **inputs: Any) -> float:
    """Return the CPU time of a forward pass; there is one thread."""
    start = time.process_time()
    with torch.no_grad():
        model(tokens, **inputs)
    return time.process_time() - start


class Peak(TorchDispatchMode):
    """Notes the most bytes that outputs of operations take at a time; scratch memory inside a kernel is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storage of its outputs until it is freed."""
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and id(each.untyped_storage()) not in self.alive:
                storage = each.untyped_storage()
                self.alive.add(id(storage))
                weakref.finalize(storage, self.free, id(storage), storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return made

    def free(self, storage: int, size: int) -> None:
        """Count storage no more."""
        self.alive.discard(storage)
        self.now -= size


def peak(model: nn.Module, tokens: Tensor, **inputs: Any) -> int:
    """Return the bytes of the weights, and of all outputs of operations at the highest point of a forward pass."""
    with torch.no_grad(), Peak() as counted:
        model(tokens, **inputs)
    return counted.most + sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def compare(family: str, padded: bool) -> tuple[list[float], float]:
    """Return the ratios of the times of neighbouring passes, and that of memory."""
    from hocket_nlp.functional import alibi

    plain = model_of(family)
    biased, _ = alibi(copy.deepcopy(plain), LENGTH)
    tokens = torch.randint(5, 1000, (BATCH, LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, : LENGTH // 4] = 0
    inputs = {"attention_mask": mask if padded else None, "use_cache": False}
    if family == "Bert":
        del inputs["use_cache"]
    ratios = []
    for turn in range(REPEATS + 2):
        order = (plain, biased) if turn % 2 else (biased, plain)
        taken = {model: seconds(model, tokens, **inputs) for model in order}
        if turn > 1:
            ratios.append(taken[biased] / taken[plain])
    return ratios, peak(biased, tokens, **inputs) / peak(plain, tokens, **inputs)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    families: Sequence[str] = parser.parse_args().families
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    rows = [[f"{BATCH} × {LENGTH} tokens, {LAYERS} layers of {WIDTH}", "time ÷", "95 % interval", "memory ÷"]]
    above = False
    for family in families:
        for padded in (False, True):
            ratios, memory = compare(family, padded)
            low, high = median_interval(ratios)
            above |= low > TIME or memory > MEMORY
            name = f"{family}, {'padded' if padded else 'full'}"
            rows.append([name, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{memory:.3f}"])
    print(table(rows))
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
