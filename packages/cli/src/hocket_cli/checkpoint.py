"""``hocket checkpoint inspect | verify | export | diff``: read checkpoints. No code in them is executed."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from hocket.basics.run_folder import is_url
from hocket.basics.safe_files import printable
from hocket.errors import MissingFile
from hocket.hookspecs.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a sub-parser for each of the four actions. Checkpoints may be URLs."""
    actions = parser.add_subparsers(dest="action", required=True)
    inspect = actions.add_parser("inspect", help="print the content: dtype and shape of tensors, and all other values")
    inspect.add_argument("path", help="the checkpoint's folder or URL; of a folder of checkpoints, the newest")
    inspect.add_argument("--only", action="append", metavar="GLOB", help="entries by dotted path; may be repeated")
    inspect.add_argument("--json", action="store_true", help="print the content as JSON")
    verify = actions.add_parser(
        "verify", help="compare every byte with the recorded checksums; exit code 1 if any differs"
    )
    verify.add_argument(
        "paths", nargs="+", metavar="path", help="a checkpoint, or a folder of checkpoints for each in it"
    )
    export = actions.add_parser(
        "export", help="write the weights to one safetensors file; also reads files of other tools"
    )
    export.add_argument(
        "path", help="a checkpoint, a .safetensors file, a file of torch.save, or a Hugging Face folder"
    )
    export.add_argument("out", help="the .safetensors file to write")
    diff = actions.add_parser("diff", help="print the differences of two checkpoints; exit code 1 if there are any")
    diff.add_argument("a", help="the folder or URL of a checkpoint, or a file of weights")
    diff.add_argument("b", help="the other one")
    diff.add_argument("--only", action="append", metavar="GLOB", help="entries by dotted path; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Run the action. A checkpoint that cannot be read prints one paragraph on stderr and returns 2."""
    from hocket.errors import CheckpointError

    try:
        return {"inspect": _inspect, "verify": _verify, "export": _export, "diff": _diff}[args.action](args)
    except (CheckpointError, ImportError, ValueError, OSError, MemoryError, RecursionError) as error:
        print(f"hocket checkpoint: {printable(str(error) or type(error).__name__)}", file=sys.stderr)
        return 2


def _within(place: str) -> list[str]:
    """Return the checkpoints in a folder of checkpoints, damaged and unfinished ones too, the newest last; else the place."""
    from hocket_checkpoints.storage import manifest
    from hocket_checkpoints.storage.urls import resolved

    place = str(resolved(place))
    if is_url(place):
        return _stored(place) or [place]
    if os.path.exists(os.path.join(place, manifest.NAME)) or os.path.isfile(place):
        return [place]
    if not os.path.isdir(place):
        raise MissingFile(
            f"{place}: there is no such folder. Give a checkpoint, such as runs/a/ep3-ba18, or a folder of checkpoints."
        )
    if checkpoints := _stored(place):
        return checkpoints
    below = [each.path for each in sorted(os.scandir(place), key=lambda each: each.name) if each.is_dir()]
    if near := next((each for each in below if _stored(each)), ""):
        raise MissingFile(f"{place} is not a folder of checkpoints. There are some in {near}: give that path.")
    return [place]


def _stored(folder: str) -> list[str]:
    from hocket_checkpoints.storage.store import Store

    return [f"{folder.rstrip('/')}/{name}" for name in Store(folder).existing(unfinished=True)]


def _inspect(args: argparse.Namespace) -> int:
    from hocket_checkpoints.storage import format as formats, references, tree_json
    from hocket_checkpoints.storage.urls import local_folder, resolved

    *_, newest = _within(args.path)
    if newest != resolved(args.path):
        print(f"hocket: {args.path} is a folder of checkpoints. This is {newest}, the newest.", file=sys.stderr)
    with local_folder(newest, args.only) as path:
        about, structure = formats.about(path), formats.structure(path, args.only)
    rows = []
    for place, leaf in tree_json.leaves(structure):
        if tree_json.special(leaf) == "$tensor":
            tensor = leaf["$tensor"]
            dtype, shape = tensor["dtype"], tensor["shape"]
            size = math.prod(shape) * references.SIZES[dtype]
            files = sorted({each["file"] for each in references.pieces(tensor)})
            rows.append({"path": place, "dtype": dtype, "shape": shape, "bytes": size, "files": files})
        else:
            rows.append({"path": place, "value": leaf})
    if args.json:
        print(json.dumps({"about": tree_json.to_json(about, lambda place, value: None), "tree": rows}, indent=1))
        return 0
    for key, value in about.items():
        print(printable(f"{key}: {value if isinstance(value, str) else _text(value)}"))
    print()
    width = min(max((len(row["path"]) for row in rows), default=0), 100)
    for row in rows:
        shown = (
            f"{row['dtype']} {row['shape']}"
            if "dtype" in row
            else _short(tree_json.from_json(row["value"], lambda _: None))
        )
        print(printable(f"{row['path']:<{width}}  {shown}"))
    tensors = [row for row in rows if "dtype" in row]
    print(
        f"\n{len(tensors)} tensors, {sum(row['bytes'] for row in tensors):,} bytes, {len(rows) - len(tensors)} other values"
    )
    return 0


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _text(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to convert integers of thousands of digits to decimal
        return hex(value) if isinstance(value, int) else f"a {type(value).__name__} of very large numbers"


def _verify(args: argparse.Namespace) -> int:
    from hocket.errors import CheckpointError
    from hocket_checkpoints.storage import format as formats
    from hocket_checkpoints.storage.urls import local_folder

    code = 0
    paths = []
    for place in args.paths:
        try:
            paths += _within(place)
        except MissingFile as error:
            print(f"hocket checkpoint: {printable(str(error))}", file=sys.stderr)
            code = 2
    for path in paths:
        try:
            with local_folder(path) as folder:
                problems = formats.verify(folder)
        except CheckpointError as error:  # the others are verified all the same
            print(f"hocket checkpoint: {printable(str(error))}", file=sys.stderr)
            code = 2
            continue
        print(printable("\n  ".join([f"{path}: {'valid' if not problems else 'not valid'}", *problems])))
        code = max(code, int(bool(problems)))
    return code


def _export(args: argparse.Namespace) -> int:
    from hocket_checkpoints.weights import export

    count = export(args.path, args.out)
    print(f"{count} tensors in {args.out}")
    return 0


def _diff(args: argparse.Namespace) -> int:

    a, b = (_everything(path, args.only) for path in (args.a, args.b))
    lines = [f"- {path}: only in {args.a}" for path in a if path not in b]
    lines += [f"+ {path}: only in {args.b}" for path in b if path not in a]
    for path in a:
        if path in b and (difference := _difference(a[path], b[path])):
            lines.append(f"! {path}: {difference}")
    print("\n".join(map(printable, lines)) if lines else f"All {len(a)} values are bitwise identical.")
    return int(bool(lines))


def _everything(path: str, only: list[str] | None) -> dict[str, Any]:
    from hocket_checkpoints.storage import format as formats
    from hocket_checkpoints.storage.urls import local_folder
    from hocket_checkpoints.weight_files import read_weights

    with local_folder(path, only) as here:
        if here.is_dir() and (here / "manifest.json").exists():
            return dict(_leaves(formats.read(here, only=only), ""))
        return dict(read_weights(here))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    if not children or not value:
        yield path, value
        return
    for key, child in children:
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _difference(a: Any, b: Any) -> str:
    """Describe the difference of two values, or return empty. Tensors are compared bit by bit."""
    import torch

    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = type(a) is type(b) and _text(a) == _text(b)
        return "" if same else f"{_short(a)} / {_short(b)}"
    kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (a, b)]
    if kinds[0] != kinds[1]:
        return " / ".join(kinds)
    bits = [each.contiguous().view(-1).view(torch.uint8).view(-1, each.element_size()) for each in (a, b)]
    differing = int((bits[0] != bits[1]).any(dim=1).sum())
    if not differing:
        return ""
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (a.to(wide) - b.to(wide)).abs().max().item()
    return f"{differing} of {a.numel()} elements differ, by {largest:.6g} at most"


command = Command("Read checkpoints: inspect, verify, export, diff", add_arguments, run)
