"""Tokens of documents: bytes, or a tokenizer of the library ``tokenizers`` that is stored in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hocket.errors import MissingFile, WrongValue
from hocket_streaming.formats.common import missing
from hocket_streaming.writing.columns import plain

#: Columns that are tried for the text of a document, in this order.
_TEXT = ("text", "content", "bytes")
#: Names of end-of-text tokens, in the order in which they are tried.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
#: The tokens of bytes: 0 to 255, and the end of a text.
_BYTES = 256


class Tokenizing:
    """Turns samples into tokens, with an end-of-text token after each one.

    Args:
        column: of the text, or of tokens that are there already.
        tokenizer: "byte", a file of the library ``tokenizers``, or "" for tokens that are there already.
        dtype: of the tokens.
        end: the end-of-text token; None adds none.
    """

    def __init__(self, column: str, tokenizer: str, dtype: np.dtype[Any], end: int | None) -> None:
        self._column, self._file, self._end = column, tokenizer, end
        self.dtype = dtype
        self._loaded: Any = None
        #: What the index of the files says about the tokens.
        self.about = {"tokenizer": tokenizer, "end_of_text": end}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    def __call__(self, sample: Mapping[str, Any]) -> bytes:
        """Return the tokens of a sample as little-endian bytes."""
        if self._column not in sample:
            raise WrongValue(f"A sample has no column {self._column!r}, but {', '.join(map(repr, sample))}.")
        value = sample[self._column]
        if not self._file:
            tokens = np.asarray(value)
            if tokens.dtype.kind not in "iu" or bool((tokens.astype(self.dtype) != tokens).any()):
                raise WrongValue(
                    f"Column {self._column!r} has tokens of {self.dtype.name} in the first sample, and {tokens.dtype.name} "
                    "that do not fit in a later one. Yield arrays of one dtype."
                )
            return tokens.astype(self.dtype).tobytes()
        if self._file == "byte":
            tokens = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
        else:
            self._loaded = self._loaded or _loaded(self._file)
            tokens = self._loaded.encode(self._text(value), add_special_tokens=False).ids
        return np.append(np.asarray(tokens, self.dtype), np.asarray([self._end], self.dtype)).tobytes()

    def _text(self, value: str | bytes) -> str:
        try:
            return value if isinstance(value, str) else value.decode()
        except UnicodeDecodeError as error:
            raise WrongValue(
                f"Column {self._column!r} has bytes that are not text in UTF-8: {error}. Convert them, or use tokenizer 'byte'."
            ) from None


def tokenizing(first: Sequence[Any], tokenizer: str) -> Tokenizing:
    """Return what turns samples like these into tokens."""
    sample = plain(first[0])
    if not tokenizer:
        arrays = [name for name, value in sample.items() if getattr(value, "dtype", np.dtype("O")).kind in "iu"]
        if len(arrays) != 1:
            raise WrongValue(
                "format='tokens' needs a tokenizer for texts. Write «tokenizer='tokenizer.json'¦--tokenizer tokenizer.json», "
                "a file of the library tokenizers, or «tokenizer='byte'¦--tokenizer byte»."
            )
        return Tokenizing(arrays[0], "", sample[arrays[0]].dtype, None)
    texts = [name for name, value in sample.items() if isinstance(value, str | bytes)]
    column = next((name for name in _TEXT if name in texts), texts[0] if len(texts) == 1 else "")
    if not column:
        raise WrongValue(
            f"The samples have the columns {', '.join(map(repr, sample))}, and none of them is 'text'. Yield "
            "{'text': …} from a function, and give it as module:function."
        )
    if tokenizer == "byte":
        return Tokenizing(column, tokenizer, np.dtype("<u2"), _BYTES)
    loaded = _loaded(tokenizer)
    end = next((number for name in END_OF_TEXT if (number := loaded.token_to_id(name)) is not None), None)
    if end is None:
        raise WrongValue(
            f"The tokenizer {tokenizer} has no end-of-text token: none of {', '.join(END_OF_TEXT)}. Add one of them to it."
        )
    size = loaded.get_vocab_size(with_added_tokens=True)
    return Tokenizing(column, os.path.abspath(tokenizer), np.dtype("<u2" if size <= 1 << 16 else "<u4"), end)


def _loaded(file: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # documents are divided among processes
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise missing("A tokenizer needs tokenizers", "pip install tokenizers") from None
    if not os.path.isfile(file):
        raise MissingFile(
            f"There is no tokenizer {file!r}. Give a tokenizer.json of the library tokenizers, or 'byte'."
        )
    return Tokenizer.from_file(file)
