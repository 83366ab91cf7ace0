"""The texts of Python's standard library, a byte-level BPE tokenizer trained on them, and their tokens, cached in files."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import os
import platform
import sys
import sysconfig
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from hocket.errors import MissingFile, MissingPackage, WrongValue
from hocket.help import warn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Split = Literal["train", "test"]
Kind = Literal["code", "docs"]

#: The token that ends each document. Its id is 0.
SEPARATOR = "<|endoftext|>"
#: The separator and the 256 bytes.
SMALLEST_VOCABULARY = 257

#: Folders that are left out: installed packages, tests, generated tables, and parts that some distributions or versions of
#: Python do not have.
_EXCLUDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "pydoc_data", "idlelib", "turtledemo",
    "tkinter", "lib2to3", "distutils", "ensurepip", "lib-dynload",
}  # fmt: skip
#: Beginnings of names that are left out, because their contents depend on how Python was built.
_MACHINE = ("config-", "_sysconfigdata", "sitecustomize")
#: Changes whenever the same arguments and sources give other tokens.
_FORMAT = "1"

T = TypeVar("T")


class Source(NamedTuple):
    """A file of the standard library: its path inside it, its bytes, and the split that it belongs to."""

    path: str
    content: bytes
    split: Split


class Tokens(NamedTuple):
    """Documents as tokens, one after another, each followed by the separator.

    ``ids``: int32 ``(tokens,)``. ``lengths``: int64 ``(files,)``, the tokens of each document with its separator.
    ``characters``: the length of the text, without separators. ``bytes``: the same in UTF-8. ``python``: the version whose
    library it is.
    """

    ids: Tensor
    lengths: Tensor
    characters: int
    bytes: int
    python: str

    @property
    def files(self) -> int:
        """Number of documents: files that are not empty."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens, separators included."""
        return len(self.ids)


@functools.lru_cache(maxsize=2)
def sources(max_bytes: int) -> tuple[Source, ...]:
    """Return files of the running Python's standard library, sorted by path.

    Files are drawn in the order of a hash of their paths until the next one would exceed ``max_bytes``. The hash's last
    byte puts a tenth of them into ``"test"``. So a file is in the same split for every size and every version of Python.

    Raises:
        ValueError: ``max_bytes`` is so small that a split is empty.
        FileNotFoundError: this Python has no sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    chosen: list[Source] = []
    total = found = 0
    for path in sorted(_paths(folder), key=_digest):
        content = (folder / path).read_bytes()
        found += 1
        if (total := total + len(content)) > max_bytes:
            break
        chosen.append(Source(path, content, "test" if _digest(path)[-1] % 10 == 0 else "train"))
    if not found:
        raise MissingFile(
            f"text-python reads the sources of Python's standard library, and {folder} holds none: this Python was "
            "installed without them. Use one whose library consists of .py files, as those of python.org and uv do."
        )
    if missing := sorted(set(get_args(Split)) - {each.split for each in chosen}):
        raise WrongValue(
            f"«max_bytes={max_bytes}» leaves no file for {' and '.join(missing)}: give at least 200000, or the default."
        )
    return tuple(sorted(chosen))


def _paths(folder: Path) -> Iterator[str]:
    for current, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED and not name.startswith(_MACHINE)]
        here = Path(current).relative_to(folder)
        yield from (
            (here / name).as_posix() for name in files if name.endswith(".py") and not name.startswith(_MACHINE)
        )


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def texts(split: Split, kind: Kind, max_bytes: int) -> list[str]:
    """Return the documents of a split, one for each file that has any text of this kind, in the order of their paths."""
    of = docstrings if kind == "docs" else _identity
    made = (of(importlib.util.decode_source(each.content)) for each in sources(max_bytes) if each.split == split)
    return [text for text in made if text]


def _identity(text: str) -> str:
    return text


def docstrings(source: str) -> str:
    """Return the docstrings of a module and its classes and functions, unindented, in their order, blank lines between."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the sources
        tree = ast.parse(source)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted((node for node in ast.walk(tree) if isinstance(node, kinds)), key=lambda node: node.lineno)
    found = [ast.get_docstring(tree), *map(ast.get_docstring, nodes)]
    return "".join(f"{text}\n\n" for text in found if text)


# --- the tokenizer


@functools.lru_cache(maxsize=4)
def tokenizer(vocab_size: int, max_bytes: int, cache_dir: Path) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on the sources of the train split; see `hocket_nlp.python_tokenizer`."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise WrongValue(
            f"vocab_size is {vocab_size}, but the bytes and the separator alone are {SMALLEST_VOCABULARY} tokens: give more, "
            "such as 1024."
        )
    Tokenizer = _tokenizers().Tokenizer
    file = cache_dir / f"tokenizer-{_key(vocab_size, max_bytes)}.json"
    return _cached(
        file,
        lambda: _train(vocab_size, texts("train", "code", max_bytes)),
        lambda content: Tokenizer.from_str(content.decode()),
        lambda made: made.to_str().encode(),
    )


def _train(vocab_size: int, documents: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(documents, trainer)
    return made


@functools.lru_cache(maxsize=8)
def tokens(split: Split, kind: Kind, vocab_size: int, max_bytes: int, cache_dir: Path) -> Tokens:
    """Return the tokens of a split; see `hocket_nlp.text_python`."""
    by = tokenizer(vocab_size, max_bytes, cache_dir)
    file = cache_dir / f"{split}-{kind}-{_key(vocab_size, max_bytes)}.pt"
    ids, lengths, characters, encoded = _cached(file, lambda: _encode(by, texts(split, kind, max_bytes)), _read, _write)
    return Tokens(ids, lengths, characters, encoded, platform.python_version())


def _encode(by: Tokenizer, documents: Sequence[str]) -> tuple[Tensor, Tensor, int, int]:
    separator = by.token_to_id(SEPARATOR)
    found = [[*each.ids, separator] for each in by.encode_batch(list(documents), add_special_tokens=False)]
    ids = torch.cat([torch.tensor(each, dtype=torch.int32) for each in found])
    sizes = sum(map(len, documents)), sum(len(text.encode()) for text in documents)
    return ids, torch.tensor([len(each) for each in found]), *sizes


def _read(content: bytes) -> tuple[Tensor, Tensor, int, int]:
    return torch.load(io.BytesIO(content), weights_only=True)  # type: ignore[no-any-return]


def _write(made: tuple[Tensor, Tensor, int, int]) -> bytes:
    buffer = io.BytesIO()
    torch.save(made, buffer)
    return buffer.getvalue()


# --- the cache


def cache_folder() -> Path:
    """Return the folder of text-python in the user's cache: ``$XDG_CACHE_HOME``, else where the system puts caches."""
    home = Path.home()
    system = {"win32": os.environ.get("LOCALAPPDATA") or home / "AppData/Local", "darwin": home / "Library/Caches"}
    return Path(os.environ.get("XDG_CACHE_HOME") or system.get(sys.platform, home / ".cache")) / "hocket/text-python"


def _key(vocab_size: int, max_bytes: int) -> str:
    """Return a name for everything that tokens depend on."""
    digest = hashlib.sha256(f"{_FORMAT} {_tokenizers().__version__} {sys.version_info[:2]} {vocab_size}".encode())
    for each in sources(max_bytes):
        digest.update(f"\n{each.path} {len(each.content)}\n".encode() + each.content)
    return digest.hexdigest()[:24]


def _cached(file: Path, make: Callable[[], T], read: Callable[[bytes], T], write: Callable[[T], bytes]) -> T:
    """Return what a file holds, or make it and write the file.

    Several processes may do so at once. Each writes a file of its own and renames it, so that nobody reads half a file. They
    write the same: training the tokenizer draws no random numbers.
    """
    try:
        return read(file.read_bytes())
    except OSError:  # there is none, or writing it explains why not
        pass
    except Exception as error:  # each format has exceptions of its own
        warn(f"{file} cannot be read ({error}); it is made anew.")
    made = make()
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(write(made))
        draft.replace(file)
    except OSError as error:
        warn(
            f"text-python could not write {file} ({error}), so the next run makes it again: give cache_dir= a folder that "
            "can be written to."
        )
        if draft.exists():
            draft.unlink()
    return made


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "text-python needs tokenizers, which is not installed. It comes with transformers. Type: pip install "
            "transformers.",
            name=error.name,
        ) from error
    return tokenizers
