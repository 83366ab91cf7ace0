"""Real text that needs no download: the sources and docstrings of Python's standard library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hocket.errors import WrongValue
from hocket_nlp import python_corpus
from hocket_nlp.python_corpus import SEPARATOR, Kind, Split, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Labels that losses ignore.
IGNORED = -100


def text_python(
    split: Split = "train",
    batch_size: int = 32,
    seed: int = 0,
    *,
    length: int = 128,
    kind: Kind = "code",
    documents: bool = False,
    vocab_size: int = 1024,
    max_bytes: int = 6_000_000,
    cache_dir: str | os.PathLike[str] | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> DataLoader[dict[str, Tensor]]:
    """Return the running Python's standard library as sequences of tokens for a language model.

    Every file is one document, which a separator token (id 0) ends. A tenth of the files are held out, by a hash of their
    paths. Consecutive sequences overlap by one token, because the first token of a sequence is not predicted. So the model
    predicts every token of the text but the first once, whatever ``length`` is, and perplexities of different lengths are
    about the same text. The tokenizer is that of :func:`python_tokenizer`; tokens are cached beside it.

    Numbers depend on the version of Python. ``loader.dataset.corpus`` says what was read:
    `hocket_nlp.python_corpus.Tokens` with ``files``, ``bytes``, ``characters``, ``tokens`` and ``python``.

    Args:
        split: ``"train"`` (shuffled) or ``"test"`` (in order), the same files for every seed, size and version of Python.
        batch_size: sequences per batch.
        seed: seed of the shuffled order of ``"train"``.
        length: tokens in a sequence, at least 2.
        kind: ``"code"`` for complete sources, or ``"docs"`` for their docstrings. Both have the same tokenizer, and the same
            files in each split.
        documents: whether each sequence is from one document. Shorter sequences are then padded, with an
            ``attention_mask``. Otherwise documents follow each other without gaps, and only the last sequence is padded.
        vocab_size: number of tokens of the tokenizer, at least 257.
        max_bytes: upper limit on the size of the files of both splits. Tests, generated tables, and packages that some
            distributions of Python omit are never read; the rest is about 8 MB.
        cache_dir: folder for tokenizer and tokens; None for ``hocket/text-python`` in the user's cache. Several processes may
            share it.
        num_workers: number of loading processes; see :class:`torch.utils.data.DataLoader`.
        drop_last: whether to drop an incomplete last batch.

    Returns:
        A loader of dicts of int64 tensors ``(B, length)``: ``input_ids``; ``labels``, the same with -100 for padding, which
        the model or its task shifts by one; and with ``documents`` the ``attention_mask``, 1 for tokens and 0 for padding.
        Padding is the separator, on the right.

    Raises:
        ModuleNotFoundError: if tokenizers is not installed.
        FileNotFoundError: if this Python has no sources.
        ValueError: for an unknown split or kind, or a ``length``, ``vocab_size`` or ``max_bytes`` that is too small.

    Example:
        >>> from hocket_nlp import text_python
        >>> batch = next(iter(text_python("test", batch_size=8, length=64, max_bytes=500_000)))
        >>> {name: tuple(tensor.shape) for name, tensor in batch.items()}
        {'input_ids': (8, 64), 'labels': (8, 64)}
    """
    if split not in get_args(Split):
        raise WrongValue(f"split must be 'train' or 'test', but is {split!r}.")
    if kind not in get_args(Kind):
        raise WrongValue(f"kind must be 'code' or 'docs', but is {kind!r}.")
    if length < 2:
        raise WrongValue(f"length is {length}, and a sequence of one token has no next one: give 2 or more.")
    folder = python_corpus.cache_folder() if cache_dir is None else Path(cache_dir)
    return DataLoader(
        TokenRows(python_corpus.tokens(split, kind, vocab_size, max_bytes, folder), length, documents),
        batch_size=batch_size,
        shuffle=split == "train",
        num_workers=num_workers,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(seed),
    )


def python_tokenizer(
    vocab_size: int = 1024, *, max_bytes: int = 6_000_000, cache_dir: str | os.PathLike[str] | None = None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of :func:`text_python` with the same arguments, as a tokenizer of transformers.

    It is a byte-level BPE (Sennrich, Haddow and Birch 2016, arXiv 1508.07909; on bytes as in GPT-2), trained on the sources of
    the train split. Decoding restores every text exactly. ``<|endoftext|>``, id 0, ends documents and pads.

    Args:
        vocab_size: number of tokens, at least 257.
        max_bytes: as for :func:`text_python`; it decides which files the tokenizer is trained on.
        cache_dir: folder for the tokenizer; None for ``hocket/text-python`` in the user's cache.

    Raises:
        ModuleNotFoundError: if transformers is not installed.
        FileNotFoundError: if this Python has no sources.
        ValueError: for a ``vocab_size`` or ``max_bytes`` that is too small.

    Example:
        >>> from hocket_nlp import python_tokenizer
        >>> tokenizer = python_tokenizer(512, max_bytes=500_000)
        >>> tokenizer.decode(tokenizer("def f(x): return x")["input_ids"])
        'def f(x): return x'
    """
    folder = python_corpus.cache_folder() if cache_dir is None else Path(cache_dir)
    trained = python_corpus.tokenizer(vocab_size, max_bytes, folder)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        clean_up_tokenization_spaces=False,
    )


class TokenRows(Dataset[dict[str, Tensor]]):
    """Sequences of ``length`` tokens, each of which begins with the last token of the one before.

    Args:
        corpus: the tokens.
        length: tokens in a sequence.
        documents: whether each sequence is from one document, with an attention mask.
    """

    def __init__(self, corpus: Tokens, length: int, documents: bool = False) -> None:
        self.corpus, self.length, self.documents = corpus, length, documents
        ends = corpus.lengths.cumsum(0).tolist() if documents else [corpus.tokens]
        self.bounds = [
            (start, min(start + length, end))
            for begin, end in zip([0, *ends], ends, strict=False)
            for start in range(begin, end - 1, length - 1)
        ]

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, stop = self.bounds[index]
        row = torch.zeros(self.length, dtype=torch.long)  # the separator
        row[: stop - start] = self.corpus.ids[start:stop]
        labels = row.clone()
        labels[stop - start :] = IGNORED
        found = {"input_ids": row, "labels": labels}
        if self.documents:
            found["attention_mask"] = (labels != IGNORED).long()
        return found
