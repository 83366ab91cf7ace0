"""A notebook, run by its kernel: a live bar, tables, a plot's numbers, Control-C and the next cell."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long
nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel run the notebook")
pytest.importorskip("ipykernel", reason="nbclient and ipykernel run the notebook")

CELLS = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
    """
import os, signal, time, torch, hocket
from support import make_data, make_model, sgd

class Press(hocket.Callback):
    def batch_start(self, state):
        time.sleep(0.15)  # the bar is drawn at most ten times a second
    def batch_end(self, state):
        if state.timestamp.batch == 4:
            os.kill(os.getpid(), signal.SIGINT)  # what the button "interrupt the kernel" sends

trainer = hocket.Trainer(
    model=make_model(), loss=torch.nn.functional.cross_entropy, optimizer=sgd, duration="3ep", device="cpu", log_every="1ba",
    train_data=make_data(), eval_data={"<test>": make_data(8, shuffle=False)}, callbacks=[Press()], loggers=["progress"],
    checkpoints=hocket.Checkpoints("runs/a", best=("<test>/loss", "min", 1)),
)""",
    "trainer.plan()",
    "result = trainer.fit()",
    "trainer.result()",
    "result = trainer.fit()",
    "result",
    "result.history",
    'trainer.evaluate("best") == {"<test>/loss": result.best.value}',
    "result.history.series('<test>/loss')[0]",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each cell shows."""
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    folder = tmp_path_factory.mktemp("notebook")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of the Jupyter packages
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
        nbclient.NotebookClient(
            notebook,
            timeout=200,
            allow_errors=True,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    return [cell.outputs for cell in notebook.cells]


def printed(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream")


def html(outputs: list[Any]) -> str:
    (shown,) = [each.data["text/html"] for each in outputs if "text/html" in each.get("data", {})]
    return str(shown)


def text(outputs: list[Any]) -> str:
    return re.sub(r"<[^<>]+>", " ", html(outputs))


def test_control_c_in_a_fit(outputs: list[list[Any]]) -> None:
    assert not outputs[0], "nothing warns"
    bar, error = text(outputs[2]), outputs[2][-1]
    assert re.search(r"training .*\d\d% +train/loss [\d.]+  [\d.]+ ba/s", bar) and "100%" not in bar
    assert "Output()" not in str(outputs[2]) and all(each.get("name") != "stderr" for each in outputs[2])
    assert (error.output_type, error.ename) == ("error", "KeyboardInterrupt") and len(error.traceback) < 12
    said = printed(outputs[2])
    assert "hocket: interrupted at ep 1 ba 4: 2 checkpoints in runs/a, the newest is ep1-ba4, the best ep1-ba3" in said
    assert "hocket: to continue: trainer.fit(), or in another process Trainer(…, resume='auto')" in said
    assert "Result after 1 epoch, 4 batches" in html(outputs[3])


def test_the_next_cell_continues(outputs: list[list[Any]]) -> None:
    assert re.search(r"100% +train/loss [\d.]+ ", text(outputs[4])) and "<test>/loss" in printed(outputs[4])
    assert "hocket: done at ep 3 ba 9" in printed(outputs[4])
    (gone_through,) = outputs[8]
    assert gone_through.data["text/plain"] == "[3, 6, 9]"


def test_tables(outputs: list[list[Any]]) -> None:
    for cell, words in (
        (1, ("Sequential, 195 parameters", "checkpoints")),
        (5, ("Result after 3 epochs", "runs/a/ep")),
    ):
        assert all(word in html(outputs[cell]) for word in words) and "<table>" in html(outputs[cell])
    assert "&lt;test&gt;/loss" in html(outputs[5]) and "<test>" not in html(outputs[5])
    assert html(outputs[6]).count("<tr>") == 10, "a header and nine batches"
    assert outputs[5][0].data["text/plain"].startswith("Result after 3 epochs, 9 batches, 252 samples")


def test_the_best_is_evaluated(outputs: list[list[Any]]) -> None:
    (same,) = outputs[7]
    assert same.data["text/plain"] == "True"
