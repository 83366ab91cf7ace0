"""Predictions in a folder: files of consecutive rows, which appear complete or not at all, and a manifest of them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from safetensors import SafetensorError, safe_open

from hocket.basics import safe_files
from hocket.basics.run_files import content, size, strict
from hocket.errors import Mistake, WrongValue
from hocket.help import optional_packages
from hocket_checkpoints.storage.locks import FileLock
from hocket_tools.arguments import checked
from hocket_tools.progress import say
from hocket_tools.writable import check_other, check_place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Columns = dict[str, NDArray[Any]]

Format = Literal["npz", "parquet", "jsonl"]
MANIFEST = "predictions.json"
#: The dtypes of columns, until the manifest is complete.
_COLUMNS = ".columns.json"


def file_name(shard: int, suffix: str) -> str:
    """Return the name of the file of a shard."""
    return f"part-{shard:06}.{suffix}"


# --- columns


def columns_of(outputs: Any, samples: int, said: Callable[[str], None] = lambda text: None) -> Columns:
    """Return the outputs of a batch as columns ``(samples, …)`` by name.

    A tensor is the column ``output``; of a mapping, tuple or named outputs each part is one, named by its keys and positions,
    such as ``logits`` or ``hidden/0``. Lists of texts or numbers, one for each sample, are columns too. ``said`` is called with
    a line about parts that are not.
    """
    import numpy as np
    import torch

    found: Columns = {}

    def add(path: str, part: Any) -> None:
        if isinstance(part, torch.Tensor) and part.dim() and len(part) == samples:
            found[path or "output"] = (part.float() if part.dtype is torch.bfloat16 else part).detach().cpu().numpy()
        elif isinstance(part, list) and len(part) == samples and {*map(type, part)} <= {str, int, float, bool}:
            found[path or "output"] = np.array(part)
        elif isinstance(part, Mapping | list | tuple):
            named = part.items() if isinstance(part, Mapping) else zip(getattr(part, "_fields", count()), part)  # noqa: B905
            for name, inner in named:
                add(f"{path}/{name}" if path else str(name), inner)
        elif part is not None:
            said(f"the output {path or type(part).__name__!r} has no row for each sample, and is not written.")

    add("", outputs)
    if not found:
        raise WrongValue(
            f"The model's output, {type(outputs).__name__}, has no tensor with a row for each of {samples} samples, so there "
            "is nothing to write. Return such a tensor, or a dict of them, from forward or eval_forward."
        )
    return found


def concatenated(batches: Sequence[Columns], name: str) -> NDArray[Any]:
    """Return a column of several batches; of other shapes than the first one's as an array of objects ``(rows,)``."""
    import numpy as np

    parts = [each[name] for each in batches]
    if len({each.shape[1:] for each in parts}) == 1:
        return np.concatenate(parts)
    rows = np.empty(sum(map(len, parts)), dtype=object)
    rows[:] = [row for part in parts for row in part]
    return rows


# --- files


def write(path: Path, columns: Columns, suffix: str) -> None:
    """Write rows into a file, with the same bytes for the same rows. Raises ValueError for rows of several shapes in npz."""
    import numpy as np

    if suffix == "npz" and (ragged := next((name for name, each in columns.items() if each.dtype == object), None)):
        raise WrongValue(
            f"The output {ragged!r} has rows of several shapes, which npz does not hold. Write --format parquet or jsonl."
        )
    with safe_files.replacing(path) as file:
        if suffix == "npz":
            np.savez(file, **columns)  # type: ignore[arg-type]
        elif suffix == "parquet":
            arrow = optional_packages.module("pyarrow", "--format parquet")
            parquet = optional_packages.module("pyarrow.parquet", "--format parquet")
            parquet.write_table(arrow.table({name: _arrow(arrow, each) for name, each in columns.items()}), file)
        else:
            for row in zip(*columns.values(), strict=True):
                values = (each.tolist() if hasattr(each, "tolist") else each for each in row)
                plain = strict(dict(zip(columns, values, strict=True)))
                file.write(json.dumps(plain, ensure_ascii=False).encode() + b"\n")


def _arrow(arrow: Any, column: NDArray[Any]) -> Any:
    """Return a column as an array of Arrow, whose dimensions are lists of fixed size unless they differ between rows."""
    if column.dtype == object:
        return arrow.array([each.tolist() for each in column])
    array = arrow.array(column.reshape(-1))
    for length in reversed(column.shape[1:]):
        array = arrow.FixedSizeListArray.from_arrays(array, length)
    return array


def read(path: Path, columns: Mapping[str, str]) -> Columns:
    """Read columns, dtypes by name, from a file. Raises WrongValue for a damaged one."""
    import numpy as np

    with _reading(path) as file:
        if path.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in columns}
        if path.suffix == ".parquet":
            parquet = optional_packages.module("pyarrow.parquet", "read_predictions")
            table = parquet.read_table(file, columns=list(columns))
            return {name: _array(table[name].to_pylist(), dtype) for name, dtype in columns.items()}
        rows = [json.loads(line) for line in file]
        return {name: _array([row[name] for row in rows], dtype) for name, dtype in columns.items()}


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file. Raise WrongValue for a damaged one, whatever exception its format has for that."""
    try:
        with path.open("rb") as file:
            yield file
    except Mistake:
        raise
    except Exception as error:
        raise _damaged(path, f": {type(error).__name__}: {error}") from error


def _damaged(path: Path, why: str = "") -> WrongValue:
    return WrongValue(f"{path} is damaged{why}. Repeat the command that wrote it: it writes damaged files again.")


def _array(rows: list[Any], dtype: str) -> NDArray[Any]:
    import numpy as np

    return concatenated([{"": np.array([each], dtype=dtype)} for each in rows], "")


# --- the manifest


def begin(folder: Path, made_of: Mapping[str, Any], overwrite: bool, run: str, held: ExitStack) -> None:
    """Create the folder with a manifest, unless the one there is of the same predictions, which are continued.

    The folder is locked until ``held`` ends, so that no two processes write into it; the lock names the run.

    Raises InUse for a folder that another process writes into, ExistingFile for one with other files, and, unless they may be
    replaced, for predictions of other weights, data, code or options.
    """
    manifest = folder / MANIFEST
    hidden = folder.is_dir() and all(each.name[0] == "." for each in folder.iterdir())
    check_place(folder, manifest.is_file() or hidden, "of earlier predictions")
    held.callback(FileLock(folder, run, "give this one another folder").release)
    parts = [each for each in folder.glob("part-*.*") if each.stem[5:].isdecimal()]
    there, differ = content(manifest), ""
    if not there and manifest.exists():
        differ = f"a damaged {MANIFEST}, so it is not known what the files beside it are"
    elif parts:  # else there is nothing to continue
        differ = differing(there.get("made_of"), made_of)
    check_other(folder, differ, overwrite)
    if differ or not parts:
        if differ:
            say(f"{folder} had {differ}, which are replaced.")
        for each in parts:
            each.unlink()
        safe_files.replace(manifest, json.dumps({"version": 1, "made_of": made_of, "complete": False}, indent=1))


def differing(then: object, now: Mapping[str, Any]) -> str:
    """Return what earlier predictions are, if they are made of something else; else an empty text."""
    known = then if isinstance(then, Mapping) else {}
    differ = [found for name, value in now.items() if (found := _differs(name, known.get(name), value))]
    return f"predictions that differ from those of this command in {', '.join(differ)}" if differ else ""


def check_file(out: str, made_of: Mapping[str, Any] | None = None, overwrite: bool = False) -> str:
    """Describe the predictions in a file if their run, data or options differ; else return an empty text.

    Raises WrongValue or ExistingFile for other files, and unless the predictions may be replaced.
    """
    if Path(out).suffix != ".safetensors":
        better = shlex.quote(str(Path(out).with_suffix(".safetensors")))
        raise WrongValue(
            f"--out {out} does not end in .safetensors, the one format of a single file. Write --out {better}; "
            "safetensors.torch.load_file reads it. For other formats, write --to FOLDER --format npz, parquet or jsonl."
        )
    ours, there, differ = False, None, ""
    with suppress(OSError, ValueError, SafetensorError):
        safe_files.check(os.stat(out), out)
        with safe_open(out, "pt") as file:
            ours = list(file.keys()) == ["outputs"]
            there = safe_files.parsed((file.metadata() or {}).get("made_of", "null"))
    check_place(Path(out), ours, "a file of outputs of an earlier prediction", is_file=True)
    if ours and made_of is not None:
        differ = differing(there, made_of)
        check_other(Path(out), differ, overwrite)
    return differ


def _differs(name: str, then: Any, now: Any) -> str:
    """Return the name if two values differ; of code with the files of both that have changed."""
    if name != "code" or not isinstance(then, Mapping):
        return name if then != now else ""
    changed = [file for file in then.keys() & now.keys() if then[file] != now[file]]
    return f"code ({', '.join(sorted(changed))})" if changed else ""


def done(folder: Path, suffix: str, said: Callable[[str], None] = lambda text: None) -> dict[int, int]:
    """Return the rows of the complete files by their numbers. ``said`` is called with a line about damaged files."""
    about, rows = content(folder / MANIFEST), {}
    first = dict(islice((content(folder / _COLUMNS) or about.get("columns") or {}).items(), 1))
    for path in sorted(folder.glob(f"part-*.{suffix}")):
        number, known = path.stem.removeprefix("part-"), about.get("bytes", {}).get(path.name, size(path))
        try:
            if known != size(path) or not first:
                raise _damaged(path)
            if number.isdecimal():
                rows[int(number)] = about.get("files", {}).get(path.name) or len(read(path, first)[next(iter(first))])
        except WrongValue:
            said(f"{path} is damaged, and is written again.")
    return rows


def note_columns(folder: Path, columns: Columns) -> None:
    """Record the dtypes of columns, which not every format does, before a file is written; of texts of any length."""
    dtypes = {name: (each[0] if each.dtype == object else each).dtype for name, each in columns.items()}
    plain = {name: "U" if each.kind == "U" else each.str for name, each in dtypes.items()}
    safe_files.replace(folder / _COLUMNS, json.dumps(plain))


def finish(folder: Path, suffix: str) -> int:
    """Write the columns and the rows of each file into the manifest, which is then complete. Return the number of rows.

    Without rows, the manifest is not complete.
    """
    about = content(folder / MANIFEST)
    files = {file_name(shard, suffix): rows for shard, rows in done(folder, suffix).items()}
    if not (rows := sum(files.values())):
        return 0
    columns = content(folder / _COLUMNS) or about.get("columns")
    sizes = {name: size(folder / name) for name in files}
    about |= {"complete": True, "rows": rows, "columns": columns, "files": files, "bytes": sizes}
    safe_files.replace(folder / MANIFEST, json.dumps(about, indent=1))
    (folder / _COLUMNS).unlink(missing_ok=True)
    return rows


class Predictions(Mapping[str, "NDArray[Any]"]):
    """The columns of a folder of predictions, by name; see `read_predictions`. Reading one reads it from all files.

    Attributes:
        rows: their number.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder, self._columns, self._files = folder, about["columns"], about["files"]
        self._bytes: dict[str, int] = about.get("bytes", {})  # which older versions did not record
        self.rows: int = about["rows"]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._columns:
            raise KeyError(f"There is no column {name!r}. The columns are {', '.join(self._columns)}.")
        return concatenated(list(self._read({name: self._columns[name]})), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def parts(self) -> Iterator[Columns]:
        """Yield the columns of each file, in order, one file in memory at a time."""
        yield from self._read(self._columns)

    def _read(self, columns: Mapping[str, str]) -> Iterator[Columns]:
        for file in self._files:
            path = self._folder / file
            if self._bytes.get(file, size(path)) != size(path):
                raise _damaged(path, f": it has {size(path)} bytes, and {self._bytes[file]} were written")
            yield read(path, columns)


@checked
def read_predictions(folder: str | Path) -> Predictions:
    """Return what ``hocket predict RUN DATA --to FOLDER`` wrote: a mapping of columns, whose rows are in the order of the data.

    Columns are numpy arrays ``(rows, …)``: ``output`` for a model that returns a tensor, or else its parts by name, and
    ``index``, the sample of the data set, where that is known. Rows of several shapes are an array of arrays.

    Raises ValueError for a folder without complete predictions.

    Example:
        >>> import pathlib, tempfile, hocket, torch
        >>> from hocket_tools import predict_into, read_predictions
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 2), device="cpu")
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(10, 4)), batch_size=4)
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "predictions"
        >>> predict_into(trainer, loader, folder)
        10
        >>> found = read_predictions(folder)
        >>> list(found), found["output"].shape, found["index"][-1].item()
        (['index', 'output'], (10, 2), 9)
    """
    folder = Path(folder)
    about = content(folder / MANIFEST)
    if not about.get("complete"):
        what = "is not complete: continue it with the command that began it" if about else f"has no {MANIFEST}"
        what = f"has a damaged {MANIFEST}" if not about and (folder / MANIFEST).exists() else what
        raise WrongValue(f"{folder} {what}. `hocket predict RUN DATA --to FOLDER` writes predictions.")
    return Predictions(folder, about)
