import argparse

import torch
from accelerate import Accelerator  #: maps
from accelerate.utils import ProjectConfiguration, set_seed  #: maps

import canary
from steps import evaluate


def main(arguments):
    set_seed(arguments.seed)  #: maps
    acc = Accelerator(  #: maps
        mixed_precision="bf16",  #: maps
        gradient_accumulation_steps=4,  #: maps
        log_with="wandb",  #: none
        project_config=ProjectConfiguration(project_dir="runs"),  #: maps
        step_scheduler_with_optimizer=False,  #: changes
    )
    acc.init_trackers("project")  #: changes
    model, loader = torch.nn.Linear(4, 1), [torch.ones(8, 4)] * 10
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = acc.prepare(model, optimizer, loader)  #: maps
    for step, batch in enumerate(loader):
        with acc.accumulate(model):  #: maps
            loss = model(batch).mean()
            acc.backward(loss)  #: maps
            if acc.sync_gradients:  #: maps
                acc.clip_grad_norm_(model.parameters(), 1.0)  #: maps
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 and acc.is_main_process:  #: maps
            acc.log({"loss": loss.item()})  #: changes
    evaluate(acc, model, loader)
    acc.save_state("runs/last")  #: maps
    acc.unwrap_model(model).cpu()  #: maps
    acc.end_training()  #: maps
    canary.sing()


if __name__ == "__main__":
    main(argparse.ArgumentParser().parse_args())

# ruff: noqa
