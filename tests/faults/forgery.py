"""Checkpoints made by hand, by a second implementation of the format, with checksums that fit: what nobody should trust."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from typing import Any

import safetensors.torch
import torch


class Executes:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch executed",))


def forge(folder, node, files=None, version=1, about=None):
    """A checkpoint made by hand, by a second implementation of the format."""
    folder.mkdir()
    raw = node if isinstance(node, bytes) else json.dumps(node).encode()
    contents = {f"tree-{hashlib.sha256(raw).hexdigest()[:16]}.json": raw, **(files or {})}
    for name, content in contents.items():
        if "/" not in name and name not in ("..", "."):
            (folder / name).write_bytes(content)
    content = {
        "format": "hocket-checkpoint",
        "version": version,
        "written": 1.0,
        "about": about or {},
        "files": {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()},
    }
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))


SHARD = "tensors-00001-0123456789abcdef.safetensors"
ONE = safetensors.torch.save({"w": torch.arange(6.0).reshape(2, 3)})


def reference(**changes):
    return {"w": {"$tensor": {"file": SHARD, "name": "w", "dtype": "float32", "shape": [2, 3], **changes}}}


def pieces(*boxes, shape=(2, 3), dtype="float32", **changes):
    parts = [{"file": SHARD, "name": "w", "begin": begin, "shape": size, **changes} for begin, size in boxes]
    return {"w": {"$tensor": {"dtype": dtype, "shape": list(shape), "pieces": parts}}}


def raw_shard(head, data=b""):
    text = json.dumps(head).encode() if not isinstance(head, bytes) else head
    return len(text).to_bytes(8, "little") + text + data


def _spiral(count):
    """Boxes of which a cut can take off only one at a time."""
    (top, left), end, found = (0, 0), (202, 202), []
    for index in range(count):
        if index % 2:
            found.append(([top, left], [1, end[1] - left]))
            top += 1
        else:
            found.append(([top, left], [end[0] - top, 1]))
            left += 1
    return [*found, ([top, left], [end[0] - top, end[1] - left])]


DEEP = b"[" * 100_000 + b"]" * 100_000
MALICIOUS = {
    "a pickled tree": (pickle.dumps(Executes()), {}, "a pickle, which is never loaded"),
    "a deep tree": (b'{"a":' + DEEP + b"}", {}, "nested too deeply|more than 100 levels"),
    "a rather deep tree": (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", {}, "levels"),
    "a number of many digits": (b'{"a":' + b"9" * 100_000 + b"}", {}, "not valid JSON"),
    "a tree that is a list": ([], {}, "not a JSON object"),
    "NaN": (b'{"a": NaN}', {}, "bare NaN"),
    "two equal keys": (b'{"a": 1, "a": 2}', {}, "one key twice"),
    "an unknown mark": ({"a": {"$import": "os"}}, {}, "import.*stands for nothing"),
    "an import path": ({"a": {"$class": "os.system", "args": ["touch executed"]}}, {}, "among other keys"),
    "a traversal in the tree": (reference(file="../../etc/passwd"), {SHARD: ONE}, r"\.\./\.\./etc/passwd"),
    "an absolute path in the tree": (reference(file="/etc/passwd"), {SHARD: ONE}, "/etc/passwd"),
    "a file that is not listed": (reference(file="tensors-00002-0123456789abcdef.safetensors"), {SHARD: ONE}, "00002"),
    "the tree as a shard": (reference(file="manifest.json"), {SHARD: ONE}, "manifest.json"),
    "a traversal in the manifest": (reference(), {SHARD: ONE, "../../x": b""}, "not a name of a checkpoint's file"),
    "an absolute path in the manifest": (reference(), {SHARD: ONE, "/etc/passwd": b""}, "/etc/passwd"),
    "another kind of file": (reference(), {SHARD: ONE, "model.pt": pickle.dumps(Executes())}, "model.pt"),
    "a pickled shard": (reference(), {SHARD: pickle.dumps(Executes())}, "a pickle, which is never loaded"),
    "an empty shard": (reference(), {SHARD: b""}, "it is empty"),
    "a huge header": (reference(), {SHARD: (2**63).to_bytes(8, "little") + b"{}"}, "not a safetensors file"),
    "a deep header": (reference(), {SHARD: raw_shard(DEEP)}, "not a valid safetensors"),
    "overlapping tensors": (
        reference(),
        {SHARD: raw_shard({n: {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]} for n in "wx"}, bytes(24))},
        "does not begin where",
    ),
    "a tensor past the end": (
        reference(),
        {SHARD: raw_shard({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})},
        "it has",
    ),
    "a negative position": (
        reference(),
        {SHARD: raw_shard({"w": {"dtype": "F32", "shape": [6], "data_offsets": [-24, 0]}}, bytes(24))},
        "not a number",
    ),
    "a shape whose size takes hours to multiply": (
        reference(),
        {SHARD: raw_shard({"w": {"dtype": "F32", "shape": [2**62] * 500_000, "data_offsets": [0, 24]}}, bytes(24))},
        "more elements than any tensor",
    ),
    "such a shape in the tree": (reference(shape=[2**62] * 500_000), {SHARD: ONE}, "more elements than any tensor"),
    "a name of many characters": (reference(name="v" * 10**6), {SHARD: ONE}, "v … v"),
    "a name that changes the terminal": (reference(name="\x1b[2J"), {SHARD: ONE}, r"no tensor '\\x1b\[2J'"),
    "an absent tensor": (reference(name="v"), {SHARD: ONE}, "no tensor 'v'"),
    "another shape": (reference(shape=[2**40]), {SHARD: ONE}, "is not what"),
    "another dtype": (reference(dtype="int32"), {SHARD: ONE}, "is not what"),
    "no dtype": (reference(dtype="system"), {SHARD: ONE}, "unknown dtype 'system'"),
    "a stride that repeats": (reference(stride=[0, 0]), {SHARD: ONE}, "is not what"),
    "a view past the end": (reference(stride=[3, 1], offset=1), {SHARD: ONE}, "is not what"),
    "a negative offset": (reference(stride=[3, 1], offset=-1), {SHARD: ONE}, "not a list of numbers"),
    "a negative stride": (reference(stride=[-3, 1], offset=3), {SHARD: ONE}, "not a list of numbers"),
    "too few strides": (reference(stride=[1]), {SHARD: ONE}, "does not fit"),
    "pieces with a gap": (pieces(([0, 0], [1, 3])), {SHARD: ONE}, "leave gaps or overlap"),
    "pieces that overlap": (pieces(([0, 0], [2, 3]), ([0, 0], [1, 3])), {SHARD: ONE}, "leave gaps or overlap"),
    "pieces that take as many cuts as there are": (
        pieces(*_spiral(400), shape=(202, 202)),
        {SHARD: ONE},
        "leave gaps or overlap",
    ),
    "a piece past the end": (pieces(([1, 0], [2, 3])), {SHARD: ONE}, "leave gaps or overlap"),
    "a piece of another shape": (pieces(([0, 0], [1, 3]), ([1, 0], [1, 3])), {SHARD: ONE}, "is not what"),
    "a piece that is no box": (pieces(("00", [2, 3])), {SHARD: ONE}, "not a list of numbers"),
    "a piece of a file elsewhere": (pieces(([0, 0], [2, 3]), file="../x"), {SHARD: ONE}, r"\.\./x"),
    "something else": (reference(script="touch executed"), {SHARD: ONE}, "described wrongly"),
}
