"""No-op model: one parameter, any batch, everything else as it was."""

from __future__ import annotations

import pytest
import torch
from support import make_data, make_model, make_trainer
from torch import nn

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket_general import NoOpModel
from hocket_general.functional import no_op_model
from hocket_testkit import AlgorithmConformance

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class TestNoOpModel(AlgorithmConformance):
    def make(self):
        return NoOpModel()


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_the_real_model_is_never_called(loss):
    class Expensive(nn.Linear):
        def forward(self, x):
            raise AssertionError("called")

    trainer = make_trainer(model=Expensive(8, 3), loss=loss, algorithms=["no-op-model"], eval_data=make_data())
    result = trainer.fit()
    assert (result.timestamp.batch, result.timestamp.sample) == (6, 168)
    assert [tuple(each.shape) for each in trainer.state.trained_parameters()] == [(1,)]
    assert [len(each) for each in trainer.predict(make_data(shuffle=False))] == [32, 32, 20]


def test_the_weight_follows_the_gradient_of_its_loss():
    trainer = make_trainer(algorithms=[NoOpModel()], duration="1ba")
    trainer.fit()
    assert trainer.state.model.weight.item() == pytest.approx(1.5 - 0.1 * 2 * 0.5)


def test_an_optimizer_that_was_made_before_trains_the_new_weight():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model=model, optimizer=optimizer, algorithms=[NoOpModel()], duration="1ba")
    trainer.fit()
    assert optimizer.param_groups[0]["params"] == [trainer.state.model.weight]
    assert trainer.state.model.weight.item() == pytest.approx(1.4)


@pytest.mark.parametrize("optimizer", [
    {"sgd": {"lr": 0.1, "groups": [{"match": "0.*", "lr": 0.5}]}},
    {"sgd": {"lr": 0.1, "layer_decay": 0.5}},
])  # fmt: skip
def test_groups_of_the_real_models_parameters_are_ignored_with_a_line(optimizer):
    (option,) = optimizer["sgd"].keys() - {"lr"}
    with pytest.warns(UserWarning, match=f"ignored {option}, .* parameters of Sequential, but NoOp"):
        trainer = make_trainer(optimizer=optimizer, algorithms=[NoOpModel()], duration="1ba")
    trainer.fit()
    assert trainer.state.model.weight.item() == pytest.approx(1.5 - 0.1 * 2 * 0.5)


@pytest.mark.parametrize(
    "batch",
    [{"input_ids": torch.zeros(4, 7, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}, torch.zeros(4, 3)],
)
def test_batches_of_any_kind(batch):
    hocket.Trainer(
        model=make_model(),
        optimizer="sgd(lr=0.1)",
        train_data=[batch] * 3,
        duration="1ep",
        algorithms=[NoOpModel()],
        device="cpu",
    ).fit()


def test_metrics_are_not_updated():
    class Refuses:
        def reset(self): ...
        def update(self, outputs, targets):
            raise AssertionError("updated")

        def compute(self):
            return 0.0

    make_trainer(algorithms=[NoOpModel()], eval_data=make_data(), metrics={"refuses": Refuses()}).fit()


def test_device_and_dtype_are_the_models():
    model, (replacement,) = no_op_model(nn.Linear(2, 2).to("meta", torch.bfloat16))
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert replacement.new is model


def test_a_task_is_refused():
    class Own(hocket.Task):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, batch):
            return self.layer(batch[0])

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1])

    with pytest.raises(PlanError, match="loss of its own"):
        make_trainer(model=Own(), loss=None, algorithms=[NoOpModel()])


def test_the_plan_shows_it():
    assert make_trainer(algorithms=[NoOpModel()]).plan().surgery["no-op-model"] == ("the model: Sequential -> NoOp",)
