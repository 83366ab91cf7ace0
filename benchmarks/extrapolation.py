"""Perplexity at 1, 2 and 4 times the training length, of examples/gpt.yaml and examples/rope.yaml.

``python extrapolation.py [key=value …] [--seeds 17 18] [--publish]`` runs ``hocket train`` for each kind of positions and each
seed, in about 5 minutes each on two cores. ``--publish`` writes docs/evidence/extrapolation.json and a table into the cards of
the algorithms. Finished runs are kept in benchmarks/results/extrapolation, and not repeated until that
folder is removed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from evidence.run import commit, made_with
from harness import table

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RESULTS = Path(__file__).parent / "results" / "extrapolation"
LENGTHS = ("1x", "2x", "4x")
BEGIN, END = "<!-- extrapolation -->", "<!-- /extrapolation -->"
_BLOCK = re.compile(rf"{BEGIN}.*?{END}\n*", re.DOTALL)
_AFTER = re.compile(r"^(<!-- evidence -->|## (Sources?|References?)\b.*)$", re.MULTILINE)


class Variant(NamedTuple):
    """A file of examples/ with overrides. ``weights_of`` names a variant that is evaluated with these overrides instead."""

    file: str
    overrides: tuple[str, ...] = ()
    weights_of: str | None = None


_ALIBI = "{alibi: {max_sequence_length: 512}}"
VARIANTS = {
    "learned positions": Variant("gpt.yaml", ("algorithms=[]",)),
    "ALiBi": Variant("gpt.yaml"),
    "ALiBi, sequence-length warm-up, truncated": Variant("gpt.yaml", (f"algorithms=[{_ALIBI}, seq-length-warmup]",)),
    "ALiBi, sequence-length warm-up, reshaped": Variant(
        "gpt.yaml", (f"algorithms=[{_ALIBI}, {{seq-length-warmup: {{truncate: false}}}}]",)
    ),
    "RoPE": Variant("rope.yaml"),
    "RoPE, YaRN in evaluation": Variant("rope.yaml", ("algorithms=[{rope-scaling: {factor: 4}}]",), weights_of="RoPE"),
}
#: The cards that have the table.
CARDS = ("alibi", "rope-scaling", "seq-length-warmup")
#: ALiBi at 4 times its training length, relative to its perplexity at that length.
LIMIT = 1.05


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if ALiBi's perplexity grows by more than 5 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18])
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value for every run, such as duration=100ba")
    arguments = parser.parse_args(argv)
    found = results(arguments.seeds, arguments.overrides)
    print(_table(found))
    if arguments.publish:
        write(found, ROOT / "docs")
    grown = ratio(found["variants"]["ALiBi"]["runs"])
    if grown > LIMIT:
        print(f"ABOVE: ALiBi's perplexity at 4x is {grown:.3f} of that at 1x, more than {LIMIT}")
    return int(grown > LIMIT)


def results(seeds: Sequence[int], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the tables say."""
    found: dict[str, Any] = {
        **made_with(),
        "seeds": list(seeds),
        "overrides": list(overrides),
        "settings": {file: _settings(file) for file in ("gpt.yaml", "rope.yaml")},
        "corpus": _corpus(),
        "variants": {},
    }
    for name, variant in VARIANTS.items():
        runs = {str(seed): measure(name, seed, overrides) for seed in seeds}
        found["variants"][name] = {**variant._asdict(), "runs": runs}
    return found


def measure(name: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Perplexity by length, and tokens of training; from the file of an earlier run with these settings if there is one."""
    variant = VARIANTS[name]
    run = f"{_slug(name)}-{seed}"
    file = RESULTS / f"{run}.json"
    key = [_settings(variant.file), *variant.overrides, *overrides]
    if file.exists() and (before := json.loads(file.read_text()))["settings"] == key:
        return dict(before["found"])
    RESULTS.mkdir(parents=True, exist_ok=True)
    words = [str(EXAMPLES / variant.file), *variant.overrides, *overrides, f"seed={seed}"]
    if variant.weights_of is None:
        shutil.rmtree(RESULTS / run, ignore_errors=True)  # of a run that was interrupted, or had other settings
        printed = _hocket("train", *words, f"folder={RESULTS}", f"run_name={run}")
    else:
        printed = _hocket("evaluate", *words, "--weights", str(RESULTS / f"{_slug(variant.weights_of)}-{seed}"))
    values = dict(re.findall(r"^(\S+) (\S+)$", printed, re.MULTILINE))
    found: dict[str, Any] = {length: float(values[f"{length}/perplexity"]) for length in LENGTHS}
    if variant.weights_of is None:
        last = json.loads((RESULTS / run / "metrics.jsonl").read_text().splitlines()[-1])
        found |= {"tokens": last["token"], "seconds": last["seconds"]}
    else:
        found["tokens"] = measure(variant.weights_of, seed, overrides)["tokens"]
    # Of this run, which may be older than the page.
    found |= {"commit": commit(), "cpu": made_with()["machine"]["cpu"]}
    file.write_text(json.dumps({"settings": key, "found": found}))
    print(
        f"{name}, seed {seed}: {', '.join(f'{key} {value}' for key, value in found.items())}",
        file=sys.stderr,
        flush=True,
    )
    return found


def _hocket(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "hocket", *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower())


def _settings(file: str) -> Any:
    return yaml.safe_load((EXAMPLES / file).read_text(encoding="utf-8"))


def _corpus() -> dict[str, Any]:
    from hocket_nlp import text_python

    read = {split: text_python(split).dataset.corpus for split in ("train", "test")}  # type: ignore[attr-defined]
    return {
        split: {key: getattr(each, key) for key in ("files", "bytes", "tokens", "python")}
        for split, each in read.items()
    }


# --- pages


def ratio(runs: Mapping[str, Mapping[str, Any]]) -> float:
    """Perplexity at 4x divided by that at 1x, the geometric mean over seeds."""
    return math.exp(statistics.fmean(math.log(each["4x"] / each["1x"]) for each in runs.values()))


def _table(found: Mapping[str, Any]) -> str:
    rows = [["positions", "perplexity at 1×", "2×", "4×", "4× ÷ 1×", "million tokens trained on"]]
    for name, each in found["variants"].items():
        runs = each["runs"]
        values = [_shown([run[length] for run in runs.values()]) for length in LENGTHS]
        tokens = statistics.fmean(run["tokens"] for run in runs.values()) / 1e6
        rows.append([name, *values, f"{ratio(runs):.2f}", f"{tokens:.1f}"])
    return table(rows)


def _shown(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def _block(found: Mapping[str, Any]) -> str:
    test = found["corpus"]["test"]
    return "\n".join(
        [
            "## Extrapolation measured here",
            "",
            "Models of 0.9 million parameters train on 128 tokens. The table has the perplexity of the same held-out files, in "
            "windows of 128, 256 and 512 tokens.",
            "",
            _table(found),
            "",
            f"[`examples/gpt.yaml`](../../examples/gpt.yaml) and [`examples/rope.yaml`](../../examples/rope.yaml), "
            f"{len(found['seeds'])} seeds each, on the library of Python {test['python']}: {test['files']} files and "
            f"{test['tokens']:,} tokens held out. Written by `python benchmarks/extrapolation.py --publish`; "
            "[all numbers](../evidence/extrapolation.json).",
        ]
    )


def write(found: Mapping[str, Any], docs: Path) -> None:
    """Write the JSON and the blocks of the cards that exist."""
    (docs / "evidence").mkdir(parents=True, exist_ok=True)
    (docs / "evidence" / "extrapolation.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in CARDS:
        if (card := docs / "algorithms" / f"{name}.md").exists():
            card.write_text(with_block(card.read_text(), _block(found)))


def with_block(card: str, block: str) -> str:
    """A card with the block in place of an earlier one, or before what else was measured or its sources, or at its end."""
    text = _BLOCK.sub("", card)
    later = _AFTER.search(text)
    at = later.start() if later else len(text)
    before, after = text[:at].rstrip("\n"), text[at:]
    return f"{before}\n\n{BEGIN}\n{block}\n{END}\n" + (f"\n{after}" if after else "")


if __name__ == "__main__":
    sys.exit(main())
