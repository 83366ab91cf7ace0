"""HuggingFaceTask in runs that are sharded, divided over tensors, killed and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from language import SAMPLES, adamw, batch, tiny
from torch.utils.data import DataLoader

import hocket
from hocket_nlp import HuggingFaceTask
from hocket_nlp.functional import rope_scaling
from hocket_testkit import RankError, run_ranks


def run(family: str, folder: Path, task: HuggingFaceTask | None = None, **more: Any) -> hocket.Trainer:
    """Batches of 4 shuffled samples, the last one smaller."""
    whole = batch(family)
    samples: Any = [{name: value[i % SAMPLES] for name, value in whole.items()} for i in range(10)]
    return hocket.Trainer(
        model=HuggingFaceTask(tiny(family)) if task is None else task, optimizer=adamw, device="cpu", folder=folder, seed=2,
        **{"train_data": DataLoader(samples, 4, shuffle=True), "global_batch": 4, "duration": "2ep", **more},
    )  # fmt: skip


STRATEGIES = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "fsdp, checkpointed": {"fsdp": {"checkpoint": True}},
    "tensor parallel": {"tensor-parallel": {"tensor": 2}},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_two_ranks_train_as_one_does(family: str, strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("hocket_strategies")

    def train(rank: int) -> dict[str, torch.Tensor]:
        trainer = run(family, tmp_path, strategy=STRATEGIES[strategy], microbatch=1)
        trainer.fit()
        return trainer.model_state_dict()

    first, _ = run_ranks(train, 2)
    alone = run(family, tmp_path / "alone")
    alone.fit()
    torch.testing.assert_close(first, alone.model_state_dict(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("algorithm", [
    pytest.param("qk-norm", marks=pytest.mark.long), {"gated-linear-units": {"init": "normal", "bias": False}},
    pytest.param({"rope-scaling": {"factor": 4}}, marks=pytest.mark.long),
])  # fmt: skip
def test_new_weights_of_a_rank_without_storage_are_those_of_rank_0(algorithm: Any, tmp_path: Path) -> None:
    """Of GPT-NeoX, whose embeddings are not tied."""
    pytest.importorskip("hocket_strategies")

    def train(rank: int, somewhere: str = "meta") -> dict[str, torch.Tensor]:
        made = tiny("neox")
        for name, parameter in made.named_parameters():
            parameter.data.add_(len(name) * 0.01)
        settings: Any = {"algorithms": [algorithm], "strategy": "fsdp"}
        trainer = run("neox", tmp_path / somewhere, HuggingFaceTask(made.to(somewhere) if rank else made), **settings)
        trainer.fit()
        return trainer.model_state_dict()

    (first, _), (same, _) = run_ranks(train, 2), run_ranks(lambda rank: train(rank, "cpu"), 2)
    torch.testing.assert_close(first, same, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("peft", [None, {"r": 2, "lora_dropout": 0.3}])
def test_a_killed_run_resumes_bitwise(family: str, peft: Any, tmp_path: Path) -> None:
    """With dropout in the model or in its adapters."""
    if peft is not None:
        pytest.importorskip("peft")

    def task() -> HuggingFaceTask:
        drop = "resid_pdrop" if family == "gpt2" else "attention_dropout"
        torch.manual_seed(3)
        return HuggingFaceTask(tiny(family, **{drop: 0.3}), peft=peft)

    class Kill(hocket.Callback):
        def before_backward(self, state: Any) -> None:
            if state.timestamp.batch == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    def saved(**more: Any) -> hocket.Trainer:
        policy = hocket.Checkpoints(tmp_path / "saved", every="1ba")
        return run(family, tmp_path, task(), checkpoints=policy, resume="auto", **more)

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(lambda rank: saved(callbacks=[Kill()]).fit(), 1)
    resumed = saved()
    assert resumed.state.timestamp.batch >= 3
    resumed.fit()
    resumed.close()
    straight = run(family, tmp_path / "straight", task())
    straight.fit()
    torch.testing.assert_close(resumed.model_state_dict(), straight.model_state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("algorithm", ["packing", {"z-loss": {"coefficient": 0.1}}])
def test_labels_that_the_task_makes_are_those_that_algorithms_see(algorithm: Any, family: str, tmp_path: Path) -> None:
    """The first batch is full, so that only later ones show whether padding counts."""
    whole = {name: value for name, value in batch(family).items() if name != "labels"}
    full = {"input_ids": whole["input_ids"].clamp(min=1), "attention_mask": torch.ones_like(whole["attention_mask"])}
    weights = []
    for name in ("made", "given"):
        data = [full, whole, whole]
        if name == "given":
            data = [{**b, "labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)} for b in data]
        task = HuggingFaceTask(tiny(family))
        settings: Any = {"algorithms": [algorithm], "global_batch": None, "duration": "1ep"}
        run(family, tmp_path / name, task, **{**settings, "train_data": data}).fit()
        weights.append(task.network.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["qk-norm", "gated-linear-units"])
def test_new_weights_beside_adapters_are_refused(algorithm: str, tmp_path: Path) -> None:
    """Folders of adapters would not hold them."""
    pytest.importorskip("peft")
    task = HuggingFaceTask(tiny("gpt2"), peft={"r": 2, "fan_in_fan_out": True})
    with pytest.raises(ValueError, match="adapters, which peft saves and merges alone"):
        run("gpt2", tmp_path, task, algorithms=[algorithm])


def test_a_model_whose_rotary_positions_cannot_be_scaled_stays_as_it_was() -> None:
    made = tiny("llama")
    made.config.rope_parameters["partial_rotary_factor"] = "none"
    made.model.rotary_emb.config = made.config
    before = dict(made.config.rope_parameters)
    with pytest.raises(ValueError, match="cannot scale the rotary positions of LlamaConfig"):
        rope_scaling(made, 4)
    assert made.config.rope_parameters == before and made.config.max_position_embeddings == 32
