"""What can be said of the deepspeed strategy without the package."""

from __future__ import annotations

import sys

import pytest

from hocket import Need
from hocket.devices.cpu import CPU
from hocket.plugins import PluginError
from hocket_strategies import DeepSpeed
from hocket_testkit import run_ranks


def test_a_missing_package_is_named_with_what_to_type():
    def rank_main(rank):
        sys.modules["deepspeed"] = None  # as if it were not installed
        with pytest.raises(PluginError, match=r"not installed.*pip install 'deepspeed>=") as refused:
            DeepSpeed().setup_environment(CPU())
        return "\n" not in str(refused.value)

    assert run_ranks(rank_main, 1) == [True]


@pytest.mark.parametrize(
    "arguments, stage",
    [
        ({}, 2),
        ({"stage": 3}, 3),
        ({"config": {"zero_optimization": {"stage": 1}}}, 1),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 1}}}, 1),
    ],
)
def test_the_stage_is_an_argument_or_in_the_configuration(arguments, stage):
    assert DeepSpeed(**arguments).stage == stage


@pytest.mark.parametrize(
    "arguments",
    [{"stage": 4}, {"stage": 2, "config": {"zero_optimization": {"stage": 1}}}, {"stage": 0, "offload": True}],
)
def test_stages_that_contradict(arguments):
    with pytest.raises(ValueError, match="Give one stage of 0, 1, 2, 3"):
        DeepSpeed(**arguments)


@pytest.mark.parametrize(
    "section, instead",
    [("optimizer", "FusedAdam"), ("scheduler", "schedule='cosine"), ("train_batch_size", "global_batch=32")],
)
def test_sections_that_belong_elsewhere(section, instead):
    with pytest.raises(ValueError, match=f"has '{section}', which hocket does not pass on.*{instead}"):
        DeepSpeed(config={section: {}})


def test_the_users_configuration_is_left_alone():
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {}}
    DeepSpeed(stage=3, config=config)
    assert config == {"gradient_accumulation_steps": 2, "zero_optimization": {}}


def test_partitions_are_not_offered_as_whole_parameters():
    assert Need.FULL_PARAMETERS in DeepSpeed(stage=0).offers
    assert not DeepSpeed(stage=1).offers
