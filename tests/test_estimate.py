"""Estimated peaks beside those that torch's profiler measures in real training, and what estimates refuse."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsals import (
    Case,
    command,
    estimated,
    gpt,
    grouped,
    mistake,
    mlp,
    resnet,
    transposed,
    transposed_without_stride,
)
from torch.profiler import ProfilerActivity, profile

import hocket
from hocket.help.raised import raised
from hocket_insight.memory.estimate import largest_microbatch, size_of
from hocket_insight.memory.rehearsal import EstimateError
from hocket_strategies.launching.forks import fork
from hocket_testkit import run_ranks


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Rehearses, and runs commands that do: forks of a process that has run backward, as this one may have, cannot."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


def measured(case: Callable[[], Case], ranks: int, folder: Any, **given: Any) -> int:
    """The most bytes that torch allocates on rank 0 in three steps.

    The profiler does not see what gloo's own threads free, so that what is freed there seems to remain: the lower of two runs.
    """

    def train(rank: int) -> int:
        import gc

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            model, arguments, batch = case()
            data = torch.utils.data.DataLoader([batch] * 8, batch_size=None)
            trainer = hocket.Trainer(
                model(), data, device="cpu", duration="3ba", eval_every=None, folder=folder, **arguments, **given
            )
            gc.collect()
            trainer.fit()
        events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
        return max(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))

    return fork(train, 1, variables={})[0] if ranks == 1 else min(run_ranks(train, ranks)[0] for _ in range(2))


CASES = [
    (mlp, "single", {}),
    (transposed, "single", {}),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [
        (mlp, "ddp", {}), (mlp, "fsdp", {}),
        (mlp, "single", {"optimizer": "sgd(lr=0.1, momentum=0.9)"}),
        (grouped, "single", {}), (grouped, "single", {"precision": "bf16"}),
        (transposed, "single", {"precision": "bf16"}), (transposed_without_stride, "single", {}),
        (resnet, "single", {"algorithms": ["channels-last"]}),
        (resnet, "single", {}), (resnet, "ddp", {}), (resnet, "fsdp", {}),
        (gpt, "single", {}), (gpt, "ddp", {}), (gpt, "fsdp", {}),
        (gpt, "single", {"precision": "bf16"}),
        (gpt, "single", {"algorithms": ["activation-checkpointing"], "microbatch": 2}),
        (gpt, "fsdp", {"algorithms": ["activation-checkpointing"], "microbatch": 2}),
    ]),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("case", "strategy", "given"), CASES)
def test_the_peak_is_within_15_percent_of_the_measured_one(
    case: Callable[[], Case], strategy: str, given: dict[str, Any], tmp_path: Any, process: ProcessPoolExecutor
) -> None:
    if strategy != "single":
        pytest.importorskip("hocket_strategies")
    ranks = 1 if strategy == "single" else 2
    given = {"optimizer": "adamw(lr=1e-3)", "strategy": strategy, **given}
    guess = process.submit(estimated, case.__name__, ranks, **given).result()
    truth = measured(case, ranks, tmp_path, **given)
    assert 0.85 < guess.peak / truth < 1.15, (guess, truth)
    assert sum(guess.kinds.values()) == guess.peak


@pytest.mark.long
def test_the_kinds_are_those_of_a_hand_count(process: ProcessPoolExecutor) -> None:
    found = process.submit(estimated, "small", optimizer="adamw(lr=1e-3)").result()
    weights = 4 * 4 * (256 * 256 + 256)
    assert found.kinds["parameters"] == weights
    assert found.kinds["gradients"] == weights
    assert found.kinds["optimizer"] == 2 * weights + 8 * 4  # and a count of steps for each tensor
    assert found.kinds["batch"] == 2 * 4 * 8 * 256


def test_models_smaller_than_the_tensors_that_have_values_are_estimated_on_several_ranks(
    process: ProcessPoolExecutor,
) -> None:
    pytest.importorskip("hocket_strategies")
    found = process.submit(estimated, "linear", 2, optimizer="sgd(lr=0.1)", strategy="ddp").result()
    assert found.kinds["parameters"] == found.kinds["gradients"] == 4 * (64 * 10 + 10)


def test_a_mistake_in_a_model_is_of_the_rehearsal_and_of_no_rank(process: ProcessPoolExecutor) -> None:
    pytest.importorskip("hocket_strategies")
    assert process.submit(mistake).result().startswith("The rehearsal raised:")


def test_a_precision_that_converts_the_model_is_refused_with_what_it_means(process: ProcessPoolExecutor) -> None:
    with pytest.raises(EstimateError, match="twice as much in fp64"):
        process.submit(estimated, "small", precision="fp64").result()


@pytest.mark.long
def test_what_lstms_take_is_said_not_to_count(tmp_path: Path) -> None:
    (tmp_path / "described.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = torch.nn.LSTM(8, 8)\n    def forward(self, x):\n        return self.layers(x)[0]\n"
        "def data(): return [(torch.ones(4, 4, 8), torch.ones(4, 4, 8))]\n"
    )
    text = "{model: described:Net, train_data: described:data, loss: mse_loss, optimizer: adamw(lr=0.1), duration: 1ep}"
    (tmp_path / "c.yaml").write_text(text)
    words = [sys.executable, "-m", "hocket", "estimate", "c.yaml", "device=cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "the memory that LSTMs take on the CPU" in done.stdout, done.stderr


@pytest.mark.parametrize("word", [pytest.param("estimate", marks=pytest.mark.long), "summary"])
def test_a_lazy_layer_is_refused_by_its_name_as_in_training(
    word: str, tmp_path: Path, process: ProcessPoolExecutor
) -> None:
    (tmp_path / "c.yaml").write_text(
        "{model: {torch.nn:Sequential: [{torch.nn:LazyLinear: [4]}]}, loss: mse_loss, duration: 1ep, device: cpu, "
        "optimizer: sgd(lr=0.1), train_data: lazy_data:data}"
    )
    (tmp_path / "lazy_data.py").write_text("import torch\ndef data(): return [(torch.ones(4, 8), torch.ones(4, 4))]\n")
    said = set()
    for each in (word, "train"):
        code, _, error = process.submit(command, tmp_path, each, "c.yaml").result()
        assert code
        said.add(error)
    assert len(said) == 1
    assert "Sequential.0.weight has no shape yet" in said.pop()


def test_a_model_that_reads_values_is_refused_by_its_line(process: ProcessPoolExecutor) -> None:
    with pytest.raises(EstimateError, match=r"Gated\.forward .*rehearsals\.py:\d+"):
        process.submit(estimated, "gated", optimizer="sgd(lr=0.1)").result()


def test_the_largest_microbatch_is_that_of_a_search_through_all_sizes() -> None:
    asked = []

    def at(size: int) -> Any:
        asked.append(size)
        return _of(1000 + 10 * size + size % 3)

    def _of(peak: int) -> Any:
        return type("R", (), {"peak": peak, "samples": 64, "microbatch": 64})

    for memory in (900, 1010, 1011, 1300, 1641, 2000):
        best = max((size for size in range(1, 65) if at(size).peak <= memory), default=0)
        asked.clear()
        assert largest_microbatch(at(64), at, memory) == best
        assert len(asked) < 12


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("500mib", 500 * 2**20)])
def test_sizes(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "24", "24 parsecs", "-3GiB", "0GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--memory"):
        size_of(text)


MODULE = """
import torch
def model(): return torch.nn.Linear(1000, 1000, bias=False)
def data(): return [(torch.ones(4, 1000), torch.ones(4, 1000))]
def loader(n: int):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(n, 1000), torch.ones(n, 1000)), batch_size=4)
"""


@pytest.mark.long
def test_the_data_set_does_not_count(tmp_path: Path, process: ProcessPoolExecutor) -> None:
    """Of 32 kB, and of 80 MB, whose samples are views."""
    (tmp_path / "thousand.py").write_text(MODULE)
    found = []
    for samples in (4, 10_000):
        (tmp_path / "c.yaml").write_text(
            f"{{model: thousand:model, train_data: {{thousand:loader: {{n: {samples}}}}}, loss: mse_loss, "
            "optimizer: adamw(lr=0.1), duration: 1ep, device: cpu}"
        )
        code, printed, error = process.submit(command, tmp_path, "estimate", "c.yaml", "--json").result()
        assert code == 0, error
        found.append(next(iter(json.loads(printed).values()))["peak"])
    assert found[0] == found[1]


def test_the_commands_read_a_file(tmp_path: Path, process: ProcessPoolExecutor) -> None:
    """4 MB of weights and of gradients, and 8 of Adam's averages."""
    (tmp_path / "thousand.py").write_text(MODULE)
    text = "{model: thousand:model, train_data: thousand:data, loss: mse_loss, optimizer: adamw(lr=0.1), duration: 1ep}"
    (tmp_path / "c.yaml").write_text(text)
    said = []
    for words in (["estimate", "c.yaml", "--json"], ["summary", "c.yaml"]):
        code, printed, error = process.submit(command, tmp_path, *words).result()
        assert code == 0, error
        said.append(printed)
    (found,) = json.loads(said[0]).values()
    assert {name: found["kinds"][name] for name in ("parameters", "gradients", "optimizer")} == {
        "parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_004,
    }  # fmt: skip
    assert "1,000,000" in said[1]


def test_messages_of_torch_are_shown_without_its_calls() -> None:
    def message(*size: Any) -> str:
        with pytest.raises((TypeError, RuntimeError)) as caught:
            torch.empty(*size) if size else torch.ops.aten.mm(torch.ones(2), 3)
        return raised("model", caught.value)

    overflow = message(10**20)
    assert "Overflow" in overflow
    assert not re.search(r"frame #|Exception raised from|\n", overflow)
    assert overflow.count('"') % 2 == 0
    assert "negative dimension -1: [-1]" in message(-1)
    assert "mm() Expected a value of type .Tensor." in message().replace("'", ".")
    assert len(message()) < 1000
