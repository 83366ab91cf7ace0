"""Parts of the state are written by their owners alone: by reading the sources, and by trying as a plug-in would."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket

#: Adapters of other frameworks: their own states have attributes of the same names, and they continue those checkpoints.
VIEWS = "migration/"
SOURCES = Path(__file__).parent.parent / "packages"
CORE = SOURCES / "core/src/hocket"
#: The part, and the modules that write its attributes.
OWNERS = {
    "step": {
        "state/state.py", "loop/actions.py", "loop/weighing.py", "loop/steps.py", "loop/task_steps.py",
        "loop/manual_steps.py", "loop/requested_steps.py", "loop/loss_functions.py", "loop/inferred_weights.py",
        "loop/fit.py", "loop/evaluate.py", "loop/predict.py", "loop/accumulation.py",
        "checkpoints/src/hocket_checkpoints/components/step.py", "algorithms-general/src/hocket_general/auto_microbatch.py",
        "algorithms-general/src/hocket_general/swa.py",  # in a step of its own
        "tools/src/hocket_tools/judging/judgement.py", "tools/src/hocket_tools/judging/recording.py",  # as evaluations do
        "tools/src/hocket_tools/tuning/batch_size_finder.py",  # while it tries
    },
    "progress": {
        "loop/fit.py", "loop/fit_duration.py", "run/data.py", "run/assembly.py",
        "checkpoints/src/hocket_checkpoints/components/data.py",
        "tools/src/hocket_tools/tuning/trial.py",  # until it has restored everything
    },
    "timestamp": {"state/progress.py"},
    "previous": {"state/progress.py"},
    "requests": set(),
    "generators": set(),
    "borrowed": set(),
    "identity": {
        "checkpoints/src/hocket_checkpoints/resuming.py", "cli/src/hocket_cli/config.py",
        "cli/src/hocket_cli/train.py",  # with what an earlier part of the run had
        "tools/src/hocket_tools/run_source.py",  # with the name of the run whose weights these are
        "run/summary.py",  # the checkpoint that it resumed from is shown once
    },
    "optimization": {
        "run/assembly.py", "loop/fit.py", "loop/manual_steps.py",  # while it clips
        "strategies/src/hocket_strategies/custom_loops/loop_steps.py",
        "insight/src/hocket_insight/memory/rehearsal.py",
        "tools/src/hocket_tools/tuning/trial.py",  # until it has restored everything
    },
    "values": {
        "state/scalars.py", "loop/evaluate.py",
        "algorithms-general/src/hocket_general/auto_microbatch.py",  # while it tries
    },
}  # fmt: skip


#: What the state itself holds, and the modules besides its own that assign it.
ASSIGNED = {
    "run/trainer.py": {"content", "exception"},
    "run/assembly.py": {"task", "prepared", "overwrites"},
    "loop/evaluate.py": {"eval_label"},
    "loop/steps.py": {"step"},
    "loop/manual_steps.py": {"step"},
    "strategies/src/hocket_strategies/custom_loops/loop_steps.py": {"prepared", "overwrites"},
    "algorithms-general/src/hocket_general/auto_microbatch.py": {"prepared"},  # while it tries
    "loop/accumulation.py": {"microbatch"},  # of a window
    "strategies/src/hocket_strategies/deepspeed.py": {"microbatch"},  # as its configuration says
}  # fmt: skip
#: What algorithms and engines may assign, as the hooks say.
FREE = {"model", "batch", "outputs", "loss", "loss_parts", "gradient_norm", "replacements"}


def assigned(tree: ast.AST) -> Iterator[str]:
    """The attribute of each assignment like ``state.task = …`` or ``self.state.task = …``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            if (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in ("state", "_state"):
                yield node.attr


def test_everything_else_of_the_state_has_an_owner() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES.glob("*/src/**/*.py"):
        where = str(path.relative_to(CORE if path.is_relative_to(CORE) else SOURCES))
        if where.startswith(VIEWS):
            continue
        if names := set(assigned(ast.parse(path.read_text()))) - FREE:
            found[where] = names
    assert found == ASSIGNED


def written(tree: ast.AST) -> Iterator[str]:
    """The part of each assignment like ``….step.loss = …`` or ``step.loss = …``."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in (each for one in targets for each in ast.walk(one)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                owner = target.value
                yield owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")


def test_only_owners_write() -> None:
    found: dict[str, set[str]] = {part: set() for part in OWNERS}
    for path in SOURCES.glob("*/src/**/*.py"):
        where = str(path.relative_to(CORE if path.is_relative_to(CORE) else SOURCES))
        if where.startswith(VIEWS):
            continue
        for part in written(ast.parse(path.read_text())):
            if part in found:
                found[part].add(where)
    assert {part: modules - OWNERS[part] for part, modules in found.items()} == {part: set() for part in OWNERS}
    assert found["step"] >= {"loop/fit.py", "loop/actions.py"}  # it sees what there is


#: Private names of torch that checkpoints look at.
TORCHS = {
    "_schema", "_version", "_load_state_dict_pre_hooks", "_load_from_state_dict", "_modules", "_parameters", "_buffers",
    "_non_persistent_buffers_set", "_values", "_indices", "_nnz", "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
}  # fmt: skip


def test_checkpoints_and_the_trainer_read_no_private_field_of_others() -> None:
    found = []
    for path in [CORE / "run/trainer.py", *SOURCES.glob("checkpoints/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                found += [] if own or node.attr in TORCHS else [f"{path.name}: {ast.unparse(node)}"]
    assert found == []


#: Flat names of the state that read one of its parts.
READ = (
    "timestamp", "previous", "max_duration", "epoch_length", "batch_samples", "batch_tokens", "rank_samples", "optimizers",
    "eval_sets", "metrics", "clipping", "run",
)  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_plug_ins_can_read_but_not_write(name: str) -> None:
    class Writes(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            setattr(state, name, getattr(state, name))

    trainer = hocket.Trainer(
        model=nn.Linear(2, 1), loss=nn.functional.mse_loss, train_data=[(torch.ones(3, 2), torch.zeros(3, 1))], device="cpu",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), duration="1ep", callbacks=[Writes()],
    )  # fmt: skip
    with pytest.raises(AttributeError, match=f"'{name}' of 'State' object has no setter"):
        trainer.fit()


def test_the_state_has_few_attributes_of_its_own() -> None:
    trainer = hocket.Trainer(nn.Linear(2, 1), loss=nn.functional.mse_loss, device="cpu", duration="1ep")
    assert len(vars(trainer.state)) <= 24
