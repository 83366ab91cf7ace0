"""Load every plug-in that the installed wheels declare, then train a small model on two batches with two of them."""

from importlib.metadata import distributions

import torch

import hocket


def load_declared() -> int:
    entry_points = [
        entry_point
        for distribution in distributions()
        if distribution.metadata["Name"].lower().startswith("hocket")
        for entry_point in distribution.entry_points
        if entry_point.group.startswith("hocket.v1.")
    ]
    for entry_point in entry_points:
        entry_point.load()
    return len(entry_points)


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
    print(f"{load_declared()} declared plug-ins load from the wheels")
    fit()
    print(f"trained with hocket from {hocket.__file__}")
