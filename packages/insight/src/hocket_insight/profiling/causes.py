"""Name the causes of a slow step, the largest first, and what to try against each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hocket.hookspecs import Event
from hocket_insight.profiling.phases import PHASES

#: The number of causes in a summary.
_CAUSES = 3
#: The least share of the step from which on a phase is a cause.
_LEAST = {
    "data": 0.25, "move": 0.10, "loss": 0.40, "optimizer": 0.40, "metrics": 0.20, "communication": 0.15,
    "evaluation": 0.30, "loop": 0.50,
}  # fmt: skip
#: The same for one plug-in.
_LEAST_OF_PLUGIN = 0.10
#: The share of a step that a wait for the device in each step counts as, if less was measured: on the CPU, where it costs
#: nothing, and on a device that is busy all the time. It keeps the host from running ahead of the device.
_OF_WAIT = 0.50
#: The least share of the step, and of its phase, from which on Python in forward or loss is a cause.
_LEAST_PYTHON, _MOST_OF_PHASE = 0.25, 0.50
#: The least share in which an idle device is a cause.
_IDLE = 0.30
#: The events before the forward pass in which a batch is made, which the data set could do as well.
_OF_DATA = {"after_dataloader", "batch_start", "before_train_batch"}
_EVENTS = {event.value for event in Event}
#: What to try instead of calls that wait for the device, by their names in `waits`; `_READS` for others.
_DECIDES = ("torch.where(condition, a, b) chooses on the device; a check that training does not need can go",)
_SELECTS = (
    "a mask that is multiplied, or torch.where(mask, x, 0), instead of a selection, whose size the host has to know",
    "the selection in the data set or collate_fn, if it depends on the batch alone",
)
_COUNTS = ("the same in the data set or collate_fn, if it depends on the batch alone",)
_READS = (
    "keep the value in a tensor, which state.log takes as it is",
    "the same only every n batches, such as at log_every",
)
_INSTEAD = {
    **dict.fromkeys(("bool() or an `if`", "`in`", "is_nonzero()", ".equal()", "torch.equal()"), _DECIDES),
    **dict.fromkeys((".allclose()", "torch.allclose()"), _DECIDES),
    **dict.fromkeys((".nonzero()", "nonzero()", "argwhere()", "where() of one argument"), _SELECTS),
    **dict.fromkeys((".masked_select()", "masked_select()", "indexing with a mask"), _SELECTS),
    **dict.fromkeys((".unique()", "torch.unique()"), _COUNTS),
    **dict.fromkeys(
        (".bincount()", "bincount()"),
        ("torch.zeros(n, device=…).scatter_add_(0, x, weights), where n is known", *_COUNTS),
    ),
    **dict.fromkeys(
        ("int()", "an index"),
        ("keep the number in a tensor, which state.log takes as it is, and x.index_select(0, i) as an index", *_COUNTS),
    ),
}
#: The ratio of a rank's own time to that of the others from which on it is a straggler.
_STRAGGLER = 1.5


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of lost time.

    Args:
        name: a phase, ``"plugin"``, ``"straggler"`` or ``"idle"``.
        subject: the plug-in, the place in the code or the rank; empty for a phase as a whole.
        share: the fraction of the step, 0.0 to 1.0; the causes are ordered by it.
        what: one sentence.
        advice: what to try, the most promising first.
    """

    name: str
    subject: str
    share: float
    what: str
    advice: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "advice": list(self.advice)}


def causes_of(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Cause]:
    """Return the largest causes in a summary, at most three; none if the step computes.

    Args:
        summary: with ``shares``, ``plugins``, ``waits``, ``device_time`` and ``ranks``; see `hocket_insight.profiling.summary`.
        facts: what the advice depends on, such as the number of worker processes of the data.
    """
    found = [
        *_phases(summary, facts),
        *_python(summary, facts),
        *_plugins(summary),
        *_waits(summary, facts),
        *_ranks(summary),
    ]
    device = summary["device_time"]
    if device is not None and not found and device["idle"] >= _IDLE:
        what = (
            f"The device idles {_percent(device['idle'])} of the time, because the host launches its work too slowly."
        )
        found.append(Cause("idle", "", device["idle"], what, _host_bound(facts)))
    return sorted(found, key=lambda cause: -cause.share)[:_CAUSES]


def verdict_of(summary: Mapping[str, Any], causes: Sequence[Cause]) -> str:
    """Return the first line of a summary."""
    if causes:
        return causes[0].what
    shares = summary["shares"]
    computing = {name: shares[name] for name in ("forward", "loss", "backward", "optimizer")}
    listed = ", ".join(f"{PHASES[name]} {_percent(share)}" for name, share in computing.items() if share >= 0.01)
    if sum(computing.values()) >= 0.5:
        return f"Compute-bound: {listed}."
    return f"No single cause: {listed}, the rest is spread over the phases below."


def general_advice(facts: Mapping[str, Any]) -> list[str]:
    """Return what makes a step faster that is bound by computation."""
    advice = []
    if facts.get("precision") == "fp32" and facts.get("device") != "cpu":
        advice.append('precision="bf16"')
    if not facts.get("compiled"):
        advice.append("compile=True")
    if facts.get("microbatch"):
        advice.append(f'a larger microbatch than {facts["microbatch"]}, or microbatch="auto"')
    return [*advice, "more devices, with devices=2"] if facts.get("device") != "cpu" else advice


def _phases(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Cause]:
    advice = {
        "data": _for_data(facts),
        "move": [
            "DataLoader(…, pin_memory=True)",
            "smaller dtypes in the data set, such as uint8 images that batch_transform= converts on the device",
        ],
        "loss": ["a loss without loops over samples in Python", "compile=True"],
        "optimizer": [
            'optimizer="adamw(fused=True)", or foreach=True, if the optimizer has it',
            "larger batches, so that there are fewer steps",
        ],
        "metrics": ["train_metrics= with fewer metrics, or none: those of eval_data stay"],
        "communication": [
            'larger batches, or accumulate="4ba": fewer reductions for the same samples',
            "gradients in bf16, or another strategy; see docs/reference/strategies.md",
        ],
        "evaluation": ["eval_every= with a longer interval", "limit_eval=100, a number of batches"],
        "loop": _host_bound(facts),
    }
    explained = {cause.name for cause in _python(summary, facts)}
    for phase, least in _LEAST.items():
        if phase in explained:
            continue
        share = summary["shares"][phase]
        if phase == "communication":  # what a rank waits for the slowest one in addition has another cause
            share = min(each["shares"][phase] for each in summary["ranks"])
        if share < least or (phase in ("optimizer", "loss") and share < summary["shares"]["backward"]):
            continue
        words = {"data": "Waiting for data", "optimizer": "The optimizer", "loss": "The loss"}.get(phase)
        what = f"{words or PHASES[phase].capitalize()} takes {_percent(share)} of a step, {_each(summary, share)}."
        yield Cause(phase, "", share, what, advice[phase])


def _python(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield forward and loss if they are mostly Python that the device waits for. In compiled code it cannot be told."""
    device = summary["device_time"]
    if facts.get("compiled") or (device is not None and device["idle"] < _IDLE):
        return
    for phase, python in summary["python"].items():
        share = summary["shares"][phase]
        if python >= _LEAST_PYTHON and python > _MOST_OF_PHASE * share:
            what = f"Most of {phase} is Python, not tensor operations: {_percent(python)} of a step, {_each(summary, python)}."
            advice = [
                f"the same without Python in {phase}: with tensors for loops over samples, or prepared in the data set",
                'profile={"window": "5ba after 10ba", "stack": True}, whose trace names the functions of Python',
                *_host_bound(facts),
            ]
            yield Cause(phase, "", python, what, advice)


def _plugins(summary: Mapping[str, Any]) -> Iterator[Cause]:
    for name, plugin in summary["plugins"].items():
        if plugin["share"] >= _LEAST_OF_PLUGIN:
            kind = plugin["kind"].removesuffix("s")
            hook = max(plugin["hooks"], key=plugin["hooks"].get)
            each = f"{_percent(plugin['share'])} of a step, {_each(summary, plugin['share'])}"
            what = f"The {kind} {name!r} takes {each}, most of it in {hook}."
            yield Cause("plugin", name, plugin["share"], what, _for_plugin(name, kind, hook))


def _for_plugin(name: str, kind: str, hook: str) -> list[str]:
    """Return what to try against a slow plug-in. What training is made of is not advised to be done less often."""
    if name == "checkpoints":
        return ['hocket.Checkpoints(…, every="1000ba"), or another longer interval']
    if kind == "logger":
        return ["log_every= with a longer interval", f"another logger than {name!r}, or one with its own thread"]
    if kind == "callback" and hook in _EVENTS:
        return [f"{name!r} every n batches instead of every batch", "the same work in epoch_end, or not at all"]
    advice = [f"fewer operations in {'batch_transform=' if name == 'batch-transform' else f'{hook} of {name!r}'}"]
    if hook in _OF_DATA:
        advice.append(
            "the same in the data set or collate_fn, if it does without the model: DataLoader(…, num_workers=4) runs them in "
            "other processes"
        )
    if kind == "algorithm":
        advice.append(f"a longer interval of {name!r}, if it has one; else a run without it, to see what it gains")
    return advice


def _waits(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Cause]:
    waits = summary["waits"]
    if not waits:
        return
    first, *others = waits
    measured = summary["shares"]["synchronisation"]
    where = f"{first['call']} at {first['where']} in {first['function']}"
    also = f" ({len(others)} more lines do: {', '.join(each['where'] for each in others[:3])})" if others else ""
    cost = (
        f"{_percent(measured)} of a step here"
        if facts.get("device") != "cpu"
        else "nothing on the CPU; on a GPU the host would wait there for all queued work"
    )
    instead, *more = _INSTEAD.get(first["call"], _READS)
    advice = [f"remove {first['call']} at {first['where']}: {instead}", *more]
    what = f"{where} makes the host wait for the device in every step{also}. This costs {cost}."
    yield Cause("synchronisation", first["where"], max(measured, _OF_WAIT), what, advice)


def _ranks(summary: Mapping[str, Any]) -> Iterator[Cause]:
    ranks = summary["ranks"]
    if len(ranks) < 2:
        return
    slowest = max(ranks, key=lambda each: each["own_seconds_per_batch"])
    others = statistics.mean(e["own_seconds_per_batch"] for e in ranks if e is not slowest)
    own = slowest["own_seconds_per_batch"]
    if own > _STRAGGLER * others:
        rest = next(each for each in ranks if each is not slowest)["shares"]
        more = {name: share - rest[name] for name, share in slowest["shares"].items() if name != "communication"}
        phase = max(more, key=lambda name: more[name])
        share = (own - others) / summary["seconds_per_batch"]
        what = (
            f"Rank {slowest['rank']} needs {own * 1e3:.3g} ms for its part of a batch and the others {others * 1e3:.3g} ms, "
            f"most of the difference in {PHASES[phase]}; the others wait for it."
        )
        advice = [f"the machine, device and data of rank {slowest['rank']}", "batches of equal length on all ranks"]
        yield Cause("straggler", f"rank {slowest['rank']}", min(share, 1.0), what, advice)


def _for_data(facts: Mapping[str, Any]) -> list[str]:
    workers = facts.get("num_workers")
    if workers is None:
        return [
            "torch.utils.data.DataLoader(dataset, num_workers=4), which loads in other processes",
            "less work for each sample, or its result stored on disk",
        ]
    if workers == 0:
        return [
            "DataLoader(…, num_workers=4, persistent_workers=True)",
            "augmentation on the device, with batch_transform=",
            "decoded samples on disk",
        ]
    return [
        f"more processes than num_workers={workers}, or a larger prefetch_factor",
        "augmentation on the device, with batch_transform=",
        "decoded samples on a faster disk",
    ]


def _host_bound(facts: Mapping[str, Any]) -> list[str]:
    advice = ["larger batches: each step then computes more for the same work in Python"]
    if not facts.get("compiled"):
        cuda = facts.get("device") == "cuda"
        advice.append('compile="reduce-overhead", which uses CUDA graphs' if cuda else "compile=True")
    return advice


def _each(summary: Mapping[str, Any], share: float) -> str:
    return f"{share * summary['seconds_per_batch'] * 1e3:.3g} ms of {summary['seconds_per_batch'] * 1e3:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
