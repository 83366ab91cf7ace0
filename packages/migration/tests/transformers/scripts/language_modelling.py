"""Train a small GPT-2 on the source of the standard library, in rows of different lengths."""

import argparse
import inspect
import json
import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

folder = sys.argv[1]
text = inspect.getsource(argparse).encode()
lengths = [17 + (7 * i) % 31 for i in range(90)]
rows, start = [], 0
for length in lengths:
    rows.append({"input_ids": list(text[start : start + length])})
    start += length


class Collate:
    def __call__(self, rows):
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(tokens, batch_first=True),
            "attention_mask": pad([torch.ones_like(each) for each in tokens], batch_first=True),
            "labels": pad(tokens, batch_first=True, padding_value=-100),
        }


transformers.set_seed(3)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=16, n_layer=2, n_head=2))
args = TrainingArguments(
    output_dir=folder,
    max_steps=13,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=3,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, data_collator=Collate())
result = trainer.train()
print(json.dumps({"log": trainer.state.log_history, "train_loss": result.training_loss}))
torch.save(model.state_dict(), f"{folder}/weights.pt")
