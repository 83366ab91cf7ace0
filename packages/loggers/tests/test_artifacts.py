"""Checkpoints and files behind URLs: on disk, in memory, and on a server that speaks S3."""

from __future__ import annotations

import importlib

import pytest
import torch

import hocket
from hocket.plugins.delivery import LoggerWarning
from hocket_loggers import ArtifactsLogger
from hocket_testkit import LoggerConformance

fsspec = pytest.importorskip("fsspec")


def trainer(folder, logger, **arguments):
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
    return hocket.Trainer(
        **{
            "model": torch.nn.Linear(3, 1), "loss": torch.nn.MSELoss(), "optimizer": "sgd(lr=0.1)", "train_data": data,
            "duration": "2ep", "device": "cpu", "folder": folder, "run_name": "a", "loggers": [logger],
            "checkpoints": hocket.Checkpoints(folder / "checkpoints", keep=1), **arguments,
        }
    )  # fmt: skip


def check(folder, url, options=None):
    """Train, and continue from the copy behind the URL, in a folder that has nothing else."""
    file = folder / "notes.txt"
    file.write_text("content")
    tree = folder / "tokenizer"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "vocabulary.json").write_text("{}")
    with trainer(folder, ArtifactsLogger(url, options=options)) as run:
        run.fit()
        run.state.bus.log_artifact(run.state, "texts/notes", file)
        run.state.bus.log_artifact(run.state, "../tokenizer", tree)
    fs, root = fsspec.core.url_to_fs(url, **(options or {}))
    assert fs.cat_file(f"{root}/a/artifacts/texts/notes/notes.txt") == b"content"
    assert fs.cat_file(f"{root}/a/artifacts/tokenizer/deep/vocabulary.json") == b"{}"
    store = hocket.checkpoints.Store(f"{url}/a/checkpoints", **(options or {}))
    name = store.latest()
    assert name == "ep2-ba12"
    there, here = store.read(name), hocket.checkpoints.Store(folder / "checkpoints").read(name)
    for key, weights in run.model_state_dict().items():
        assert torch.equal(weights, next(value for found, value in there["model"].items() if found.endswith(key)))
    assert there.keys() == here.keys()


def test_a_folder(tmp_path):
    url = (tmp_path / "copies").as_uri()
    check(tmp_path, url)
    with trainer(tmp_path / "new", "memory", resume=f"{url}/a/checkpoints/latest", duration="3ep") as resumed:
        assert resumed.fit().timestamp.batch == 18


def test_memory(tmp_path):
    check(tmp_path, "memory://copies")


def test_s3(tmp_path, monkeypatch):
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}"}
        fsspec.filesystem("s3", **options).mkdir("bucket")
        check(tmp_path, "s3://bucket/copies", options)
    finally:
        running.stop()


def test_a_checkpoint_is_copied_once(tmp_path):
    logger = ArtifactsLogger((tmp_path / "copies").as_uri())
    with trainer(tmp_path, logger) as run:
        run.fit()
        manifest = tmp_path / "copies/a/checkpoints/ep2-ba12/manifest.json"
        before = manifest.stat().st_mtime_ns
        run.state.bus.flush(run.state)
        run.fit("1ep")
    assert manifest.stat().st_mtime_ns == before
    assert (tmp_path / "copies/a/checkpoints/latest").read_text().strip() == "ep3-ba18"


def test_where_nothing_can_be_written_training_goes_on(tmp_path):
    (tmp_path / "copies").write_text("a file, where a folder should be")
    logger = ArtifactsLogger((tmp_path / "copies").as_uri(), options={"attempts": 1})
    with pytest.warns(LoggerWarning, match="artifacts"), trainer(tmp_path, logger) as run:
        assert run.fit().timestamp.batch == 12


def test_what_is_no_url():
    with pytest.raises(ValueError, match=r"'runs' is none\. Write 's3://bucket/folder', or 'file:///"):
        ArtifactsLogger("runs")


def test_a_protocol_that_nobody_knows():
    with pytest.raises(ValueError, match=r"no protocol 'memori'\. Write 'memory://…', or one of .*, s3, "):
        ArtifactsLogger("memori://copies")
    ArtifactsLogger("simplecache::memory://copies")


def test_a_protocol_whose_package_is_not_installed(monkeypatch):
    registry = importlib.import_module("fsspec.registry")  # `fsspec.registry` is a mapping
    far = {"class": "not_there.FileSystem", "err": "Install not_there"}
    monkeypatch.setitem(registry.known_implementations, "far", far)
    with pytest.raises(ModuleNotFoundError, match=r"Install not_there\. Install fsspec's package for far:// with pip"):
        ArtifactsLogger("far://copies")


class TestArtifacts(LoggerConformance):
    exempt = dict.fromkeys(
        (
            "test_writes_down_what_is_logged",
            "test_goes_on_after_it_was_closed",
            "test_two_runs_do_not_mix",
            "test_values_that_are_not_finite",
        ),
        "it writes no metrics",
    )

    def make(self):
        return ArtifactsLogger("memory://artifacts")

    @pytest.fixture(autouse=True)
    def _empty(self):
        yield
        fsspec.filesystem("memory").store.clear()
