"""What cannot work is one paragraph that names the culprit and the remedy, and comes before training where it can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import make_trainer, sgd
from torch import nn
from torch.nn import functional as F

import hocket
from hocket import Event, Phase, plugins
from hocket.basics.time import TimeError
from hocket_cli import main


@pytest.fixture
def make() -> Callable[..., hocket.Trainer]:
    return make_trainer


def refused(error: type[BaseException], *words: str) -> Any:
    """Expects an error whose message is one paragraph with these words in it."""

    class Expectation:
        def __enter__(self) -> None:
            self.raises = pytest.raises(error)
            self.info = self.raises.__enter__()

        def __exit__(self, *exception: Any) -> Any:
            caught = self.raises.__exit__(*exception)
            message = str(self.info.value)
            assert "\n" not in message.strip(), message
            for word in words:
                assert word in message, (word, message)
            return caught

    return Expectation()


def test_a_misspelt_algorithm(make) -> None:
    with refused(plugins.UnknownPluginError, "'blurpol'", "Did you mean 'blurpool'?"):
        make(algorithms=["blurpol"])


def test_a_misspelt_hook(make) -> None:
    """Lightning 2.2-h: a misspelt hook was ignored."""

    class Watch(hocket.Callback):
        def epoch_ends(self, state: hocket.State) -> None: ...

    with refused(plugins.HookError, "epoch_ends", "Did you mean 'epoch_end'?"):
        make(callbacks=[Watch()])


def test_an_unknown_argument_of_a_hook(make) -> None:
    class Watch(hocket.Callback):
        def epoch_end(self, stat: hocket.State) -> None: ...

    with refused(plugins.HookError, "'stat'", "Did you mean 'state'?"):
        make(callbacks=[Watch()])


def test_an_algorithm_with_a_hook_for_a_method(make) -> None:
    class Method(hocket.Algorithm):
        events = {Event.BATCH_END}

        def apply(self, event: Event, state: hocket.State) -> None: ...
        def epoch_end(self, state: hocket.State) -> None: ...

    with refused(plugins.HookError, "epoch_end", "Event.EPOCH_END"):
        make(algorithms=[Method()])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"colout": {"p_row": "a lot"}}, ("p_row='a lot'", "float")),
        ({"colout": {"prow": 0.1}}, ("'prow'", "Did you mean 'p_row'?")),
        ("colout(p_row)", ("'p_row'", "key=value")),
        ("colout(p_row=[1)", ("Brackets",)),
        ({"colout": 0.1}, ("Write {'colout': {'p_row': 0.1}}",)),
        ({"colout": {}, "blurpool": {}}, ("one name",)),
        (5, ("5", "algorithms")),
    ],
)
def test_wrong_configurations(make, config, words) -> None:
    with refused(plugins.PluginConfigError, *words):
        make(algorithms=[config])


def test_a_list_that_is_none(make) -> None:
    with refused(TypeError, "algorithms=5", "a list of names"):
        make(algorithms=5)


def algorithm(name: str, **attributes: Any) -> hocket.Algorithm:
    def apply(self: Any, event: Event, state: hocket.State) -> None: ...

    kind = type(name, (hocket.Algorithm,), {"events": {Event.BATCH_END}, "apply": apply, **attributes})
    return kind()


def test_a_cyclic_order(make) -> None:
    first, second = algorithm("First", before=("second",)), algorithm("Second", before=("first",))
    with refused(plugins.OrderError, "'first'", "'second'", "cycle"):
        make(algorithms=[first, second])


def test_a_conflict(make) -> None:
    with refused(plugins.ConflictError, "'first'", "'second'", "Remove one of them"):
        make(algorithms=[algorithm("First", conflicts=("second",)), algorithm("Second", phase=Phase.DATA)])


def test_one_name_twice(make) -> None:
    """Both run, under names that differ, and both are told apart in the plan; two that are the same are refused."""
    trainer = make(algorithms=["ema", {"ema": {"half_life": "7ba"}}])
    assert [attachment.name for attachment in trainer.plan().attachments if attachment.kind == "algorithms"] == [
        "ema",
        "ema-2",
    ]
    with refused(ValueError, "'ema' twice", "the same arguments", "Remove one"):
        make(algorithms=["ema", "ema"])


@pytest.mark.parametrize("duration", ["5", 5, "5 apples", "ten ep", "-1ep", "0.5dur", "1.5ba", ""])
def test_durations(make, duration) -> None:
    """composer.md S18: '5' was 50 seconds."""
    with refused(ValueError, str(duration).strip()):
        make(duration=duration)


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_loss_that_is_not_finite(make, when) -> None:
    """Lightning 2.2-g: NaN weights were a success."""
    calls = itertools.count()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        bad = when == "at once" or next(calls) == 3
        return F.cross_entropy(outputs, targets) * (float("nan") if bad else 1.0)

    trainer = make(loss=loss)
    with refused(FloatingPointError, "batch 0" if when == "at once" else "batch 3", "nonfinite='skip'"):
        trainer.fit()
    assert all(p.isfinite().all() for p in trainer.state.model.parameters()), "the optimizer did not step"


def test_an_optimizer_without_parameters(make) -> None:
    net = nn.Linear(8, 3)
    empty = torch.optim.SGD([{"params": list(net.parameters())}], lr=0.1)
    empty.param_groups[0]["params"].clear()
    with refused(ValueError, "SGD holds no parameters", "model.parameters()"):
        make(optimizer=empty)


def test_a_model_without_anything_to_train(make, model) -> None:
    with refused(ValueError, "Sequential", "requires a gradient"):
        make(model=model().requires_grad_(False))


def test_an_optimizer_of_another_model(make, model) -> None:
    with refused(ValueError, "not in the model", "optimizer=lambda"):
        make(optimizer=sgd(model().parameters()))


def test_two_optimizers_over_one_parameter(make, model) -> None:
    net = model()
    with refused(ValueError, "another optimizer"):
        make(model=net, optimizer=[sgd(net.parameters()), sgd(net.parameters())])


def test_something_that_is_no_optimizer(make) -> None:
    with refused(TypeError, "int", "torch.optim"):
        make(optimizer=lambda parameters: 3)


def test_a_model_on_another_device(make) -> None:
    with refused(ValueError, "meta", "to_empty"):
        make(model=nn.Linear(8, 3, device="meta"))


def test_a_model_on_two_devices(make) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    net[1].to("meta")
    with refused(ValueError, "1.weight", "meta"):
        make(model=net)


def test_no_model(make) -> None:
    with refused(TypeError, "torch.nn.Module"):
        make(model="resnet")


def test_a_task_with_a_loss(make) -> None:
    with refused(TypeError, "Mine", "loss="):
        make(model=type("Mine", (hocket.Task,), {})())


def test_no_loss(make) -> None:
    trainer = make(loss=None)
    with refused(TypeError, "without a loss", "loss="):
        trainer.fit()


def test_a_loss_that_is_not_a_scalar(make) -> None:
    trainer = make(loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))
    with refused(ValueError, "shape (32,)", "mean"):
        trainer.fit()


def test_a_loss_that_is_not_a_tensor(make) -> None:
    with refused(TypeError, "float", "scalar tensor"):
        make(loss=lambda outputs, targets: 1.0).fit()


# --- data


def test_an_empty_loader(make) -> None:
    """composer.md 3.2: an endless loop."""
    for duration in ("2ep", "5ba", "100sp", "1min"):
        with refused(ValueError, "yielded no batch"):
            make(train_data=[], duration=duration).fit()


def test_an_iterator_that_is_exhausted(make, data) -> None:
    with refused(ValueError, "iterator", "once"):
        make(train_data=iter(data()), duration="2ep").fit()


def test_an_infinite_loader(make, data) -> None:
    batches = list(data())
    with refused(ValueError, "never ends", "'1000ba'"):
        make(train_data=itertools.cycle(batches), duration="2ep").fit()
    assert make(train_data=itertools.cycle(batches), duration="7ba").fit().timestamp.batch == 7
    assert make(train_data=itertools.cycle(batches), duration="2ep", limit_train=3).fit().timestamp.batch == 6


def test_a_loader_without_length(make, data) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from list(data())

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    result = make(train_data=loader, duration="2ep").fit()
    assert (result.timestamp.epoch, result.timestamp.batch) == (2, 6)
    trainer = make(train_data=Stream(), schedule="cosine")
    with refused(ValueError, "The number of batches per epoch is unknown"):
        trainer.fit()


@pytest.mark.parametrize("nothing", ["0ep", "0.0s", ["2ep", "0ba"]])
def test_a_duration_of_nothing(make, nothing) -> None:
    with refused(TimeError, "duration='0", "trains nothing", "'10ep'"):
        make(duration=nothing)
    if isinstance(nothing, str):
        with refused(TimeError, "duration='0", "trains nothing", "'10ep'"):
            make().fit(nothing)


@pytest.mark.parametrize("argument", ["eval_every", "log_every"])
@pytest.mark.parametrize("nothing", ["0ba", "0.0dur", 0])
def test_an_interval_of_nothing(make, argument, nothing) -> None:
    with refused(TimeError, f"{argument}={nothing!r} is never due", "Write an interval, such as '1ep'"):
        make(**{argument: nothing})


def test_a_fit_that_is_over(make) -> None:
    trainer = make(duration="1ep")
    trainer.fit()
    with pytest.warns(UserWarning, match=r"1ep are done.*fit\(duration="):
        assert trainer.fit().timestamp.epoch == 1
    assert trainer.fit("1ep").timestamp.epoch == 2


def test_what_is_missing(make) -> None:
    with refused(ValueError, "train_data="):
        make(train_data=None).fit()
    with refused(ValueError, "optimizer="):
        make(optimizer=None).fit()
    with refused(ValueError, "duration="):
        make(duration=None).fit()
    with refused(ValueError, "eval_data="):
        make().evaluate()


def test_a_batch_whose_samples_cannot_be_counted(make) -> None:
    with refused(ValueError, "how many samples", "count(batch)"):
        make(train_data=[(torch.zeros(4, 8), torch.zeros(5))]).fit()


def test_an_empty_evaluation_set(make) -> None:
    with refused(ValueError, "'test'", "no batch"):
        make().evaluate({"test": []})


def test_a_metric_that_is_none(make, data) -> None:
    class Mean:
        def update(self, outputs: Any, targets: Any) -> None: ...
        def reset(self) -> None: ...

    with refused(TypeError, "'mean'", "compute()"):
        make(eval_data=data(), metrics={"mean": Mean()})


# --- settings


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"clip_gradients": -1.0}, ("clip_gradients=-1.0", "('value', 0.5)")),
        ({"clip_gradients": ("size", 1.0)}, ("'size'", "'adaptive'")),
        ({"nonfinite": "ignore"}, ("'ignore'", "'skip'")),
        ({"microbatch": 0}, ("microbatch=0", "'auto'")),
        ({"microbatch": 2.5}, ("microbatch=2.5",)),
        ({"log_every": "10"}, ("'10'", "unit")),
        ({"schedule": "cosin"}, ("'cosin'", "Did you mean 'cosine'?")),
        ({"precision": "fp23"}, ("'fp23'",)),
        ({"device": "gpu"}, ("'gpu'",)),
        ({"strategy": "dpp"}, ("'dpp'", "Did you mean 'ddp'?")),
        ({"schedule_every": "1sp", "schedule": lambda o: torch.optim.lr_scheduler.ConstantLR(o)}, ("1sp", "'1ep'")),
        (
            {"schedule": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            ("ReduceLROnPlateau", 'schedule="plateau(on='),
        ),
        ({"limit_train": 1.5}, ("limit_train=1.5", "an int of 1 or more")),
        ({"fast_dev_run": 0}, ("fast_dev_run=0", "an int of 1 or more")),
        ({"overfit": -1}, ("overfit=-1", "an int of 1 or more")),
        ({"sanity_eval": -1}, ("sanity_eval=-1", "an int of 1 or more")),
    ],
)
def test_settings(make, setting, words) -> None:
    with refused(Exception, *words):
        make(**setting)


def test_a_method_that_a_strategy_cannot_serve(make) -> None:
    class Sharded(hocket.Strategy):
        offers = hocket.Need.NOTHING

    with refused(plugins.PlanError, "'sam'", "second gradient", "'sharded'"):
        make(algorithms=["sam"], strategy=Sharded())


def test_a_duration_in_tokens_of_batches_without(make) -> None:
    with refused(ValueError, "No tokens were counted", "100tok", "count(batch)"):
        make(duration="100tok").fit()


CONFIGURATION = """
model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 1}}
loss: torch.nn.functional.mse_loss
optimizer: sgd(lr=0.1)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "file.yaml", "duration=5x"], ("'5x' is not a time", "'10ep'")),
        (["train", "file.yaml", "microbatch=0"], ("microbatch=0",)),
        (["train", "file.yaml", "durration=5ep"], ("'durration'", "Did you mean 'duration'?")),
        (["--no-plugin", "plugins", "list"], ("'--no-plugin'", "--no-plugins")),
    ],
)
def test_the_command_line(arguments, words, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text(CONFIGURATION)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for word in words:
        assert word in said
