import composer.functional as cf  #: maps
import torch
from composer import Callback, ComposerModel, Evaluator, Event, Trainer  #: maps
from composer.algorithms import BlurPool, LabelSmoothing, ProgressiveResizing  #: maps changes
from composer.callbacks import LRMonitor, MLPerfCallback, SpeedMonitor  #: maps none
from composer.core import Algorithm  #: maps
from composer.models import ComposerClassifier  #: maps
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW  #: maps
from composer.utils import dist  #: maps
from torchvision.models import resnet50

import canary


class ResNet(ComposerModel):  #: maps
    def __init__(self):
        super().__init__()
        self.network = resnet50()

    def forward(self, batch):  #: maps
        return self.network(batch[0])

    def loss(self, outputs, batch):  #: maps
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def update_metric(self, batch, outputs, metric):  #: changes
        metric.update(outputs, batch[1])

    def get_metrics(self, is_train):  #: maps
        return {}


class Report(Callback):  #: maps
    def epoch_end(self, state, logger):  #: maps
        logger.log_metrics({"elapsed": float(state.get_elapsed_duration())})  #: maps
        if state.timestamp.epoch > 3:  #: maps
            state.stop_training()  #: maps

    def iteration_start(self, state, logger):  #: none
        pass


class Noise(Algorithm):  #: maps
    def match(self, event, state):  #: changes
        return event == Event.AFTER_LOSS  #: maps

    def apply(self, event, state, logger):  #: changes
        state.loss = state.loss + torch.randn(())  #: maps


def main(loader, validation):
    model = ComposerClassifier(resnet50(), num_classes=1000)  #: maps
    cf.apply_blurpool(model)  #: changes
    optimizer = DecoupledSGDW(model.parameters(), lr=2.0)  #: maps
    trainer = Trainer(  #: maps
        model=model,  #: maps
        train_dataloader=loader,  #: maps
        eval_dataloader=[Evaluator(label="val", dataloader=validation)],  #: maps
        optimizers=optimizer,  #: changes
        schedulers=CosineAnnealingWithWarmupScheduler("8ep"),  #: maps
        max_duration="90ep",  #: maps
        algorithms=[  #: maps
            BlurPool(),  #: maps
            LabelSmoothing(0.1),  #: maps
            ProgressiveResizing(),  #: changes
            Noise(),
        ],
        callbacks=[SpeedMonitor(), LRMonitor(), Report(), MLPerfCallback("x")],  #: maps none
        precision="amp_bf16",  #: changes
        save_folder="runs/{run_name}",  #: maps
        save_ignore_keys=["state/optimizers/*"],  #: none
        autoresume=True,  #: maps
        seed=17 + dist.get_global_rank(),  #: maps
    )
    trainer.fit(duration="1ep", reset_time=True)  #: maps none
    trainer.eval(subset_num_batches=2)  #: maps
    print(trainer.state.timestamp, trainer.engine, canary)  #: maps none


main(None, None)

# ruff: noqa
