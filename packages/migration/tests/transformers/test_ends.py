"""Metrics that are computed batch by batch, and runs that are over, as with transformers' own Trainer."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments  # noqa: E402

from hocket_migration.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(count):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(64, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in made]


def trainer_of(kind, folder, compute=None, preprocess=None, callbacks=None, **given):
    transformers.set_seed(0)
    settings = {"use_cpu": True, "report_to": "none", "save_strategy": "no", **given}
    return kind(
        model=GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16)),
        train_dataset=rows(64), eval_dataset=rows(18), compute_metrics=compute, preprocess_logits_for_metrics=preprocess,
        callbacks=callbacks, args=TrainingArguments(output_dir=str(folder), **settings),
    )  # fmt: skip


class Rows:
    """Count rows, and see what it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, found, compute_result=False):
        inputs = None if found.inputs is None else sorted(found.inputs)
        losses = None if found.losses is None else found.losses.shape
        self.calls.append((found.predictions.shape, found.label_ids.shape, inputs, losses, compute_result))
        return {"rows": sum(call[1][0] for call in self.calls)} if compute_result else {}


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
@pytest.mark.parametrize("given", [{}, {"include_for_metrics": ["inputs", "loss"]}, {"eval_accumulation_steps": 1}])
@pytest.mark.parametrize("preprocess", [None, lambda logits, labels: logits.argmax(-1)])
def test_metrics_of_batches_are_those_of_transformers(verb, given, preprocess, tmp_path):
    found = []
    for kind in (Trainer, transformers.Trainer):
        trainer = trainer_of(kind, tmp_path, Rows(), preprocess, batch_eval_metrics=True, **given)
        if verb == "evaluate":
            metrics, shape = trainer.evaluate(), None
        else:
            output = trainer.predict(rows(18))
            metrics, shape = output.metrics, (output.predictions.shape, output.label_ids.shape)
        prefix = {"evaluate": "eval", "predict": "test"}[verb]
        found.append(
            (metrics[f"{prefix}_rows"], round(metrics[f"{prefix}_loss"], 5), shape, trainer.compute_metrics.calls)
        )
    assert found[0] == found[1]
    assert found[0][0] == 18


class Notes(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **more):
        self.events.append("train")

    def on_step_end(self, args, state, control, **more):
        self.events.append(state.global_step)

    def on_epoch_end(self, args, state, control, **more):
        self.events.append("epoch")

    def on_train_end(self, args, state, control, **more):
        self.events.append("end")


@pytest.mark.parametrize("bar", [False, True])
@pytest.mark.parametrize("length", [{"max_steps": 2}, {"num_train_epochs": 1}, {"max_steps": 8}, {"max_steps": 16}])
def test_a_run_that_is_over_resumes_as_in_transformers(length, bar, tmp_path):
    found = []
    for kind in (Trainer, transformers.Trainer):
        folder, notes = tmp_path / kind.__module__, Notes()
        given = {"save_strategy": "steps", "save_steps": 2, "disable_tqdm": not bar, **length}
        trainer_of(kind, folder, **given).train()
        last = transformers.trainer_utils.get_last_checkpoint(str(folder))
        trainer = trainer_of(kind, folder, callbacks=[notes], **given)
        steps = trainer.train(resume_from_checkpoint=last).global_step
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        found.append((steps, notes.events, weights))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=1e-6)
