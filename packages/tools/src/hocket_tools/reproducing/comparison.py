"""The first difference between the entries of a recorded journal and those of a repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: An entry of a journal, or an environment.
Entry = Mapping[str, Any]
#: What is compared, in the order in which a batch computes it, and what the first difference points at.
POINTS = {
    "order": "the sampler, its seed, or the number of samples",
    "inputs": "a sample whose contents changed, or a transformation of samples",
    "losses": "the computation of the loss: kernels, threads, precision, hardware, or the code of model and loss",
    "gradients": "the computation of gradients, since the loss is the same: kernels, threads, hardware, or the code",
    "gradient_norm": "the reduction of gradients over parameters and ranks",
    "lr": "the learning rate or its schedule",
    "weights": "the optimizer, its options, or a plug-in that changes weights, since the gradients are the same",
    "optimizers": "the optimizer or its options, since gradients and weights are the same",
    "plug-ins": "an algorithm that was added, removed or changed, since weights are the same",
    "random": "code that draws another number of random numbers",
}
_NAMES = {
    "order": "the order of samples", "inputs": "the contents of samples", "losses": "the loss", "gradients": "gradients",
    "gradient_norm": "the norm of gradients", "lr": "learning rates", "weights": "weights",
    "optimizers": "the optimizer's state", "plug-ins": "the state of algorithms", "random": "random numbers",
}  # fmt: skip
#: What is compared for a batch, the others for an entry.
_BY_STEP = ("order", "inputs", "losses")
#: Digits of the checksum of a sample, or of the order of a batch.
_DIGITS = 8


@dataclass(slots=True)
class Difference:
    """The first difference that one rank has seen."""

    #: The batch, 0 before the first; and the last one after which weights were compared, and the same.
    batch: int
    compared: int
    #: One of `POINTS`, and what else differs then.
    what: str
    others: list[str]
    #: Values then and now, or where it is; may be empty.
    detail: str
    #: Whether the batch is between entries, so that its samples and weights were not compared.
    between: bool = False
    rank: int = 0
    #: Whether both runs have a seed.
    seeded: bool = True
    #: What has changed in the environment, in words.
    changes: list[str] = field(default_factory=list)

    @property
    def points_at(self) -> str:
        """What it points at, in words."""
        if not self.seeded:
            return "random numbers, which are others in each run without a seed: one of the two has none"
        if self.batch == 0 and (self.what == "random" or (self.what == "weights" and "random numbers" in self.others)):
            return "the seed"
        if self.batch == 0 and self.what == "weights":
            return "the initialization of the model, or the weights that were loaded, since the random numbers are the same"
        samples = ", or the contents of samples" * self.between
        step = ", or the step of an earlier batch" * (self.batch > self.compared + 1)
        if self.what == "losses" and (samples or step):
            return f"the computation of the loss{samples}{step}, not compared here"
        return POINTS[self.what]

    def __str__(self) -> str:
        when = f"in batch {self.batch}" if self.batch else "before the first batch"
        rank = f" of rank {self.rank}" if self.rank else ""
        others = f"; then also {', '.join(self.others)}" if self.others else ""
        one = _NAMES[self.what].startswith("the ") and self.what != "inputs"
        return f"{when}, {_NAMES[self.what]}{rank} differ{'s' if one else ''}{self.detail}{others}"


def first_difference(
    then: Entry, now: Entry, compared: int, random: bool = True, indices: Sequence[Any] | None = None
) -> Difference | None:
    """Return the first difference between two entries of the same batch, or None.

    Args:
        compared: the batch of the entry before, in which nothing differed; -1 if there is none.
        random: whether generators are compared, which a run without a seed does not control.
        indices: the data set's indices of the samples in the batch of the entry, if they are known.
    """
    batch = now["batch"]
    known = min(_count(then), _count(now))
    for step in range(max(batch - known, compared, 0) + 1, batch + 1):
        for what in _BY_STEP:
            if (detail := _in_step(what, then, now, step, indices)) is not None:
                others = _others(what, then, now, random, step)
                return Difference(step, max(compared, 0), what, others, detail, between=step < batch)
    for what in POINTS:
        if what not in _BY_STEP and _differs(what, then, now, random):
            detail = _where(what, then[what], now[what])
            return Difference(batch, max(compared, 0), what, _others(what, then, now, random, batch), detail)
    return None


def _count(entry: Entry) -> int:
    """Return how many batches the losses of an entry are of."""
    return len(entry.get("losses") or ())


def _in_step(what: str, then: Entry, now: Entry, step: int, indices: Sequence[Any] | None) -> str | None:
    """Return how a value of one batch differs, or None."""
    was, here = then.get(what), now.get(what)
    if was is None or here is None:
        return None
    behind = now["batch"] - step  # as the last of so many
    if what == "losses":
        a, b = was[-1 - behind], here[-1 - behind]
        return None if a == b else f": {b!r}, and was {a!r}"
    if what == "order":
        a, b = (text[len(text) - _DIGITS * (behind + 1) : len(text) - _DIGITS * behind] for text in (was, here))
        return None if a == b else ""
    return None if behind or was == here else _samples(was, here, indices)


def _samples(was: str, here: str, indices: Sequence[Any] | None) -> str:
    """Return which samples differ, if their checksums were recorded."""
    if len(was) != len(here):
        return ": the batch has another size"
    if len(was) == 16 and indices is not None and len(indices) != 2:
        return ""  # one digest of the batch
    differ = [at // _DIGITS for at in range(0, len(was), _DIGITS) if was[at : at + _DIGITS] != here[at : at + _DIGITS]]
    named = [indices[at] if indices is not None and at < len(indices) else at for at in differ]
    where = "in the data set" if indices is not None else "in the batch"
    shown = ", ".join(map(str, named[:5])) + (" …" if named[5:] else "")
    return f": {len(named)} of {len(was) // _DIGITS} samples, number {shown} {where}"


def _differs(what: str, then: Entry, now: Entry, random: bool) -> bool:
    was, here = then.get(what), now.get(what)
    if was is None or here is None or (what == "random" and not random):
        return False
    if what == "random":  # NumPy may have been imported in one of them only
        return any(was[name] != here[name] for name in was.keys() & here.keys())
    return bool(was != here)


def _others(what: str, then: Entry, now: Entry, random: bool, step: int) -> list[str]:
    """Return the names of what else differs at the same time."""
    later = list(POINTS)[list(POINTS).index(what) + 1 :]
    if step != now["batch"]:
        return []
    counted = _count(then) and _count(now)
    steps = [
        each for each in later if each in _BY_STEP and counted and _in_step(each, then, now, step, None) is not None
    ]
    entries = [each for each in later if each not in _BY_STEP and _differs(each, then, now, random)]
    return [_NAMES[each] for each in (*steps, *entries)]


def _where(what: str, was: Any, here: Any) -> str:
    if isinstance(was, Mapping) and isinstance(here, Mapping):
        if what == "weights" and was.keys() != here.keys():
            return f": the model has other modules, {', '.join(sorted(was.keys() ^ here.keys())[:3])}"
        names = was.keys() & here.keys() if what == "random" else {**was, **here}
        differ = [name for name in names if was.get(name) != here.get(name)]
        first = "first in " if what == "weights" and differ[1:] else "in "
        return f" {first}{differ[0] or 'the model'}" if what == "weights" else f" of {', '.join(differ)}"
    if what in ("lr", "gradient_norm"):
        return f": {here!r}, and was {was!r}"
    return ""


def changes(then: Entry, now: Entry, what: str, sources: Mapping[str, str]) -> list[str]:
    """Return in words what has changed between two environments, what explains a difference of this kind best first.

    Args:
        sources: the recorded texts of source files, by digest.
    """
    found: dict[str, list[str]] = {}
    pairs = []
    for section in _SECTIONS:
        was, here = dict(then.get(section) or {}), dict(now.get(section) or {})
        if not was:  # a run in Python has no configuration
            continue
        lines = found[section] = []
        for name in dict.fromkeys([*was, *here]):
            a, b = was.get(name), here.get(name)
            missing = name not in was or name not in here
            if a == b or (missing and section in ("versions", "code")):
                continue  # modules are imported when they are needed
            if section == "configuration":
                pairs.append((a, b))
            elif section == "settings" and (a, b) in pairs:
                continue
            lines.append(_changed(section, name, a, b, sources))
    first = _EXPLAINED_BY.get(what, ())
    return [line for section in (*first, *(s for s in found if s not in first)) for line in found.get(section, ())]


#: The sections of an environment.
_SECTIONS = "configuration", "settings", "data", "code", "kernels", "threads", "versions", "hardware", "variables"
#: The sections of an environment that explain a difference first.
_EXPLAINED_BY = {
    "order": ("data", "configuration", "settings", "code"),
    "inputs": ("data", "code", "configuration"),
    "losses": ("kernels", "code", "threads", "versions", "hardware"),
    "gradients": ("kernels", "code", "threads", "versions", "hardware"),
    "weights": ("configuration", "settings", "code", "versions"),
    "plug-ins": ("settings", "configuration"),
}


#: What is said before the names of a section.
_SAID = {
    "kernels": "the kernel setting ", "threads": "the number of threads ", "code": "the git ", "data": "the data's ",
    "variables": "the variable ", "hardware": "the ",
}  # fmt: skip


def _changed(section: str, name: str, was: Any, here: Any, sources: Mapping[str, str]) -> str:
    if section == "code" and name != "commit":
        return f"{name} has changed{_lines(name, str(was), sources)}"
    if section == "data" and name == "contents":
        return "the tensors of the training data have other contents"
    return f"{_SAID.get(section, '')}{name} was {_short(was)}, is {_short(here)}"


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _lines(name: str, digest: str, sources: Mapping[str, str]) -> str:
    """Return the first changed lines of a source file, if the run recorded its text."""
    import difflib
    from pathlib import Path

    from hocket_tools.reproducing import environment

    then, now = sources.get(digest), environment.text(Path(name))
    if then is None or now is None:
        return ""
    a, b = then.splitlines(), now.splitlines()
    blocks = [block for block in difflib.SequenceMatcher(None, a, b, False).get_opcodes() if block[0] != "equal"]
    shown = []
    for _, start, stop, new_start, new_stop in blocks[:3]:
        old, new = (" / ".join(line.strip() for line in part[:3]) for part in (a[start:stop], b[new_start:new_stop]))
        # A long line would be shown without what has changed.
        if (same := next((at for at, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), 0)) > 50:
            old, new = (f"…{text[same - 20 :]}" for text in (old, new))
        shown.append(f"line {new_start + 1}: `{_short(new) if new else ''}`, was `{_short(old) if old else ''}`")
    return f" ({'; '.join(shown)}{'; …' if blocks[3:] else ''})"
