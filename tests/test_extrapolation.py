"""benchmarks/extrapolation.py: which commands it runs, what it keeps, and what it writes. `hocket` itself is replaced."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
#: Perplexity at 1x, 2x and 4x, of seed 1; those of seed 2 are 2 larger.
VALUES = {
    "learned-positions": (20.0, 90.0, 500.0),
    "alibi": (20.0, 19.0, 18.0),
    "alibi-sequence-length-warm-up-truncated": (21.0, 20.0, 19.0),
    "alibi-sequence-length-warm-up-reshaped": (21.0, 20.0, 19.0),
    "rope": (20.0, 30.0, 60.0),
    "rope-yarn-in-evaluation": (20.0, 22.0, 25.0),
}


@pytest.fixture
def extrapolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import extrapolation

    monkeypatch.setattr(extrapolation, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(extrapolation, "ROOT", tmp_path)
    corpus = {"files": 3, "bytes": 9000, "tokens": 4000, "python": "3.x"}
    monkeypatch.setattr(extrapolation, "_corpus", lambda: {"train": corpus, "test": corpus})
    yield extrapolation
    for name in {name for name in sys.modules if name.partition(".")[0] in ("evidence", "harness", "extrapolation")}:
        if name not in before:
            del sys.modules[name]


@pytest.fixture
def ran(extrapolation: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands, which print the values above."""
    commands: list[list[str]] = []

    def hocket(*words: str) -> str:
        commands.append(list(words))
        seed = next(int(word.removeprefix("seed=")) for word in words if word.startswith("seed="))
        if words[0] == "train":
            folder, name = (
                word.partition("=")[2] for word in words if word.startswith(("folder=", "run_name="))
            )  # fmt: skip
            run = Path(folder) / name
            assert not run.exists()
            run.mkdir(parents=True)
            (run / "metrics.jsonl").write_text(json.dumps({"token": 2_400_000, "seconds": 100.0}) + "\n")
            kind = name.rpartition("-")[0]
        else:
            where = Path(words[words.index("--weights") + 1])
            assert where.name == f"rope-{seed}" and where.exists()
            kind = "rope-yarn-in-evaluation"
        values = [value + 2 * (seed - 1) for value in VALUES[kind]]
        lines = [f"{length}/perplexity {value}" for length, value in zip(extrapolation.LENGTHS, values, strict=True)]
        return "\n".join(["train/loss 3.1", *lines, "weights in somewhere", ""])

    monkeypatch.setattr(extrapolation, "_hocket", hocket)
    return commands


def test_the_overrides_are_those_that_the_examples_explain(extrapolation: Any) -> None:
    for variant in extrapolation.VARIANTS.values():
        text = (ROOT / "examples" / variant.file).read_text(encoding="utf-8")
        assert all(override in text for override in variant.overrides)


def test_each_kind_is_trained_once_for_each_seed_and_yarn_is_rope_evaluated_again(
    extrapolation: Any, ran: list[list[str]]
) -> None:
    assert extrapolation.main(["--seeds", "1", "2"]) == 0
    kinds = [(words[0], Path(words[1]).name) for words in ran]
    assert kinds == [("train", "gpt.yaml")] * 8 + [("train", "rope.yaml")] * 2 + [("evaluate", "rope.yaml")] * 2
    ran.clear()
    assert extrapolation.main(["--seeds", "1", "2"]) == 0
    assert not ran, "finished runs are kept"
    assert extrapolation.main(["duration=9ba", "--seeds", "1", "2"]) == 0
    assert len(ran) == 12 and all("duration=9ba" in words for words in ran)


def test_the_table_has_means_over_seeds_and_a_ratio(extrapolation: Any, ran: list[list[str]], capsys: Any) -> None:
    extrapolation.main(["--seeds", "1", "2"])
    printed = capsys.readouterr().out
    grown = math.sqrt((18 / 20) * (20 / 22))
    deviation = math.sqrt(2)
    expected = (
        f"| ALiBi | 21.00 ± {deviation:.2f} | 20.00 ± {deviation:.2f} | 19.00 ± {deviation:.2f} | {grown:.2f} | 2.4 |"
    )
    assert expected in printed
    assert "| RoPE, YaRN in evaluation | 21.00 " in printed


def test_more_than_five_percent_is_a_failure(
    extrapolation: Any, ran: list[list[str]], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setitem(VALUES, "alibi", (20.0, 20.0, 20.9))
    assert extrapolation.main(["--seeds", "1"]) == 0
    monkeypatch.setitem(VALUES, "alibi", (20.0, 20.0, 21.1))
    assert extrapolation.main(["duration=1ba", "--seeds", "1"]) == 1
    assert "ABOVE: ALiBi's perplexity at 4x is 1.055 of that at 1x" in capsys.readouterr().out


def test_publishing_writes_json_and_replaces_the_block_of_each_card(
    extrapolation: Any, ran: list[list[str]], tmp_path: Path
) -> None:
    cards = tmp_path / "docs" / "algorithms"
    cards.mkdir(parents=True)
    sources = "## Sources\n\n- A paper.\n"
    measured = "<!-- evidence -->\n## Measured here\n<!-- /evidence -->\n"
    (cards / "alibi.md").write_text(f"# ALiBi\n\nText.\n\n{measured}\n{sources}")
    (cards / "rope-scaling.md").write_text(f"# RoPE\n\nText.\n\n{sources}")
    for seeds in (["1"], ["1", "2"], ["1", "2"]):
        extrapolation.main(["--seeds", *seeds, "--publish"])
    alibi, rope = ((cards / name).read_text() for name in ("alibi.md", "rope-scaling.md"))
    assert not (cards / "seq-length-warmup.md").exists()
    block = alibi[alibi.index(extrapolation.BEGIN) : alibi.index(extrapolation.END) + len(extrapolation.END)]
    assert alibi == f"# ALiBi\n\nText.\n\n{block}\n\n{measured}\n{sources}"
    assert rope == f"# RoPE\n\nText.\n\n{block}\n\n{sources}"
    assert "21.00 ± 1.41" in block and "2 seeds each, on the library of Python 3.x: 3 files and 4,000 tokens" in block
    found = json.loads((tmp_path / "docs" / "evidence" / "extrapolation.json").read_text())
    assert found["variants"]["RoPE"]["runs"]["2"].pop("commit") == extrapolation.commit()
    assert found["variants"]["RoPE"]["runs"]["2"].pop("cpu") == found["machine"]["cpu"]
    assert found["variants"]["RoPE"]["runs"]["2"] == {"1x": 22, "2x": 32, "4x": 62, "tokens": 2_400_000, "seconds": 100}
    assert {"machine", "versions", "corpus", "settings", "seeds"} <= found.keys()
