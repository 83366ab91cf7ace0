"""Weights from other tools' files, what fits a module, and `hocket checkpoint`."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import re
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import hocket
from hocket.checkpoints import CheckpointError
from hocket_checkpoints.storage import format as formats
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.weight_files import read_weights
from hocket_checkpoints.weights import export, load_weights
from hocket_cli import main


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))


def prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def write_hugging_face(folder, state, kind):
    """As `save_pretrained` lays folders out, with two shards where the kind says so."""
    folder.mkdir()
    ending = "safetensors" if "safetensors" in kind else "bin"
    stem = "model" if ending == "safetensors" else "pytorch_model"
    save = safetensors.torch.save_file if ending == "safetensors" else torch.save
    (folder / "config.json").write_text("{}")
    if "sharded" not in kind:
        save(dict(state), folder / f"{stem}.{ending}")
        return
    names = list(state)
    places = {name: f"{stem}-{1 + (i > 2):05}-of-00002.{ending}" for i, name in enumerate(names)}
    for file in set(places.values()):
        save({name: state[name] for name in names if places[name] == file}, folder / file)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write(kind, folder, state):
    path = folder / "x"
    if kind == "hocket":
        formats.write(path, {"model": dict(state), "optimizers": [{"step": torch.ones(2)}]}, {})
    elif kind.startswith("hugging face"):
        write_hugging_face(path, state, kind)
    elif kind == "safetensors":
        path = folder / "x.safetensors"
        safetensors.torch.save_file(dict(state), path)
    else:
        content = {
            "state_dict": state,
            "legacy": state,
            "wrapped": prefixed(state, "module._orig_mod."),
            "nested": {"epoch": 3, "model_state_dict": state, "optimizer": {"state": {0: torch.ones(3)}}},
            "lightning": {
                "pytorch-lightning_version": "2.5.0",
                "epoch": 1,
                "state_dict": prefixed(state, "model."),
                "optimizer_states": [{"state": {0: {"step": torch.ones(())}}}],
            },
            "composer": {"state": {"model": prefixed(state, "module.model."), "timestamp": {"epoch": 1}}, "rng": [1]},
        }[kind]
        torch.save(content, path, _use_new_zipfile_serialization=kind != "legacy")
    return path


KINDS = [
    "hocket", "safetensors", "state_dict", "legacy", "wrapped", "nested", "lightning", "composer", "hugging face safetensors",
    "hugging face safetensors sharded", "hugging face bin", "hugging face bin sharded",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_loaded_and_exported(tmp_path, kind):
    source = net().state_dict()
    path = write(kind, tmp_path, source)
    weights = read_weights(path)
    assert equal({name: weights[name] for name in source}, source) and len(weights) == len(source)
    other = net(1)
    assert not load_weights(other, weights)
    assert equal(other.state_dict(), source)
    assert export(path, tmp_path / "out" / "w.safetensors") == len(source)
    exported = safetensors.torch.load_file(tmp_path / "out" / "w.safetensors")
    assert equal({name: exported[name] for name in source}, source)
    assert os.listdir(tmp_path / "out") == ["w.safetensors"]


def test_an_import_path_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"There is no a\.b:mlp in .* from a\.b import mlp; and give mlp\."):
        read_weights("a.b:mlp")
    with pytest.raises(CheckpointError, match=r"of Hugging Face\.$"):
        read_weights("runs/a:b")


def test_weights_are_a_file_or_tensors_and_the_module_comes_first(tmp_path):
    module, saved = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    load_weights(module, str(tmp_path / "model.pt"))
    assert torch.equal(module.weight, saved.weight)
    with pytest.raises(CheckpointError, match=r"There is no bert-base .*'hub:org/name'"):
        load_weights(module, "bert-base")
    for given in (("model.pt", module), (module, None), (module, saved), (module, [saved.weight])):
        with pytest.raises(
            TypeError, match=r"it takes a torch.nn.Module, and then its weights.* Write load_weights\(model"
        ):
            load_weights(*given)


def test_latest_is_the_newest_checkpoint(tmp_path, monkeypatch):
    store = Store(tmp_path)
    for value in (1.0, 2.0):
        store.save(f"ba{value:.0f}", {"model": {"w": torch.full((3,), value)}}, {})
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "latest", f"{tmp_path}/latest", "latest"):
        assert equal(read_weights(path), {"w": torch.full((3,), 2.0)})
    torch.save({"w": torch.zeros(3)}, tmp_path / "plain")
    (tmp_path / "else").mkdir()
    (tmp_path / "plain").rename(tmp_path / "else" / "latest")  # weights in a file that happens to have this name
    assert equal(read_weights("else/latest"), {"w": torch.zeros(3)})


class Holds(nn.Module):
    """Has a part that is called as wrappers call theirs."""

    def __init__(self, name, seed=0):
        super().__init__()
        self.add_module(name, net(seed))


@pytest.mark.parametrize(
    "name, content",
    [
        ("module", lambda state: state),
        ("module", lambda state: prefixed(state, "module._orig_mod.")),
        ("model", lambda state: {"pytorch-lightning_version": "2.5.0", "state_dict": state}),
        ("model", lambda state: {"pytorch-lightning_version": "2.5.0", "state_dict": prefixed(state, "model.")}),
        ("model", lambda state: {"state": {"model": prefixed(state, "module.")}, "rng": []}),
    ],
)
def test_a_model_may_have_a_part_with_the_name_of_a_wrapper(tmp_path, name, content):
    source = Holds(name).state_dict()
    torch.save(content(source), tmp_path / "x.pt")
    weights = read_weights(tmp_path / "x.pt")
    holds, part = Holds(name, 1), net(1)
    assert not load_weights(holds, weights) and equal(holds.state_dict(), source)
    assert not load_weights(part, weights) and equal(prefixed(part.state_dict(), f"{name}."), source)
    assert not load_weights(Holds(name, 1), weights, remap={"": f"{name}."})
    bigger = nn.ModuleDict({name: net(1), "head": nn.Linear(2, 2)})
    assert not load_weights(bigger, weights, ignore=["head.*"])


def test_times_and_random_numbers_of_composer_are_left_out(tmp_path):
    np = pytest.importorskip("numpy")
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": None}
    timestamp = {"Timestamp": {"epoch": 1, "total_wct": datetime.timedelta(seconds=3)}}
    state = {"model": prefixed(net().state_dict(), "model."), "timestamp": timestamp, "seed": np.arange(3)}
    torch.save({"state": state, "rng": [rng]}, tmp_path / "x.pt")
    assert equal(read_weights(tmp_path / "x.pt"), net().state_dict())
    torch.save({"state": {"model": {"w": np.ones(2)}}}, tmp_path / "x.pt")  # nothing is made of arrays
    with pytest.raises(CheckpointError, match="no tensors where weights are expected"):
        read_weights(tmp_path / "x.pt")


def test_transformers_reads_what_is_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs")
    assert "lm_head.weight" not in weights  # tied: stored under one of its names
    fresh = transformers.GPT2LMHeadModel(config)
    assert not load_weights(fresh, weights)
    assert equal(fresh.state_dict(), model.state_dict())
    formats.write(tmp_path / "ours", {"model": model.state_dict()}, {})
    (tmp_path / "hf").mkdir()
    config.save_pretrained(tmp_path / "hf")
    export(tmp_path / "ours", tmp_path / "hf" / "model.safetensors")
    assert equal(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").state_dict(), model.state_dict())


class Executes:
    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.parametrize("new", [True, False])
def test_pickles_that_execute_are_refused(tmp_path, monkeypatch, new):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": Executes()}, "x.ckpt", _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError, match=r"x\.ckpt.*save its state_dict alone"):
        read_weights("x.ckpt")
    os.rename("x.ckpt", "x.safetensors")
    with pytest.raises(CheckpointError, match="a pickle, which is never loaded"):
        read_weights("x.safetensors")
    assert not (tmp_path / "executed").exists()


def laughs(make, leaf, levels=40):
    for _ in range(levels):
        leaf = make(leaf)
    return leaf


def cyclic(container):
    container["w"], container["again"] = torch.ones(1), [container]
    return container


UNBOUNDED = {
    "shared dicts": (lambda: laughs(lambda d: {"a": d, "b": d}, {"w": torch.ones(1)}), "unfold into more than"),
    "shared lists": (lambda: {"w": torch.ones(1), "x": laughs(lambda e: [e, e], 1)}, "unfold into more than"),
    "a key that takes for ever to hash": (
        lambda: {"w": torch.ones(1), "x": [laughs(lambda e: (e, e), 1)]},
        "unfold into more than",
    ),
    "a dict that contains itself": (lambda: cyclic({}), "contain themselves"),
    "deep lists": (lambda: {"w": torch.ones(1), "x": laughs(lambda e: [e], 1, 300)}, "more than 200 levels"),
    "deep dicts": (lambda: laughs(lambda e: {"a": e}, {"w": torch.ones(1)}, 300), "more than 200 levels"),
    "a view of a number as 4 TB": (lambda: {"w": torch.ones(1).expand(10**12)}, "4,000,000,000,000 bytes of 4"),
    "a sparse tensor": (lambda: {"w": torch.eye(2).to_sparse()}, "'w' is a sparse"),
    "a tensor without memory": (lambda: {"w": torch.empty(2, device="meta")}, "'w' is a sparse, quantized or meta"),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", UNBOUNDED)
@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_small_files_that_ask_for_endless_work_are_refused(tmp_path, name, new):
    make, message = UNBOUNDED[name]
    torch.save(make(), tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    assert (tmp_path / "x.pt").stat().st_size < 10_000
    with pytest.raises(CheckpointError, match=f"x.pt.*{message}"):
        read_weights(tmp_path / "x.pt")


def archive(path, parts, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, content in parts.items():
            made.writestr(f"x/{name}", content)


def test_archives_that_claim_more_than_they_have(tmp_path):
    torch.save({"w": torch.arange(5.0)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good:
        parts = {each.filename.partition("/")[2]: good.read(each) for each in good.infolist()}
    archive(tmp_path / "x.pt", parts)
    assert torch.equal(read_weights(tmp_path / "x.pt")["w"], torch.arange(5.0))
    archive(tmp_path / "x.pt", {**parts, "data/1": bytes(10**7)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="more bytes than the file"):
        read_weights(tmp_path / "x.pt")
    archive(tmp_path / "x.pt", {**parts, "DATA.PKL": parts["data.pkl"]})
    with pytest.raises(CheckpointError, match="two parts of one name"):
        read_weights(tmp_path / "x.pt")
    claims = parts["data.pkl"].replace(b"K\x05tq", b"J\x00\x00\x00\x40tq")
    assert claims != parts["data.pkl"]
    archive(tmp_path / "x.pt", {**parts, "data.pkl": claims})
    with pytest.raises(CheckpointError, match="said to have 1073741824 elements of 'torch FloatStorage'"):
        read_weights(tmp_path / "x.pt")
    buffer = b"\x80\x02cbuiltins\nbytearray\nq\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."
    archive(tmp_path / "x.pt", {**parts, "data.pkl": buffer})
    with pytest.raises(CheckpointError, match="a buffer by its size alone"):
        read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("seed", range(3))
def test_damaged_pickles_are_refused_by_name(tmp_path, seed):
    """Whatever torch's unpickler raises for them."""
    torch.save(net().state_dict(), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    raw, drawn = (tmp_path / "x.pt").read_bytes(), random.Random(seed)
    for _ in range(100):
        damaged = bytearray(raw)
        for _ in range(3):
            damaged[drawn.randrange(400)] = drawn.randrange(256)
        (tmp_path / "x.pt").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            read_weights(tmp_path / "x.pt")


def test_what_is_no_regular_file_is_never_opened(tmp_path):
    """Reading a pipe would wait for ever, and a device would never end."""
    listed = {"weight_map": {"w": "pipe.safetensors"}}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(listed))
    paths = [tmp_path / "pipe.pt", tmp_path / "pipe.safetensors", tmp_path / "pipe", "/dev/zero", tmp_path / "hf"]
    for path in (*paths[:3], tmp_path / "hf" / "pipe.safetensors"):
        os.mkfifo(path)
    for path in paths:
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_weights(path)
    with pytest.raises(CheckpointError, match="is not replaced"):
        export(write("safetensors", tmp_path, net().state_dict()), paths[0])
    for name in ("x" * 300, "x\0", "hf/" * 3000):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_weights(tmp_path / name)
        with pytest.raises(CheckpointError, match="cannot be read"):
            formats.read(tmp_path / name)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "..", "a/b.bin"])
def test_an_index_that_leaves_its_folder(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match=f"'{re.escape(file)}', which is not a file of its own folder"):
        read_weights(tmp_path)


def test_what_holds_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match="There is no"):
        read_weights(tmp_path / "absent")
    with pytest.raises(
        CheckpointError, match=r"has no weights itself: neither manifest\.json nor one of model\.safetensors"
    ):
        read_weights(tmp_path)
    torch.save({"a": 1}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="no tensors where weights are expected"):
        read_weights(tmp_path / "a")
    torch.save([1], tmp_path / "b")
    with pytest.raises(CheckpointError, match="holds a list and no state_dict"):
        read_weights(tmp_path / "b")
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(CheckpointError, match="was not read"):
        read_weights(tmp_path / "c")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: it is missing"):
        read_weights(tmp_path)


def test_what_does_not_fit_is_listed_and_nothing_is_loaded():
    module, before = net(), {name: tensor.clone() for name, tensor in net().state_dict().items()}
    state = net(1).state_dict()
    state["0.weight"] = torch.ones(3, 5)
    del state["1.running_mean"]
    state["head.bias"] = torch.ones(2)
    with pytest.raises(CheckpointError) as raised:
        load_weights(module, state)
    text = str(raised.value)
    assert "missing from the weights: 1.running_mean" in text and "not in the module: head.bias" in text
    assert "of another shape: 0.weight ([3, 5], the module has [3, 4])" in text and "strict=False" in text
    assert equal(module.state_dict(), before)
    report = load_weights(module, state, strict=False)
    assert report.missing == ("1.running_mean",) and report.unexpected == ("head.bias",)
    assert report.mismatched == (("0.weight", (3, 5), (3, 4)),)
    after = module.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"]) and torch.equal(after["2.weight"], state["2.weight"])


def test_ignore():
    module, before = net(), {name: tensor.clone() for name, tensor in net().state_dict().items()}
    state = net(1).state_dict()
    state["1.weight"], state["1.new"] = torch.ones(9), torch.ones(1)
    del state["1.bias"]
    assert not load_weights(module, state, ignore=["1.*"])
    after = module.state_dict()
    for name in before:
        assert torch.equal(after[name], before[name] if name.startswith("1.") else state[name])


def test_ignore_has_to_match_and_is_a_list():
    with pytest.raises(TypeError, match=r"ignore='2.\*' is not a list of patterns. Give one: ignore=\['2.\*'\]"):
        load_weights(net(), net(1).state_dict(), ignore="2.*")
    with pytest.raises(ValueError, match=r"ignore=\['head.\*'\] matches no weight. .*0.weight, 0.bias"):
        load_weights(net(), net(1).state_dict(), ignore=["2.*", "head.*"])
    load_weights(net(), {**net(1).state_dict(), "head.weight": torch.ones(1)}, ignore=["head.*"])


def test_it_warns_of_nothing_loaded_and_of_nan():
    state = net(1).state_dict()
    for given, more in ((state, {"ignore": ["*"]}), ({"w": torch.ones(1)}, {"strict": False})):
        module = net()
        with pytest.warns(UserWarning, match="No weight of Sequential was loaded"):
            assert "everything fits" not in str(load_weights(module, given, **more))
        assert equal(module.state_dict(), net().state_dict())
    state["0.bias"][1] = float("nan")
    with pytest.warns(UserWarning, match="are NaN in 0.bias. Load"):
        load_weights(net(), state)
    state["0.bias"][1] = -float("inf")  # such as a mask: a value to compute with
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(net(), state)


@pytest.mark.parametrize(
    ("rename", "remap"),
    [
        (lambda name: f"net.{name}", {"net.": ""}),
        (lambda name: name.removeprefix("0."), {"weight": "0.weight", "bias": "0.bias"}),
        (lambda name: name.replace("0.", "enc.").replace("c.bias", "c.b"), {"enc.": "0.", "enc.b": "0.bias"}),
        (lambda name: name.replace("0.", "a.b.").replace("1.", "a."), {"a.": "1.", "a.b.": "0."}),
    ],
)  # fmt: skip
def test_remap(rename, remap):
    source = net(1).state_dict()
    module = net()
    assert not load_weights(module, {rename(name): tensor for name, tensor in source.items()}, remap=remap)
    assert equal(module.state_dict(), source)


def test_remaps_that_mean_nothing():
    state = net().state_dict()
    with pytest.raises(
        ValueError,
        match=r"remap has enc, which no name equals or begins with; prefixes end with a dot. The names are 0.weight",
    ):
        load_weights(net(), state, remap={"enc": "0"})
    with pytest.raises(ValueError, match=r"gives '0\.bias' to two weights"):
        load_weights(net(), state, remap={"1.bias": "0.bias"})


def test_a_failed_export_leaves_the_old_file(tmp_path):
    formats.write(tmp_path / "c", {"model": {"w": torch.ones(2, dtype=torch.complex128)}}, {})
    (tmp_path / "w.safetensors").write_text("old")
    with pytest.raises(CheckpointError, match="was not written"):
        export(tmp_path / "c", tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["c", "w.safetensors"]


# --- hocket checkpoint


def make(folder, value=1.0, **more):
    tree = {
        "model": {"w": torch.full((2, 3), value), "nan": torch.tensor([float("nan")])},
        "step": 7,
        "lr": [0.1],
        **more,
    }
    formats.write(folder, tree, {"run": "digits"})
    return str(folder)


def test_inspect(tmp_path, capsys):
    path = make(tmp_path / "c", big=2**80, text="x" * 200)
    assert main(["checkpoint", "inspect", path]) == 0
    out = capsys.readouterr().out
    assert "run: digits" in out and re.search(r"model\.w +float32 \[2, 3\]", out) and re.search(r"step +7\n", out)
    assert re.search(rf"big +{2**80}\n", out) and "2 tensors, 28 bytes, 4 other values" in out
    assert main(["checkpoint", "inspect", path, "--only", "model", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in told["tree"]] == ["model.w", "model.nan"] and told["about"]["run"] == "digits"
    assert main(["checkpoint", "inspect", str(tmp_path / "absent")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    safetensors.torch.save_file(net().state_dict(), tmp_path / "w.safetensors")
    assert main(["checkpoint", "inspect", str(tmp_path / "w.safetensors")]) == 2
    assert "it is a file, and a checkpoint is a folder with manifest.json" in capsys.readouterr().err


def test_verify(tmp_path, capsys):
    good, bad = make(tmp_path / "good"), make(tmp_path / "bad")
    assert main(["checkpoint", "verify", good]) == 0
    shard = next((tmp_path / "bad").glob("*.safetensors"))
    os.truncate(shard, 20)
    assert main(["checkpoint", "verify", good, bad]) == 1
    out = capsys.readouterr().out
    assert f"{good}: valid" in out and f"{bad}: not valid\n  {shard.name}: it has 20 bytes" in out
    assert main(["checkpoint", "verify", str(tmp_path / "absent"), good]) == 2
    captured = capsys.readouterr()
    assert f"{good}: valid" in captured.out and "absent: there is no such folder. Give" in captured.err


def test_a_folder_that_has_no_checkpoint_leads_to_one_below_it(tmp_path, capsys):
    make(tmp_path / "runs" / "a" / "ep1-ba4")
    for action in ("inspect", "verify"):
        assert main(["checkpoint", action, str(tmp_path / "runs")]) == 2
        assert f"There are some in {tmp_path / 'runs' / 'a'}: give that path" in capsys.readouterr().err
        assert main(["checkpoint", action, str(tmp_path / "runs" / "a")]) == 0


@pytest.mark.parametrize("place", ["{folder}/run", "memory://{folder}/run/"])
def test_of_a_folder_of_checkpoints_verify_reads_each_and_inspect_the_newest(place, tmp_path, capsys):
    place = place.format(folder=tmp_path)
    fsspec = pytest.importorskip("fsspec")
    store, where = Store(place), place.rstrip("/")
    for number in (2, 10, 9):  # neither the order of names nor that of numbers is that of writing
        store.save(f"ba{number}", {"number": number}, {})
    files = fsspec.filesystem("memory" if "://" in place else "file")
    assert main(["checkpoint", "verify", place]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{where}/ba{number}: valid" for number in (2, 10, 9)]
    assert main(["checkpoint", "inspect", place, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tree"] == [{"path": "number", "value": 9}] and f"This is {where}/ba9, the newest" in err
    assert main(["checkpoint", "inspect", f"{where}/ba2"]) == 0
    assert not capsys.readouterr().err
    files.rm(f"{where}/ba10/manifest.json")
    assert main(["checkpoint", "verify", place, f"{where}/ba9"]) == (2 if "://" in place else 1)
    out, err = capsys.readouterr()
    assert f"{where}/ba10" in out + err and "no manifest.json" in out + err
    assert out.splitlines()[-3:] == [f"{where}/ba{number}: valid" for number in (2, 9, 9)]


def test_weights_of_a_folder_of_checkpoints_name_the_newest_and_not_the_last_that_was_copied(tmp_path):
    for number in (2, 10):
        Store(tmp_path).save(f"ba{number}", {"model": {}}, {})
    os.utime(tmp_path / "ba10/manifest.json", (5, 5))
    with pytest.raises(CheckpointError, match=r"There is '.*/ba10' in it"):
        read_weights(tmp_path)


def test_what_is_no_checkpoint_has_one_problem(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  {tmp_path} is not a checkpoint: the folder has no manifest.json. Give the folder of one, such as runs/a/ep1-ba100."
    ]


def test_export(tmp_path, capsys):
    assert main(["checkpoint", "export", make(tmp_path / "c"), str(tmp_path / "w.safetensors")]) == 0
    assert "2 tensors in" in capsys.readouterr().out
    assert torch.equal(safetensors.torch.load_file(tmp_path / "w.safetensors")["w"], torch.ones(2, 3))


def test_diff(tmp_path, capsys):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    assert main(["checkpoint", "diff", a, b]) == 0
    assert "All 4 values are bitwise identical" in capsys.readouterr().out
    changed = torch.ones(2, 3)
    changed[0, 1] = 1.5
    formats.write(tmp_path / "b", {"model": {"w": changed, "nan": torch.ones(1)}, "step": 8, "lr": [0.1, 0.2]}, {})
    assert main(["checkpoint", "diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"+ lr.1: only in {b}" in lines and "! step: 7 / 8" in lines and len(lines) == 4
    assert "! model.w: 1 of 6 elements differ, by 0.5 at most" in lines
    assert main(["checkpoint", "diff", a, b, "--only", "lr.0"]) == 0


def test_what_cannot_be_compared_is_no_difference(tmp_path, capsys):
    """1 is the exit code for a difference; and no command is recommended that refuses the same file."""
    path, store = make(tmp_path / "c"), Store(tmp_path / "run")
    store.save("ba1", {"model": {"w": torch.ones(3)}}, {})
    latest = str(tmp_path / "run" / "latest")
    assert main(["checkpoint", "inspect", latest]) == 0
    assert main(["checkpoint", "diff", latest, str(tmp_path / "run" / "ba1")]) == 0
    shutil.rmtree(tmp_path / "run" / "ba1")
    assert main(["checkpoint", "export", latest, str(tmp_path / "out.safetensors")]) == 2
    assert "names the newest checkpoint, 'ba1', which is missing or damaged" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("x")
    assert main(["checkpoint", "inspect", str(tmp_path / "notes.txt")]) == 2
    assert "diff" not in capsys.readouterr().err
    (tmp_path / "damaged.pt").write_bytes(b"0.")
    os.mkfifo(tmp_path / "pipe")
    for other in (
        latest,
        *map(str, (tmp_path / "notes.txt", tmp_path / "damaged.pt", tmp_path / "pipe", tmp_path / "absent")),
    ):
        assert main(["checkpoint", "diff", path, other]) == 2
        assert other in capsys.readouterr().err
    torch.save({"w": torch.ones(2, 3), "nan": torch.tensor([float("nan")])}, tmp_path / "w.pt")
    assert main(["checkpoint", "inspect", str(tmp_path / "w.pt")]) == 2
    assert "compared by: hocket checkpoint diff" in capsys.readouterr().err
    assert main(["checkpoint", "diff", str(tmp_path / "w.pt"), str(tmp_path / "w.pt")]) == 0


def test_names_in_files_cannot_write_to_the_terminal(tmp_path, capsys):
    path = make(tmp_path / "c", **{"\x1b[2J": 1, "x" * 1000: 2, "int": 16**20_000})
    assert main(["checkpoint", "inspect", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"\x1b[2J" in out and re.search(r"\nint +0x10000", out)
    assert main(["checkpoint", "diff", path, make(tmp_path / "d")]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_urls(tmp_path, capsys):
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    Store(url).save("ba1", {"model": {"w": torch.ones(3)}}, {})
    assert main(["checkpoint", "verify", f"{url}/ba1"]) == 0
    assert main(["checkpoint", "export", f"{url}/ba1", str(tmp_path / "w.safetensors")]) == 0
    assert main(["checkpoint", "inspect", f"{url}/ba2"]) == 2
    assert "It has: ba1" in capsys.readouterr().err
    fsspec.filesystem("memory").store.clear()


def test_a_script_that_loads_weights_goes_on_with_those_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed script is started again as it is."""
    monkeypatch.chdir(tmp_path)

    def script(duration: str) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = hocket.Trainer(
            model=nn.Linear(2, 1), loss="mse_loss", optimizer="sgd(lr=0.1)", duration=duration, device="cpu", seed=1,
            train_data=[(torch.randn(4, 2), torch.randn(4, 1))] * 3, checkpoints="c", resume="auto",
        )  # fmt: skip
        trainer.load_weights({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        trainer.fit()
        return trainer.state.model.weight.detach().clone()  # type: ignore[union-attr]

    whole = script("2ep")
    shutil.rmtree("c")
    script("1ep")
    with pytest.warns(UserWarning, match=r"not loaded, because this run was resumed from .*ep1-ba3.*resume=None"):
        assert torch.equal(script("2ep"), whole)


def test_integers_are_no_floating_point_weights_and_nothing_is_loaded():
    module, before, state = net(), net().state_dict(), net(1).state_dict()
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"0.weight has the dtype int64, .* float32: .*Nothing was loaded"):
            load_weights(module, {name: value.long() for name, value in state.items()}, strict)
    with pytest.raises(CheckpointError, match=r"1.num_batches_tracked has the dtype float32, .* has int64"):
        load_weights(module, {**state, "1.num_batches_tracked": torch.tensor(0.5)})
    assert equal(module.state_dict(), before)
    load_weights(module, {name: value.bfloat16() for name, value in state.items()})


def test_weights_that_were_read_are_saved_as_a_state_dict(tmp_path):
    torch.save(prefixed(net().state_dict(), "module."), tmp_path / "a.pt")
    torch.save(read_weights(tmp_path / "a.pt"), tmp_path / "b.pt")
    assert equal(torch.load(tmp_path / "b.pt", weights_only=True), net().state_dict())
    assert equal(read_weights(tmp_path / "b.pt"), net().state_dict())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: read_weights(None), r"read_weights\(None\).*Write read_weights\('model.pt'\)"),
        (lambda: load_weights(net(), net().state_dict(), remap=["0."]), "is not a dict of names. Write remap="),
        (lambda: load_weights(net(), net().state_dict(), remap={"0.": None}), "is not a dict of names. Write remap="),
        (lambda: load_weights(net(), net().state_dict(), strict="no"), "strict='no' is a switch.* Write strict=False"),
        (lambda: load_weights(net(), {**net().state_dict(), "0.bias": [1, 2]}), "0.bias is a list. Give a tensor"),
        (lambda: load_weights(net(), {0: torch.ones(2)}, strict=False), "name 0, which is not text"),
    ],
)
def test_arguments_of_another_type(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_what_is_not_a_file_of_weights_says_why(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(12)}, tmp_path / "whole.safetensors")
    torch.save({"w": torch.ones(12)}, tmp_path / "whole.pt")
    for name, content, words in [
        ("a.yaml", b"a: 1\n", "it was not read: it is not a file of weights. Give a .safetensors file"),
        ("a.pt", b"", "it was not read: it is empty. Give"),
        ("b.pt", (tmp_path / "whole.pt").read_bytes()[:-50], "it was not read: it is cut off or damaged"),
        ("a.safetensors", b"", "it is empty. Copy or write it again."),
        (
            "b.safetensors",
            (tmp_path / "whole.safetensors").read_bytes()[:-5],
            "it is not a valid safetensors file: its",
        ),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / name}: {words}")) as raised:
            read_weights(tmp_path / name)
        assert "pickle" not in str(raised.value).replace("not a pickle", "")
    torch.save(net(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"it holds a torch.nn.modules.container.Sequential, .*state_dict\(\), '"):
        read_weights(tmp_path / "model.pt")


def test_a_damaged_checkpoint_names_one_that_is_complete(tmp_path):
    for name in ("ep0-ba1", "ep0-ba2"):
        formats.write(tmp_path / name, {"model": {"w": torch.ones(9)}}, {})
    (shard,) = (tmp_path / "ep0-ba2").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-5])
    words = rf"{tmp_path}/ep0-ba2 cannot be read: tensors-.* Give another checkpoint: '{tmp_path}/ep0-ba1' is complete"
    with pytest.raises(CheckpointError, match=words):
        read_weights(tmp_path / "ep0-ba2")


def test_the_report_names_the_prefix_of_a_wrapper_that_was_removed(tmp_path):
    torch.save(prefixed(net(1).state_dict(), "module._orig_mod."), tmp_path / "w.pt")
    module, within = net(), nn.ModuleDict({"_orig_mod": net()})
    first = "9 tensors loaded, without the prefix 'module._orig_mod.' that all names had"
    count = len(module.state_dict())
    assert str(load_weights(module, tmp_path / "w.pt")).splitlines() == [
        first.replace("9", str(count)),
        "everything fits",
    ]
    assert load_weights(within, tmp_path / "w.pt").removed == "module."
    torch.save(net(1).state_dict(), tmp_path / "w.pt")
    assert "prefix" not in str(load_weights(module, tmp_path / "w.pt"))
