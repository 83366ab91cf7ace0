"""The drop-in Trainer against transformers' own, on tiny models with dropout."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import hocket  # noqa: E402
from hocket_migration.transformers import Seq2SeqTrainer, Trainer, configuration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(count=44, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(5, 12, (), generator=generator))
        tokens = torch.randint(1, 60, (length,), generator=generator)
        made.append({"input_ids": tokens, "labels": tokens.sum() % classes})
    return made


def texts(count=44):
    return [{"input_ids": row["input_ids"]} for row in rows(count)]


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([sample["input_ids"] for sample in samples], batch_first=True)
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    if "labels" in samples[0]:
        batch["labels"] = torch.stack([sample["labels"] for sample in samples])
    else:
        batch["labels"] = tokens.masked_fill(tokens == 0, -100)
    return batch


def masking(samples):
    """Collate for masked language models, with random numbers of torch's global generator."""
    batch = collate(samples)
    chosen = torch.rand(batch["input_ids"].shape) < 0.3
    batch["labels"] = batch["labels"].masked_fill(~chosen, -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(chosen, 61)
    return batch


def classifier():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def gpt():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def arguments(folder, kind=transformers.TrainingArguments, **more):
    given = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True, **more,
    }  # fmt: skip
    return kind(output_dir=str(folder), **given)


def log_of(trainer):
    skipped = ("runtime", "per_second")
    return [
        {name: value for name, value in row.items() if not any(each in name for each in skipped)}
        for row in trainer.state.log_history
    ]


def trained(cls, model, folder, given, **more):
    transformers.set_seed(5)
    network = model()
    trainer = cls(model=network, args=given(folder), **{"data_collator": collate, **copy.deepcopy(more)})
    trainer.train()
    return trainer


def compare(model, given, tmp_path, ours=Trainer, theirs=transformers.Trainer, **more):
    mine = trained(ours, model, tmp_path / "ours", given, **more)
    other = trained(theirs, model, tmp_path / "theirs", given, **more)
    assert len(mine.state.log_history) == len(other.state.log_history) > 3
    for row, expected in zip(log_of(mine), log_of(other), strict=True):
        assert row == pytest.approx(expected, abs=1e-5), (row, expected)
    for name, value in other.model.state_dict().items():
        torch.testing.assert_close(mine.model.state_dict()[name], value, atol=1e-5, rtol=1e-4)
    return mine, other


def _means(base):
    class Weighted(base):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0, 3.0]))
            return (loss, outputs) if return_outputs else loss

        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    return Weighted


def test_a_subclass_with_its_own_loss_and_optimizer(tmp_path):
    compare(classifier, arguments, tmp_path, _means(Trainer), _means(transformers.Trainer), train_dataset=rows(40))


def test_random_masks_and_group_by_length(tmp_path):
    def given(folder):
        return arguments(folder, train_sampling_strategy="group_by_length")

    def model():
        return transformers.BertForMaskedLM(classifier().config)

    compare(model, given, tmp_path, train_dataset=texts(), data_collator=masking)


def test_llama_with_checkpointed_activations_and_several_evaluation_sets(tmp_path):
    def given(folder):
        return arguments(
            folder, gradient_checkpointing=True, eval_strategy="steps", eval_steps=3, max_steps=7, weight_decay=0.1,
            max_grad_norm=0.0,
        )  # fmt: skip

    same = [{"input_ids": torch.arange(1, 9) + i % 7} for i in range(12)]  # where transformers' mean of means is exact
    compare(llama, given, tmp_path, train_dataset=texts(), eval_dataset={"a": same, "b": same[:5]})


def test_an_iterable_dataset_and_label_smoothing(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows(24)

    def given(folder):
        return arguments(folder, max_steps=5, label_smoothing_factor=0.1, lr_scheduler_type="cosine")

    compare(classifier, given, tmp_path, train_dataset=Stream())


class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.events.append(
                (name, state.global_step, state.epoch and round(state.epoch, 6), sorted(kwargs))
            )
        return super().__getattribute__(name)


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == 2
        control.should_training_stop = state.global_step >= 7


class Halt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 7


def test_callbacks_see_the_same_events(tmp_path):
    recorded = []
    for cls in (Trainer, transformers.Trainer):
        transformers.set_seed(5)
        recorder = Recorder()
        trainer = cls(
            model=classifier(), args=arguments(tmp_path / cls.__module__, logging_steps=3), train_dataset=rows(),
            eval_dataset=rows(6), data_collator=collate, callbacks=[recorder, StopAt()],
        )  # fmt: skip
        trainer.train()
        recorded.append(recorder.events)
    assert recorded[0] == recorded[1]
    assert {"on_substep_end", "on_evaluate", "on_optimizer_step", "on_train_end"} <= {event[0] for event in recorded[0]}


class Evaluating(TrainerCallback):
    """It leaves the model in eval mode, in which dropout would be off."""

    def on_step_end(self, args, state, control, model, **kwargs):
        model.eval()


def _noting(base):
    class Noting(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.modes.append((model.training, self.accelerator.sync_gradients))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def log(self, logs, *args, **kwargs):
            self.modes.append(self.model.training)
            super().log(logs, *args, **kwargs)

    Noting.modes = []
    return Noting


def test_the_mode_of_the_model_is_that_of_transformers(tmp_path):
    def given(folder):
        return arguments(folder, eval_strategy="steps", eval_steps=3)

    ours, theirs = _noting(Trainer), _noting(transformers.Trainer)
    mine, other = compare(
        classifier, given, tmp_path, ours, theirs, train_dataset=rows(), eval_dataset=rows(6), callbacks=[Evaluating()]
    )
    assert [each for each in ours.modes if each != (False, True)] == [
        each
        for each in theirs.modes
        if each != (False, True)  # evaluation: of how many batches is hocket's affair
    ]
    assert {(True, True), (True, False), False} <= set(ours.modes)
    assert mine.state.total_flos == other.state.total_flos > 0


def _flagged(base):
    class Flagged(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if return_outputs and model.training:
                raise ValueError("outputs are for evaluation")
            outputs = model(**inputs)
            self.dtypes.add((outputs.logits.dtype, torch.is_autocast_enabled("cpu")))
            uniform = torch.log_softmax(outputs.logits, -1).mean()  # of tensors in bfloat16 it would be rounded
            loss = outputs.loss - 0.1 * uniform
            return (loss, outputs) if return_outputs else loss

    Flagged.dtypes = set()
    return Flagged


def test_losses_are_computed_in_float32_and_without_outputs_in_training(tmp_path):
    def given(folder):
        return arguments(folder, bf16=True, eval_strategy="epoch")

    ours, theirs = _flagged(Trainer), _flagged(transformers.Trainer)
    mine, other = compare(classifier, given, tmp_path, ours, theirs, train_dataset=rows(), eval_dataset=rows(8, seed=1))
    assert ours.dtypes == theirs.dtypes == {(torch.float32, False)}
    found, expected = mine.predict(rows(8)), other.predict(rows(8))
    assert found.predictions.dtype == expected.predictions.dtype
    assert found.predictions == pytest.approx(expected.predictions, abs=1e-5)


class Drawing(torch.utils.data.Dataset):
    """Its rows draw from the generators of Python and NumPy."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = dict(self.rows[index])
        row["input_ids"] = row["input_ids"].clone()
        row["input_ids"][0] = random.randrange(60)
        row["input_ids"][1] = np.random.randint(60)
        return row


def test_random_numbers_go_on_after_an_evaluation(tmp_path):
    def given(folder):
        return arguments(folder, eval_strategy="steps", eval_steps=3)

    compare(classifier, given, tmp_path, train_dataset=Drawing(rows()), eval_dataset=Drawing(rows(6)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"callbacks": ["ema"]}, r"was given 'ema'.*hocket=\{'algorithms': \['ema'\]\}"),
        ({"callbacks": [hocket.Callback()]}, r"Write those of hocket as hocket=\{'callbacks'"),
        (
            {"args": {"output_dir": "out"}},
            r"args=\) was given dict. Write Trainer\(model=model, args=TrainingArguments",
        ),
        ({"model": "bert"}, r"model=\) was given 'bert'.*AutoModel….from_pretrained\('bert'\)"),
    ],
)
def test_arguments_of_another_kind_are_refused(given, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        Trainer(**{"model": classifier(), "args": arguments(tmp_path), **given})


def test_a_loss_that_is_not_returned_is_named(tmp_path):
    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            model(**inputs)

    with pytest.raises(TypeError, match=r"compute_loss of Mine returned None. Return the loss"):
        Mine(model=classifier(), args=arguments(tmp_path), train_dataset=rows(8), data_collator=collate).train()


class ChangesArguments(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        args.max_grad_norm = 0.5


class StopsWithinAStep(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("callback", "message"),
    [(ChangesArguments, "'max_grad_norm': 0.5}, which hocket reads once"), (StopsWithinAStep, "Set it in on_step_end")],
)
def test_what_callbacks_cannot_do_is_said(callback, message, tmp_path):
    with pytest.raises(NotImplementedError, match=message):
        trained(Trainer, classifier, tmp_path, arguments, train_dataset=rows(), callbacks=[callback()])


def test_plateau_early_stopping_and_the_best_model(tmp_path):
    def given(folder):
        return arguments(
            folder, num_train_epochs=6, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
            metric_for_best_model="loss", lr_scheduler_type="reduce_lr_on_plateau", save_total_limit=2,
        )  # fmt: skip

    mine, other = compare(
        classifier, given, tmp_path, train_dataset=rows(), eval_dataset=rows(10, seed=1),
        callbacks=[EarlyStoppingCallback(1)],
    )  # fmt: skip
    assert mine.state.best_global_step == other.state.best_global_step
    kept = [sorted(each.name for each in (tmp_path / of).glob("checkpoint-*")) for of in ("ours", "theirs")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    "step", [4, pytest.param(6, marks=pytest.mark.long)]
)  # in the middle of an epoch of six steps, and at its end
@pytest.mark.parametrize("writer", [Trainer, transformers.Trainer])
def test_a_checkpoint_of_either_continues(tmp_path, writer, step):
    def given(folder):
        return arguments(folder, save_strategy="steps", save_steps=step)

    full = trained(transformers.Trainer, gpt, tmp_path / "full", given, train_dataset=texts())
    trained(writer, gpt, tmp_path / "part", given, train_dataset=texts())
    transformers.set_seed(123)
    trainer = Trainer(model=gpt(), args=given(tmp_path / "rest"), train_dataset=texts(), data_collator=collate)
    trainer.train(resume_from_checkpoint=str(tmp_path / "part" / f"checkpoint-{step}"))
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == pytest.approx(
        [row["loss"] for row in full.state.log_history if "loss" in row], abs=1e-5
    )


def test_predictions_and_metrics(tmp_path):
    def metrics(predicted):
        return {"accuracy": float((predicted.predictions == predicted.label_ids).mean())}

    made = []
    for cls in (Trainer, transformers.Trainer):
        transformers.set_seed(5)
        trainer = cls(
            model=classifier(), args=arguments(tmp_path), data_collator=collate, compute_metrics=metrics,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), eval_dataset=rows(11),
        )  # fmt: skip
        made.append(
            (trainer.evaluate(), trainer.predict(rows(11)), trainer.evaluate(rows(9), metric_key_prefix="train"))
        )
    (mine, predicted, train), (other, expected, of_train) = made
    assert mine["eval_accuracy"] == other["eval_accuracy"] and train["train_loss"] == pytest.approx(
        of_train["train_loss"]
    )
    assert mine["eval_loss"] == pytest.approx(other["eval_loss"])
    np.testing.assert_array_equal(predicted.predictions, expected.predictions)
    np.testing.assert_array_equal(predicted.label_ids, expected.label_ids)


def test_evaluation_of_padded_rows_is_the_mean_over_tokens(tmp_path):
    """transformers takes the mean of the means of batches."""
    samples = texts(11)
    losses = {}
    for cls in (Trainer, transformers.Trainer):
        for size in (2, 8):
            transformers.set_seed(5)
            trainer = cls(
                model=gpt(), args=arguments(tmp_path, per_device_eval_batch_size=size), data_collator=collate,
                eval_dataset=samples,
            )  # fmt: skip
            losses[cls, size] = trainer.evaluate()["eval_loss"]
    assert losses[Trainer, 2] == pytest.approx(losses[Trainer, 8], abs=1e-6)
    assert abs(losses[transformers.Trainer, 2] - losses[transformers.Trainer, 8]) > 1e-5


def test_sequence_to_sequence_with_generation(tmp_path):
    def given(folder):
        return arguments(
            folder, kind=transformers.Seq2SeqTrainingArguments, eval_strategy="epoch", predict_with_generate=True,
            generation_max_length=6, num_train_epochs=1,
        )  # fmt: skip

    def model():
        return T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
        )

    def metrics(predicted):
        return {"tokens": float(np.asarray(predicted.predictions).clip(0).sum())}

    samples = [{"input_ids": torch.arange(1, 9) + i % 5, "labels": torch.arange(2, 8) + i % 5} for i in range(16)]
    compare(
        model, given, tmp_path, Seq2SeqTrainer, transformers.Seq2SeqTrainer, train_dataset=samples, eval_dataset=samples[:6],
        data_collator=transformers.default_data_collator, compute_metrics=metrics,
    )  # fmt: skip


def test_hocket_on_top(tmp_path):
    """Plug-ins, microbatches and checkpoints of hocket, beside the arguments of transformers."""
    pytest.importorskip("hocket_general")
    transformers.set_seed(5)
    plain = trained(Trainer, gpt, tmp_path / "a", arguments, train_dataset=texts())
    more = {"hocket": {"algorithms": ["ema"], "microbatch": 2, "checkpoints": str(tmp_path / "runs")}}
    network = _seeded(gpt)
    network.config.use_cache = False
    trainer = Trainer(
        model=network, args=arguments(tmp_path / "b"), train_dataset=texts(), data_collator=collate, **more
    )
    trainer.train()
    assert isinstance(trainer.hocket, hocket.Trainer)
    assert list((tmp_path / "runs").iterdir())
    first = [each.state.log_history[0]["loss"] for each in (plain, trainer)]
    assert first[0] == pytest.approx(first[1], abs=0.2)  # dropout is drawn for other microbatches
    averages = trainer.hocket.model_state_dict(evaluated=True)
    weights = trainer.hocket.model_state_dict(evaluated=False)
    assert any(not torch.equal(averages[name], weights[name]) for name in weights)
    trainer.save_model(tmp_path / "saved")
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
    torch.testing.assert_close(saved["transformer.wpe.weight"], averages["transformer.wpe.weight"])


def test_a_checkpoint_of_hocket_continues(tmp_path):
    full = trained(Trainer, gpt, tmp_path / "a", arguments, train_dataset=texts())
    for stop in (Halt(), None):
        transformers.set_seed(5)
        trainer = Trainer(
            model=gpt(), args=arguments(tmp_path / "b"), train_dataset=texts(), data_collator=collate,
            callbacks=[stop] if stop else None,
            hocket={"checkpoints": hocket.Checkpoints(tmp_path / "runs", every="100ba"), "resume": "auto"},
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == (7 if stop else 12)
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (trainer, full)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == 12
    assert trainer.state.epoch == 2
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(full.state.log_history[-1]["train_loss"])


def _seeded(model):
    transformers.set_seed(5)
    return model()


def test_a_mean_that_transformers_adds_up_is_said(tmp_path):
    trainer = Trainer(model=classifier(), args=arguments(tmp_path), train_dataset=rows(8), data_collator=collate)
    with pytest.warns(UserWarning, match="2 times as large"):
        trainer.train()
    again = Trainer(model=classifier(), args=arguments(tmp_path), train_dataset=rows(8), data_collator=collate)
    again.loss_is_scaled_for_ga = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*times as large")
        again.train()
    ratio = trainer.state.log_history[0]["loss"] / again.state.log_history[0]["loss"]
    assert ratio == pytest.approx(2, abs=0.4)


def _overriding(name):
    return type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})


def test_the_name_of_transformers_4_for_the_tokenizer_is_said():
    with pytest.raises(TypeError, match=r"Trainer\(tokenizer=\) is a name of transformers 4. Write processing_class="):
        Trainer(torch.nn.Linear(1, 1), tokenizer=None)


@pytest.mark.parametrize("name", ["training_step", "evaluation_loop", "_inner_training_loop", "hyperparameter_search"])
def test_overrides_that_are_not_called_are_refused_by_name(name, tmp_path):
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which hocket does not call"):
        _overriding(name)(model=gpt(), args=arguments(tmp_path))


@pytest.mark.parametrize(
    "field",
    [{"auto_find_batch_size": True}, {"bf16_full_eval": True}, {"torch_empty_cache_steps": 4}, {"optim": "lomo"}],
)
def test_fields_without_counterpart_are_refused_by_name(field, tmp_path):
    with pytest.raises(ValueError, match=rf"TrainingArguments\({next(iter(field))}=.*\)"):
        Trainer(model=gpt(), args=arguments(tmp_path, **field))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"duration": "1ep"}, "num_train_epochs"), ({"algoritms": []}, "no argument"), ("ema", "is a str")],
)
def test_arguments_of_hocket_are_checked(given, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        Trainer(model=gpt(), args=arguments(tmp_path), hocket=given)


def test_the_configuration_trains_as_the_trainer_does(tmp_path):
    """Without dropout and with the data in order, hocket.Trainer and the configuration give the same losses."""

    def given(folder):
        return arguments(
            folder, train_sampling_strategy="sequential", weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine"
        )

    def model():
        return BertForSequenceClassification(
            BertConfig.from_dict(
                {**classifier().config.to_dict(), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            )
        )

    theirs = trained(_plain_means(), model, tmp_path / "a", given, train_dataset=rows(40))
    found = configuration(given(tmp_path))
    import yaml

    assert yaml.safe_load(yaml.safe_dump(found)) == found
    loader = torch.utils.data.DataLoader(rows(40), batch_size=4, collate_fn=collate)
    trainer = hocket.Trainer(model=_seeded(model), train_data=loader, **found, loss_reduction="mean")
    losses = trainer.fit().history["train/loss"]
    assert list(losses) == pytest.approx([row["loss"] for row in theirs.state.log_history if "loss" in row], abs=2e-5)


def _plain_means():
    return type("Means", (transformers.Trainer,), {"loss_is_scaled_for_ga": False})


def test_every_field_is_expressed_settled_or_refused_by_name(tmp_path):
    import dataclasses

    from hocket_migration.transformers.fields import FIELDS

    def other(field):
        examples = {"bool": True, "int": 7, "float": 0.5, "str": "other"}
        kind = str(field.type)
        return next((value for name, value in examples.items() if name in kind), {"a": 1})

    args = arguments(tmp_path, gradient_accumulation_steps=1, logging_steps=500)
    before = configuration(args)
    for field in dataclasses.fields(transformers.TrainingArguments):
        described = FIELDS[field.name]
        changed = copy.copy(args)
        object.__setattr__(changed, field.name, other(field))
        try:
            found = configuration(changed)
        except ValueError as error:
            assert field.name in str(error) or described.argument, (field.name, error)
        except (TypeError, KeyError, AttributeError):
            assert described.argument or described.settled  # a value that transformers itself refuses
        else:
            assert found != before or described.settled, field.name


def test_a_field_that_no_argument_expresses_is_refused_by_the_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5: .*\n.*eval_delay=1"):
        configuration(arguments(tmp_path, neftune_noise_alpha=5, eval_delay=1))
