"""A project of Composer's, whose imports alone differ between mosaicml and hocket_migration.

``python project.py FOLDER`` trains the cases, prints results, and writes checkpoints.
"""

import json
import sys
from pathlib import Path

import torch
from composer import Callback, Evaluator, Trainer
from composer.algorithms import BlurPool, ChannelsLast, GradientClipping, LabelSmoothing, LayerFreezing
from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.core import Algorithm, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
)


class LearningRates(Callback):
    """The learning rate of each batch."""

    def __init__(self):
        self.rates = []

    def batch_start(self, state, logger):
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


class Reading(Callback):
    """What a callback reads of the state."""

    def __init__(self):
        self.read, self.at_end = [], []

    def batch_end(self, state, logger):
        self.read.append([int(state.timestamp.batch), *state.schedulers[0].get_last_lr()])

    def eval_end(self, state, logger):
        self.read.append([state.dataloader_label, type(state.device).__name__])

    def fit_end(self, state, logger):
        if state.algorithms:  # mosaicml cannot name the parameters after layer freezing
            return
        tree = state.state_dict()
        (optimizer,) = tree["optimizers"].values()
        (now,) = tree["timestamp"].values()
        self.at_end.append([sorted(tree["model"]), sorted(optimizer["state"]), now["batch"], now["sample"]])


class Scaled(Algorithm):
    """An algorithm of the project's own."""

    def match(self, event, state):
        return event == Event.BEFORE_FORWARD and state.timestamp.batch >= 2

    def apply(self, event, state, logger):
        state.batch_set_item(0, state.batch[0] * 0.5)
        logger.log_metrics({"scaled": 0.5})


class Regression(ComposerModel):
    """A model with two losses and no metrics."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(12, 3)

    def forward(self, batch):
        return self.line(batch[0].flatten(1)[:, :12])

    def loss(self, outputs, batch):
        error = outputs - batch[0].flatten(1)[:, 12:15]
        return {"squared": error.square().mean(), "absolute": error.abs().mean()}


def data(samples=24):
    generator = torch.Generator().manual_seed(0)
    images, labels = (
        torch.randn(samples, 3, 6, 6, generator=generator),
        torch.randint(0, 4, (samples,), generator=generator),
    )
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8)


def classifier():
    torch.manual_seed(1)
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3, stride=2), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(4))
    network(torch.zeros(1, 3, 6, 6))
    return ComposerClassifier(network, num_classes=4)


def regression():
    torch.manual_seed(1)
    return Regression()


def sgd(parameters):
    return DecoupledSGDW(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def adam(parameters):
    return DecoupledAdamW(parameters, lr=0.01, weight_decay=1e-4)


def inverse(state):
    return 1 / (1 + state.timestamp.batch.value)


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


#: By name: what differs from the defaults of `train`.
CASES = {
    "plain": {"schedulers": LinearScheduler()},
    "microbatches": {"device_train_microbatch_size": 3, "schedulers": LinearWithWarmupScheduler("2ba")},
    "algorithms": {
        "algorithms": lambda: [BlurPool(), LabelSmoothing(0.1), GradientClipping("norm", 1.0), ChannelsLast()],
        "schedulers": CosineAnnealingScheduler(alpha_f=0.1),
    },
    "adam": {"optimizer": adam, "schedulers": CosineAnnealingWithWarmupScheduler("1ep"), "max_duration": "10ba"},
    "torch": {"schedulers": steps, "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01)},
    "custom": {"algorithms": lambda: [Scaled()], "schedulers": inverse, "step_schedulers_every_batch": False},
    "losses": {"model": regression, "schedulers": [MultiStepScheduler(["1ep"]), ExponentialScheduler(0.5)], "evaluators": []},
    "scaled": {"schedulers": PolynomialScheduler(2.0), "scale_schedule_ratio": 0.5, "max_duration": "6ep"},
    "freezing": {"algorithms": lambda: [LayerFreezing(freeze_start=0.3)], "schedulers": LinearScheduler()},
    "subset": {"train_subset_num_batches": 2, "schedulers": StepScheduler("1ep"), "eval_interval": "3ba"},
    **{
        f"stopper-{number}": {
            "callbacks": stopper, "schedulers": LinearScheduler(), "max_duration": "6ep", "eval_interval": "2ba",
        }
        for number, stopper in enumerate(
            [
                lambda: EarlyStopper("MulticlassAccuracy", "test", patience="3ba"),
                lambda: EarlyStopper("MulticlassAccuracy", "train", patience="2ba"),
                lambda: EarlyStopper("CrossEntropy", "half", comp=torch.less, min_delta=0.5),
                lambda: ThresholdStopper("CrossEntropy", "half", 10.0, comp="less"),
                lambda: ThresholdStopper("MulticlassAccuracy", "train", 0.1),
                lambda: ThresholdStopper("MulticlassAccuracy", "train", 0.1, stop_on_batch=True),
            ]
        )
    },
    **{
        f"schedule-{number}": {"schedulers": scheduler, "max_duration": "2ep", "evaluators": []}
        for number, scheduler in enumerate(
            [
                ConstantWithWarmupScheduler("3ba", alpha=0.5),
                CosineAnnealingWarmRestartsScheduler("2ba", t_mult=2.0),
                MultiStepWithWarmupScheduler("2ba", ["4ba"], gamma=0.3),
                PolynomialWithWarmupScheduler("0.4dur", power=3.0, alpha_f=0.05),
                LinearScheduler(alpha_i=0.2, alpha_f=0.9, t_max="0.5dur"),
            ]
        )
    },
}  # fmt: skip


def train(case, **given):
    """Train a case; return losses and learning rates of its batches, and metrics."""
    case = dict(case)
    model = case.pop("model", classifier)()
    optimizer = case.pop("optimizer", sgd)(model.parameters())
    rates, reading, values = LearningRates(), Reading(), InMemoryLogger()
    stoppers = [case.pop("callbacks")()] if "callbacks" in case else []
    evaluators = [
        Evaluator(label="test", dataloader=data(), metric_names=["Accuracy"]),
        Evaluator(label="half", dataloader=data(), subset_num_batches=1),
    ]
    schedulers = case.pop("schedulers")
    trainer = Trainer(
        model=model,
        train_dataloader=data(),
        max_duration=case.pop("max_duration", "3ep"),
        eval_dataloader=case.pop("evaluators", evaluators),
        optimizers=optimizer,
        schedulers=steps(optimizer) if schedulers is steps else schedulers,
        algorithms=case.pop("algorithms", list)(),
        callbacks=[rates, reading, *stoppers],
        loggers=[values],
        progress_bar=False,
        device="cpu",
        seed=3,
        **case,
        **given,
    )
    trainer.fit()
    metrics = trainer.state.eval_metrics
    return {
        "loss": [float(value) for _, value in values.data["loss/train/total"]],
        "rate": rates.rates,
        "read": reading.read,
        "at end": reading.at_end,
        "logged": sorted(name for name in values.data if name.startswith("loss/")),
        "metrics": {
            f"{label}/{name}": float(metric.compute())
            for label, named in metrics.items()
            for name, metric in named.items()
        },
    }


if __name__ == "__main__":
    where = Path(sys.argv[1])
    kept = {"save_interval": "2ba", "save_filename": "{batch}.pt", "save_overwrite": True}
    results = {
        name: train(case, **({"save_folder": str(where / name), **kept} if name in ("algorithms", "adam") else {}))
        for name, case in CASES.items()
    }
    print(json.dumps(results))
