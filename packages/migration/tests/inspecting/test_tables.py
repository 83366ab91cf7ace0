"""The tables are complete: every argument, hook and public member of the frameworks has an entry."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

from hocket.plugins.building import build
from hocket_migration.inspecting.tables import sources


def _public(cls: type, but: type = object) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_") and not hasattr(but, name)}


def _arguments(function: object) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}  # type: ignore[arg-type]


def test_every_entry_says_something():
    for source in sources().values():
        tables = [source.symbols]
        for kind in source.kinds.values():
            tables += [kind.arguments, kind.members, *kind.keywords.values()]
            assert set(kind.returns.values()) <= set(source.kinds), kind.name
            assert set(kind.symbols) <= set(source.symbols), kind.name
        for table in tables:
            assert all(entry.text and entry.text == entry.text.strip() for entry in table.values())


def test_schedules_and_optimizers_that_are_named_can_be_made():
    texts = [
        entry.text
        for source in sources().values()
        for table in (source.symbols, *(t for k in source.kinds.values() for t in (k.arguments, k.members)))
        for entry in table.values()
    ]
    found = {
        kind: {each for text in texts for each in re.findall(f"{kind.removesuffix('s')}='([^'…]+)'", text)}
        for kind in ("schedules", "optimizers")
    }
    assert min(map(len, found.values())) > 3
    mappings = {each for text in texts for each in re.findall(r"schedule=(\{[^…]+\})", text)}
    for each in (*sorted(found["schedules"]), *map(ast.literal_eval, sorted(mappings))):
        assert build("schedules", each).obj is not None
    for each in sorted(found["optimizers"]):
        assert build("optimizers", each, list(torch.nn.Linear(2, 2).parameters())).obj is not None


def test_lightning():
    lightning = pytest.importorskip("lightning")
    torch = pytest.importorskip("torch")
    from lightning.pytorch import callbacks, loggers, plugins, profilers, strategies, utilities

    source = sources()["lightning"]
    kinds = source.kinds
    assert _arguments(lightning.Trainer.__init__) == set(kinds["Trainer"].arguments)
    assert _public(lightning.Trainer) <= set(kinds["Trainer"].members)
    for method in ("fit", "validate", "test", "predict", "save_checkpoint"):
        assert _arguments(getattr(lightning.Trainer, method)) == set(kinds["Trainer"].keywords[method]), method
    assert _public(lightning.LightningModule, torch.nn.Module) <= set(kinds["LightningModule"].members)
    assert _arguments(lightning.LightningModule.log) == set(kinds["LightningModule"].keywords["log"])
    assert _arguments(lightning.LightningModule.log_dict) == set(kinds["LightningModule"].keywords["log_dict"])
    assert _public(lightning.LightningDataModule) <= set(kinds["LightningDataModule"].members)
    assert _public(lightning.Callback) <= set(kinds["Callback"].members)
    assert _arguments(callbacks.BackboneFinetuning.__init__) == set(kinds["BackboneFinetuning"].arguments)
    assert _arguments(lightning.Fabric.__init__) == set(kinds["Fabric"].arguments)
    assert _public(lightning.Fabric) <= set(kinds["Fabric"].members)
    for module in (lightning, callbacks, loggers, plugins, profilers, strategies, utilities):
        assert {name for name in module.__all__ if name[0] != "_"} <= set(source.symbols), module.__name__


def test_transformers():
    transformers = pytest.importorskip("transformers")
    source = sources()["transformers"]
    kinds = source.kinds
    fields = {each.name for each in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert fields <= set(kinds["TrainingArguments"].arguments)
    for name in (
        set(kinds["TrainingArguments"].arguments) - fields
    ):  # names of transformers 4, and what to write instead
        text = kinds["TrainingArguments"].arguments[name].text
        assert "transformers 5" in text and set(re.findall(r"(\w+)=", text)) <= fields, name
    assert "tokenizer" not in _arguments(transformers.Trainer.__init__)
    assert _public(transformers.TrainingArguments) <= set(kinds["TrainingArguments"].members)
    assert _arguments(transformers.Trainer.__init__) <= set(kinds["Trainer"].arguments)
    assert _public(transformers.Trainer) <= set(kinds["Trainer"].members)
    assert _public(transformers.TrainerCallback) <= set(kinds["TrainerCallback"].members)
    for name in ("TrainerState", "TrainerControl"):
        fields = {each.name for each in dataclasses.fields(getattr(transformers, name))}
        assert fields <= set(kinds[name].members)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    kind = sources()["accelerate"].kinds["Accelerator"]
    assert _arguments(accelerate.Accelerator.__init__) == set(kind.arguments)
    made = accelerate.Accelerator(cpu=True)
    assert {name for name in dir(made) if not name.startswith("_")} <= set(kind.members)


def test_composer():
    """Composer cannot be installed beside current torch; these are the arguments of its Trainer, version 0.32."""
    arguments = Path(__file__).with_name("composer_trainer.txt").read_text().split()
    assert len(arguments) == 54
    earlier = {"fsdp_config"}  # of earlier versions, and still taken
    assert set(arguments) | earlier == set(sources()["composer"].kinds["Trainer"].arguments)


def test_names_of_hocket_in_the_tables_exist():
    """What an entry tells to write can be written: arguments of the Trainer and names of plug-ins."""
    for package in ("general", "vision", "nlp", "loggers", "strategies"):
        pytest.importorskip(f"hocket_{package}")
    import hocket
    from hocket.plugins import registry

    known = set(inspect.signature(hocket.Trainer.__init__).parameters)
    plugins = {
        group: {each.name for each in registry.entries(group)} for group in ("algorithms", "callbacks", "loggers")
    }
    entries = [
        entry.text
        for source in sources().values()
        for table in (source.symbols, *(kind.arguments for kind in source.kinds.values()))
        for entry in table.values()
    ]
    for text in entries:
        for argument, names in re.findall(r"\b(algorithms|callbacks|loggers)=\[([^\]]*)\]", text):
            for name in re.findall(r"'([a-z0-9-]+)'", names.partition("{")[0]):
                assert name in plugins[argument], text
        for argument in re.findall(r"hocket\.Trainer\((\w+)=", text):
            assert argument in known, text
