"""Which modules become units."""

from __future__ import annotations

import pytest
from torch import nn

from hocket_strategies.wrapping import units, units_of_one_dtype


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)  # 80 parameters
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)  # 40 and 36


class Network(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.inputs = nn.Embedding(5, 4)  # 20
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.outputs = nn.Linear(4, 5, bias=False)
        if tied:
            self.outputs.weight = self.inputs.weight


def names(model, wrap):
    known = {module: name for name, module in model.named_modules()}
    return [known[module] for module in units(model, wrap)]


def test_blocks_are_found():
    assert names(Network(), "auto") == ["blocks.0", "blocks.1"]


def test_the_model_may_say_what_its_blocks_are():
    model = Network()
    model._no_split_modules = ["MultiheadAttention"]
    assert names(model, "auto") == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize("wrap", ["Block", ["Block"], Block, [Block]])
def test_by_class(wrap):
    assert names(Network(), wrap) == ["blocks.0", "blocks.1"]


def test_inner_units_come_first_and_subclasses_count():
    class Special(Block):
        pass

    model = Network()
    model.blocks[1] = Special()
    assert names(model, ["Block", nn.LayerNorm, "MultiheadAttention"]) == [
        "blocks.0.attention",
        "blocks.0",
        "blocks.1.attention",
        "blocks.1",
        "norm",
    ]


@pytest.mark.parametrize(
    "smallest, expected",
    [
        (1000, []),
        (100, [""]),  # a block has 156
        (40, [".attention", ".first"]),  # the second layer's 36 are too few, and all that is left of the block
        (36, [".attention", ".first", ".second"]),
    ],
)
def test_by_size(smallest, expected):
    assert names(Network(), smallest) == [f"blocks.{i}{name}" for i in range(2) for name in expected]


def test_neither_the_model_nor_a_list_is_a_unit():
    assert not {"", "blocks"} & set(names(Network(), 1))


def test_a_shared_parameter_keeps_its_users_together():
    assert names(Network(tied=True), 20) == [name for name in names(Network(), 20) if name not in ("inputs", "outputs")]
    with pytest.raises(ValueError, match="Embedding shares weight with the rest of the model"):
        units(Network(tied=True), "Embedding")


def test_nothing_and_nonsense():
    assert names(Network(), None) == []
    with pytest.raises(ValueError, match=r"has no Blok. Its classes are Block, Embedding, LayerNorm"):
        units(Network(), "Blok")
    for wrong in (True, 0, [3], {"Block": 1, 2: 3}):
        with pytest.raises(TypeError, match="is not valid: give 'auto'"):
            units(Network(), wrong)


def test_what_has_another_dtype_is_a_unit_of_its_own():
    model = Network()
    known = {module: name for name, module in model.named_modules()}
    assert units_of_one_dtype(model, units(model)) == units(model)
    model.norm.double()
    model.blocks[0].first.double()
    found = [known[module] for module in units_of_one_dtype(model, units(model))]
    assert found == ["blocks.0.first", "blocks.0", "blocks.1", "norm"]
