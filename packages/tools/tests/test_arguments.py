"""Arguments of the public functions: what does not fit the annotations is refused, with what to write instead."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass

import numpy as np
import pytest
import torch
from torch import nn

import hocket
import hocket_tools
from hocket_tools.arguments import checked
from hocket_tools.exporting.callback import Export


def trainer():
    data = [(torch.randn(8, 4), torch.randint(4, (8,)))]
    model = nn.Linear(4, 4)
    return hocket.Trainer(model, loss="cross_entropy", eval_data={"test": data}, metrics=["accuracy"], device="cpu")


def test_every_public_function_checks_its_arguments():
    public = {name: getattr(hocket_tools, name) for name in hocket_tools.__all__}
    calls = {name: each.__init__ if isinstance(each, type) else each for name, each in public.items()}
    records = {name for name, each in public.items() if is_dataclass(each)}
    written = {name: call for name, call in calls.items() if inspect.isfunction(call) and name not in records}
    unchecked = [name for name, call in written.items() if "understood" not in call.__code__.co_qualname]
    assert len(written) > 15 and unchecked == ["Predictions", "RepetitionDiffers"]  # which users do not make


IMAGES = torch.zeros(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hocket_tools.magnitude_masks(nn.Linear(2, 2), 0.5), r"weights=dict\(model\.named_parameters\(\)\)"),
        (
            lambda: hocket_tools.prune_channels("model", (2, 4)),
            r"model='model', which is str.*Write model=trainer\.state\.model",
        ),
        (
            lambda: hocket_tools.tune(trainer(), "lr", progress=True),
            r"progress=True, which is bool; it should be a function",
        ),
        (lambda: hocket_tools.export(trainer(), overwrite="no"), r"it should be True or False\. Write overwrite=False"),
        (lambda: hocket_tools.export(trainer(), out=5), r"text, a path or None\. Write out='…'"),
        (lambda: hocket_tools.export(trainer(), dynamic=["input"]), r"Write dynamic={'…': \[1\]}"),
        (lambda: hocket_tools.export(trainer(), dynamic={"input": "2"}), r"Write dynamic={'input': \[2\]}"),
        (
            lambda: hocket_tools.export(trainer(), dynamic={"input": [2, "a"]}),
            r"given dynamic\['input'\]\[1\]='a', which is str; it should be an integer",
        ),
        (
            lambda: hocket_tools.compare_compressed(trainer(), {"a": nn.Linear(4, 4), "b": len}),
            r"given models\['b'\]=<built-in function len>, which is builtin_function_or_method; .* class Module",
        ),
        (lambda: hocket_tools.compare_compressed(trainer(), [nn.Linear(4, 4)]), r"Write models={'int8': small}"),
        (
            lambda: hocket_tools.Finetuning([("0ep", "4.*")]),
            r"given stages\[0\]=\('0ep', '4\.\*'\), which is tuple.* Write stages\[0\]={'at': '0ep', 'train'",
        ),
        (lambda: hocket_tools.compared(trainer(), None, hocket_tools.How()), r"Write first=hocket_tools\.judge\("),
        (lambda: Export(every=2), r"Write every='1ep'"),
        (lambda: hocket_tools.judge(trainer(), "test", worst="3"), r"an integer\. Write worst=3\."),
        (lambda: hocket_tools.judge(trainer(), "test", metrics="accuracy"), r"Write metrics=\['accuracy'\]"),
        (lambda: hocket_tools.judge(trainer(), "test", how={"level": 0.9}), r"Write how=hocket_tools\.How"),
        (lambda: hocket_tools.judge(nn.Linear(1, 1), "test"), r"Write trainer=hocket\.Trainer"),
        (lambda: hocket_tools.compared(None), r"^compared was not given second"),
        (lambda: hocket_tools.corrupt(np.zeros((1, 3, 8, 8)), "fog", 1), "ndarray as images"),
        (lambda: hocket_tools.corrupt(IMAGES, "fog", 1.0), "severity=1.0, which is float"),
        (lambda: hocket_tools.bootstrap([1, 2]), r"Write statistic=Statistic\('accuracy', right, lambda"),
        (lambda: hocket_tools.merge_adapters(trainer()), r"class Module\. Write model=trainer\.state\.model"),
        (lambda: hocket_tools.quantize("runs/a"), r"class Module\. Write model=trainer\.state\.model"),
        (lambda: hocket_tools.fake_quantize(trainer().state), r"Write model=state\.model"),
        (lambda: hocket_tools.read_predictions(trainer().result()), r"Write folder=result\.run_folder"),
        (lambda: hocket_tools.mcnemar((), 2), r"first_only=\(\), which is tuple; it should be an integer"),
        (lambda: hocket_tools.mcnemar(1.5, 2), "first_only=1.5, which is float; it should be an integer"),
        (lambda: hocket_tools.Pruning(scope="global"), r"'layer' or 'model'\. Write scope='layer'"),
        (lambda: hocket_tools.Pruning(keep="1"), r"Write keep=\['1'\]"),
        (lambda: hocket_tools.QuantizationAwareTraining("int8_static"), r"Write to='int8-static'"),
        (
            lambda: hocket_tools.fake_quantize(nn.Linear(2, 2), calibration=[]),
            r"^fake_quantize has no argument calibration",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_write(call, said):
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        call()
    assert isinstance(caught.value, hocket.errors.Mistake) and "\n" not in str(caught.value)


def test_what_fits_passes():
    @checked
    def function(number: float, names: list[str] | None = None, pair: tuple[int, int] = (1, 2)) -> object:
        return number, names, pair

    assert function(np.float64(2), names=["a"], pair=[1, 2]) == (2.0, ["a"], [1, 2])
    assert hocket_tools.mcnemar(np.int64(1), 8) == hocket_tools.mcnemar(1, 8)
    assert str(inspect.signature(function)).startswith("(number: 'float'")


def dropping(x):
    return torch.nn.functional.dropout(x, 0.5)


class Dropping(nn.Linear):
    def forward(self, input):
        return dropping(super().forward(input))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: hocket_tools.judge(trainer(), "tset"),
            r"no evaluation set 'tset'; the Trainer has test\. Write judge\(trainer, 'test'\)",
        ),
        (
            lambda: hocket_tools.judge(trainer(), "test", metrics=["acc"]),
            r"no metric 'acc'.*Write metrics=\['accuracy'\]",
        ),
        (lambda: hocket_tools.withstand(trainer(), hocket_tools.judge(trainer(), "test"), kinds=[]), "no kind"),
        (
            lambda: hocket_tools.withstand(trainer(), hocket_tools.judge(trainer(), "test"), kinds="fog"),
            r"kinds=\['fog'\]",
        ),
        (
            lambda: hocket_tools.quantize(nn.Linear(64, 4), "int8", group_size=64),
            r"group_size=64 has no effect with to='int8'\. Remove it, or write to='int4'",
        ),
        (lambda: hocket_tools.fake_quantize(nn.Linear(64, 4), group_size=64), r"group_size=64 has no effect"),
        (lambda: hocket_tools.QuantizationAwareTraining("int8", 64), r"group_size=64 has no effect"),
        (
            lambda: hocket_tools.Statistic("loss", np.random.rand(50), len),
            r"rows of float64 of shape \(50,\).*write rows=numpy\.arange\(50\)",
        ),
        (lambda: hocket_tools.corrupt(IMAGES, "fog", 1, seed=-1), r"seed=-1.*0 or more"),
        (lambda: hocket_tools.corrupt(IMAGES, "fog", 1, places=[]), "0 places for 1 images"),
        (lambda: hocket_tools.corrupt(IMAGES[0], "fog", 1), r"images\[None\] for one image"),
        (lambda: hocket_tools.corrupt((IMAGES * 255).byte(), "fog", 1), "images / 255 for bytes"),
        (lambda: hocket_tools.quantize(nn.Linear(4, 4), calibration=torch.ones(2, 4)), r"calibration=\[inputs\]"),
        (lambda: hocket_tools.quantize(nn.Linear(4, 4), "int8", [torch.ones(2, 4)]), "to='int8-static' only; omit it"),
        (lambda: hocket_tools.quantize(nn.ReLU(), "int8"), r"ReLU has none\. Quantize a model with linear layers"),
        (
            lambda: hocket_tools.compare_compressed(trainer(), {"a": nn.Linear(5, 4)}),
            r"with the model 'a' raised.*Give models",
        ),
        (
            lambda: hocket_tools.compare_compressed(trainer(), {"a": nn.Linear(4, 3)}),
            r"'a' has outputs of shapes \[\(8, 3\)\]",
        ),
        (
            lambda: hocket_tools.prune_channels(nn.Linear(4, 4), (2, 5)),
            r"cannot compute example=, inputs of shapes \[\(2, 5\)\]",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_write(call, said):
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        call()
    assert (
        isinstance(caught.value, hocket.errors.Mistake)
        and "\n" not in str(caught.value)
        and "--" not in str(caught.value)
    )


def test_two_prunings_are_refused():
    with pytest.raises(ValueError, match=r"has 'pruning' twice\. Each would undo"):
        hocket.Trainer(nn.Linear(4, 4), device="cpu", algorithms=[hocket_tools.Pruning(), hocket_tools.Pruning()])


def test_an_export_with_random_outputs_says_the_cause(tmp_path):
    data = [(torch.randn(8, 4), torch.randint(4, (8,)))]
    run = hocket.Trainer(Dropping(4, 4), loss="cross_entropy", eval_data={"test": data}, device="cpu")
    with pytest.raises(FloatingPointError, match=r"other outputs when it is called twice: look for dropout"):
        hocket_tools.export(run, "torch-export", tmp_path / "out")
