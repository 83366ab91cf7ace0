"""Streams beside a memory map, litdata and mosaicml-streaming: ``streaming.py [--litdata PYTHON --mosaic PYTHON]``.

Each measurement is a process of its own, and every repeat runs all of them one after the other. All have two worker processes,
batches of 64 and the same arrays. Remote data come from a stand-in for S3 with 10 ms of latency, a process of its own.
Libraries are imported before the clock starts; litdata reads Parquet in spawned workers only, which import them again. "Cold"
is the first epoch of a process: with its start, an empty cache, and local files that the system does not have in memory.
"Warm" is the median of the epochs after it. The exit code is 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import streaming_limits
from harness import Series, machine, publish, table
from streaming_data import BUCKET, SIZES, Store, forget, write

READER = Path(__file__).with_name("streaming_reader.py")
FORMATS = {"MDS": "mds", "litdata's files": "litdata", "npy": "npy", "Parquet": "parquet"}
MAP, LITDATA, MOSAIC = "memory map, full shuffle", "litdata's loader", "mosaic's data set"
PARQUET = "litdata's loader, Parquet"
EPOCHS = 4
#: The least ratio of samples a second of hocket's to theirs. Parquet is compared with litdata's of Parquet, and MDS, the format
#: of mosaicml-streaming, with its data set.
BOUNDS = {MAP: 0.6, LITDATA: 1.0, MOSAIC: 1.5}
#: With a short run on a busy machine, far below.
LOOSE = 0.2
Key = tuple[int, str, str]
Rates = tuple[float, float, float] | None


def run(litdata: str | None, mosaic: str | None, repeats: int, short: bool = False) -> dict[str, Any]:
    """Samples a second and seconds to the first batch of every reader, with ratios within each repeat; and the limits."""
    pythons = {"litdata": litdata, "mosaic": mosaic}
    with tempfile.TemporaryDirectory(prefix="hocket-streams-") as temporary:
        folder, cache = Path(temporary) / "data", Path(temporary) / "cache"
        write(folder, litdata, [2_048] if short else list(SIZES), parquet=not short)
        store = Store(folder)
        try:
            found: dict[Key, list[Rates]] = {}
            errors: list[str] = []
            versions: dict[str, str] = {}
            loads = []
            for repeat in range(repeats):
                cases = list(_cases(litdata, mosaic, short))
                for key, reader, path in cases if repeat % 2 == 0 else reversed(cases):
                    shutil.rmtree(cache, ignore_errors=True)
                    forget(folder / str(key[0]))
                    ask = {"reader": reader, "path": str(folder / path), "cache": str(cache), "epochs": EPOCHS}
                    if key[1] == "S3":
                        ask |= {"path": f"s3://{BUCKET}/{path}", "options": store.options}
                    answer = asked(ask, pythons.get(reader) or sys.executable)
                    found.setdefault(key, []).append(_rates(answer))
                    errors += [f"{key}: {answer['error']}"] if "error" in answer else []
                    versions |= answer.get("versions", {}) if reader != "memory map" else {}
                    loads.append(os.getloadavg()[0])
                    print(key, found[key][-1], f"load {loads[-1]:.1f}", file=sys.stderr, flush=True)
            limits = None if short else streaming_limits.run(folder, cache, store, repeats)
        finally:
            store.close()
    result = summary(found, LOOSE if short else None) | {"errors": errors, "versions": versions, "load": sorted(loads)}
    return described(result, limits, repeats)


def described(result: dict[str, Any], limits: dict[str, Any] | None, repeats: int) -> dict[str, Any]:
    """Add the table of limits, and what the figures were taken on."""
    load, versions = result["load"], result["versions"]
    about = f"{date.today()}, {repeats} repeats, {os.cpu_count()} cores with a load of {median(load):.1f} ({load[0]:.1f} to "
    about += f"{load[-1]:.1f}); {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}."
    result["table"] += f"\n\n{about}"
    if limits:
        result["limits"] = limits["values"]
        result["table"] += f"\n\n{limits['table']}"
        result["above"] += limits["above"]
    return result


def _cases(litdata: str | None, mosaic: str | None, short: bool) -> Any:
    for size in [2_048] if short else SIZES:
        for place in ("local", "S3"):
            if place == "local":
                yield (size, place, MAP), "memory map", f"{size}/npy/rows.npy"
            for name, folder in FORMATS.items():
                if (folder == "litdata" and not litdata) or (short and (folder != "mds" or place == "S3")):
                    continue
                yield (size, place, f"hocket, {name}"), "hocket", f"{size}/{folder}"
            if litdata:
                yield (size, place, LITDATA), "litdata", f"{size}/litdata"
                if not short and place == "local":  # its reader of Parquet knows no endpoint of S3
                    yield (size, place, PARQUET), "litdata", f"{size}/parquet"
            if mosaic:
                yield (size, place, MOSAIC), "mosaic", f"{size}/mds"


def asked(ask: Mapping[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """Return the answer of a reader in a process of its own, or its error."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is not installed would be compiled by every process
    try:
        done = subprocess.run(
            [python, str(READER), json.dumps(ask)], capture_output=True, text=True, timeout=90, env=environment
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": "no end in 90 s"}
    except ValueError:
        return {"error": (done.stderr.strip().splitlines() or ["nothing"])[-1]}
    return answer


def _rates(answer: Mapping[str, Any]) -> Rates:
    """Return samples a second, cold and warm, and seconds to the first batch; None if it failed or repeated a sample."""
    epochs = answer.get("epochs", [])
    whole = max((epoch["samples"] for epoch in epochs), default=0)  # an epoch that takes too long is cut short
    if not epochs or any(not epoch["distinct"] == epoch["samples"] == whole for epoch in epochs):
        return None
    rates = [epoch["samples"] / epoch["seconds"] for epoch in epochs]
    return rates[0], median(rates[1:]), epochs[0]["first"]


def _shown(rates: Sequence[Rates], at: int) -> str:
    good = [one[at] for one in rates if one]
    failed = f" ({len(rates) - len(good)} of {len(rates)} failed)" if at == 0 and len(good) < len(rates) else ""
    return (str(Series(good)) if good else "") + failed


def summary(found: Mapping[Key, Sequence[Rates]], loose: float | None = None) -> dict[str, Any]:
    """Return the table, the raw figures, and bounds that are missed."""
    head = ["sample", "data", "reader", "cold, samples/s", "warm, samples/s", "first batch, s"]
    rows = [[*head, "÷ memory map, warm", "÷ litdata, cold", "÷ litdata, warm", "÷ mosaic, cold", "÷ mosaic, warm"]]
    values: dict[str, Any] = {}
    above: list[str] = []
    for (size, place, reader), rates in found.items():
        row = [f"{size:,} bytes", place, reader, *(_shown(rates, at) for at in range(3))]
        own = values[f"{size}, {place}, {reader}"] = {"cold, warm, first": rates}
        for other, at in ((MAP, 1), (LITDATA, 0), (LITDATA, 1), (MOSAIC, 0), (MOSAIC, 1)):
            name = PARQUET if other == LITDATA and reader == "hocket, Parquet" else other
            theirs = found.get((size, "local" if other == MAP else place, name), [])
            ratios = [one[at] / two[at] for one, two in zip(rates, theirs, strict=False) if one and two]
            if not ratios or not reader.startswith("hocket"):
                row.append("")
                continue
            ratio, bound, when = median(ratios), loose or BOUNDS[other], "warm" if at else "cold"
            own[f"÷ {other}, {when}"] = ratios
            row.append(f"{ratio:.2f}")
            compared = place == "local" if other == MAP else other == LITDATA or reader == "hocket, MDS"
            if ratio < bound and compared:
                row[-1] += " (missed)"
                above.append(f"{reader}, {size:,} bytes, {place}, {when}: {ratio:.2f} of the {other}, not {bound}")
        rows.append(row)
    used = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    return {"values": values, "above": above, "table": table([[row[at] for at in used] for row in rows])}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--litdata", help="the Python of an environment with litdata")
    parser.add_argument("--mosaic", help="the Python of an environment with mosaicml-streaming")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the raw figures")
    parser.add_argument("--publish", action="store_true", help="write them and the tables where `nox -s bench` does")
    arguments = parser.parse_args()
    found = run(arguments.litdata, arguments.mosaic, 1 if arguments.short else arguments.repeats, arguments.short)
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "Streams": found}, indent=1) + "\n")
    if arguments.publish:
        publish("Streams", found)
    print(found["table"])
    for each in found["above"]:
        print(f"MISSED: {each}")
    return 1 if found["above"] else 0


if __name__ == "__main__":
    sys.exit(main())
