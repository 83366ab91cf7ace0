"""Checkpoints of which every rank writes its shards: bitwise, without gathering, whoever reads them and whatever fails."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from sharded_model import PLAN, WIDTH, WORDS, held, network, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

import hocket
from hocket_checkpoints import CheckpointError, DamagedCheckpointWarning, content
from hocket_checkpoints.storage import assembly, format as formats, shards
from hocket_checkpoints.storage.store import Store
from hocket_cli import main
from hocket_testkit import RankError, run_ranks

FSDP = {"fsdp": {"wrap": ["Block"]}}
SHARDED = {
    "fsdp": (2, FSDP),
    "fsdp, uneven": (3, FSDP),
    "fsdp x replicate": (4, {"fsdp": {"wrap": ["Block"], "replicate": 2}}),
    "tensor": (2, {"tensor-parallel": {"plan": PLAN}}),
    "fsdp x tensor": (4, {"tensor-parallel": {"plan": PLAN, "tensor": 2, "shard": 2, "wrap": ["Block"]}}),
}


class Doubles(hocket.Callback):
    """Has state by the model's names, as shards where the weights are."""

    def __init__(self):
        self.doubles = {}

    def batch_end(self, state):
        self.doubles = {name: 2 * each.detach() for name, each in state.model.named_parameters()}

    def state_dict(self):
        return {"doubles": self.doubles}

    def load_state_dict(self, state_dict):
        self.doubles = state_dict["doubles"]


def make(strategy, folder, seed=1, resume=None, doubles=None, **policy):
    return trainer(
        network(seed), strategy, str(folder), duration="3ba", callbacks=[doubles or Doubles()], seed=5, resume=resume,
        checkpoints=hocket.Checkpoints(folder, **{"every": "1ba", "keep": None, **policy}),
    )  # fmt: skip


LEARNED = ["model", "optimizers", "plugins", "timestamp"]


def learned(tree):
    """What does not depend on the number of ranks."""
    return {key: tree[key] for key in LEARNED}


def same(a, b, path=""):
    """Bit by bit, and plain."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), path
        for index, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{path}.{index}")
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, path


def written(strategy, size, folder, **policy):
    """What each rank had in the end, whole."""

    def run(rank):
        one = make(strategy, folder, **policy)
        one.fit("2ba")
        tree = one.state_dict()
        one.close()
        return tree

    return run_ranks(run, size, timeout=120)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The folder of a run on two ranks, to copy."""
    folder = tmp_path_factory.mktemp("two")
    written(FSDP, 2, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, asynchronous", [*((kind, False) for kind in SHARDED), ("fsdp, uneven", True), ("fsdp x tensor", True)]
)
def test_the_shards_are_the_whole_state(tmp_path, kind, asynchronous):
    size, strategy = SHARDED[kind]
    trees = written(strategy, size, tmp_path, asynchronous=asynchronous)
    store = Store(tmp_path)
    assert store.names() == ["ep0-ba1", "ep0-ba2"] == [store.names()[0], store.latest()]
    same(learned(store.read("ep0-ba2")), learned(trees[0]))
    (tree,) = (tmp_path / "ep0-ba2").glob("tree-*.json")
    assert json.loads(tree.read_text())["model"]["network.blocks.0.up.weight"]["$tensor"]["pieces"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdp, uneven", "fsdp x tensor"])
def test_any_number_of_ranks_goes_on_from_them(tmp_path, kind):
    """Sharded, in one process, and sharded again."""
    size, strategy = SHARDED[kind]
    first = written(strategy, size, tmp_path)[0]
    for ranks, other in ((1, "single"), (size, strategy), (2, FSDP), (2, "ddp")):

        def run(rank, other=other):
            doubles = Doubles()
            one = make(other, tmp_path, seed=9, resume="auto", doubles=doubles)
            kinds, tree = {type(each) for each in doubles.doubles.values()}, one.state_dict()
            one.close()
            return tree, kinds

        for tree, kinds in run_ranks(run, ranks, timeout=120):
            same(learned(tree), learned(first))
            assert kinds == ({Tensor} if other in ("single", "ddp") else {DTensor})


@pytest.mark.long
def test_nothing_is_gathered_and_no_rank_needs_more_than_its_share(tmp_path, monkeypatch):
    """Bytes of copies while writing and reading, against those of parameters and optimizer state that a rank holds."""

    def ungathered(tensor):
        assert not isinstance(tensor, DTensor)
        return tensor

    monkeypatch.setattr("hocket.basics.plain_data.full", ungathered)
    monkeypatch.setattr("hocket_strategies.fsdp.full", ungathered)

    def write(rank):
        one = make(FSDP, tmp_path, asynchronous=True)
        one.fit("2ba")
        kept = one.settings.checkpoints._writer._background._staging._kept
        one.close()
        return sum(each.nbytes for name, each in kept.items() if name.partition(".")[0] in LEARNED), held(one)

    def read(rank):
        made = []
        new, begin = shards.new, assembly.Assembly._begin
        monkeypatch.setattr(shards, "new", lambda entry: made.append(new(entry)) or made[-1])
        monkeypatch.setattr(assembly.Assembly, "_begin", lambda *args: made.append(begin(*args)) or made[-1])
        one = make(FSDP, tmp_path, resume="auto")
        made.clear()
        Store(tmp_path).read("ep0-ba2", only=LEARNED, like=one.state.content.like())
        one.close()
        return sum(each.nbytes for each in made), held(one)

    for copied, mine in run_ranks(write, 4) + run_ranks(read, 4):
        assert copied <= 4 / 3 * mine + 200  # what Doubles keeps is a third of the rest; and there are counts of steps
    whole = sum(file.stat().st_size for file in (tmp_path / "ep0-ba2").glob("*.safetensors"))
    assert mine < whole / 5


def test_commands(tmp_path, of_two, capsys):
    """Such checkpoints are looked at, verified, exported and compared as others are."""
    shutil.copytree(of_two, tmp_path, dirs_exist_ok=True)
    tree, path = Store(tmp_path).read("ep0-ba2"), str(tmp_path / "ep0-ba2")
    formats.write(tmp_path / "plain", tree, {})
    assert main(["checkpoint", "diff", path, str(tmp_path / "plain")]) == 0
    assert main(["checkpoint", "verify", path]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "inspect", path, "--only", "model.*", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)["tree"]}
    row = rows["model.network.blocks.0.up.weight"]
    assert (row["shape"], row["bytes"], len(row["files"])) == ([64, 16], 64 * 16 * 8, 2)
    assert main(["checkpoint", "export", path, str(tmp_path / "all.safetensors")]) == 0
    exported = shards.load(tmp_path / "all.safetensors")
    assert len(exported) == len(tree["model"])
    assert all(torch.equal(tree["model"][tree["model_prefix"] + name], value) for name, value in exported.items())


def test_old_checkpoints_are_read_as_shards(tmp_path):
    """What one process has written whole, each rank reads a part of."""
    one = make("single", tmp_path)
    one.fit("2ba")
    expected = one.state_dict()

    def run(rank):
        doubles = Doubles()
        other = make(FSDP, tmp_path, seed=9, resume="auto", doubles=doubles)
        return (
            other.state_dict(),
            {type(each) for each in doubles.doubles.values()},
            isinstance(next(other.state.task.parameters()), DTensor),
        )

    for tree, kinds, sharded in run_ranks(run, 2):
        same(tree["model"], expected["model"])
        same(tree["optimizers"], expected["optimizers"])
        assert kinds == {Tensor} and sharded  # plug-ins get what they gave


# --- what fails


def failing(at, then):
    """shards.save, which does something else on rank 1 when it is called for the ``at``-th time."""
    save, calls = shards.save, []

    def instead(*args):
        calls.append(args)
        if os.environ["RANK"] == "1" and len(calls) == at:
            then(*args)
        return save(*args)

    return instead


def no_space(path, tensors):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write_is_told_to_all(tmp_path, monkeypatch, asynchronous):
    def run(rank):
        one = make(FSDP, tmp_path, asynchronous=asynchronous, every="1ba")
        one.fit("1ba")
        monkeypatch.setattr(shards, "save", failing(1, no_space))
        with pytest.raises(CheckpointError, match=r"Rank 1: .*disk is full" if rank == 0 else "disk is full"):
            one.fit("2ba")
        monkeypatch.undo()
        return one.state.timestamp.batch

    assert run_ranks(run, 2) == ([3, 3] if asynchronous else [2, 2])
    store = Store(tmp_path)
    assert store.names() == ["ep0-ba1"] and store.latest() == "ep0-ba1"
    assert [entry for entry in tmp_path.iterdir() if entry.name.endswith(".partial")] == []


@pytest.mark.parametrize("dies, asynchronous", [(0, True), (1, False), pytest.param(1, True, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(tmp_path, monkeypatch, dies, asynchronous):
    def run(rank):
        one = make(FSDP, tmp_path, asynchronous=asynchronous)
        one.fit("1ba")
        if rank == dies:
            monkeypatch.setattr(shards, "save", lambda *args: os._exit(9))
        one.fit("2ba")

    with pytest.raises(RankError):
        run_ranks(run, 2, timeout=60)
    store = Store(tmp_path)
    assert store.names() == ["ep0-ba1"] == [store.latest()]
    again = run_ranks(lambda rank: make(FSDP, tmp_path, resume="auto").fit().timestamp.batch, 2)
    assert again == [3, 3] and store.latest() == "ep0-ba3"
    assert [entry for entry in tmp_path.iterdir() if entry.name.endswith(".partial")] == []


def test_a_damaged_piece_is_named_and_the_checkpoint_passed_over_by_all(tmp_path, of_two):
    shutil.copytree(of_two, tmp_path, dirs_exist_ok=True)
    piece = max((tmp_path / "ep0-ba2").glob("tensors-*2-*.safetensors"), key=lambda file: file.stat().st_size)
    raw = bytearray(piece.read_bytes())
    raw[-3] ^= 1
    piece.write_bytes(raw)
    assert formats.verify(tmp_path / "ep0-ba2") == [
        f"{piece.name}: its content is not what was written (another SHA-256)."
    ]
    with pytest.raises(CheckpointError, match=piece.name):
        formats.read(tmp_path / "ep0-ba2")

    def run(rank):
        with pytest.warns(DamagedCheckpointWarning, match=rf"'ep0-ba2', which is damaged: .*{piece.name}"):
            return make(FSDP, tmp_path, resume="auto").state.timestamp.batch

    assert run_ranks(run, 2) == [1, 1]


def test_ranks_that_do_not_share_a_folder(tmp_path, monkeypatch):
    def run(rank):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.chdir(tmp_path / str(rank))
        with pytest.raises(CheckpointError, match=r"is not there on .*Ranks write their shards into one folder"):
            make(FSDP, Path("run")).fit("1ba")

    run_ranks(run, 2)
    assert Store(tmp_path / "0" / "run").names() == []


def test_other_ranks_do_not_see_the_checkpoints(tmp_path, of_two, monkeypatch):
    """Then nobody begins anew."""
    shutil.copytree(of_two, tmp_path / "0" / "run")
    (tmp_path / "1").mkdir()

    def run(rank):
        monkeypatch.chdir(tmp_path / str(rank))
        with pytest.raises(CheckpointError, match="has no checkpoint 'ep0-ba2'"):
            make(FSDP, Path("run"), resume="auto")

    run_ranks(run, 2)


@pytest.mark.parametrize("strategy", [FSDP, pytest.param("ddp", marks=pytest.mark.long)])
def test_a_checkpoint_of_another_head_is_refused_before_anything_is_loaded(tmp_path, strategy):
    def made(rank, words):
        model = network(rank, tied=False)
        model.head = torch.nn.Linear(WIDTH, words, bias=False)
        return trainer(
            model, strategy, str(tmp_path), duration="2ba", checkpoints=hocket.Checkpoints(tmp_path / f"run{rank}")
        )

    def rank_main(rank):
        made(1, WORDS).fit("1ba")
        other = made(2, WORDS + 5)
        tree = Store(tmp_path / "run1").read("ep0-ba1", like=other.state.content.like())
        before = {name: value.clone() for name, value in other.model_state_dict().items()}
        head = len(list(other.state.model.parameters())) - 1
        with pytest.raises(
            content.ContentError, match=r"network.head.weight \(\[12, 16\], the module has \[17, 16\]\)"
        ):
            other.load_state_dict(tree)
        with pytest.raises(content.ContentError, match=rf"~int\.{head}\.\*"):
            other.load_state_dict(tree, ignore=["model.network.head.*"])
        assert all(torch.equal(value, before[name]) for name, value in other.model_state_dict().items())
        other.load_state_dict(tree, ignore=["model.network.head.*", f"optimizers.0.state.state.~int.{head}.*"])
        other.fit()
        return {name: value.clone() for name, value in other.model_state_dict().items()}

    one, two = run_ranks(rank_main, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_url(tmp_path):
    """Each rank uploads its files, and downloads what it needs."""
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/run"
    trees = written(FSDP, 2, url)
    store = Store(url)
    assert store.names() == ["ep0-ba1", "ep0-ba2"]
    same(learned(store.read("ep0-ba2")), learned(trees[0]))

    def run(rank):
        one = make(FSDP, url, resume="auto", every=None)
        return one.state_dict()

    for tree in run_ranks(run, 2):
        same(tree["optimizers"], trees[0]["optimizers"])
