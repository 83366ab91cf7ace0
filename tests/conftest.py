"""The shared data and model as fixtures, and an empty folder for each test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import make_data, make_model
from torch import nn
from torch.utils.data import DataLoader


@pytest.fixture
def data() -> Callable[..., DataLoader[Any]]:
    """See `make_data`."""
    return make_data


@pytest.fixture
def model() -> Callable[..., nn.Module]:
    """See `make_model`."""
    return make_model


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_an_empty_folder: None) -> None:
    pass
