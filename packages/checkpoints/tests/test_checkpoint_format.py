"""The checkpoint format: exact round trips, every kind of damage, and kills."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hocket.checkpoints import CheckpointError
from hocket.state.ranks import Ranks
from hocket_checkpoints.storage import (
    format as formats,
    header,
    manifest as manifests,
    pages,
    partials,
    references,
    shards,
)
from hocket_checkpoints.storage.snapshot import Snapshot, Staging

pytest.importorskip("numpy")  # the safetensors library, which files are compared with, needs it

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def bits(tensor):
    """Dtype, shape and bytes in row-major order, read by torch alone."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.tolist())


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    return a == b


def random_tensor(dtype, shape, seed):
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)
    if dtype is torch.bool:
        return (raw % 2).bool().reshape(shape)
    return raw.view(dtype).reshape(shape)


tensors = st.builds(
    random_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 99)
)
leaves = st.one_of(
    tensors,
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(),
    st.text(st.characters(categories=["Cs"]), max_size=3),
    st.binary(max_size=20),
)
keys = st.one_of(st.text(max_size=5), st.sampled_from(["$tensor", "$$x", "$", "a.b", "a", "__metadata__", "~2"]))
trees = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=4),
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@given(tree=trees)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.long
def test_any_tree_comes_back(tmp_path, tree):
    formats.write(tmp_path / "c", tree, {"n": 1})
    assert formats.verify(tmp_path / "c") == []
    assert same(formats.read(tmp_path / "c"), tree)


def make(folder, value=1.0):
    tree = {
        "model": {"layer.weight": torch.full((20, 3), value), "layer.bias": torch.arange(3.0)},
        "optimizers": [{"lr": 0.1, "moment": torch.ones(300_000)}, {"lr": 0.2, "moment": torch.zeros(4)}],
        "step": 7,
    }
    formats.write(folder, tree, {"value": value})
    return tree


def listed(folder):
    return json.loads((folder / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_memory_formats(tmp_path, dtype):
    base = random_tensor(dtype, (4, 3, 6), 0)
    tree = {
        "zero-dim": base[0, 0, 0].clone(),
        "empty": base[:0],
        "transposed": base.clone().permute(2, 0, 1),
        "strided": base.clone()[:, 1:, ::2],
        "expanded": base[0, 0, :1].clone().expand(5),
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
    }
    formats.write(tmp_path / "c", tree, {})
    read = formats.read(tmp_path / "c")
    assert all(bits(read[key]) == bits(tree[key]) for key in tree)
    assert read["transposed"].stride() == tree["transposed"].stride()
    assert read["strided"].is_contiguous() and type(read["parameter"]) is torch.Tensor


def test_the_safetensors_library_reads_the_shards_and_we_its_files(tmp_path):
    known = {str(dtype): random_tensor(dtype, (3, 5), 1) for dtype in DTYPES if str(dtype)[6:] in header.NAMES}
    formats.write(tmp_path / "c", known, {})
    found = {}
    for file in (tmp_path / "c").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    assert same({key: found[key.replace("~2", "")] for key in known}, known)
    safetensors.torch.save_file(known, tmp_path / "theirs.safetensors", metadata={"a": "b"})
    theirs = shards.load(tmp_path / "theirs.safetensors")
    assert same({key: theirs[key] for key in known}, known)


def test_shared_memory_is_stored_once_and_shared_again(tmp_path):
    weight = torch.randn(300, 100)
    raw = torch.arange(64, dtype=torch.uint8)
    tree = {
        "a": {"weight": weight, "tied": weight, "transposed": weight.t(), "row": weight[3], "again": weight.detach()},
        "mixed": [raw[1:], raw[8:24].view(torch.float32), raw[16:32].view(torch.complex128)],
        "apart": [torch.empty(40).fill_(float(i)) for i in range(2)],
    }
    formats.write(tmp_path / "c", tree, {})
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 1.1 * 4 * weight.numel() + 4000
    read = formats.read(tmp_path / "c")
    assert same(read, tree)
    read["a"]["weight"][3, 0] = 7.0
    assert (
        read["a"]["tied"][3, 0]
        == read["a"]["transposed"][0, 3]
        == read["a"]["row"][0]
        == read["a"]["again"][3, 0]
        == 7.0
    )
    before = read["mixed"][1].clone()
    read["mixed"][0][7:] = 0
    assert not torch.equal(read["mixed"][1], before) and (read["mixed"][1] == 0).all() and (read["mixed"][2] == 0).all()
    read["apart"][0].zero_()
    assert (read["apart"][1] == 1).all()


def test_slices_that_do_not_overlap_are_stored_apart(tmp_path):
    flat = torch.arange(1_000_000.0)
    formats.write(tmp_path / "c", {"a": flat[:10], "b": flat[500_000:500_010]}, {})
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 5000


def test_arrays_that_lie_over_each_other_are_stored_apart(tmp_path):
    array = pytest.importorskip("numpy").arange(100, dtype="float32")
    for number, (one, other) in enumerate([(array[:60], array[30:]), (array[30:], array[:60]), (array, array[::2])]):
        tree = {"one": torch.from_numpy(one), "other": torch.from_numpy(other), "tied": torch.from_numpy(one)}
        formats.write(tmp_path / str(number), tree, {})
        read = formats.read(tmp_path / str(number))
        assert same(read, tree)
        read["one"].zero_()
        assert torch.equal(read["tied"], read["one"])


class Executes:
    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, {"b": object()}]}, r"a\.1\.b: a builtins\.object"),
        ({"a": {1: 2}}, r"a: the key 1 is of type int"),
        ({"a": {"x": Executes()}}, r"a\.x"),
        ({"a": {"x": {1, 2}}}, r"a\.x: a builtins\.set"),
        ({"a": torch.ones(2, device="meta")}, "a: a tensor on the meta device"),
        ({"a": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}, r"a: a torch\.bits8"),
        ({"a": torch.ones(2).to_sparse()}, "a: a torch.sparse_coo tensor"),
    ],
)
def test_what_cannot_be_stored_is_named_and_leaves_nothing(tmp_path, tree, place):
    with pytest.raises(TypeError, match=place):
        formats.write(tmp_path / "c", tree, {})
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_contains_itself(tmp_path):
    tree = {}
    tree["a"] = [tree]
    with pytest.raises(ValueError, match="does it contain itself"):
        formats.write(tmp_path / "c", tree, {})


def test_about(tmp_path):
    before = time.time()
    formats.write(tmp_path / "c", {}, {"plugins": {"a": "1.0"}, "loss": math.nan})
    about = formats.about(tmp_path / "c")
    assert about["plugins"] == {"a": "1.0"} and math.isnan(about["loss"])
    assert about["format"] == manifests.VERSION and about["hocket"] and before <= about["written"] <= time.time()
    with pytest.raises(TypeError, match=r"about\.x"):
        formats.write(tmp_path / "d", {}, {"x": torch.ones(1)})


def test_only(tmp_path):
    tree = make(tmp_path / "c")
    assert same(formats.read(tmp_path / "c", only=["model"]), {"model": tree["model"]})
    assert same(formats.read(tmp_path / "c", only=["model.*.bias"]), {"model": {"layer.bias": torch.arange(3.0)}})
    assert same(
        formats.read(tmp_path / "c", only=["optimizers.1", "step"]), {"optimizers": tree["optimizers"][1:], "step": 7}
    )
    with pytest.raises(CheckpointError, match=r"nothing that matches modle\. It has: model, optimizers, step"):
        formats.read(tmp_path / "c", only=["modle"])
    # Files that hold none of it are not needed.
    (large,) = [name for name in listed(tmp_path / "c") if (tmp_path / "c" / name).stat().st_size > 1_000_000]
    (tmp_path / "c" / large).unlink()
    assert same(formats.read(tmp_path / "c", only=["model"]), {"model": tree["model"]})
    with pytest.raises(CheckpointError, match=f"{large}: it is missing"):
        formats.read(tmp_path / "c")


# --- damage


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["tree", "tensors-00001", "tensors-00002", "manifest"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "flipped", "missing", "link", "empty"])
def test_damage_is_refused_by_name(tmp_path, kind, damage):
    make(tmp_path / "c")
    (name,) = [name for name in files_of(tmp_path / "c") if name.startswith(kind)]
    file = tmp_path / "c" / name
    raw = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(raw[: len(raw) // 2])
    elif damage == "longer":
        file.write_bytes(raw + b"x")
    elif damage == "flipped":
        middle = len(raw) * 2 // 3
        file.write_bytes(raw[:middle] + bytes([raw[middle] ^ 4]) + raw[middle + 1 :])
    elif damage == "missing":
        file.unlink()
    elif damage == "link":
        shutil.copy(file, tmp_path / "elsewhere")
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=name):
        formats.read(tmp_path / "c")
    (problem,) = formats.verify(tmp_path / "c")
    assert name in problem


@pytest.mark.long
def test_every_flipped_bit_is_found(tmp_path):
    formats.write(tmp_path / "c", {"a": torch.arange(5.0), "b": "text", "c": [1, 2.5]}, {"x": [1, "y"]})
    whole = formats.read(tmp_path / "c")
    for name in files_of(tmp_path / "c"):
        file = tmp_path / "c" / name
        raw = file.read_bytes()
        for bit in random.Random(0).sample(range(8 * len(raw)), min(8 * len(raw), 250)):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            try:
                # White space between the manifest's values may change without changing anything.
                assert same(formats.read(tmp_path / "c"), whole) and name == "manifest.json"
            except CheckpointError as error:
                assert name in str(error) or name == "manifest.json"
        file.write_bytes(raw)
    assert formats.verify(tmp_path / "c") == []


def test_extra_files_are_named_and_never_read(tmp_path):
    tree = make(tmp_path / "c")
    (tmp_path / "c" / "model.pt").write_bytes(pickle.dumps(Executes()))
    assert formats.verify(tmp_path / "c") == ["model.pt: it is not part of the checkpoint, and is never read."]
    assert same(formats.read(tmp_path / "c"), tree)


@pytest.mark.parametrize("problem", ["nothing", "a file"])
def test_what_is_no_checkpoint(tmp_path, problem):
    if problem == "a file":
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "tree.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        formats.read(tmp_path / "c")


# --- copies


@pytest.mark.parametrize("shape", [(), (0,), (1 << 20,), (1 << 20) + 1, (3, (1 << 20) + 7)])
def test_memory_in_huge_pages_is_like_any_other(shape):
    """What lies before and behind it stays as it is."""
    around = [torch.full((1000,), 7.0) for _ in range(50)]
    shape = shape if isinstance(shape, tuple) else (shape,)
    tensor = pages.advise(torch.empty(shape))
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.storage_offset() == 0
    assert (tensor.fill_(3.0) == 3.0).all() and all((each == 7.0).all() for each in around)


def test_a_copy_is_of_one_moment_and_its_memory_is_kept(tmp_path):
    weight = torch.randn(3000, 1000)  # more than a thread copies at a time
    tree = {
        "weight": weight, "tied": weight, "row": weight[3], "empty": torch.empty(0, 3), "step": torch.tensor(7.0),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "wide": torch.randn(5, dtype=torch.complex128),
        "every other": torch.randn(6, 8)[:, ::2],
    }  # fmt: skip
    staging, places = Staging(), []
    for value in (1.0, 2.0):
        weight.fill_(value)
        expected, snapshot = copy.deepcopy(tree), Snapshot(tree)
        staging.copy(snapshot)
        for each in tree.values():
            each.zero_()
        formats.write(tmp_path / "c", snapshot, {})
        read = formats.read(tmp_path / "c")
        assert same(read, expected) and read["tied"] is read["weight"]
        assert read["row"].untyped_storage().data_ptr() == read["weight"].untyped_storage().data_ptr()
        assert sum(each.tensor.nbytes for each in snapshot.stored) < weight.nbytes + 2000
        places.append([each.tensor.data_ptr() for each in snapshot.stored])
    assert places[0] == places[1]


# --- pieces


def cut(box, draw, left=3):
    """Boxes that make up a box, as (begin, shape)."""
    begin, shape = box
    dim = draw(st.integers(0, len(shape) - 1))
    if not left or shape[dim] < 2:
        return [box]
    at = draw(st.integers(1, shape[dim] - 1))
    lower = (begin, [*shape[:dim], at, *shape[dim + 1 :]])
    upper = ([*begin[:dim], begin[dim] + at, *begin[dim + 1 :]], [*shape[:dim], shape[dim] - at, *shape[dim + 1 :]])
    return [part for half in (lower, upper) for part in cut(half, draw, left - 1)]


@given(st.data())
def test_pieces_are_whole_if_they_hold_each_element_once(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    boxes = cut(([0] * len(shape), shape), data.draw)
    change = data.draw(st.sampled_from(["none", "drop", "move", "repeat"]))
    begin, size = boxes.pop() if change in ("drop", "move") else boxes[0]
    if change == "move":
        boxes.append(([data.draw(st.integers(0, 3)) for _ in begin], size))
    elif change == "repeat":
        boxes.append((begin, size))
    held = torch.zeros([n + 8 for n in shape], dtype=torch.int)
    for begin, size in boxes:
        held[tuple(slice(at, at + n) for at, n in zip(begin, size, strict=True))] += 1
    inside = tuple(slice(0, n) for n in shape)
    once = bool((held[inside] == 1).all()) and held.sum() == held[inside].numel()
    reference = {"shape": shape, "pieces": [{"begin": begin, "shape": size} for begin, size in boxes]}
    assert references.whole(reference) == once


# --- writing that is interrupted


def test_a_checkpoint_is_replaced_and_what_is_none_is_not(tmp_path):
    make(tmp_path / "c")
    tree = make(tmp_path / "c", 2.0)
    assert same(formats.read(tmp_path / "c"), tree)
    assert set(files_of(tmp_path / "c")) == {"manifest.json", *listed(tmp_path / "c")}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("…")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint \(it has thesis\.tex\)"):
        make(tmp_path / "data")
    assert files_of(tmp_path) == ["c", "data"] and files_of(tmp_path / "data") == ["thesis.tex"]


def test_staging_memory_is_of_the_dtype():
    staging = Staging()
    for dtype in (torch.float32, torch.float64, torch.int32):
        snapshot = Snapshot({"a": torch.arange(5, dtype=dtype)})
        staging.copy(snapshot)
        (stored,) = snapshot.stored
        assert stored.tensor.dtype is dtype and stored.tensor.tolist() == [0, 1, 2, 3, 4]


def test_shards_are_bounded_and_numbered_by_rank(tmp_path, monkeypatch):
    """Of five tensors of 40 bytes two are in a file of at most 100; ranks that write into one folder share no number."""
    monkeypatch.setattr(formats, "SHARD", 100)
    tree = {"model": {str(number): torch.full((10,), float(number)) for number in range(5)}}
    numbers = []
    for rank in range(2):
        files = formats.write_part(tmp_path, Snapshot(tree), Ranks(rank, 2)).files
        sizes = [sum(each.nbytes for each in safetensors.torch.load_file(tmp_path / name).values()) for name in files]
        assert sorted(sizes) == [40, 80, 80]
        numbers += [int(name.split("-")[1]) for name in files]
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


def test_small_checkpoints_have_work_for_several_threads(tmp_path):
    tree = {"model": {str(number): torch.full((1 << 18,), float(number)) for number in range(24)}}
    formats.write(tmp_path / "c", tree, {})
    sizes = sorted(file.stat().st_size >> 20 for file in (tmp_path / "c").glob("tensors-*"))
    assert sizes == [8, 8, 8] and same(formats.read(tmp_path / "c"), tree)


def fork(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        function()
    finally:
        os._exit(0)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")


@needs_fork
@pytest.mark.parametrize("there", ["new", "replaced"])
@pytest.mark.long
def test_killed_at_any_moment(tmp_path, there, monkeypatch):
    """Twenty kills spread over the time that a write takes: the old checkpoint or the new one, always whole."""
    monkeypatch.setattr(formats, "SHARD", 400_000)
    draw = random.Random(0)
    old = make(tmp_path / "old") if there == "new" else None
    path = tmp_path / "c"
    started = time.perf_counter()
    make(path)
    whole = time.perf_counter() - started
    seen = set()
    for attempt in range(20):
        if there == "new":
            shutil.rmtree(path, ignore_errors=True)
        value = float(attempt + 2)
        previous = formats.about(path)["value"] if path.exists() else None
        pid = fork(lambda value=value: make(path, value))
        time.sleep(draw.uniform(0, 1.5 * whole))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if path.exists():
            assert formats.verify(path) == []
            found = formats.about(path)["value"]
            assert found in (previous, value) and (formats.read(path)["model"]["layer.weight"] == found).all()
            seen.add(found == value)
        else:
            assert there == "new"
            seen.add(False)
        if old is not None:
            assert same(formats.read(tmp_path / "old"), old)
    partials.clean(tmp_path)
    make(path, 99.0)
    assert files_of(tmp_path) == (["c", "old"] if there == "new" else ["c"])
    assert set(files_of(path)) == {"manifest.json", *listed(path)}


@pytest.mark.long
@needs_fork
@pytest.mark.parametrize("call", ["rename", "replace", "fsync", "mkdir"])
@pytest.mark.parametrize("there", ["new", "replaced"])
def test_killed_at_every_system_call(tmp_path, call, there):
    """The child kills itself before its first, second, third … call, until it gets through."""
    path = tmp_path / "c"
    outcomes = []
    for nth in range(30):
        shutil.rmtree(path, ignore_errors=True)
        if there == "replaced":
            make(path, 1.0)

        def child(nth=nth):
            real, calls = getattr(os, call), iter(range(nth))

            def counted(*arguments, **keywords):
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **keywords)

            setattr(os, call, counted)
            make(path, 2.0)

        _, status = os.waitpid(fork(child), 0)
        if path.exists():
            assert formats.verify(path) == []
            outcomes.append(formats.about(path)["value"])
            assert (formats.read(path)["model"]["layer.weight"] == outcomes[-1]).all()
        else:
            outcomes.append(None)
        if not os.WIFSIGNALED(status):
            break
    assert outcomes[-1] == 2.0 and outcomes == sorted(outcomes, key=lambda value: value or 0)
    assert set(outcomes) <= ({1.0, 2.0} if there == "replaced" else {None, 2.0})


def test_leftovers_of_the_living_stay(tmp_path):
    mine = partials.begin(tmp_path / "c")
    host = mine.name.split(".")[2].rpartition("-")[0].rpartition("-")[0]
    names = {
        "dead": f".c.{host}-{2**22 + 1}-{'0' * 16}.partial",
        "parent": f".c.{host}-{os.getppid()}-{'0' * 16}.partial",
        "elsewhere": f".c.other-7-{'0' * 16}.partial",
        "elsewhere, long ago": f".c.other-8-{'0' * 16}.partial",
        "of this process, before it was this process": f".c.{host}-{os.getpid()}-{'0' * 16}.partial",
        "not ours": ".download.partial",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
    os.utime(tmp_path / names["elsewhere, long ago"], (0, 0))
    partials.clean(tmp_path)
    kept = {names[key] for key in ("parent", "elsewhere", "not ours")} | {mine.name}
    assert {entry.name for entry in tmp_path.iterdir()} == kept
    partials.end(mine)
    assert not mine.exists()


def test_several_threads_write_side_by_side(tmp_path):
    threads = [threading.Thread(target=make, args=(tmp_path / f"c{i}", float(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [formats.read(tmp_path / f"c{i}", only=["model"])["model"]["layer.weight"][0, 0] for i in range(4)] == [
        0,
        1,
        2,
        3,
    ]
    assert files_of(tmp_path) == ["c0", "c1", "c2", "c3"]


def test_looking_does_not_import_torch(tmp_path):
    make(tmp_path / "c")
    code = (
        "import sys; from hocket_checkpoints import format; from hocket_cli import main\n"
        f"assert format.verify({str(tmp_path / 'c')!r}) == []\n"
        f"assert main(['checkpoint', 'inspect', {str(tmp_path / 'c')!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'fsspec' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optimizers.0.moment" in done.stdout and "float32 [300000]" in done.stdout


def test_one_stream_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for tensors of two GPUs."""

    class Fake:
        is_cuda, shape, dtype = True, (4,), torch.float32

        def __init__(self, number: int) -> None:
            self.device = torch.device("cuda", number % 2)

    made: list[torch.device] = []

    def stream(device: torch.device) -> Any:
        made.append(device)
        return SimpleNamespace(wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **options: torch.empty(4))
    stored = [SimpleNamespace(name=str(number), tensor=Fake(number)) for number in range(100)]
    snapshot: Any = SimpleNamespace(stored=stored)
    Staging().copy(snapshot, lambda tensor: True)
    assert sorted(map(str, made)) == ["cuda:0", "cuda:1"]
