"""Train a small GPT-2 on several ranks, with a loader of its own that the accelerator prepares."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

folder = sys.argv[1]
generator = torch.Generator().manual_seed(0)
rows = [
    torch.randint(1, 60, (int(torch.randint(5, 12, (), generator=generator)),), generator=generator) for _ in range(44)
]


def collate(samples):
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": tokens.masked_fill(tokens == 0, -100),
    }


class Mine(Trainer):
    def get_train_dataloader(self):
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=collate)
        return self.accelerator.prepare(loader)


set_seed(5)
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
args = TrainingArguments(
    output_dir=folder,
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    remove_unused_columns=False,
)
trainer = Mine(model=model, args=args, train_dataset=rows, data_collator=collate)
trainer.train()
if trainer.is_world_process_zero():
    with open(f"{folder}/log.json", "w") as file:
        json.dump(trainer.state.log_history, file)
# without it, the threads of the group abort a process now and then while it exits
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
