"""What a framework adds to a step (1) and makes of a realistic one (2): each contender beside the hand-written loop."""

from __future__ import annotations

from typing import Any

from harness import Series, Worker, table


def overhead(workers: list[Worker], repeats: int) -> dict[str, Any]:
    """Microseconds per step over the hand-written loop, on an MLP whose own step takes little more than 100."""
    own, raw = _interleaved(workers, "mlp", repeats)
    added = {
        case: Series([(a - b) * 1e6 for a, b in zip(own[case].values, raw[case].values, strict=True)]) for case in own
    }
    rows = [["32-64-10 MLP, batch 16, SGD, 1 thread", "added to a step, µs", "hand-written step, µs"]]
    for case, series in added.items():
        rows.append([case, str(series), str(Series([v * 1e6 for v in raw[case].values]))])
    ratio = {case: [a / b for a, b in zip(own[case].values, raw[case].values, strict=True)] for case in own}
    return {"added_us": {case: each.values for case, each in added.items()}, "ratio": ratio, "table": table(rows)}


def millisecond(workers: list[Worker], repeats: int, cases: tuple[str, ...]) -> dict[str, Any]:
    """A step of about a millisecond as a multiple of the hand-written loop's; the first case is the Trainer's own part."""
    own, raw = _interleaved(workers, "wide mlp", repeats, cases, in_turn=True)
    ratio = {case: Series([a / b for a, b in zip(own[case].values, raw[case].values, strict=True)]) for case in own}
    bare = next(iter(ratio.values()))
    rows = [["256-512-10 MLP, batch 96, SGD, 1 thread", "÷ hand-written", "÷ bare", "hand-written step, µs"]]
    for case, series in ratio.items():
        of_bare = Series([a / b for a, b in zip(series.values, bare.values, strict=True)])
        rows.append([case, str(series), str(of_bare), str(Series([v * 1e6 for v in raw[case].values]))])
    return {"ratio": {case: series.values for case, series in ratio.items()}, "table": table(rows)}


def realistic(workers: list[Worker], repeats: int, cases: tuple[str, ...]) -> dict[str, Any]:
    """Time per step as a multiple of the hand-written loop's, on models that are not toys."""
    result: dict[str, Any] = {"ratio": {}}
    rows = [["", "ResNet-18, 32 × 3 × 64 × 64", "4-layer GPT, 8 × 128"]]
    columns: dict[str, dict[str, Series]] = {}
    for workload in ("resnet18", "gpt"):
        own, raw = _interleaved(workers, workload, repeats, cases)
        columns[workload] = {
            case: Series([a / b for a, b in zip(own[case].values, raw[case].values, strict=True)]) for case in own
        }
        result["ratio"][workload] = {case: series.values for case, series in columns[workload].items()}
    rows += [[case, *(str(columns[workload][case]) for workload in columns)] for case in columns["gpt"]]
    return result | {"table": table(rows)}


def _interleaved(
    workers: list[Worker], workload: str, repeats: int, only: tuple[str, ...] = (), in_turn: bool = False
) -> tuple[dict[str, Series], dict[str, Series]]:
    """Every case once per repeat, so that a machine that slows down slows down all of them."""
    own: dict[str, Series] = {}
    raw: dict[str, Series] = {}
    for repeat in range(repeats + 1):
        for worker in workers:
            for case in worker.cases:
                if only and case not in only:
                    continue
                answer = worker.ask(workload=workload, case=case, in_turn=in_turn)
                if repeat:  # the first one warms up
                    name = f"hocket, {case}" if worker.name == "hocket" else case
                    own.setdefault(name, Series()).values.append(answer["own"])
                    raw.setdefault(name, Series()).values.append(answer["raw"])
    return own, raw
