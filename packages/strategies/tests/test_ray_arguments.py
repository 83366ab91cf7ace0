"""What can be said of the ray strategy without Ray, or without its workers."""

from __future__ import annotations

import sys

import pytest

from hocket.devices.cpu import CPU
from hocket.plugins import PluginError
from hocket_strategies import Ray
from hocket_strategies.ray import launch


def test_a_missing_package_is_named_with_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for attempt in (lambda: Ray().setup_environment(CPU()), lambda: launch(print)):
        with pytest.raises(PluginError, match=r"not installed.*pip install 'ray\[train\]>=") as refused:
            attempt()
        assert "\n" not in str(refused.value)


def test_outside_of_a_worker_it_says_how_to_start_some():
    pytest.importorskip("ray.train.torch")
    with pytest.raises(RuntimeError, match=r"no Ray Train worker.*launch\(function, scaling"):
        Ray().setup_environment(CPU())


@pytest.mark.parametrize(
    "training, arguments", [(print, ["--epochs"]), ("train.py", {"epochs": 3}), ("train.py", "--x")]
)
def test_arguments_that_do_not_fit(training, arguments):
    pytest.importorskip("ray.train.torch")
    with pytest.raises(TypeError, match=r"arguments=.* should be"):
        launch(training, arguments=arguments)
