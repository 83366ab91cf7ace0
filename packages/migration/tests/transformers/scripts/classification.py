"""Fine-tune a small BERT to tell two kinds of texts apart, as the first pages of transformers' documentation do."""

import json
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

folder = sys.argv[1]


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.rows = [
            torch.randint(
                int(label) * 10, 40, (int(torch.randint(5, 12, (), generator=generator)),), generator=generator
            )
            for label in self.labels
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def collate(rows):
    tokens = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": torch.stack([row["labels"] for row in rows]),
    }


def compute_metrics(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


set_seed(7)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
    )
)
args = TrainingArguments(
    output_dir=folder,
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    learning_rate=3e-3,
    weight_decay=0.1,
    warmup_steps=3,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Rows(74, 0),
    eval_dataset=Rows(21, 1),
    data_collator=collate,
    compute_metrics=compute_metrics,
)
result = trainer.train()
print(json.dumps({"log": trainer.state.log_history, "train_loss": result.training_loss, "eval": trainer.evaluate()}))
torch.save(model.state_dict(), f"{folder}/weights.pt")
