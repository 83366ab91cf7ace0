"""A journal of digests: a repetition passes, and differences that are planted in it are named with their batch and cause."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.plugins import PluginError
from hocket_cli import main
from hocket_testkit import CallbackConformance
from hocket_testkit.ranks import RankError, run_ranks
from hocket_tools import Journal, RepetitionDiffers
from hocket_tools.reproducing import digests

SAMPLES, BATCH = 96, 8
PROJECT = "import planted_library\n\ndef scaled(outputs):\n    return planted_library.scaled(outputs) * 1.0\n"
LIBRARY = "__version__ = '1.0'\n\ndef scaled(outputs):\n    return outputs * 1.0\n"


class After(hocket.Callback):
    """Do something once, after a batch."""

    def __init__(self, batch: int, act: Callable[[nn.Module], Any]) -> None:
        self.batch, self.act = batch, act

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            self.act(state.model)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def flip(module: nn.Module) -> None:
    with torch.no_grad():
        module[4].weight[0] += 1e-2


class Planted(NamedTuple):
    """A difference in a repetition, and what has to be said of it."""

    #: The batch of the first difference, by construction.
    batch: int
    #: What differs first; or several, of which one does, depending on the rounding of this machine's kernels.
    what: str
    #: Texts of the message.
    said: tuple[str, ...]
    seed: int = 7
    lr: float = 0.1
    decay: float = 0.0
    precision: str = "fp32"
    #: Positions in the order of samples that are exchanged; a changed sample; what happens to initial weights.
    exchanged: tuple[int, int] | None = None
    sample: int | None = None
    initial: Callable[[nn.Module], Any] = lambda module: None
    later: tuple[int, Callable[[nn.Module], Any]] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    project: str = PROJECT
    library: str = LIBRARY


PLANTED = {
    "seed": Planted(0, "weights", ("That points at the seed", "seed was 7, is 8"), seed=8),
    "initial weight": Planted(
        0, "weights", ("differ in 4", "initialization of the model", "Nothing that is recorded"), initial=flip
    ),
    "learning rate": Planted(0, "lr", ("[0.2], and was [0.1]", "lr was 0.1, is 0.2"), lr=0.2),
    "option of the optimizer": Planted(
        1, "weights", ("since the gradients are the same", "weight_decay was 0.0, is 0.01"), decay=0.01
    ),
    # Positions 33 and 60 are in the fifth and the eighth batch.
    "order of samples": Planted(5, "order", ("the order of samples differs", "the sampler"), exchanged=(33, 60)),
    "sample": Planted(
        9, "inputs", ("1 of ", "number 70 in the data set", "the tensors of the training data have other"), sample=70
    ),
    "kernel": Planted(
        1, "losses or gradients", ("the kernel setting oneDNN was True, is False",),
        context=lambda: torch.backends.mkldnn.flags(enabled=False),
    ),
    "precision": Planted(1, "losses", ("precisions was ['fp32'], is ['bf16']",), precision="bf16"),
    "changed line": Planted(
        1, "losses", ("planted_project.py has changed (line 4: `return planted_library.scaled(outputs) * 1.01`, was `return",),
        project=PROJECT.replace("* 1.0", "* 1.01"),
    ),
    "version of a library": Planted(
        1, "losses", ("planted_library was 1.0, is 1.1",),
        library=LIBRARY.replace("1.0'", "1.1'").replace("* 1.0", "* 1.001"),
    ),
    "weights in a batch": Planted(6, "weights", ("weights differ in 4", "a plug-in that changes weights"), later=(6, flip)),
    "random numbers in a batch": Planted(
        7, "random", ("random numbers differ of torch",), later=(7, lambda module: torch.rand(1))
    ),
    "threads": Planted(
        1, "losses or gradients", ("the number of threads intra-op was 1, is 2",), context=lambda: threads(2)
    ),
}  # fmt: skip
HONEST = Planted(0, "", ())


def imported(folder: Path, plant: Planted) -> Any:
    """Import the project anew, with the texts of its modules."""
    for name, text in (("planted_project", plant.project), ("planted_library", plant.library)):
        sys.modules.pop(name, None)
        (folder / f"{name}.py").write_text(text)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    import importlib

    importlib.invalidate_caches()
    return importlib.import_module("planted_project")


def trained(
    folder: Path,
    plant: Planted,
    name: str,
    against: Path | None = None,
    every: str = "1ba",
    ranks: int = 1,
    **options: Any,
) -> hocket.Trainer:
    """Train a small convolutional network for an epoch, with something planted in it."""
    project = imported(folder, plant) if ranks == 1 else sys.modules["planted_project"]
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    targets = torch.randint(0, 4, (SAMPLES,), generator=generator)
    noise = torch.randn(1_000_000, generator=generator)
    if plant.sample is not None:
        inputs[plant.sample, 0, 3, 3] += 1e-3
    order = list(range(SAMPLES))
    if plant.exchanged is not None:
        first, second = plant.exchanged
        order[first], order[second] = order[second], order[first]
    loader = DataLoader(TensorDataset(inputs, targets), BATCH, sampler=order)  # type: ignore[arg-type]
    torch.manual_seed(plant.seed)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Dropout(0.2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    plant.initial(model)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # A sum of so many numbers is divided over the threads.
        penalty = (noise.square() * (1 + outputs.float().square().mean())).sum() * 1e-6
        return nn.functional.cross_entropy(project.scaled(outputs), targets) + penalty

    later = [After(*plant.later)] if plant.later else []
    journal = Journal(every, against=None if against is None else str(against))
    with plant.context():
        trainer = hocket.Trainer(
            model=model, loss=loss, train_data=loader, global_batch=BATCH, seed=plant.seed,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, lr=plant.lr, momentum=0.9, weight_decay=plant.decay
            ),
            precision=plant.precision, device="cpu", strategy="ddp" if ranks > 1 else "auto", callbacks=[*later, journal],
            run_name=name, folder=folder / "runs", **{"duration": "1ep", **options},
        )  # fmt: skip
        with trainer:
            trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a project, with runs recorded on one rank."""
    folder, path, before = tmp_path_factory.mktemp("journal"), sys.path[:], os.getcwd()
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    with threads(1):
        trained(folder, HONEST, "first")
        trained(folder, HONEST, "coarse", every="100ba")
        yield folder
    os.chdir(before)
    sys.path[:] = path


def differing(folder: Path, plant: Planted, name: str, first: str, every: str = "1ba", ranks: int = 1) -> Any:
    with pytest.raises(RepetitionDiffers) as raised:
        trained(folder, plant, name, folder / "runs" / first, every, ranks)
    return raised.value


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal without their numbers, and without the end."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "line"} for line in found if "end" not in line]


def test_an_honest_repetition_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(folder, HONEST, "again", folder / "runs/first")
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "repeated" in line]
    assert said.endswith("runs/first is repeated bitwise: 12 batches, 13 entries of its journal.")
    report = json.loads((folder / "runs/again/verification.json").read_text())
    assert report["same"] and report["batch"] == 12 and report["changes"] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(folder: Path, name: str) -> None:
    plant = PLANTED[name]
    error = differing(folder, plant, f"other {name}", "first")
    assert error.difference.batch == plant.batch and error.difference.what in plant.what.split(" or "), str(error)
    assert all(text in str(error) for text in plant.said), str(error)
    report = json.loads((folder / f"runs/other {name}/verification.json").read_text())
    assert (report["same"], report["batch"], report["what"]) == (False, plant.batch, error.difference.what)


def test_losses_and_orders_name_the_batch_within_an_interval(folder: Path) -> None:
    order = differing(folder, PLANTED["order of samples"], "coarse order", "coarse", "100ba").difference
    assert (order.batch, order.what, order.compared) == (5, "order", 0)
    # A changed weight after batch 6 is seen in the loss of batch 7.
    weights = differing(folder, PLANTED["weights in a batch"], "coarse weights", "coarse", "100ba")
    assert (weights.difference.batch, weights.difference.what) == (7, "losses")
    assert "both runs need a journal of each batch: {journal: {every: 1ba}}" in str(weights)
    sample = differing(folder, PLANTED["sample"], "coarse sample", "coarse", "100ba")
    assert (sample.difference.batch, sample.difference.what) == (9, "losses")
    assert "have other contents" in str(sample) and "or the contents of samples, or the step of an earlier" in str(
        sample
    )


def test_the_state_of_an_algorithm_is_compared(folder: Path) -> None:
    """Averages of weights do not change the run's own weights, and are its result."""

    def averaged(name: str, half_life: str | None, **options: Any) -> hocket.Trainer:
        algorithms = [] if half_life is None else [{"ema": {"half_life": half_life}}]
        return trained(folder, HONEST, name, algorithms=algorithms, duration="3ba", **options)

    averaged("averaged", "2ba")
    averaged("averaged again", "2ba", against=folder / "runs/averaged")
    for half_life, batch, changed in (
        ("3ba", 2, "ema half_life was 2ba, is 3ba"),
        (None, 0, "algorithms was .'ema'., is not"),
    ):
        with pytest.raises(RepetitionDiffers, match=f"the state of algorithms differs of ema.* {changed}") as raised:
            averaged(f"averaged {half_life}", half_life, against=folder / "runs/averaged")
        assert raised.value.difference.batch == batch


def test_a_long_line_is_shown_where_it_changed(folder: Path) -> None:
    long = PROJECT.replace("* 1.0", f"* {' + '.join(['0.0'] * 30)}* 1.0 + outputs")
    trained(folder, HONEST._replace(project=long), "long")
    changed = long.replace("* 1.0 +", "* 1.5 + 0.001 +")
    error = differing(folder, HONEST._replace(project=changed), "long changed", "long")
    assert "* 1.5 + 0.001 +" in str(error)


def test_runs_with_other_intervals_are_compared_where_both_have_entries(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(folder, HONEST, "thirds", folder / "runs/first", "3ba")
    assert "12 batches, 5 entries" in capsys.readouterr().err
    plant = PLANTED["weights in a batch"]
    coarser, finer = differing(folder, plant, "fifths", "first", "5ba"), differing(folder, plant, "finer", "coarse")
    assert coarser.difference.batch == finer.difference.batch == 7


def test_the_entries_hold_what_a_plain_loop_computes(folder: Path) -> None:
    head, environment, start, *entries = lines(folder / "runs/first/journal.jsonl")
    assert head["ranks"] == 1 and environment["batch"] == 0 and [e["batch"] for e in entries] == list(range(1, 13))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Dropout(0.2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    def expected(number: int) -> str:  # by hashlib and NumPy
        hashed = hashlib.blake2b(digest_size=8)
        named = [(name, tensor) for name, tensor in model.named_parameters() if name.startswith(f"{number}.")]
        hashed.update(f"{len(named)},".encode())
        for name, tensor in named:
            hashed.update(b"2," + repr(name).encode() + f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            hashed.update(tensor.detach().numpy().tobytes())
        return hashed.hexdigest()

    assert start["weights"] == {"0": expected(0), "4": expected(4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    targets = torch.randint(0, 4, (SAMPLES,), generator=generator)
    noise = torch.randn(1_000_000, generator=generator)
    torch.manual_seed(7)
    losses = []
    for batch, (images, labels) in enumerate(DataLoader(TensorDataset(inputs, targets), BATCH)):
        outputs = model(images)
        loss = (
            nn.functional.cross_entropy(outputs, labels) + (noise.square() * (1 + outputs.square().mean())).sum() * 1e-6
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert entries[batch]["weights"]["4"] == expected(4)
    assert [entry["losses"] for entry in entries] == [[loss] for loss in losses]
    (coarse,) = lines(folder / "runs/coarse/journal.jsonl")[3:]
    assert coarse["losses"] == losses and coarse["weights"] == entries[-1]["weights"]


def test_a_digest_depends_on_every_bit() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    digest = digests.digest(tensor)
    assert digest == digests.digest(torch.zeros(4, 3, dtype=torch.bfloat16).t().contiguous())
    others = [
        tensor.float(),
        tensor.flatten(),
        -tensor,
        tensor.to_sparse(),
        [tensor],
        {"a": tensor},
        torch.zeros(0),
        None,
    ]
    assert len({digest, *map(digests.digest, others)}) == 1 + len(others)
    assert digests.digest(tensor.view(torch.int16).t()) == digests.digest(tensor.view(torch.int16).t().clone())


def crash(model: nn.Module) -> None:
    raise RuntimeError("crashed")


def test_a_resumed_run_continues_its_journal(folder: Path) -> None:
    options = {"checkpoints": {"folder": str(folder / "stored"), "every": "4ba"}, "resume": "auto"}
    with pytest.raises(RuntimeError, match="crashed"):
        trained(folder, HONEST._replace(later=(8, crash)), "resumed", every="3ba", **options)
    file = folder / "runs/resumed/journal.jsonl"
    assert [line.get("batch") for line in lines(file)] == [None, 0, 0, 3, 6]
    with file.open("a") as opened:  # half of a line, which a killed run leaves
        opened.write('{"batch": 9, "los')
    trained(folder, HONEST, "resumed", every="3ba", **options)
    resumed, first = (lines(folder / f"runs/{name}/journal.jsonl") for name in ("resumed", "first"))
    assert resumed[1]["environment"] == first[1]["environment"]
    assert [line["batch"] for line in resumed[2:]] == [0, 3, 6, 9, 12]
    losses = [loss for line in first[2:] for loss in line.pop("losses", ())]
    assert [loss for line in resumed[2:] for loss in line.pop("losses", ())] == losses and len(losses) == 12
    assert "".join(line.pop("order", "") for line in resumed[2:]) == "".join(
        line.pop("order", "") for line in first[2:]
    )
    assert resumed[2:] == first[2::3]


def test_refusals(folder: Path) -> None:
    for every, write in (("1ep", 100), ("10", 10), ("x", 100)):
        with pytest.raises(
            ValueError, match=rf"is no time in batches, which a journal counts\. Write every='{write}ba'"
        ):
            Journal(every)
    for given, write in (
        ({"every": 1}, "every='100ba'"),
        ({"every": None}, "every='100ba'"),
        ({"against": 5}, "against="),
    ):
        with pytest.raises(TypeError, match=rf"it should be .*\. Write {write}"):
            Journal(**given)
    with pytest.raises(PluginError, match=r"There is no folder .*nosuch, whose journal"):
        trained(folder, HONEST, "refused-0", folder / "runs/nosuch")
    with pytest.raises(ValueError, match=r"callbacks has 'journal' twice\. Both would write one journal\.jsonl"):
        hocket.Trainer(torch.nn.Linear(1, 1), callbacks=["journal", {"journal": {"every": "7ba"}}], device="cpu")
    (folder / "runs/empty").mkdir()
    with pytest.raises(PluginError, match=r"has no journal to compare with. Record one first: hocket train --from"):
        trained(folder, HONEST, "refused", folder / "runs/empty")
    file = folder / "runs/of-two/journal.jsonl"
    file.parent.mkdir()
    file.write_text((folder / "runs/first/journal.jsonl").read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(PluginError, match=r"recorded on 2 rank\(s\), and this run is on 1"):
        trained(folder, HONEST, "refused-2", folder / "runs/of-two")
    with pytest.raises(PluginError, match=r"No batch of .*coarse was compared"):
        trained(folder, HONEST, "refused-3", folder / "runs/coarse", "5ba", duration="7ba")


@pytest.mark.parametrize("line", [1, 4, 7])
def test_a_damaged_journal_is_refused_and_not_verified_in_part(folder: Path, line: int) -> None:
    file = folder / f"runs/damaged-{line}/journal.jsonl"
    file.parent.mkdir()
    texts = (folder / "runs/first/journal.jsonl").read_text().splitlines(keepends=True)
    texts[line - 1] = texts[line - 1].replace('"', "", 1)
    file.write_text("".join(texts))
    with pytest.raises(PluginError, match=rf"journal.jsonl is damaged, or lacks a line, at line {line}, "):
        trained(folder, HONEST, f"not verified {line}", file.parent)


@pytest.mark.parametrize("line", [1, 2, 3, 7, 14])
def test_a_journal_without_one_of_its_lines_is_refused(folder: Path, line: int) -> None:
    file = folder / f"runs/without-{line}/journal.jsonl"
    file.parent.mkdir()
    texts = (folder / "runs/first/journal.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(texts[: line - 1] + texts[line:]))
    with pytest.raises(PluginError, match=rf"journal.jsonl is damaged, or lacks a line, at line {line}, .*Record one"):
        trained(folder, HONEST, f"not verified without {line}", file.parent)


def test_a_resumed_run_does_not_hide_that_a_line_is_missing(folder: Path) -> None:
    options = {"checkpoints": {"folder": str(folder / "stored whole"), "every": "4ba"}, "resume": "auto"}
    with pytest.raises(RuntimeError, match="crashed"):
        trained(folder, HONEST._replace(later=(8, crash)), "hole", every="1ba", **options)
    file = folder / "runs/hole/journal.jsonl"
    texts = file.read_text().splitlines(keepends=True)
    file.write_text("".join(texts[:5] + texts[6:]))
    trained(folder, HONEST, "hole", every="1ba", **options)
    with pytest.raises(PluginError, match=r"lacks a line, at line 6, "):
        Journal.check_recorded(str(file.parent))


def test_a_journal_that_is_cut_off_does_not_verify_the_rest(folder: Path) -> None:
    file = folder / "runs/cut/journal.jsonl"
    file.parent.mkdir()
    whole = (folder / "runs/first/journal.jsonl").read_bytes()
    assert json.loads(whole.splitlines()[-1]) == {"batch": 12, "end": True, "line": 16}
    for name, part, last in (("end", whole[:-30], 12), ("entry", whole[:-300], 11)):
        file.write_bytes(part)
        with pytest.raises(
            PluginError, match=rf"{last} batches, .* has no end, .* cut off after batch {last}\. Record one"
        ):
            trained(folder, HONEST, f"of cut {name}", file.parent)
        report = json.loads((folder / f"runs/of cut {name}/verification.json").read_text())
        assert (report["batch"], report["recorded"], report["complete"]) == (last, last, False)
    for part in (b"".join(whole.splitlines(keepends=True)[:3]), whole[:50]):
        file.write_bytes(part)
        with pytest.raises(PluginError, match=r"journal.jsonl is empty or cut off: .*Record one first"):
            Journal.check_recorded(str(file.parent))


class TestJournal(CallbackConformance):
    exempt = {"test_does_not_wait_for_the_device": "an entry of each batch reads weights and gradients on the host"}

    def make(self) -> Journal:
        return Journal("1ba")


# --- two ranks


def on_two(folder: Path, plant: Planted, name: str, against: str | None = None, every: str = "1ba") -> list[Any]:
    """Train on two ranks; return the message of each rank, and the difference, or None."""
    imported(folder, plant)

    def rank_main(rank: int) -> Any:
        try:
            trained(folder, plant, name, None if against is None else folder / "runs" / against, every, 2)
        except RepetitionDiffers as error:
            return str(error), error.difference
        return None

    return run_ranks(rank_main, 2)


@pytest.fixture(scope="module")
def first_on_two(folder: Path) -> str:
    assert on_two(folder, HONEST, "first on two") == [None, None]
    return "first on two"


@pytest.mark.long
def test_an_honest_repetition_passes_on_two_ranks(folder: Path, first_on_two: str) -> None:
    assert on_two(folder, HONEST, "again on two", first_on_two) == [None, None]
    assert json.loads((folder / "runs/again on two/verification.json").read_text())["batch"] == 12
    one, two = (lines(folder / f"runs/{first_on_two}/journal{rank}.jsonl")[3:] for rank in ("", ".rank1"))
    assert [entry["weights"] for entry in one] == [entry["weights"] for entry in two]
    assert all(a["inputs"] != b["inputs"] and a["order"] != b["order"] for a, b in zip(one, two, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if name != "threads"])  # ranks compute with one
def test_a_planted_difference_is_named_on_two_ranks(folder: Path, first_on_two: str, name: str) -> None:
    plant = PLANTED[name]
    (text, difference), (other, _) = on_two(folder, plant, f"two {name}", first_on_two)
    assert text == other
    assert difference.batch == plant.batch and difference.what in plant.what.split(" or "), text
    assert all(part in text for part in plant.said), text
    # Rank 1 has the second half of each global batch: sample 70 is its third of the ninth, and 33 is rank 0's second.
    assert difference.rank == (name == "sample")


@pytest.mark.long
def test_a_run_on_two_ranks_continues_its_journals(folder: Path, first_on_two: str) -> None:
    def rank_main(rank: int, later: Any) -> None:
        options = {"checkpoints": {"folder": str(folder / "stored-2"), "every": "5ba"}, "resume": "auto"}
        trained(folder, HONEST._replace(later=later), "resumed on two", every="4ba", ranks=2, **options)

    imported(folder, HONEST)
    with pytest.raises(RankError, match="crashed"):
        run_ranks(lambda rank: rank_main(rank, (7, crash)), 2)
    run_ranks(lambda rank: rank_main(rank, None), 2)
    assert on_two(folder, HONEST, "verified on two", "resumed on two") == [None, None]
    for name in ("journal", "journal.rank1"):
        resumed, first = (lines(folder / f"runs/{run}/{name}.jsonl")[3:] for run in ("resumed on two", first_on_two))
        assert [loss for line in resumed for loss in line["losses"]] == [
            loss for line in first for loss in line["losses"]
        ]


# --- the command

CONFIG = """
model: {torch.nn:Sequential: [{torch.nn:Linear: [64, 32]}, {torch.nn:Dropout: [0.2]}, {torch.nn:Linear: [32, 10]}]}
loss: planted_project:loss
train_data: planted_project:loader
global_batch: 8
optimizer: {adamw: {lr: 1e-3}}
duration: 12ba
seed: 17
device: cpu
run_name: first
algorithms: [{ema: {half_life: 4ba}}]
callbacks: [{journal: {every: 5ba}}]
"""
LOSS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def loader():
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(96, 64, generator=generator), torch.randint(0, 10, (96,), generator=generator)
    return DataLoader(TensorDataset(images, labels), 8, shuffle=True)

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("c.yaml").write_text(CONFIG)
    Path("planted_project.py").write_text(LOSS)

    def call(*arguments: str) -> tuple[int, str]:
        sys.modules.pop("planted_project", None)
        shutil.rmtree("__pycache__", ignore_errors=True)
        code = main([*arguments])
        return code, capsys.readouterr().err

    return call


def test_the_command_verifies_a_run(typed: Callable[..., tuple[int, str]]) -> None:
    assert typed("train", "c.yaml")[0] == 0
    code, said = typed("train", "--from", "runs/first", "--verify")
    assert code == 0 and "hocket: runs/first is repeated bitwise: 12 batches, 4 entries of its journal." in said
    code, said = typed("train", "--from", "runs/first", "--verify", "callbacks=[lr-monitor]", "model=nosuch:model")
    assert code == 2 and "runs/first has a journal, and this run would keep none" in said, "before the model is made"
    journal = "{journal: {every: 5ba}}"
    assert f"hocket train --from runs/first --verify 'callbacks=[{journal}, lr-monitor]'" in said
    said = typed("train", "--from", "runs/first", "--verify", "callbacks=[]", "checkpoints=stored")[1]
    assert f"hocket train --from runs/first --verify 'callbacks=[{journal}]'" in said
    file = Path("runs/first/journal.jsonl")
    whole = file.read_text()
    file.write_text("")
    said = typed("train", "--from", "runs/first", "--verify", "model=nosuch:model")[1]
    assert "Record one first: hocket train --from runs/first; then verify that run." in said
    file.write_text(whole)
    code, said = typed("train", "--from", "runs/first", "--verify", "seed=null")
    assert code == 1 and "one of the two has none. What has changed: seed was 17, is not set" in said
    Path("planted_project.py").write_text(LOSS.replace("cross_entropy(outputs", "cross_entropy(outputs * 1.001"))
    code, said = typed("train", "--from", "runs/first", "--verify")
    assert code == 1 and "in batch 1, the loss differs" in said
    assert "planted_project.py has changed (line 11: `return torch.nn.functional.cross_entropy(outputs * 1.001" in said


def test_the_command_says_what_to_type(typed: Callable[..., tuple[int, str]]) -> None:
    code, said = typed("train", "c.yaml", "--verify")
    assert code == 2 and "Name it: hocket train --from runs/a --verify" in said
    assert typed("train", "c.yaml", "callbacks=[lr-monitor]", "duration=1ba", "algorithms=[]")[0] == 0
    code, said = typed("train", "--from", "runs/first", "--verify")
    assert (
        code == 2
        and "without a journal" in said
        and "hocket train --from runs/first 'callbacks=[{journal: {every: 100ba}}, lr-monitor]'" in said
    )


@pytest.mark.long
def test_the_command_verifies_a_run_on_two_ranks(typed: Callable[..., tuple[int, str]]) -> None:
    def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hocket", "launch", "-n", "2", "-m", "hocket", "train", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert launched("c.yaml").returncode == 0
    again = launched("--from", "runs/first", "--verify")
    assert again.returncode == 0 and again.stderr.count("runs/first is repeated bitwise: 12 batches") == 1
    other = launched("--from", "runs/first", "--verify", "optimizer.adamw.weight_decay=0.5")
    assert other.returncode == 1, other.stderr
    assert "weight_decay was 0.01, is 0.5" in other.stderr
    code, said = typed("train", "--from", "runs/first", "--verify", "strategy=auto")
    assert code == 2 and "recorded on 2 rank(s), and this run is on 1" in said
