"""What a LightningModule and its callbacks may set on ``self.trainer``."""

from __future__ import annotations

from typing import Any

#: Attributes that are arguments of the Trainer.
_CHANGEABLE = {
    "fast_dev_run", "overfit_batches", "log_every_n_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "check_val_every_n_epoch", "val_check_interval", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps", "default_root_dir", "min_epochs", "min_steps",
}  # fmt: skip
#: Attributes that modules read, and what to write instead of setting them.
_WITHOUT_EFFECT = {
    "train_dataloader": "Return the loader from train_dataloader(), or give it to fit",
    "val_dataloaders": "Return the loaders from val_dataloader(), or give them to fit",
    "test_dataloaders": "Return the loaders from test_dataloader(), or give them to test",
    "predict_dataloaders": "Return the loaders from predict_dataloader(), or give them to predict",
    "val_check_batch": "Write Trainer(val_check_interval=…)",
    "ckpt_path": "Give fit, validate, test or predict ckpt_path=…",
    "barebones": "Give the arguments that it stands for to the Trainer",
    "enable_autolog_hparams": "Give it to the Trainer",
}
#: Other attributes of Lightning's Trainer that it acts on, and this one has not.
_LIGHTNINGS = {
    "validate_loop", "test_loop", "_data_connector", "_callback_connector", "_checkpoint_connector", "_signal_connector",
    "_detect_anomaly", "_loggers",
}  # fmt: skip


class Changes:
    """Setting attributes of a trainer: arguments are changed where that has an effect, and what would have none is refused."""

    #: Whether an attribute that is an argument is changed by the user when it is set.
    _made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CHANGEABLE and self._made:
            self.change(name, value)
        elif name in _WITHOUT_EFFECT or (name not in vars(self) and name in _LIGHTNINGS):
            raise AttributeError(
                f"trainer.{name} cannot be set under hocket, where it would have no effect. "
                f"{_WITHOUT_EFFECT.get(name, 'Omit it')}."
            )
        super().__setattr__(name, value)

    def keep(self, **values: Any) -> None:
        """Set attributes that modules only read."""
        vars(self).update(values)

    def change(self, name: str, value: Any) -> None:
        """Change an argument that the Trainer was given. Raises AttributeError where it cannot be changed."""
        raise AttributeError(f"trainer.{name} cannot be set here. Give its counterpart to hocket.Trainer.")
