from lightning.pytorch.callbacks import Callback  #: maps
from lightning.pytorch.utilities import rank_zero_only  #: maps


class Images(Callback):  #: maps
    @rank_zero_only  #: maps
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  #: maps
        if batch_idx == 0 and trainer.logger is not None:  #: maps
            images, _ = batch
            trainer.logger.experiment.add_images("images", images, trainer.global_step)  #: maps changes
        if trainer.current_epoch > 2:  #: maps
            pl_module.freeze()  #: maps

    def on_exception(self, trainer, pl_module, exception):  #: maps
        trainer.should_stop = True  #: maps


# ruff: noqa
