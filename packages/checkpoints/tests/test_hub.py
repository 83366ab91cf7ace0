"""Models in the cache of Hugging Face: found by name, and never fetched unless asked."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import make_trainer
from torch import nn

from hocket.checkpoints import CheckpointError, load_weights, read_weights

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(cache: Path, name: str, file: str, tensors: dict[str, Any], commit: str = COMMIT, ref: str = "main") -> None:
    """Write a file as the cache has it: a blob, a link in a snapshot, and the commit of a reference.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    repo = cache / hub.file_download.repo_folder_name(repo_id=name, repo_type="model")
    blob, link = repo / "blobs" / f"{abs(hash((file, commit))):x}", repo / "snapshots" / commit / file
    for folder in (blob.parent, link.parent, repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, blob)
    link.symlink_to(Path("../" * (len(link.relative_to(repo).parts) - 1)) / "blobs" / blob.name)
    (repo / "refs" / ref).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two models, in a process that cannot connect to anything."""
    for module in ("constants", "_snapshot_download", "utils._cache_manager", "file_download"):
        target = f"huggingface_hub.{module}"
        __import__(target)
        if hasattr(sys.modules[target], "HF_HUB_CACHE"):
            monkeypatch.setattr(f"{target}.HF_HUB_CACHE", str(tmp_path))

    def refuse(*arguments: Any) -> None:
        raise AssertionError("it connects to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    weights = {"encoder.weight": torch.ones(4, 4), "encoder.bias": torch.zeros(4)}
    put(tmp_path, "org/tiny", "model.safetensors", weights)
    put(tmp_path, "org/tiny", "other.safetensors", {"x": torch.ones(1)})
    put(tmp_path, "alone", "onnx/model.safetensors", {"x": torch.ones(1)}, ref="v1")
    return tmp_path


def test_a_model_of_the_cache_is_read_by_its_name(cache: Path) -> None:
    weights = read_weights("hub:org/tiny")
    assert weights.keys() == {"encoder.weight", "encoder.bias"}
    for place in (f"hub:org/tiny@{COMMIT}", "hub:org/tiny@main", "hub:org/tiny/model.safetensors"):
        assert read_weights(place).keys() == weights.keys()
    assert read_weights("hub:org/tiny@main/other.safetensors").keys() == {"x"}
    model = nn.Sequential(nn.Linear(4, 4))
    trainer = make_trainer(model=model, train_data=None, loss=None, optimizer=None, duration=None, device="cpu")
    report = trainer.load_weights("hub:org/tiny", remap={"encoder.": "0."})
    assert set(report.loaded) == {"0.weight", "0.bias"} and model[0].weight.eq(1).all()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            "hub:org/tinny",
            r"not in the cache in .*alone, org/tiny.*'hub:org/tiny'.*hf download org/tinny;.*network=True",
        ),
        ("hub:some/thing", r"alone, org/tiny, and nothing is downloaded unless asked\. To download"),
        ("hub:org/tiny@v2", rf"has org/tiny, but not v2; it has {COMMIT}, main.*hf download org/tiny --revision v2"),
        ("hub:alone", "has alone, but not main; it has .*v1"),
        ("hub:alone@v1", "has no weights itself"),
        ("hub:org/tiny/model.bin", r"without model\.bin; it has model\.safetensors, other\.safetensors.*hf download"),
        ("hub:a b/c", "names no model of the hub"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(cache: Path, place: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_weights(place)


def test_the_network_is_used_only_if_asked(cache: Path) -> None:
    with pytest.raises((CheckpointError, AssertionError), match=r"not downloaded|connects"):
        read_weights("hub:some/thing", network=True)


@pytest.mark.long
def test_an_empty_cache_and_no_library(tmp_path: Path) -> None:
    code = "import sys; sys.modules[{!r}] = None\nfrom hocket.checkpoints import read_weights\nread_weights('hub:a/b')"
    for module, words in (("nothing", "which has no models"), ("huggingface_hub", "pip install huggingface_hub")):
        run = subprocess.run(
            [sys.executable, "-c", code.format(module)], capture_output=True, text=True, env={"HF_HOME": str(tmp_path)}
        )
        assert run.returncode == 1 and words in run.stderr, run.stderr


def test_an_error_names_the_prefix_by_which_weights_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for before, after in (("module.", ""), ("net._orig_mod.", "")):
        saved = {f"{before}{name}": value for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=rf"remap={{'{before}': '{after}'}}, by which 4 of them fit"):
            load_weights(model, saved)
        load_weights(model, saved, remap={before: after})
    backbone = {name.removeprefix("0."): value for name, value in model.state_dict().items() if name[0] == "0"}
    with pytest.raises(CheckpointError, match=r"remap={'': '0.'}, by which 2 of them fit"):
        load_weights(model, backbone)
    with pytest.raises(CheckpointError, match=r"remap={'old.': 'new.'} for other names"):
        load_weights(model, {"other": torch.ones(3)})


def test_the_report_counts_and_lists_everything() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    saved = {"0.weight": torch.ones(4, 4), "1.weight": torch.ones(3, 4), "more": torch.ones(1)}
    report = load_weights(model, saved, strict=False, ignore=["2.*"])
    assert str(report).splitlines() == [
        "1 tensor loaded, 2 ignored, 2 missing from the weights, 1 not in the module, 1 of another shape",
        "ignored: 2.weight, 2.bias",
        "missing from the weights: 0.bias, 1.bias",
        "not in the module: more",
        "of another shape: 1.weight ([3, 4], the module has [2, 4])",
    ]
    assert report.loaded == ("0.weight",) and model[0].weight.eq(1).all() and not model[1].weight.eq(1).all()
