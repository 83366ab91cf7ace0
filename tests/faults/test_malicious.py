"""Checkpoints that were made to do harm are refused by name, and execute nothing."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audited
import pytest
import safetensors.torch
import torch
from forgery import MALICIOUS, ONE, SHARD, Executes, forge, pieces, reference

from hocket.checkpoints import CheckpointError
from hocket_checkpoints.storage import format as formats, manifest as manifests


def test_checkpoints_made_by_hand(tmp_path):
    """Whole tensors, as version 1 had them, and tensors in pieces."""
    values = torch.arange(6.0).reshape(2, 3)
    doubles = values.to(torch.complex128)
    as_bytes = safetensors.torch.save({"w": doubles.view(-1).view(torch.uint8)})
    four = pieces(([0, 0], [2, 3]), ([0, 3], [2, 3]), ([2, 0], [2, 3]), ([2, 3], [2, 3]), shape=(4, 6))
    made = {
        "whole": (reference(), ONE, 1, values),
        "pieces": (four, ONE, 2, values.repeat(2, 2)),
        "bytes": (pieces(([0, 0], [2, 3]), dtype="complex128"), as_bytes, 2, doubles),
    }
    for name, (node, shard, version, expected) in made.items():
        forge(tmp_path / name, node, {SHARD: shard}, version)
        assert formats.verify(tmp_path / name) == []
        read = formats.read(tmp_path / name)
        assert list(read) == ["w"] and read["w"].dtype == expected.dtype and torch.equal(read["w"], expected)


@pytest.mark.parametrize("name", MALICIOUS)
def test_malice_is_refused_and_executes_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    node, files, message = MALICIOUS[name]
    forge(tmp_path / "c", node, files)
    modules = set(sys.modules)
    with pytest.raises(CheckpointError, match=message):
        formats.read(tmp_path / "c")
    assert formats.verify(tmp_path / "c")
    new = {name for name in set(sys.modules) - modules if not name.startswith("hocket")}
    assert not (tmp_path / "executed").exists() and not new


def test_large_json_is_refused_before_it_is_read(tmp_path, monkeypatch):
    formats.write(tmp_path / "c", {"step": 7}, {})
    with (tmp_path / "c" / "manifest.json").open("r+b") as file:
        file.truncate(10 * 2**30)  # a hole: takes no room
    with pytest.raises(CheckpointError, match="at most"):
        formats.read(tmp_path / "c")
    monkeypatch.setattr(manifests, "LIMIT", 100)
    with pytest.raises(CheckpointError, match=r"Give long lists and bytes as tensors"):
        formats.write(tmp_path / "d", {"a": list(range(100))}, {})


def test_versions(tmp_path, monkeypatch):
    forge(tmp_path / "newer", {}, version=3)
    with pytest.raises(
        CheckpointError, match=r"format version 3; this hocket reads 1, 2. To read it, install a newer hocket"
    ):
        formats.read(tmp_path / "newer")
    forge(tmp_path / "older", {"weights": 1}, version=0)
    with pytest.raises(CheckpointError, match="format version 0"):
        formats.read(tmp_path / "older")
    monkeypatch.setitem(manifests.UPGRADES, 0, lambda node: {"model": node["weights"]})
    assert formats.read(tmp_path / "older") == {"model": 1} and formats.verify(tmp_path / "older") == []


# --- everything that reads, under an audit hook


def payloads() -> dict[str, bytes]:
    """Pickles of every kind that make a file when they are loaded."""
    made = {f"protocol {protocol}": pickle.dumps(Executes(), protocol) for protocol in (0, 2, 5)}
    for name, new in (("archive", True), ("legacy", False)):
        torch.save({"state_dict": {"w": Executes()}}, "payload", _use_new_zipfile_serialization=new)
        made[name] = Path("payload").read_bytes()
    Path("payload").unlink()
    return made


#: What files of other tools are called.
FOREIGN = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")

#: Contents whose form is right: what is done to the tree, and what is said about it.
CONTENTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an optimizer's class": (lambda tree: tree["optimizers"]["0"].update({"class": "os.system"}), "os.system"),
    "an algorithm's class": (lambda tree: tree["attached"][-1].update({"class": "os.system"}), "os.system"),
    "another plug-in": (
        lambda tree: tree["attached"].append(
            {
                "kind": "algorithms",
                "name": "os.system",
                "class": "os.system",
                "dist": "evil",
                "version": "1",
                "config": {},
            }
        ),
        "pip install evil==1;",
    ),
    "a module of torch": (lambda tree: tree["optimizers"]["0"].update(state={"~torch": "onnx"}), "onnx"),
    "no array": (lambda tree: tree["optimizers"]["0"].update(state={"~array": [1]}), "list"),
    "weights that are text": (lambda tree: tree["model"].update({"network.weight": "os.system"}), "network.weight"),
    "no clock": (lambda tree: tree.pop("timestamp"), "timestamp"),
    "another version": (lambda tree: tree.update(version={"$": 1}), "version"),
    "ranks without end": (lambda tree: tree.update(ranks=[]), "'ranks' is missing, empty or damaged"),
    "an unknown decision": (lambda tree: tree["requested"].update(decisions=["__class__"]), "__class__"),
}


def sparse(path: Path, start: bytes = b"") -> None:
    """A file of 20 GB that takes no room."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(20 << 30)


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    trainer = audited.make()
    trainer.fit("1ep")
    tree = copy.deepcopy(trainer.state_dict())

    def case(name: str) -> Path:
        (tmp_path / name.replace("/", "|")).mkdir()
        return tmp_path / name.replace("/", "|") / "c"

    formats.write(case("good"), tree, {})
    formats.write(damaged := case("damaged"), tree, {})
    for file in damaged.iterdir():
        os.truncate(file, file.stat().st_size - 9)
    for name in FOREIGN[1:4:2]:
        (folder := case(f"good {name}")).mkdir()
        torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
        (folder / FOREIGN[3]).write_text(json.dumps({"weight_map": {"w": "pytorch_model.bin"}}))
        if name != FOREIGN[3]:
            (folder / FOREIGN[3]).unlink()
    for kind, new in (("file", True), ("legacy file", False)):
        torch.save({"w": torch.ones(2)}, case(f"good {kind}"), _use_new_zipfile_serialization=new)
        torch.save({"x": object}, case(f"damaged {kind}"), _use_new_zipfile_serialization=new)
    for name, (node, files, _) in MALICIOUS.items():
        forge(case(f"forged: {name}"), node, files)
    for name, (change, _) in CONTENTS.items():
        change(changed := copy.deepcopy(tree))
        formats.write(case(f"content: {name}"), changed, {})
    good = tmp_path / "good" / "c"
    for kind, payload in payloads().items():
        for name in os.listdir(good):
            shutil.copytree(good, folder := case(f"{kind} as {name}"))
            (folder / name).write_bytes(payload)
        for name in FOREIGN:
            (folder := case(f"{kind} as {name}")).mkdir()
            (folder / name).write_bytes(payload)
        for ending in ("", ".pt", ".ckpt", ".safetensors"):
            folder = case(f"{kind} as a file{ending}").parent
            (folder / f"c{ending}").write_bytes(payload)
            if ending:
                (folder / "c").symlink_to(f"c{ending}")
    secret = tmp_path / "secret"
    secret.write_bytes(ONE)
    for name in os.listdir(good):
        shutil.copytree(good, folder := case(f"a link as {name}"))
        shutil.copy(folder / name, secret.with_name(f"secret-{name}"))
        (folder / name).unlink()
        (folder / name).symlink_to(secret.with_name(f"secret-{name}"))
        shutil.copytree(good, folder := case(f"a large {name}"))
        sparse(folder / name, (folder / name).read_bytes())
    for name in FOREIGN[2:]:
        (folder := case(f"an index that leaves its folder, {name}")).mkdir()
        (folder / name).write_text(json.dumps({"weight_map": {"w": "../../secret.safetensors"}}))
        (folder := case(f"a large {name}")).mkdir()
        sparse(folder / name, b"{")
    return tmp_path


@pytest.mark.long
def test_nothing_that_reads_executes_anything(cases: Path) -> None:
    done = subprocess.run(
        [sys.executable, audited.__file__, str(cases)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    good = {case: results.pop(case) for case in list(results) if case.startswith("good")}
    assert not any(good["good"].values()) and not any(found["weights"] for found in good.values())
    assert len(results) > 90
    assert not (cases / "executed").exists()
    for name in os.listdir(cases / "good" / "c"):
        for case, found in results.items():
            if case.endswith(f" {name}"):
                for reader in ("read", "verify", "latest", "resume", "inspect command"):
                    assert name in found[reader], (case, reader)
    assert "MemoryError" not in done.stdout
    for case, found in results.items():
        assert found["resume"] and (found["weights"] or case.startswith(("content: ", "a link"))), case
    for name, (_, message) in CONTENTS.items():
        found = results[f"content: {name}"]
        assert message in found["resume"] and "content: " in found["resume"], (name, found["resume"])
        assert not found["verify"]
    pickle.loads(payloads()["protocol 0"])  # it works
    assert (cases / "executed").exists()


@pytest.mark.parametrize("do", ["import antigravity", "eval('1')", "os.system('true')", "open('/etc/hostname')"])
def test_the_hook_notices(tmp_path: Path, do: str) -> None:
    act = compile(do, "", "exec")
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        audit = audited.Audit(tmp_path)
        audit.learning = False
        with audit:
            types.FunctionType(act, {"os": os, "__builtins__": __builtins__})()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99
