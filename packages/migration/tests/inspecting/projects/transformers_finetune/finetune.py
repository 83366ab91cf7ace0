import evaluate
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,  #: maps
    Trainer,  #: maps
    TrainerCallback,  #: maps
    TrainingArguments,  #: maps
)
from transformers.trainer_utils import get_last_checkpoint  #: maps

import canary


class Weighted(Trainer):  #: maps
    def __init__(self, *args, weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.weights = weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  #: maps
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor(self.weights, device=self.args.device)  #: maps
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weights)
        self.log({"weighted": loss.item()})  #: maps
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):  #: none
        return super().training_step(model, inputs, num_items_in_batch)  #: none


class Stop(TrainerCallback):  #: maps
    def on_step_end(self, args, state, control, **kwargs):  #: maps
        if state.global_step > args.max_steps / 2:  #: maps
            control.should_training_stop = True  #: maps
        control.should_epoch_stop = False  #: none


def main():
    data = load_dataset("imdb")
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
    metric = evaluate.load("accuracy")
    args = TrainingArguments(  #: maps
        "out",  #: maps
        per_device_train_batch_size=16,  #: maps
        gradient_accumulation_steps=4,  #: maps
        num_train_epochs=3,  #: maps
        auto_find_batch_size=True,  #: changes
        bf16=True,  #: maps
        eval_strategy="epoch",  #: changes
        torch_empty_cache_steps=10,  #: none
        report_to="wandb",  #: maps
    )
    trainer = Weighted(
        weights=[1.0, 2.0],
        model=model,  #: maps
        args=args,  #: maps
        train_dataset=data["train"],  #: maps
        data_collator=DataCollatorWithPadding(tokenizer),  #: maps
        compute_metrics=metric.compute,  #: changes
        callbacks=[EarlyStoppingCallback(3), Stop()],  #: maps
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))  #: maps
    trainer.hyperparameter_search(n_trials=3)  #: none
    trainer.save_model()  #: maps
    print(trainer.state.log_history, trainer.evaluate(), canary)  #: maps


main()

# ruff: noqa
