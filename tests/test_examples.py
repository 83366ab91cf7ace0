"""The examples in docstrings: every public name that users call has one, and each runs as it stands, with nothing imported."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hocket.data import adapters
from hocket.plugins import registry

PACKAGES = Path(__file__).parents[1] / "packages"
#: Examples of a module that need an optional library, which is not imported to find out.
NEEDS = {
    "hocket_general.schedule_free": "schedulefree",
    "hocket_general.soap_optimizer": "pytorch_optimizer",
    "hocket_loggers.tensorboard": "tensorboard",
    "hocket_migration.composer.models.huggingface": "transformers",
    "hocket_migration.composer.models.tasks": "torchmetrics",
    "hocket_migration.composer.trainer": "torchmetrics",
    "hocket_migration.lightning.task": "lightning",
    "hocket_migration.lightning.trainer": "lightning",
    "hocket_migration.transformers.arguments": "transformers",
    "hocket_migration.transformers.trainer": "transformers",
    "hocket_nlp.alibi": "transformers",
    "hocket_nlp.datasets": "transformers",
    "hocket_nlp.huggingface": "transformers",
    "hocket_nlp.gated_linear_units": "transformers",
    "hocket_nlp.qk_norm": "transformers",
    "hocket_nlp.rope_scaling": "transformers",
    "hocket_nlp.seq_length_warmup": "transformers",
    "hocket_nlp.fused_cross_entropy": "transformers",
    "hocket_nlp.packing": "transformers",
    "hocket_report.callback": "vl_convert",
    "hocket_report.page": "vl_convert",
    "hocket_strategies.precisions.fp8": "torchao",
    "hocket_strategies.precisions.int8": "torchao",
    "hocket_vision.datasets": "sklearn",
}
#: Modules whose ``__all__`` users call, and the one without.
MODULES = (
    "hocket", "hocket.plugins", "hocket.data", "hocket_checkpoints", "hocket.surgery", "hocket.schedules", "hocket_testkit",
    "hocket_general", "hocket_general.functional", "hocket_vision", "hocket_vision.functional", "hocket_nlp",
    "hocket_nlp.functional", "hocket_strategies", "hocket_loggers", "hocket_report",
)  # fmt: skip
#: Kinds of plug-ins that users name, and may also import.
KINDS = ("algorithms", "callbacks", "loggers", "strategies", "precisions", "devices", "schedules", "datasets", "shards")
#: The others, with reasons.
WITHOUT = {
    "hocket.data.Position": "a name for a type, dict[str, Any]",
    "hocket.hookimpl": "an instance of pluggy's class, which has no docstring here; the example of hocket.Callback uses it",
}


class Example(NamedTuple):
    """A docstring with an example."""

    module: str
    name: str
    text: str
    file: str
    line: int


def _examples() -> Iterator[Example]:
    for source in sorted(PACKAGES.glob("*/src/*")):
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for name, node in _documented(ast.parse(file.read_text(encoding="utf-8")), module):
                text = ast.get_docstring(node)
                if text and ">>>" in text:
                    yield Example(module, name, text, str(file), node.body[0].lineno - 1)


def _documented(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, node
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            yield from _documented(inner, f"{name}.{inner.name}")


EXAMPLES = list(_examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=[each.name for each in EXAMPLES])
def test_example_runs(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    if library := NEEDS.get(example.module):
        pytest.importorskip(library, reason=f"{library} is not installed, which {example.module} is about")
    monkeypatch.setattr(adapters, "_FURTHER", list(adapters._FURTHER))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    test = doctest.DocTestParser().get_doctest(
        example.text, {"__name__": "__main__"}, example.name, example.file, example.line
    )
    printed: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert results.attempted
    if results.failed:
        pytest.fail("".join(printed), pytrace=False)


def _called() -> dict[str, Any]:
    """What users call, by the name that they import it under."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", [each for each in own if each[0] != "_"]):
            found[f"{module.__name__}.{name}"] = getattr(module, name)
    for kind in KINDS:
        for entry in registry.entries(kind):
            if entry.dist.startswith("hocket"):
                found[f"{kind}: {entry.name}"] = entry.load()
    return {name: value for name, value in found.items() if callable(value) and not _is_raised(value)}


def _is_raised(value: Any) -> bool:
    """Whether this is an exception or a warning: users catch them and do not call them."""
    return inspect.isclass(value) and issubclass(value, BaseException)


def test_what_users_call_has_an_example() -> None:
    with_one = {each.name for each in EXAMPLES}
    without = {
        name
        for name, value in _called().items()
        if f"{value.__module__}.{getattr(value, '__qualname__', '')}" not in with_one
    }
    assert without == WITHOUT.keys(), "Add an `Example:` at the end of the docstring."
