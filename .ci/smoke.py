"""Train a small model on two batches with two plug-ins that the installed wheels declare."""

import torch

import hocket


def fit() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 4), torch.randint(3, (16,))
    model = torch.nn.Linear(4, 3)
    before = model.weight.detach().clone()
    trainer = hocket.Trainer(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        train_data=[(inputs[:8], targets[:8]), (inputs[8:], targets[8:])],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        algorithms=["label-smoothing", "ema"],
        duration="2ba",
    )
    print(trainer.plan())
    trainer.fit()
    assert not torch.equal(model.weight, before), "two steps of SGD left the weights as they were"


if __name__ == "__main__":
    fit()
    print(f"trained with hocket from {hocket.__file__}")
