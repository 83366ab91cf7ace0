"""A callback that records digests of what a run computes, and compares them with those of another run."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics import safe_files
from hocket.basics.run_files import strict
from hocket.basics.time import TimeError, Unit, interval_of
from hocket.errors import Mistake, WrongValue
from hocket.hookspecs.callback import Callback
from hocket.loop.agreement import ranks_of
from hocket.plugins import PluginError
from hocket.state.component import Check, Component, PerRank, Saved
from hocket.state.state import State
from hocket_tools.arguments import checked
from hocket_tools.progress import say
from hocket_tools.reproducing import comparison, digests
from hocket_tools.reproducing.environment import environment, sources, text
from hocket_tools.reproducing.journal_file import JournalFile, Recorded, add_sources, path_of, read_sources

if TYPE_CHECKING:
    from torch import Tensor

#: The file in the folder of a repetition that says how it compares.
VERIFICATION = "verification.json"


class RepetitionDiffers(Mistake, ArithmeticError):
    """A repeated run computes other numbers than the recorded one. ``difference`` says where, and what has changed."""

    difference: comparison.Difference


class Journal(Callback):
    """Record digests of what a run computes in ``journal.jsonl``, so that a repetition can be compared with it.

    An entry has, at the interval, digests of the weights by module, of gradients before clipping, of the states of optimizers
    and algorithms, of the samples of the batch and of all random-number generators; the norm of gradients if they are clipped,
    and learning rates. For each batch since the entry before it has the loss and a checksum of the samples' indices, if these
    are known. At the start of a fit the environment is recorded: versions, hardware, threads, kernels, settings, the
    configuration, a description of the data, and digests of the imported source files that are not installed.
    ``journal.sources.json`` has their texts.

    Each rank writes the digests of its own batches and shards; other ranks than 0 write ``journal.rank1.jsonl`` and so on. A
    resumed run removes entries after its checkpoint and continues.

    Args:
        every: an interval in batches, such as ``"100ba"``. Weights are read then, about 1 GB per second, so a small interval
            is for small models, or to narrow a difference down.
        sources: whether to keep the texts of source files, so that a comparison names the changed lines.
        against: the folder of a run whose journal this run is compared with, entry by entry, as by
            ``hocket train --from RUN --verify``. The first difference ends the run.

    Raises:
        ValueError: the interval is not a number of batches.
        PluginError: when a Trainer is made: the other run has no journal, or was on another number of ranks.
        RepetitionDiffers: (an ArithmeticError) something differs from the other run.

    Example:
        >>> import hocket, torch
        >>> from hocket_tools.reproducing.journal import RepetitionDiffers
        >>> def run(name, lr, **options):
        ...     model = torch.nn.Linear(4, 1)
        ...     torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        ...     return hocket.Trainer(
        ...         model=model, loss=torch.nn.MSELoss(), optimizer=f"sgd(lr={lr})", device="cpu", seed=1, run_name=name,
        ...         train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 3, callbacks=[{"journal": {"every": "1ba", **options}}],
        ...     ).fit("1ep")
        >>> first = run("first", 0.1).run_folder
        >>> run("again", 0.1, against=str(first)).timestamp.batch
        3
        >>> try:
        ...     run("other", 0.2, against=str(first))
        ... except RepetitionDiffers as error:
        ...     print(str(error).partition(":")[0])
        runs/first is not repeated
    """

    once = "Both would write one journal.jsonl. Remove one; the smaller interval records more."

    @checked
    def __init__(self, every: str = "100ba", sources: bool = True, against: str | Path | None = None) -> None:
        time = None
        with suppress(TimeError):
            time = interval_of(every, "every").every
        if time is None or time.unit is not Unit.BATCH:
            number = every if str(every).isdecimal() and int(every) else 100
            raise WrongValue(
                f"«every={every!r}» is no time in batches, which a journal counts. Write «every='{number}ba'»."
            )
        self._every = int(time.value)
        self.every_batches = {"after_train_batch": self._every}
        self._sources = sources
        self._against = None if against is None else _folder_of(Path(against))
        self._file: JournalFile | None = None
        #: Since the entry before: the losses, and checksums of the indices of samples.
        self._losses: list[float | Tensor | None] = []
        self._orders: list[str | None] = []
        #: Of the batch of the next entry: digests of its samples and gradients, and the indices of its samples.
        self._inputs: str | None = None
        self._gradients: str | None = None
        self._indices: list[Any] | None = None
        self._written = -1
        #: The recorded journal, the entries of this run that were not compared yet, the last batch that was, and how many were.
        self._recorded: Recorded | None = None
        self._here = Recorded()
        self._compared, self._entries = -1, 0

    @staticmethod
    def check_recorded(place: str) -> None:
        """Raise PluginError unless the folder of a run has a journal of rank 0 to compare with."""
        _checked(_folder_of(Path(place)), 0)

    def compare_with(self, place: str, state: State) -> None:
        """Compare this run with the recorded one in this folder, from the next fit on. Raises PluginError as `init`."""
        self._against = _folder_of(Path(place))
        self.init(state)

    def init(self, state: State) -> None:
        """Read the journal to compare with. Raises PluginError for a missing journal, or another world size."""
        if (against := self._against) is not None:
            rank, ranks = state.strategy.rank, state.strategy.world_size
            self._recorded = ranks_of(state).agree(lambda: _recorded(against, rank, ranks))

    def checkpoint_components(self, state: State) -> list[Component]:
        """Add what each rank recorded since its last entry to checkpoints."""
        return [_Pending(state.attachment_of(self).name, self)]

    # --- record

    def fit_start(self, state: State) -> None:
        """Record the environment, and the state before the first batch."""
        rank, ranks, batch = state.strategy.rank, state.strategy.world_size, state.timestamp.batch
        folder = state.run_folder
        here = json.loads(json.dumps(environment(state), default=str))
        self._environment = here
        if rank == 0 and self._sources:
            code = here["code"]
            texts = {code[name]: text(file) for name, file in sources().items() if name in code}
            add_sources(folder, {digest: read for digest, read in texts.items() if read is not None})
        self._file = JournalFile(path_of(folder, rank), state.run.id, batch, rank=rank, ranks=ranks)
        if self._file.kept.environment(batch + 1) != here:
            self._file.write({"batch": batch, "environment": here})
        if not batch and self._written < 0:
            self._write(state)

    def batch_start(self, state: State) -> None:
        """Read the samples of the batch: their indices, and their contents if an entry is due."""
        self._indices = state.sample_indices()
        self._orders.append(digests.of_indices(self._indices))
        if not (state.timestamp.batch + 1) % self._every:
            batches = getattr(state.batch, "batches", None)  # of a window
            self._inputs = digests.of_batch(state.batch) if batches is None else digests.digest(*batches)

    def after_train_batch(self, state: State) -> None:
        """Read the gradients, if an entry is due."""
        self._gradients = digests.digest([parameter.grad for parameter in state.trained_parameters()])

    def batch_end(self, state: State) -> None:
        """Keep the loss, and write an entry if it is due."""
        loss = state.loss
        self._losses.append(loss.clone() if loss is not None and state.overwrites else loss)
        if not state.timestamp.batch % self._every:
            self._write(state)

    def fit_end(self, state: State) -> None:
        """Write the last entry, and say how the run compares."""
        if self._written != state.timestamp.batch:
            self._inputs = self._gradients = None
            self._write(state)
        assert self._file is not None
        self._file.write({"batch": self._written, "end": True})
        if self._recorded is not None:
            self._conclude(state, self._recorded)

    def _write(self, state: State) -> None:
        orders = [each for each in self._orders if each is not None]
        norm = state.gradient_norm
        algorithms = [a for a in state.bus.attachments if a.kind == "algorithms" and hasattr(a.obj, "state_dict")]
        entry = {
            "batch": state.timestamp.batch,
            "epoch": state.timestamp.epoch,
            "losses": _numbers(self._losses),
            "order": "".join(orders) if orders and len(orders) == len(self._orders) == len(self._losses) else None,
            "inputs": self._inputs,
            "gradients": self._gradients,
            "gradient_norm": None if norm is None else float(norm),
            "lr": [float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups],
            "weights": digests.by_module(state.task, state.model_prefix),
            "optimizers": digests.of_optimizers(state.optimizers),
            "plug-ins": {each.name: digests.digest(each.obj.state_dict()) for each in algorithms},
            "random": digests.of_generators(state.generators.state_dict()),
        }
        entry = {name: value for name, value in entry.items() if value is not None and value != []}
        self._losses, self._orders, self._inputs, self._gradients = [], [], None, None
        self._written = state.timestamp.batch
        assert self._file is not None
        self._file.write(entry)
        if self._recorded is not None:
            self._compare(state, self._recorded, json.loads(json.dumps(strict(entry))))

    # --- compare

    def _compare(self, state: State, recorded: Recorded, entry: dict[str, Any]) -> None:
        """Raise RepetitionDiffers on all ranks if an entry differs on one."""
        batch, found = entry["batch"], None
        self._here.entries[batch] = entry
        if batch in recorded.entries:
            then, now = (each.entry(batch, self._compared) for each in (recorded, self._here))
            seeded = None not in (state.seed, (recorded.environment(1).get("settings") or {}).get("seed", 0))
            found = comparison.first_difference(then, now, self._compared, seeded, self._indices)
        if found is not None:
            found.rank, found.seeded = state.strategy.rank, seeded
            found.changes = self._changes(recorded, found.batch, found.what)
        if state.strategy.world_size > 1:
            all_found = [each for each in state.bus.all_gather_object(found) if each is not None]
            order = list(comparison.POINTS)
            found = min(all_found, key=lambda each: (each.batch, order.index(each.what), each.rank), default=None)
        if found is not None:
            self._report(state, same=False, **asdict(found), points_at=found.points_at)
            error = RepetitionDiffers(self._explained(found))
            error.difference = found
            raise error
        if batch in recorded.entries:
            self._compared, self._entries = batch, self._entries + 1
            self._here.entries.clear()

    def _changes(self, recorded: Recorded, batch: int, what: str) -> list[str]:
        assert self._against is not None
        return comparison.changes(recorded.environment(batch), self._environment, what, read_sources(self._against))

    def _explained(self, found: comparison.Difference) -> str:
        since = f" Entries up to batch {found.compared} are identical." if self._entries else ""
        changed = (
            f" What has changed: {'; '.join(found.changes)}."
            if found.changes
            else " Nothing that is recorded of the environment has changed: look for a kernel that is not deterministic "
            "(deterministic: true), files that the run reads, or another machine."
            if found.seeded
            else " Record a run with a seed, such as seed=1, and repeat that one."
        )
        narrow = (
            " To know the first batch and what it computes differently, both runs need a journal of each batch: "
            "{journal: {every: 1ba}}."
            if found.what not in ("order", "inputs") and (found.between or found.batch > found.compared + 1)
            else ""
        )
        text = f"{self._against} is not repeated: {found}.{since} That points at {found.points_at}.{changed}{narrow}"
        return text.replace("«", '"').replace("»", '"')

    def _conclude(self, state: State, recorded: Recorded) -> None:
        """Say that nothing differs. Raises PluginError if nothing was compared, or the recorded journal is not complete."""
        assert self._against is not None
        if not self._entries or not self._compared:
            raise PluginError(
                f"No batch of {self._against} was compared: its journal has entries after batches "
                f"{', '.join(map(str, list(recorded.entries)[:5]))}, and this run after others. Repeat it with the interval of "
                "its journal, and for at least as long."
            )
        changed = self._changes(recorded, self._compared, "")
        last, ended = max(recorded.entries), all(state.bus.all_gather_object(recorded.ended))
        facts = {"batch": self._compared, "entries": self._entries, "recorded": last, "complete": ended}
        self._report(state, same=True, changes=changed, **facts)
        more = f", of {last} that were recorded" if last > self._compared else ""
        note = f", although {'; '.join(changed)}" if changed else ""
        compared = f"{self._compared} batches{more}, {self._entries} entries of its journal{note}"
        text = safe_files.printable(f"{self._against} is repeated bitwise: {compared}.")
        if not ended:
            raise PluginError(
                f"{text} That is not the whole run: its journal has no end, because the run was interrupted or the file is cut "
                f"off after batch {last}. {_record(self._against)}"
            )
        say(text, state.strategy.rank)

    def _report(self, state: State, **values: Any) -> None:
        if state.strategy.rank == 0:
            safe_files.replace(
                state.run_folder / VERIFICATION, json.dumps({"against": str(self._against), **values}, indent=1)
            )


class _Pending(Component):
    """What a rank recorded since its last entry."""

    scope = "rank"

    def __init__(self, path: str, journal: Journal) -> None:
        self.path, self._journal = path, journal

    def state_dict(self, gather: bool) -> dict[str, Any]:
        journal = self._journal
        return {"losses": _numbers(journal._losses), "orders": list(journal._orders), "written": journal._written}

    def absent(self, checkpoint: Saved) -> Check:
        return Check()  # of a run that began without a journal

    def load_state_dict(self, saved: PerRank | None) -> None:
        if saved is not None and saved.existed:
            journal, own = self._journal, saved.own
            journal._losses, journal._orders, journal._written = own["losses"], own["orders"], own["written"]


def _numbers(losses: list[float | Tensor | None]) -> list[float | None]:
    """Return losses as numbers, with one wait for a device."""
    import torch

    tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    if len(tensors) == len(losses) and len({(t.dtype, t.device, t.shape) for t in tensors}) == 1:
        numbers: list[float | None] = torch.stack(tensors).flatten().tolist()
        return numbers
    return [None if loss is None else float(loss) for loss in losses]


def _folder_of(place: Path) -> Path:
    """Return the folder of a run, from it, its configuration or one of its checkpoints."""
    return next((each for each in [place, *place.parents][:3] if path_of(each, 0).is_file()), place)


def _recorded(folder: Path, rank: int, ranks: int) -> Recorded:
    """Return the journal of a run for this rank. Raises PluginError if there is none to compare with."""
    first = _checked(folder, 0)
    worlds = {start["settings"]["ranks"] for start in first.environments.values() if "settings" in start} - {ranks}
    if worlds:
        raise PluginError(
            f"{folder} was recorded on {' and then '.join(map(str, sorted(worlds)))} rank(s), and this run is on {ranks}: each "
            f"rank records its part of batches, and sums over ranks are rounded otherwise. Start as many: "
            f"hocket launch -n {min(worlds)} -m hocket train --from {folder} --verify."
        )
    return _checked(folder, rank) if rank else first


def _checked(folder: Path, rank: int) -> Recorded:
    """Read the journal of a rank. Raises PluginError if the file does not exist or has damaged lines."""
    path = path_of(folder, rank)
    recorded = Recorded.read(path)
    if recorded.head and any(recorded.entries) and not recorded.damaged:
        return recorded
    if not folder.exists():
        raise PluginError(
            f"There is no folder {folder}, whose journal this run is compared with. Give the folder of a run."
        )
    what = f"{folder} has no journal to compare with."
    if recorded.damaged:
        numbers = ", ".join(map(str, recorded.damaged[:5])) + (" …" if recorded.damaged[5:] else "")
        what = f"{path} is damaged, or lacks a line, at line {numbers}, so a comparison would omit what it recorded."
    elif path.exists():
        what = f"{path} is empty or cut off: it has no entry after a batch to compare with."
    raise PluginError(f"{what} {_record(folder)}")


def _record(folder: Path) -> str:
    """Return advice to record a journal; a run whose configuration has one repeats it."""
    file = folder / "config.yaml"
    has = file.is_file() and "journal:" in file.read_text(encoding="utf-8", errors="replace")
    callbacks = "" if has else " 'callbacks=[{journal: {every: 100ba}}]', with the callbacks that it has"
    return f"Record one first: hocket train --from {folder}{callbacks}; then verify that run."
