"""`write`: a data set from a source, shuffled, in several processes, continued after a kill with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics.masking import masked
from hocket.basics.run_folder import is_url
from hocket.basics.safe_files import replace
from hocket.errors import ExistingFile, WrongFile, WrongValue
from hocket_streaming.store.folders import default_folder
from hocket_streaming.store.paths import absolute
from hocket_streaming.writing import sources
from hocket_streaming.writing.job import Job, continued, folder
from hocket_streaming.writing.mds import refuse_existing, target as files_of
from hocket_streaming.writing.processes import computed
from hocket_streaming.writing.progress import Progress
from hocket_streaming.writing.sources import Source
from hocket_streaming.writing.targets import target_for

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: Samples by which the types of columns are known.
_FIRST = 1000


@dataclass(frozen=True, slots=True)
class Written:
    """What `write` wrote.

    Attributes:
        path: the data set.
        samples: of the source; documents where they were packed.
        files: how many files.
        bytes: of all files.
        seconds: since this call began.
    """

    path: str
    samples: int
    files: int
    bytes: int
    seconds: float


def write(
    source: str | Source,
    target: str,
    *,
    format: str = "mds",
    columns: Mapping[str, str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    workers: int = 0,
    memory: int = 1 << 30,
    size_limit: int | None = None,
    group: int = 1 << 23,
    compression: str = "",
    hashes: Sequence[str] = ("xxh64",),
    tokenizer: str = "",
    length: int = 0,
    parts: int = 0,
    source_format: str = "",
    source_options: Mapping[str, Any] | None = None,
    work: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write a data set in chunks. Called again after a kill, it continues; the bytes are those of a write without it.

    It begins anew if the settings differ, or the source: the file of the function's module, or names, sizes and times of files.
    Samples are written twice: sorted into runs in a folder of work, then merged into files. A local target has its name when it
    is complete; at a URL, ``index.json`` is written last.

    Args:
        source: ``"module:function"``, whose function yields samples (dicts of plain values and arrays), a folder of files,
            files of JSON lines, text or CSV, or a data set of a format that hocket reads; paths or URLs.
        target: a folder or URL that has no data set.
        format: "mds", "parquet" or "tokens".
        columns: encodings of MDS by name, for columns whose first samples do not show it.
        shuffle: whether samples are in a random order, uniform over all orders, or in that of the source.
        seed: of the shuffle.
        workers: processes. A script that asks for several needs ``if __name__ == "__main__":``.
        memory: bytes for samples in all processes together, about.
        size_limit: bytes of a file, before compression: 64 MiB for MDS, 256 MiB for others.
        group: bytes of a row group of Parquet, about.
        compression: "zstd" or "zstd:7" with a level; "" for none.
        hashes: checksums in the index of MDS: xxh64, sha1, sha256.
        tokenizer: of ``format="tokens"``: a file of the library tokenizers, or "byte"; "" for columns of tokens.
        length: tokens of a row, of ``format="tokens"``.
        parts: of a function with the arguments ``part`` and ``parts``; 0 for 64. Another number gives another order.
        source_format: the format of the source, where several would serve.
        source_options: of the format of the source, such as ``{"dtype": "uint16", "length": 2048}`` for tokens.
        work: a local folder, below which a folder for runs is made; by default beside a local target, or in the user's cache.
        storage_options: of fsspec, for URLs.
        progress: where progress is shown.

    Raises:
        ExistingFile: the target has files.
        WrongValue: a setting, or a value that does not fit its column.
        WrongState: another process writes this data set.

    Example:
        >>> import hocket_streaming, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.jsonl").write_text('{"x": 1}\\n{"x": 2}\\n')
        >>> hocket_streaming.write(str(folder / "a.jsonl"), str(folder / "mds")).samples
        2
    """
    began = time.monotonic()
    for name, value, least, most in (("workers", workers, 0, 4096), ("memory", memory, 1 << 16, 1 << 60)):
        if not least <= value <= most:
            raise WrongValue(f"«{name}={value}» should be from {least} to {most}.")
    remote, final, found = is_url(target), Path(target).absolute(), source
    if isinstance(found, str):
        if (_real(target) + "/" * remote).startswith(f"{_real(found)}/"):
            raise WrongValue(f"The target {target} is inside the source {found}. Write to a folder beside it.")
        found = sources.find(found, source_format, parts, storage_options, source_options, format == "tokens")
    first = _first(found, source)
    stated = dict(columns or {})
    options = {"compression": compression, "hashes": list(hashes), "size_limit": size_limit, "group": group}
    options |= {"tokenizer": tokenizer, "length": length}
    made = target_for(format, first, stated, **options)  # type: ignore[arg-type]
    settings = json.dumps([found.identity, format, stated, bool(shuffle), seed, options], sort_keys=True)
    begun = hashlib.sha256(settings.encode()).hexdigest()
    staging = final.with_name(f".{final.name}.files")
    digest = hashlib.sha256((target if remote else str(final)).encode()).hexdigest()[:16]
    beside = final.with_name(f".{final.name}.writing")
    work = Path(work or default_folder("writing")).absolute() / digest if work or remote else beside
    files = files_of(target if remote else str(staging), storage_options if remote else None)
    report = work / "complete.json"
    if not (continued(work, begun) and (remote or report.exists())):
        _refuse(files, made.last if remote else "", final)
    with _continuing(work, staging), folder(work, begun, staging, remote), progress or Progress(False) as shown:
        if not report.exists():
            job = Job(found, made, files, work, shuffle, seed, max(1 << 16, memory // (2 * max(1, workers))))
            _compute(job.sort, job.missing("part", found.parts), found.parts, "parts read:", workers, shown)
            for task, missing, count in job.merges():
                _compute(task, missing, count, "runs merged:", workers, shown)
            count = len(job.ranges)
            _compute(job.make, job.missing("file", count), count, "files written:", workers, shown)
            written = job.written(len(job.ranges))
            samples = sum(each.samples for each in job.ranges)
            if made.last:
                job.write(made.last, made.index([entry for *_, entry in written]))
            replace(report, json.dumps([samples, len(written), sum(size for _, size, _ in written)]))
        if staging.exists():
            os.replace(staging, final)
        samples, count, size = json.loads(report.read_text())
        shutil.rmtree(work)
    return Written(str(masked(target)) if remote else str(final), samples, count, size, time.monotonic() - began)


def _real(path: str) -> str:
    path = absolute(path)
    return path if "://" in path else os.path.realpath(path)


@contextmanager
def _continuing(work: Path, staging: Path) -> Iterator[None]:
    """Add to an error what is left behind."""
    try:
        yield
    except BaseException as error:
        if (work / "settings").exists():
            left = " and ".join(str(each) for each in (work, staging) if each.exists())
            error.add_note(f"The same command continues from {left}, which can be deleted to begin anew.")
        raise


def _refuse(files: Files, last: str, final: Path) -> None:
    if last:
        refuse_existing(files, last)
    elif files.local and final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ExistingFile(f"{final} is there already. Write to another folder, or remove this one.")


def _first(source: Source, name: str | Source) -> list[Any]:
    for part in range(source.parts):
        if first := list(islice(source.read(part), _FIRST)):
            return first
    raise WrongFile(f"The source {name} has no samples. Check what it yields, or its files.")


def _compute(
    task: Callable[[int], object], missing: list[int], count: int, what: str, workers: int, progress: Progress
) -> None:
    progress.start(what, count, count - len(missing))
    for _ in computed(task, missing, workers):
        progress.step()
