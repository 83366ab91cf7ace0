"""Layer-wise learning-rate decay: the repeated blocks of a model, each slower than those after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.basics.plugin_errors import PluginConfigError
from hocket_general.layer_order import layers


class Transformer(nn.Module):
    """Names as in timm's: parameters of its own, an embedding, numbered blocks, a last norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4))
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(12))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs) + self.position
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def trainer(optimizer: object, model: nn.Module | None = None, **more: object) -> hocket.Trainer:
    data = [(torch.ones(2, 4), torch.ones(2, 2))] * 4
    return hocket.Trainer(
        model=model or Transformer(),
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        train_data=data,
        device="cpu",
        **more,
    )


def options_of(made: hocket.Trainer, option: str) -> dict[str, float]:
    names = {id(each): name for name, each in made.state.model.named_parameters()}
    groups = [group for each in made.state.optimizers for group in each.param_groups]
    return {names[id(each)]: group[option] for group in groups for each in group["params"]}


def test_layer_decay_is_that_of_beit() -> None:
    """BEiT's ``scales[layer] = decay ** (depth + 1 - layer)``, with embeddings as layer 0 and the head as layer depth + 1."""
    rates = options_of(trainer({"adamw": {"lr": 0.1, "layer_decay": 0.75}}), "lr")

    def layer(name: str) -> int:
        if name.startswith(("position", "embed")):
            return 0
        return int(name.split(".")[1]) + 1 if name.startswith("blocks") else 13

    assert rates == pytest.approx({name: 0.1 * 0.75 ** (13 - layer(name)) for name in rates})


def test_layer_decay_scales_the_rates_of_groups() -> None:
    given = {"adamw": {"lr": 0.1, "layer_decay": 0.5, "groups": [{"match": "blocks.11.*.bias", "lr": 1.0}]}}
    rates = options_of(trainer(given), "lr")
    assert rates["blocks.11.1.bias"] == 0.5 and rates["blocks.11.1.weight"] == 0.05 and rates["head.weight"] == 0.1


def test_layer_decay_of_torchvisions_vit_is_that_of_beit() -> None:
    """Blocks are ``encoder_layer_0`` and so on, and the numbers in them (``mlp.0``, ``mlp.3``) are not."""
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(32, 8, 12, 2, 32, 64, num_classes=3)
    rates = options_of(trainer({"adamw": {"lr": 0.1, "layer_decay": 0.5}}, model), "lr")

    def layer(name: str) -> int:
        if name.startswith(("class_token", "conv_proj", "encoder.pos_embedding")):
            return 0
        return int(name.split(".")[2].removeprefix("encoder_layer_")) + 1 if "encoder_layer" in name else 13

    assert rates == pytest.approx({name: 0.1 * 0.5 ** (13 - layer(name)) for name in rates})


def firsts(model: nn.Module) -> list[str]:
    """Return the first parameter of each layer, in order."""
    found = layers(model, [name for name, _ in model.named_parameters()])
    assert list(found) == [name for name, _ in model.named_parameters() if found]
    assert list(found.values()) == sorted(found.values())
    return [next(name for name in found if found[name] == layer) for layer in sorted(set(found.values()))]


@pytest.mark.parametrize(
    ("name", "stem", "stages", "head"),
    [
        ("resnet18", "conv1", [("layer1", 2), ("layer2", 2), ("layer3", 2), ("layer4", 2)], "fc"),
        ("resnet50", "conv1", [("layer1", 3), ("layer2", 4), ("layer3", 6), ("layer4", 3)], "fc"),
        ("swin_t", "features.0", [("features.1", 2), ("features.3", 2), ("features.5", 6), ("features.7", 2)], "norm"),
        ("convnext_tiny", "features.0", [(f"features.{at}", n) for at, n in ((1, 3), (3, 3), (5, 9), (7, 3))], "class"),
        ("efficientnet_b0", "features.0", [(f"features.{at}", n) for at, n in enumerate((1, 2, 2, 3, 3, 4, 1), 1)],
         "features.8"),
    ],
)  # fmt: skip
def test_blocks_of_torchvision_are_layers(name: str, stem: str, stages: list[tuple[str, int]], head: str) -> None:
    """Between a stem and a head; downsampling between stages belongs to the block before, as in SimMIM's Swin."""
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        found = firsts(getattr(models, name)())
    blocks = [f"{stage}.{index}." for stage, count in stages for index in range(count)]
    assert len(found) == len(blocks) + 2 and found[0].startswith(stem) and found[-1].startswith(head)
    assert all(each.startswith(block) for each, block in zip(found[1:-1], blocks, strict=True))


def test_blocks_of_transformers_are_layers() -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
    bert = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    found = firsts(transformers.GPT2LMHeadModel(gpt2))
    assert found[0] == "transformer.wte.weight" and found[-1] == "transformer.ln_f.weight"
    assert found[1:-1] == [f"transformer.h.{index}.ln_1.weight" for index in range(3)]
    found = firsts(transformers.BertForSequenceClassification(bert))
    assert found[0] == "bert.embeddings.word_embeddings.weight" and found[-1] == "bert.pooler.dense.weight"
    assert found[1:-1] == [f"bert.encoder.layer.{index}.attention.self.query.weight" for index in range(3)]


def perceptron(*, norm: bool) -> nn.Sequential:
    return nn.Sequential(
        *(each for _ in range(3) for each in (nn.Linear(4, 4), *([nn.LayerNorm(4)] * norm), nn.ReLU()))
    )


def blocks(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(count)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"net": perceptron(norm=False)}, ["net.0", "net.2", "net.4"]),
        ({"net": perceptron(norm=True)}, ["net.0", "net.3", "net.6", "net.7"]),
        (
            {"stem": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "blocks": nn.Sequential(*blocks(2)),
             "neck": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "head": nn.Linear(4, 2)},
            ["stem.0", "blocks.0.0", "blocks.1.0", "neck.0"],
        ),
        ({"embed": nn.Linear(4, 4), "blocks": nn.ModuleList(blocks(1))}, ["embed", "blocks.0.0"]),
        ({"embed": nn.Linear(4, 4), "block_1": blocks(1)[0], "block_2": blocks(1)[0]}, ["embed", "block_1.0", "block_2.0"]),
        ({"encoder": nn.Transformer(4, 2, 1, 1, 4, batch_first=True)},
         ["encoder.encoder.layers.0.self_attn", "encoder.decoder.layers.0.self_attn", "encoder.decoder.norm"]),
        ({"conv1": nn.Conv2d(3, 4, 3), "fc": nn.Linear(4, 2)}, []),
    ],
)  # fmt: skip
def test_layers_are_the_repeated_blocks(parts: dict[str, nn.Module], expected: list[str]) -> None:
    found = firsts(nn.ModuleDict(parts))
    assert len(found) == len(expected) and all(
        name.startswith(f"{each}.") for name, each in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "schedule", ["linear(alpha_f=0.5)", lambda each: torch.optim.lr_scheduler.StepLR(each, 4, 0.5)]
)
def test_schedules_keep_the_ratio_of_the_rates(schedule: object) -> None:
    made = trainer({"sgd": {"lr": 0.1, "layer_decay": 0.5}}, schedule=schedule)
    before = options_of(made, "lr")
    made.fit("4ba")
    assert options_of(made, "lr") == pytest.approx({name: rate / 2 for name, rate in before.items()})


def test_layer_decay_needs_blocks() -> None:
    with pytest.raises(PluginConfigError, match="needs blocks that repeat"):
        trainer({"adamw": {"layer_decay": 0.5}}, nn.Linear(4, 2))
