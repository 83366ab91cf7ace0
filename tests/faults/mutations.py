"""Files that somebody else may send: valid ones, changed by chance."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

#: What bytes are replaced by: what readers have stumbled on.
TOKENS = [
    b"\x00", b"\xff\xfe", b"\x1b[2J", b"\xc2\x9b31m", b"\xe2\x80\xae", b"\\ud800", b"[" * 2000, b'{"a":' * 700, b"9" * 5000,
    b"1e400", b"-1", b"NaN", b"null", b"true", b"{}", b"[]", b'""', b"0x", b"1e-400", b"\n", b"\r", b"\t", b"../", b"/dev/zero",
    b"/etc/passwd", b"&a ", b"*a", b"<<: ", b"!!int ", b"!!binary ", b"!!python/object/apply:os.system ", b"? ", b"- ",
    b"---\n", b"${x}", b"{{x}}", b"|\n", b">\n", b"'", b'"', b"%YAML 9\n", b"://", b"a" * 3000, "\U0001f600é".encode(),
]  # fmt: skip
#: What values are replaced by.
VALUES: list[Any] = [
    None, True, -1, 0, 2**63, 10**400, 1e400, float("nan"), "", "\x1b[31m", "\ud800", "../../..", "/dev/zero", "x" * 3000, [],
    {}, [[]], {"": None}, [None] * 100, {"a": {"b": [1, {"c": []}]}}, "mine:Net", "1e9ba", "NaN",
]  # fmt: skip
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def mutate(path: Path, rng: random.Random, others: list[Path]) -> str:
    """Change a file, and say how."""
    ways: list[Callable[[Path, random.Random], None]] = [_bytes] * 5 + [_special]
    if path.suffix in (".json", ".jsonl", ".ipynb"):
        ways += [_values] * 5
    elif path.suffix == ".yaml":
        ways += [_lines] * 3 + [_values] * 4 + [_bomb]
    if path.name == "manifest.json" or path.with_name("manifest.json").is_file():
        ways = [_resealed] * 5 + ways
    elif path.suffix in (".pt", ".ckpt", ".bin"):
        ways += [_pickle] * 5
    way = rng.choice(ways)
    if others and rng.random() < 0.05:
        path.write_bytes(rng.choice(others).read_bytes())
        return "the content of another"
    way(path, rng)
    return way.__name__


def changed(raw: bytes, rng: random.Random) -> bytes:
    """Return bytes with some of them changed, removed, repeated or replaced."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
        end = min(end, at + rng.choice((0, 1, 8, 100)))
        kind = rng.randrange(6)
        if kind == 0 and raw:
            at = min(at, len(raw) - 1)
            raw = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        elif kind == 1:
            raw = raw[:at] + raw[end:]
        elif kind == 2:
            raw = raw[:end] + raw[at:end] * rng.choice((1, 3, 50)) + raw[end:]
        elif kind == 3 and rng.random() < 0.3:
            raw = raw[:at]
        else:
            raw = raw[:at] + rng.choice(TOKENS) + raw[end:]
    return raw


def _bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(changed(path.read_bytes(), rng))


def _special(path: Path, rng: random.Random) -> None:
    """Put something in its place that is no file with an end."""
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.write_bytes(b"")
        os.truncate(path, 1 << 40)
    elif kind == 5:
        path.symlink_to("/etc/passwd")
    else:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)


def _values(path: Path, rng: random.Random) -> None:
    """Replace values of JSON or YAML by others."""

    def change(value: Any) -> Any:
        if rng.random() < share:
            return rng.choice(VALUES)
        if isinstance(value, dict):
            made = {key: change(each) for key, each in value.items() if rng.random() > share / 2}
            return made | ({"\x1b[1m": 1} if rng.random() < share else {})
        return [change(each) for each in value] if isinstance(value, list) else value

    share, text = rng.choice((0.02, 0.1, 0.3)), path.read_text()
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(change(yaml.safe_load(text)), sort_keys=False))
        return
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    path.write_text("\n".join(json.dumps(change(json.loads(line))) for line in lines) + "\n")


def _resealed(path: Path, rng: random.Random) -> None:
    """Change a file of a checkpoint, and make its name, the manifest and its digest fit."""
    folder, manifest = path.parent, path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    if path == manifest:
        _values(path, rng)
        content = json.loads(path.read_text())
    else:
        rng.choice([_bytes, _values] if path.suffix == ".json" else [_bytes])(path, rng)
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        name = f"{path.stem.rpartition('-')[0]}-{digest[:16]}{path.suffix}"
        os.rename(path, folder / name)
        del content["files"][path.name]
        content["files"][name] = {"size": len(raw), "sha256": digest}
    if isinstance(content, dict):
        content.pop("sha256", None)
        content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    manifest.write_text(json.dumps(content))


def _lines(path: Path, rng: random.Random) -> None:
    """Repeat, remove, indent, exchange and extend lines of YAML."""
    lines = path.read_text().splitlines()
    for _ in range(rng.choice((1, 2, 6))):
        at = rng.randrange(len(lines))
        key = lines[at].partition(":")[0]
        lines[at : at + 1] = rng.choice(
            [
                [], [lines[at]] * 2, [f"  {lines[at]}"], [lines[at].lstrip()],
                [lines[at] + rng.choice(TOKENS).decode("latin-1")], [f"{key}: &x {{y: *x}}"],
                [f"{key}: {json.dumps(rng.choice(VALUES))}"], [f"{key}: " + "[" * 300 + "]" * 300],
                [rng.choice(lines)], [f'{key}: "\\e[31m\\u202e"'], [f"{key}: {rng.choice(lines).partition(':')[2]}"],
            ]
        ) or [""]  # fmt: skip
    path.write_text("\n".join(lines) + "\n", errors="replace")


def _bomb(path: Path, rng: random.Random) -> None:
    """Use aliases of aliases somewhere."""
    where = rng.choice(("x-a: *a9\n", "model: *a9\n", "optimizer: {sgd: *a8}\n", "<<: {k: *a9}\n", ""))
    path.write_text(BOMB + path.read_text() + where)


def _pickle(path: Path, rng: random.Random) -> None:
    """Change instructions of the pickle in an archive of torch.save, or put another one there."""
    bombs = [
        b"\x80\x02]q\x00h\x00a.", b"\x80\x02}q\x00X\x01\x00\x00\x00kh\x00s.", 
        pickle.dumps({"state": None, "state_dict": {}}, 2),
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 40 + b".",
        b"\x80\x02}q\x00(" + b"h\x00" * 10 + b"u.", b"\x80\x02" + b"(" * 5000 + b"t" * 5000 + b".", b"\x80\x02.", b"",
        b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b".", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00touch\x85R.",
        b"\x80\x02I" + b"9" * 4000 + b"\n.", b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    ]  # fmt: skip
    with zipfile.ZipFile(path) as archive:
        parts = {each.filename: archive.read(each) for each in archive.infolist()}
    name = next(each for each in parts if each.endswith("data.pkl"))
    parts[name] = rng.choice(bombs) if rng.random() < 0.4 else changed(parts[name], rng)
    with zipfile.ZipFile(path, "w") as archive:
        for each, raw in parts.items():
            archive.writestr(each, raw)
