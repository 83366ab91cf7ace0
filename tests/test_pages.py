"""README.md and the pages for users: what they show runs, from an empty folder, in the order of the page."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pages import ROOT, apply, blocks, write

import hocket

#: The programs of a page that is named after another one use what that one has made.
PAGES = (
    "README.md",
    pytest.param("docs/how-to/installing.md", marks=pytest.mark.long),
    pytest.param("docs/tutorials/first-run.md", marks=pytest.mark.long),
    pytest.param("docs/tutorials/from-pytorch.md", marks=pytest.mark.long),
    "docs/tutorials/your-model.md",
    pytest.param("docs/tutorials/stop-and-resume.md", marks=pytest.mark.long),
    pytest.param("docs/tutorials/several-machines.md", marks=pytest.mark.long),
    pytest.param("docs/tutorials/read-a-run.md", marks=pytest.mark.long),
    pytest.param("docs/tutorials/streaming.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/streaming.md", marks=pytest.mark.long),  # a server of S3
    "docs/how-to/mix-data-sets.md docs/reference/streaming.md",
    pytest.param("docs/how-to/write-shards.md", marks=pytest.mark.long),  # a dozen processes
    pytest.param("docs/how-to/compress-a-run.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/compress.md", marks=pytest.mark.long),
    "docs/how-to/mixed-precision.md",
    "docs/how-to/gradient-accumulation.md",
    "docs/how-to/early-stopping.md",
    pytest.param("docs/how-to/checkpoints.md docs/reference/checkpoints.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/resume.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/spot-machines.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/s3.md", marks=pytest.mark.long),  # a server of S3
    pytest.param("docs/how-to/load-weights.md", marks=pytest.mark.long),
    *(
        pytest.param(f"docs/how-to/{name}.md", marks=pytest.mark.long)  # two processes
        for name in ("multi-node", "slurm", "fsdp", "tensor-parallel", "deepspeed", "ray")
    ),
    pytest.param("docs/how-to/out-of-memory.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/nan.md", marks=pytest.mark.filterwarnings("ignore:Not finite in batch 14")),
    pytest.param("docs/how-to/reproducibility.md", marks=pytest.mark.long),  # worker processes
    "docs/how-to/learning-rate-schedules.md",
    "docs/how-to/task-events.md",
    "docs/how-to/runtime-steps.md",
    "docs/how-to/contrastive.md",
    "docs/how-to/ragged-batches.md",
    "docs/how-to/imbalanced-data.md",
    "docs/how-to/several-loaders.md",
    "docs/reference/losses.md",
    "docs/how-to/evaluation.md",
    "docs/how-to/custom-metrics.md",
    "docs/how-to/evaluating-a-checkpoint.md",
    pytest.param("docs/how-to/judge-a-run.md", marks=pytest.mark.long),
    "docs/how-to/judge-in-python.md",
    "docs/how-to/ema.md",
    pytest.param("docs/how-to/export.md", marks=pytest.mark.long),  # traces a model
    "docs/how-to/k-fold.md",
    pytest.param("docs/how-to/repeat-a-run.md", marks=pytest.mark.long),  # three processes
    "docs/how-to/logging.md",
    "docs/how-to/log-from-a-callback.md",
    "docs/how-to/log-a-metric.md",
    "docs/how-to/language.md",
    "docs/how-to/generate.md",
    "docs/how-to/train-on-text.md",
    "docs/how-to/parameter-groups.md",
    "docs/how-to/freezing.md",
    "docs/how-to/muon.md",
    "docs/how-to/schedule-free.md",
    pytest.param("docs/how-to/lora.md", marks=pytest.mark.long),  # imports transformers
    "docs/how-to/packing.md",
    "docs/reference/optimizers.md",
    "docs/how-to/loggers.md docs/reference/loggers.md",
    "docs/how-to/copy-to-a-url.md",
    "docs/how-to/monitors.md",
    "docs/how-to/watch-a-run.md",
    "docs/how-to/profiling.md docs/reference/profiles.md",
    pytest.param("docs/how-to/sweeps.md docs/reference/sweeps.md", marks=pytest.mark.long),  # a dozen processes
    "docs/how-to/compare-runs.md",
    pytest.param("docs/explanation/streaming.md", marks=pytest.mark.long),
    pytest.param("docs/how-to/notebooks.md", marks=pytest.mark.long),  # two processes
    pytest.param("docs/how-to/estimating.md", marks=pytest.mark.long),
    "docs/how-to/summarize-a-model.md",
    "docs/how-to/from-composer.md",
    "docs/how-to/composer-checkpoints.md",
    "docs/reference/other-trainers.md",
    pytest.param("docs/how-to/runtime.md docs/reference/runtime.md", marks=pytest.mark.long),
)

#: What a page needs that the tests of other pages do not.
NEEDS = {
    "schedule-free": ["schedulefree"],
    "lora": ["peft"],
    "compare-runs": ["vl_convert"],
    "s3": ["s3fs", "moto.server"],
    "tutorials/streaming": ["s3fs", "moto.server", "PIL"],
    "how-to/streaming": ["s3fs", "moto.server"],
    "write-shards": ["pyarrow", "zstandard"],
    "deepspeed": ["deepspeed"],
    "ray": ["ray"],
}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket ``my-bucket`` of a server on this machine."""
    import moto.server
    import s3fs

    server = moto.server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()  # clients of another page's server
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # the buckets of another page's server, which this process keeps
    s3fs.S3FileSystem().mkdir("my-bucket")
    yield
    server.stop()


@pytest.mark.parametrize("name", PAGES)
def test_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torchmetrics")
    needed = next((packages for page, packages in NEEDS.items() if name.endswith(f"/{page}.md")), [])
    for package in needed:
        pytest.importorskip(package)
    if "moto.server" in needed:
        request.getfixturevalue("bucket")
    if "stream" in name or "shards" in name:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    ran, before, printed = 0, set(sys.modules), ""
    try:
        with torch.random.fork_rng(devices=[]):
            for page, block in ((each, block) for each in map(ROOT.joinpath, name.split()) for block in blocks(each)):
                if block.language == "diff":
                    apply(block, tmp_path)
                elif "file" in block.words:
                    write(block, tmp_path)
                elif file := block.words.get("result"):
                    assert (tmp_path / file).read_text(encoding="utf-8") == block.text
                elif block.language == "python":
                    # As many empty lines as the page has above, so that a traceback names the page's line.
                    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
                    ran += 1
                elif block.language == "console":
                    last, printed = printed, _commands(block.text, tmp_path)
                    assert "same" not in block.words or printed == last, f"{page}:{block.line}: {printed}"
                    ran += 1
    finally:
        for module in set(sys.modules) - before:
            if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[module]
    assert ran


def test_defaults_in_the_table_of_monitors_are_those_of_the_constructors() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \|.*\|([^|]*)\|$", (ROOT / "docs/reference/monitors.md").read_text(), re.MULTILINE
    )
    checked = 0
    for name, defaults in rows:
        for argument, value in re.findall(r"`(\w+)=([^`]+)`", defaults):
            if value == '"train"':  # another choice, not the default
                continue
            parameters = inspect.signature(hocket.plugins.get("callbacks", name)).parameters
            assert parameters[argument].default == ast.literal_eval(value), (name, argument)
            checked += 1
    assert checked >= 11


def _commands(text: str, folder: Path) -> str:
    """Run the lines that begin with ``$ hocket`` or ``$ python``, and return what they print.

    The lines after a command are among those that it prints, in their order; ``…`` stands for any text.
    """
    everything = ""
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        program, *arguments = shlex.split(command, comments=True)
        if program not in ("hocket", "python"):
            continue
        words = [sys.executable, *(["-m", "hocket"] if program == "hocket" else []), *arguments]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that both streams are in the order of a terminal
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, cwd=folder, text=True, env=environment, timeout=120, **streams)
        printed = done.stdout
        assert done.returncode == 0, f"{command}\n{printed}"
        lines = iter(printed.splitlines())
        for line in shown.splitlines():
            pattern = ".*".join(re.escape(part) for part in line.split("…"))
            assert any(re.fullmatch(pattern, other) for other in lines), f"{command}: no line {line!r} in\n{printed}"
        everything += printed
    return everything
