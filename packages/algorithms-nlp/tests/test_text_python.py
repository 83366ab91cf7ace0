"""text-python: the standard library as tokens, compared with its files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import textwrap
import tokenize
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hocket.plugins import registry
from hocket_nlp import python_corpus, python_tokenizer, text_python
from hocket_nlp.datasets import TokenRows
from hocket_testkit.imports import import_in_fresh_process

SMALL = 400_000
VOCABULARY = 300
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small(cache: Path):
    """`text_python` of a small corpus."""

    def made(split="train", batch_size=16, seed=0, **arguments):
        return text_python(
            split, batch_size, seed, vocab_size=VOCABULARY, max_bytes=SMALL, cache_dir=cache, **arguments
        )

    return made


@pytest.fixture
def forgetful():
    """Empty the caches in memory, before and after."""
    kept = (python_corpus.sources, python_corpus.tokenizer, python_corpus.tokens)
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.fixture(scope="module")
def tokenizer(cache: Path):
    return python_tokenizer(VOCABULARY, max_bytes=SMALL, cache_dir=cache)


def files(split: str, size: int = SMALL) -> list[str]:
    return [each.path for each in python_corpus.sources(size) if each.split == split]


def written(path: str) -> str:
    """The text of a file, read as Python's own tools do."""
    with tokenize.open(LIBRARY / path) as file:
        return file.read()


# --- the texts


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_tokens_are_the_files_of_the_split_each_with_a_separator_after_it(split, small, tokenizer):
    corpus = small(split).dataset.corpus
    texts = [text for path in sorted(files(split)) if (text := written(path))]
    assert tokenizer.decode(corpus.ids) == "".join(text + "<|endoftext|>" for text in texts)
    ends = corpus.lengths.cumsum(0) - 1
    assert (corpus.ids == 0).nonzero().flatten().tolist() == ends.tolist()
    assert corpus.files == len(texts) and corpus.tokens == len(corpus.ids) == ends[-1] + 1
    assert corpus.characters == sum(map(len, texts)) and corpus.bytes == sum(len(text.encode()) for text in texts)
    assert corpus.python == ".".join(map(str, sys.version_info[:3]))
    assert corpus.tokens < corpus.bytes / 1.3, "tokens longer than a byte are used"


def test_a_file_is_in_one_split_and_in_the_same_for_every_size():
    small, large = ({split: set(files(split, size)) for split in ("train", "test")} for size in (SMALL, 3_000_000))
    assert small["train"] < large["train"] and small["test"] < large["test"]
    assert not large["train"] & large["test"]
    share = len(large["test"]) / len(large["train"] | large["test"])
    assert 0.04 < share < 0.2
    for size, chosen in ((SMALL, small), (3_000_000, large)):
        total = sum((LIBRARY / path).stat().st_size for path in chosen["train"] | chosen["test"])
        assert 0.5 * size < total <= size


def test_known_files_are_in_the_split_that_the_hash_of_their_path_says():
    """Written down, so that a change of the split is noticed: numbers before and after it do not compare."""
    split = {each.path: each.split for each in python_corpus.sources(10**9)}
    expected = {
        "argparse.py": "train", "asyncio/tasks.py": "train", "ast.py": "test", "traceback.py": "test",
    }  # fmt: skip
    assert expected.items() <= split.items()


def test_tests_generated_tables_and_what_depends_on_the_installation_are_left_out():
    parts = {part for each in python_corpus.sources(10**9) for part in each.path.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "encodings", "pydoc_data", "tkinter", "distutils"}
    assert not [part for part in parts if part.startswith(("_sysconfigdata", "config-"))]


def test_docstrings_are_those_of_module_classes_and_functions_in_order():
    source = '''
    """Module."""
    def f():
        """First.

            Indented.
        Not.
        """
        async def inner():
            "Inner."
    class C:
        """Class with \\d."""
        def method(self): return "not one"
    '''
    expected = "Module.\n\nFirst.\n\n    Indented.\nNot.\n\nInner.\n\nClass with \\d.\n\n"
    assert python_corpus.docstrings(textwrap.dedent(source)) == expected
    assert python_corpus.docstrings("x = 1") == ""


def test_docs_are_the_docstrings_of_the_same_files_in_the_tokens_of_the_same_tokenizer(small, tokenizer):
    code, docs = (small("test", kind=kind).dataset.corpus for kind in ("code", "docs"))
    texts = [text for path in files("test") if (text := python_corpus.docstrings(written(path)))]
    assert tokenizer.decode(docs.ids) == "".join(text + "<|endoftext|>" for text in texts)
    assert 0 < docs.tokens < code.tokens / 2


# --- the tokenizer


@given(text=st.text())
def test_decoding_restores_every_text(text, tokenizer):
    if "<|endoftext|>" not in text:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_is_one_of_transformers_with_the_separator_as_special_token(tokenizer):
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    padded = tokenizer(["def", "def f(x): return x"], padding=True, return_tensors="pt")
    assert padded["attention_mask"][0].sum() < padded["attention_mask"].shape[1]
    assert tokenizer.batch_decode(padded["input_ids"], skip_special_tokens=True) == ["def", "def f(x): return x"]


def test_the_tokenizer_has_not_seen_the_test_files(small, tokenizer, monkeypatch, tmp_path, forgetful):
    """With other test files it is the same."""
    others = tuple(
        each if each.split == "train" else each._replace(content=b"qqqq zzzz " * 10_000)
        for each in python_corpus.sources(SMALL)
    )
    monkeypatch.setattr(python_corpus, "sources", lambda max_bytes: others)
    python_corpus.tokenizer.cache_clear()
    again = python_tokenizer(VOCABULARY, max_bytes=SMALL, cache_dir=tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()


# --- the sequences


@pytest.mark.parametrize("length", [2, 3, 50, 128, 256, 512])
def test_every_token_but_the_first_is_predicted_once_whatever_the_length(length, small):
    dataset = small("test", length=length).dataset
    predicted = []
    for index in range(len(dataset)):
        row = dataset[index]
        assert row["input_ids"].shape == row["labels"].shape == (length,)
        kept = row["labels"] != -100
        assert row["labels"][kept].equal(row["input_ids"][kept]) and not row["input_ids"][~kept].any()
        assert kept.tolist() == sorted(kept.tolist(), reverse=True), "padding is on the right"
        assert index == len(dataset) - 1 or kept.all(), "only the last sequence is padded"
        predicted.append(row["labels"][1:][kept[1:]])
    assert torch.cat(predicted).equal(dataset.corpus.ids[1:].long())


def test_sequences_of_documents_do_not_cross_them_and_predict_every_token_but_their_first(small):
    dataset = small("test", length=64, documents=True).dataset
    rows = [dataset[index] for index in range(len(dataset))]
    predicted = []
    for row in rows:
        kept = row["attention_mask"].bool()
        assert row["attention_mask"].dtype == torch.long and (row["labels"] != -100).equal(kept)
        assert row["input_ids"][kept].equal(row["labels"][kept]) and not row["input_ids"][~kept].any()
        inside = row["input_ids"][kept]
        assert inside[:-1].all(), "a separator is the last token"
        predicted.append(inside[1:])
    firsts = {0, *dataset.corpus.lengths.cumsum(0).tolist()}
    expected = [token for at, token in enumerate(dataset.corpus.ids.tolist()) if at not in firsts]
    assert torch.cat(predicted).tolist() == expected
    assert any(not row["attention_mask"].all() for row in rows)


def test_a_text_that_ends_with_a_sequence_has_no_further_one():
    ids = torch.arange(1, 8, dtype=torch.int32)
    corpus = python_corpus.Tokens(ids, torch.tensor([4, 3]), 0, 0, "")

    def rows(*arguments) -> list[list[int]]:
        dataset = TokenRows(corpus, *arguments)
        return [dataset[index]["labels"].tolist() for index in range(len(dataset))]

    assert rows(4) == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert rows(3) == [[1, 2, 3], [3, 4, 5], [5, 6, 7]]
    assert rows(5) == [[1, 2, 3, 4, 5], [5, 6, 7, -100, -100]]
    assert rows(4, True) == [[1, 2, 3, 4], [5, 6, 7, -100]]
    assert rows(3, True) == [[1, 2, 3], [3, 4, -100], [5, 6, 7]]


def test_batches_are_dicts_of_int64(small):
    batch = next(iter(small(batch_size=5, length=32)))
    assert set(batch) == {"input_ids", "labels"}
    assert {(tensor.dtype, tuple(tensor.shape)) for tensor in batch.values()} == {(torch.int64, (5, 32))}
    batch = next(iter(small(batch_size=5, length=32, documents=True)))
    assert set(batch) == {"input_ids", "labels", "attention_mask"}


def test_the_seed_orders_the_training_sequences_and_leaves_the_test_in_order(small):
    def order(split: str, seed: int) -> torch.Tensor:
        return torch.cat([batch["input_ids"] for batch in small(split, seed=seed, length=64)])

    first, again, other = (order("train", seed) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, other.tolist()))
    dataset = small("test", length=64).dataset
    assert order("test", 1).equal(torch.stack([dataset[index]["input_ids"] for index in range(len(dataset))]))
    loader = small("train", length=64, drop_last=True)
    assert len(loader) == len(loader.dataset) // 16


def test_workers_load_the_same(small):
    alone, several = (list(small("test", length=128, num_workers=workers)) for workers in (0, 1))
    assert all(one["input_ids"].equal(other["input_ids"]) for one, other in zip(alone, several, strict=True))


# --- the cache

DIGEST = f"""
import hashlib, sys
from hocket_nlp import text_python
digest = hashlib.sha256()
for kind in ("code", "docs"):
    loader = text_python(vocab_size={VOCABULARY}, max_bytes={SMALL}, kind=kind, cache_dir=sys.argv[1])
    digest.update(loader.dataset.corpus.ids.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.long
def test_processes_agree_and_may_share_a_folder(tmp_path, small, cache):
    """Ranks on several machines have no common folder: each trains the tokenizer, with the same result."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST, str(tmp_path)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(seed)},
        )
        for seed in (1, 4)
    ]  # fmt: skip
    here = hashlib.sha256()
    for kind in ("code", "docs"):
        here.update(small(kind=kind).dataset.corpus.ids.numpy().tobytes())
    assert {process.communicate(timeout=120)[0].strip() for process in started} == {here.hexdigest()}
    names = {each.name for each in tmp_path.iterdir()}
    assert len(names) == 3 and names <= {each.name for each in cache.iterdir()}, "no drafts are left"


def test_the_second_time_everything_is_read(small, cache, monkeypatch, forgetful):
    ids = small().dataset.corpus.ids
    python_corpus.tokens.cache_clear()
    python_corpus.tokenizer.cache_clear()
    monkeypatch.setattr(python_corpus, "_train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(python_corpus, "_encode", lambda *_: pytest.fail("encoded again"))
    assert small().dataset.corpus.ids.equal(ids)


@pytest.mark.parametrize("change", ["source", "vocab_size", "tokenizers", "python", "format"])
def test_another_source_or_version_has_other_files(change, monkeypatch):
    before = python_corpus._key(VOCABULARY, SMALL)
    assert python_corpus._key(VOCABULARY, SMALL) == before
    changed = VOCABULARY
    if change == "source":
        first, *rest = python_corpus.sources(SMALL)
        edited = (first._replace(content=first.content + b"#"), *rest)
        monkeypatch.setattr(python_corpus, "sources", lambda max_bytes: edited)
    elif change == "vocab_size":
        changed += 1
    elif change == "tokenizers":
        monkeypatch.setattr("tokenizers.__version__", "0.0")
    elif change == "python":
        monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    else:
        monkeypatch.setattr(python_corpus, "_FORMAT", "0")
    assert python_corpus._key(changed, SMALL) != before


def test_a_damaged_file_is_made_anew(tmp_path, forgetful):
    arguments = {"vocab_size": VOCABULARY, "max_bytes": SMALL, "cache_dir": tmp_path}
    ids = text_python("test", **arguments).dataset.corpus.ids
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    python_corpus.tokens.cache_clear()
    python_corpus.tokenizer.cache_clear()
    with pytest.warns(UserWarning, match="cannot be read .* made anew"):
        assert text_python("test", **arguments).dataset.corpus.ids.equal(ids)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, forgetful):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not write .*cache_dir="):
        loader = text_python("test", vocab_size=VOCABULARY, max_bytes=SMALL, cache_dir=tmp_path / "file" / "folder")
    assert loader.dataset.corpus.tokens


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert python_corpus.cache_folder() == tmp_path / "hocket" / "text-python"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert python_corpus.cache_folder() == Path.home() / ".cache" / "hocket" / "text-python"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert python_corpus.cache_folder() == Path.home() / "Library" / "Caches" / "hocket" / "text-python"


# --- errors


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"split": "validation"}, "split must be 'train' or 'test', but is 'validation'"),
        ({"kind": "text"}, "kind must be 'code' or 'docs', but is 'text'"),
        ({"length": 1}, "length is 1.*give 2 or more"),
        ({"vocab_size": 256}, "vocab_size is 256.*257 tokens: give more"),
        ({"max_bytes": 0}, "max_bytes=0 leaves no file for test and train"),
        ({"max_bytes": -1}, "max_bytes=-1 leaves no file"),
    ],
)
def test_what_cannot_be_is_named(arguments, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        text_python(cache_dir=tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_python_without_sources_is_named(monkeypatch, tmp_path, forgetful):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="holds none: this Python was installed without them"):
        text_python(cache_dir=tmp_path)


def test_without_tokenizers_the_error_says_what_to_type(monkeypatch, tmp_path, forgetful):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install transformers"):
        text_python(cache_dir=tmp_path)


# --- the plug-in


def test_the_plug_in_is_the_function():
    assert registry.get("datasets", "text-python") is text_python


def test_neither_tokenizers_nor_transformers_is_imported_for_the_name():
    imported = import_in_fresh_process(text_python.__module__)
    assert "hocket_nlp" in imported.packages and not imported.packages & {"tokenizers", "transformers"}
