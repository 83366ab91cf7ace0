"""The panels of a page beside the curves, as HTML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hocket.basics import run_files as files
from hocket.basics.direction import mode_of
from hocket_cli import run_listing
from hocket_report.markup import Markup, code, hint, joined, section, table, tag
from hocket_report.run_contents import Run

#: The events of a fit by the part of it in which they happen, in order.
_PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Construction", ("init", "before_load", "after_load")),
    ("Start of a fit", ("before_fit", "fit_start")),
    ("Each epoch", ("epoch_start",)),
    ("Each batch", ("before_dataloader", "after_dataloader", "batch_start", "before_train_batch")),
    (
        "Each microbatch",
        ("before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"),
    ),
    ("Each batch, after its gradients", ("after_train_batch", "batch_end", "batch_checkpoint")),
    (
        "Each evaluation",
        (
            "eval_standalone_start", "eval_before_all", "eval_start", "eval_batch_start", "eval_before_forward",
            "eval_after_forward", "eval_batch_end", "eval_end", "eval_after_all", "eval_standalone_end",
        ),
    ),
    ("End of an epoch", ("epoch_end", "epoch_checkpoint")),
    ("End of a fit", ("fit_end", "after_fit")),
    (
        "Predictions",
        (
            "predict_start", "predict_batch_start", "predict_before_forward", "predict_after_forward",
            "predict_batch_end", "predict_end",
        ),
    ),
    ("Exceptions and the end", ("exception", "close")),
)  # fmt: skip


def name_of(runs: Sequence[Run], number: int) -> Markup:
    """Return the name of a run with its colour."""
    return tag(
        "span", tag("i", class_="chip", style=f"background:{colour(number)}"), runs[number].about.label, class_="run"
    )


def colour(number: int) -> str:
    """Return the CSS colour of a run; those beyond the palette are spread over the circle of hues."""
    return f"var(--series-{number})" if number < 8 else f"hsl({number * 137 % 360} 60% 50%)"


def overview(runs: Sequence[Run]) -> Markup:
    """Return the table of the runs: status, position and the latest metrics, of which the best is marked."""
    names = dict.fromkeys(name for run in runs for name in run.about.evaluated)
    if not names:
        names = dict.fromkeys(name for run in runs for name in run.about.values if name.startswith("train/"))
    shown = [*names][:8]
    best = {name: _best(runs, name) for name in shown} if len(runs) > 1 else {}
    rows = []
    for number, run in enumerate(runs):
        at, seconds = run.about.position, run.about.position.get("seconds")
        cells: list[Any] = [
            name_of(runs, number),
            tag("span", run.about.status, class_=f"status {_status(run.about.status)}", title=run.about.reason),
            "" if run.about.began is None else _when(run.about.began),
            f"epoch {at.get('epoch', 0):,.0f}, batch {at.get('batch', 0):,.0f}" if at else "",
            "" if seconds is None else run_listing.duration(seconds),
        ]
        for name in shown:
            value = run_listing.latest_of(run.about.values, name)
            text: Any = "" if value is None else f"{value:.4g}"
            if value is not None and not math.isfinite(value):
                text = tag("span", text, class_="status bad", title="not finite")
            cells.append(tag("b", text, title="the best of these runs") if number in best.get(name, ()) else text)
        rows.append(cells)
    reasons = [
        hint(joined([tag("b", run.about.label), f": {run.about.status}: {run.about.reason[:500]}"]))
        for run in runs
        if run.about.status not in ("finished", "running")
    ]
    return joined([table(["run", "status", "began", "position", "trained for", *shown], rows, "numbers"), *reasons])


def _best(runs: Sequence[Run], name: str) -> set[int]:
    ranked = next((run.about.best[1] for run in runs if run.about.best and run.about.best[0] == name), None)
    mode = ranked or mode_of(name)
    values = {number: run_listing.latest_of(run.about.values, name) for number, run in enumerate(runs)}
    there = [value for value in values.values() if value is not None and math.isfinite(value)]
    if mode is None or len(set(there)) < 2:
        return set()
    target = max(there) if mode == "max" else min(there)
    return {number for number, value in values.items() if value == target}


def _status(status: str) -> str:
    return {"finished": "good", "running": "good", "failed": "bad", "killed": "bad"}.get(status, "unsure")


def plan(runs: Sequence[Run]) -> Markup:
    """Return who acts when: the events in order, and on each the plug-ins in call order."""
    return section("plan", "Plan", *_each(runs, lambda run: _mapping(run.summary.get("plan")), _plan, _NO_SUMMARY))


def _plan(found: Mapping[str, Any]) -> Markup:
    kinds = {
        str(each.get("name")): (str(each.get("kind")), _described(each))
        for each in _list(found.get("plugins"))
        if isinstance(each, dict)
    }
    events, actions = _mapping(found.get("events")), _mapping(found.get("actions"))
    rows = []
    left = dict(events)
    for phase, hooks in _PHASES:
        here = {hook: left.pop(hook) for hook in hooks if hook in left}
        if here:
            rows.append(_phase(phase, here, kinds))
    if left:
        rows.append(_phase("Other events", left, kinds))
    if actions:
        rows.append(_phase("Around actions, the outermost first", actions, kinds))
    acting = {str(name) for who in [*events.values(), *actions.values()] for name in _list(who)}
    there = dict.fromkeys(kind for name, (kind, _) in kinds.items() if name in acting)
    legend = tag("p", *(tag("span", kind, class_=f"plug {_kind(kind)}") for kind in there), class_="legend")
    if not rows:
        return hint("No plug-in acts on any event.")
    return joined([legend, tag("div", *rows, class_="timeline")])


def _phase(title: str, hooks: Mapping[str, Any], kinds: Mapping[str, tuple[str, str]]) -> Markup:
    rows = []
    for hook, who in hooks.items():
        chips = []
        for name in map(str, _list(who)):
            kind, described = kinds.get(name, ("", ""))
            chips.append(tag("span", name, class_=f"plug {_kind(kind)}", title=f"{kind}: {described}".strip(": ")))
        rows.append(tag("div", tag("span", hook, class_="event"), tag("span", *chips, class_="who"), class_="moment"))
    return tag("div", tag("h3", title), *rows, class_="phase")


def _described(plugin: Mapping[str, Any]) -> str:
    config = ", ".join(f"{key}={value}" for key, value in _mapping(plugin.get("config")).items())
    where = f"{plugin['dist']} {plugin.get('version') or ''}" if plugin.get("dist") else "given as an object"
    return f"{where}; {config}" if config else where


def _kind(kind: str) -> str:
    return f"kind-{kind}" if kind in ("algorithms", "callbacks", "loggers", "task", "strategies", "precisions") else ""


def costs(runs: Sequence[Run]) -> Markup:
    """Return the time that each plug-in took in its own code, per batch and as a share of the fit."""
    what = joined(["Costs are measured with ", code("profile_plugins: true"), " and written at the end of a fit."])
    title = "Costs of plug-ins"
    return section("costs", title, *_each(runs, lambda run: _costs_of(run) or None, _costs, what))


def _costs_of(run: Run) -> list[tuple[str, float, float, float, str]]:
    """Return plug-in, seconds, seconds per batch, share of the fit, and its most expensive hook; the greatest first.

    Summaries without the number of batches may have the costs of a few batches only, and are not shown.
    """
    batches, fitted = (files.finite(run.summary.get(f"fit_{each}")) or 0.0 for each in ("batches", "seconds"))
    if batches <= 0 or fitted <= 0:
        return []
    totals: dict[str, dict[str, float]] = {}
    for each in _list(run.summary.get("costs")):
        if isinstance(each, dict) and (seconds := files.finite(each.get("seconds"))) is not None:
            hooks = totals.setdefault(str(each.get("plugin")), {})
            hooks[str(each.get("hook"))] = hooks.get(str(each.get("hook")), 0.0) + seconds
    found = []
    for plugin, hooks in totals.items():
        seconds = sum(hooks.values())
        found.append((plugin, seconds, seconds / batches, seconds / fitted, max(hooks, key=hooks.__getitem__)))
    return sorted(found, key=lambda each: -each[1])


def _costs(found: list[tuple[str, float, float, float, str]]) -> Markup:
    most = max((each[1] for each in found), default=0.0) or 1.0
    rows = [
        [plugin, bar(seconds / most), _seconds(seconds), f"{each * 1e6:,.0f} µs", f"{share:.2%}", hook]
        for plugin, seconds, each, share, hook in found
    ]
    head = ["plug-in", "", "total", "per batch", "of the fit", "most of it in"]
    what = (
        "Seconds in a plug-in's own code, before and after fits too, over the batches and the seconds of all fits of the run, "
        "up to the checkpoint where it was resumed."
    )
    return joined([table(head, rows, "numbers"), hint(what)])


def profile(runs: Sequence[Run]) -> Markup:
    """Return the shares of a step, and the causes with what to try."""
    what = joined(["The shares of a step are measured with ", code('profile: "5ba after 10ba"'), "."])
    return section("profile", "Profile", *_each(runs, lambda run: run.profile or None, _profile, what))


def _profile(found: Mapping[str, Any]) -> Markup:
    shares = {str(name): float(each) for name, each in _mapping(found.get("shares")).items() if _share(each)}
    order = sorted(shares, key=lambda name: -shares[name])
    rows = [[name, bar(shares[name]), f"{shares[name]:.1%}"] for name in order]
    parts: list[Markup] = []
    batches = files.finite(found.get("batches"))
    if (seconds := files.finite(found.get("seconds_per_batch"))) is not None:
        over = "" if batches is None else f" over {batches:,.0f} batches"
        parts.append(tag("p", f"A batch took {_seconds(seconds)}{over}."))
    parts.append(table(["part of the step", "", "share"], rows, "numbers") if rows else hint("It has no shares."))
    given = {
        name: each.get("share") if isinstance(each, dict) else each
        for name, each in _mapping(found.get("plugins")).items()
    }
    plugins = {str(name): float(each) for name, each in given.items() if each is not None and _share(each)}
    if plugins:
        listed = sorted(plugins.items(), key=lambda each: -each[1])
        parts.append(
            table(["plug-in", "", "share"], [[name, bar(each), f"{each:.1%}"] for name, each in listed], "numbers")
        )
    causes = [each for each in _list(found.get("causes")) if isinstance(each, dict)]
    if causes:
        items = [
            tag(
                "li", tag("b", each.get("what", "")), f" ({each['share']:.0%})" if _share(each.get("share")) else "",
                f" Try: {'; '.join(advice)}." if (advice := [str(one) for one in _list(each.get("advice"))]) else "",
            )
            for each in causes
        ]  # fmt: skip
        parts.append(joined([tag("h3", "The largest causes, and what to try"), tag("ol", *items)]))
    return joined(parts)


def system(runs: Sequence[Run]) -> Markup:
    """Return device, machine and versions."""
    found = [_mapping(run.summary.get("system")) for run in runs]
    if not any(found):
        return section("system", "System", hint(_NO_SUMMARY))
    texts = [{str(key): str(value) for key, value in each.items()} for each in found]
    return section("system", "System", _side_by_side(runs, texts))


def configuration(runs: Sequence[Run]) -> Markup:
    """Return the configuration, and first of all the differences between the runs."""
    found = [run.configuration for run in runs]
    if not any(found):
        what = joined(["A run's configuration is written with ", code("loggers: [jsonl]"), "."])
        return section("configuration", "Configuration", hint(what))
    parts: list[Markup] = []
    if len(runs) > 1:
        keys = dict.fromkeys(key for each in found for key in each)
        differing = [key for key in keys if len({each.get(key) for each in found}) > 1]
        differences = [{key: each[key] for key in differing if key in each} for each in found]
        parts.append(tag("h3", "Differences"))
        parts.append(_side_by_side(runs, differences) if differing else hint("The configurations are equal."))
    origins = " and ".join(dict.fromkeys(run.configured_by for run in runs))
    complete = joined([tag("summary", f"All values, from {origins}"), _side_by_side(runs, found)])
    parts.append(tag("details", complete, open=len(runs) == 1))
    return section("configuration", "Configuration", *parts)


def _side_by_side(runs: Sequence[Run], found: Sequence[Mapping[str, str]]) -> Markup:
    """Return a table with a column for each run; rows that differ are marked."""
    rows = []
    for key in dict.fromkeys(key for each in found for key in each):
        values = [each.get(key) for each in found]
        equal = len(set(values)) == 1
        rows.append([key, *("—" if each is None else each if equal else tag("mark", each) for each in values)])
    return table(["", *(name_of(runs, number) for number in range(len(runs)))] if len(runs) > 1 else [], rows)


def checkpoints(runs: Sequence[Run]) -> Markup:
    """Return the checkpoints that exist, with the best."""
    what = joined(["No checkpoints. They are written with ", code("checkpoints: runs/a"), "."])

    def found(run: Run) -> Run | None:
        return run if run.checkpoints or run.checkpoints_elsewhere else None

    return section("checkpoints", "Checkpoints", *_each(runs, found, _checkpoints, what))


def _checkpoints(run: Run) -> Markup:
    if run.checkpoints_elsewhere:
        return hint(f"The checkpoints are in {run.checkpoints_elsewhere}, which this page does not read.")
    names = [*dict.fromkeys(name for each in run.checkpoints for name in each["metrics"])][:8]
    rule, best = run.about.best, None
    if rule is not None:
        ranked = [each for each in run.checkpoints if rule[0] in each["metrics"]]
        choose = max if rule[1] == "max" else min
        best = choose(ranked, key=lambda each: each["metrics"][rule[0]])["name"] if ranked else None
    rows = []
    for each in run.checkpoints:
        marks = [tag("b", " best", class_="good")] if each["name"] == best else []
        at = each["position"]
        rows.append(
            [
                joined([each["name"], *marks]), at.get("epoch", ""), at.get("batch", ""), _when(each["written"]),
                _size(each["bytes"]), *(f"{each['metrics'][name]:.4g}" if name in each["metrics"] else "" for name in names),
            ]
        )  # fmt: skip
    ranking = [] if rule is None else [hint(f"Ranked by the {'highest' if rule[1] == 'max' else 'lowest'} {rule[0]}.")]
    return joined([table(["checkpoint", "epoch", "batch", "written", "size", *names], rows, "numbers"), *ranking])


_NO_SUMMARY = joined(["This is written with ", code("loggers: [jsonl]"), ", since version 0.1 of hocket."])


def _each(
    runs: Sequence[Run], find: Callable[[Run], Any], show: Callable[[Any], Markup], without: Any
) -> Iterable[Markup]:
    """Show what each run has under its name; what all runs have in common once; and a hint for those without."""
    found = [find(run) for run in runs]
    if not any(found):
        return [hint(without)]
    if len(runs) == 1:
        return [show(found[0])]
    pages = [show(each) if each else hint(without) for each in found]
    if len(set(pages)) == 1:
        return [hint("The same in all runs."), pages[0]]
    return [
        tag("details", tag("summary", name_of(runs, number)), page, open=number < 2)
        for number, page in enumerate(pages)
    ]


def bar(share: float) -> Markup:
    """Return a bar of a length from 0 to 1."""
    return tag("span", tag("i", style=f"width:{min(max(share, 0.0), 1.0) * 100:.1f}%"), class_="bar")


def _share(value: Any) -> bool:
    found = files.finite(value)
    return found is not None and 0 <= found <= 1


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds * 1e6:,.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:,.1f} ms"
        if seconds < 1
        else f"{seconds:,.2f} s"
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
