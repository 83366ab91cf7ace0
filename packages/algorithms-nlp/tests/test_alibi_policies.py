"""Policies: which classes they belong to, and those that other distributions declare."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hocket.surgery import NoEffectWarning
from hocket_nlp import AlibiPolicy, alibi_policies
from hocket_nlp.alibi_sites import check_unchanged
from hocket_nlp.functional import alibi, alibi_slopes

#: A model as a stranger writes it: heads have another name, attention has no configuration, positions another place.
MODEL = """
    import torch
    from torch import nn
    from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import create_bidirectional_mask

    class AcmeConfig(PreTrainedConfig):
        model_type = "acme"

        def __init__(self, width=12, acme_heads=3, **options):
            super().__init__(**options)
            self.width, self.acme_heads = width, acme_heads
            self.hidden_size, self.max_position_embeddings = width, 16

    class Mixer(nn.Module):
        mixes = True

        def forward(self, hidden, mask, name):
            split = hidden.unflatten(-1, (3, -1)).transpose(1, 2)
            out, _ = AttentionInterface()[name](self, split, split, split, mask)
            return out.flatten(2)

    class Place(nn.Embedding):
        def forward(self, index, *, shift):
            return super().forward(index + shift)

    class AcmeModel(PreTrainedModel):
        config_class = AcmeConfig
        _supports_sdpa = True

        def __init__(self, config):
            super().__init__(config)
            self.words = nn.Embedding(61, config.width)
            self.table = nn.ModuleDict({"place": Place(16 + 1, config.width)})
            self.layers = nn.ModuleList([Mixer(), Mixer()])
            self.post_init()

        def get_input_embeddings(self):
            return self.words

        def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, use_cache=None):
            hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
            mask = create_bidirectional_mask(self.config, hidden, attention_mask)
            hidden = hidden + self.table["place"](torch.arange(hidden.shape[1]), shift=1)
            for layer in self.layers:
                hidden = layer(hidden, mask, self.config._attn_implementation)
            return hidden
"""
POLICY = """
    from hocket_nlp import AlibiPolicy

    policy = AlibiPolicy(
        positions="table.place",
        attention=lambda module: getattr(module, "mixes", False),
        causal=lambda module: False,
        heads=lambda config: config.acme_heads,
    )
    nothing = None
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions that declare policies, in a folder on the path."""

    def install(dist: str = "acme", target: str = "acme_policies:policy", name: str = "acme_model.AcmeModel") -> None:
        folder = tmp_path / f"{dist.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{alibi_policies.GROUP}]\n{name} = {target}\n")
        alibi_policies.forget()

    (tmp_path / "acme_model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "acme_policies.py").write_text(textwrap.dedent(POLICY))
    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in ("acme_model", "acme_policies"):
        sys.modules.pop(module, None)
    alibi_policies.forget()


def acme() -> Any:
    import acme_model

    torch.manual_seed(0)
    return acme_model.AcmeModel(acme_model.AcmeConfig()).eval()


def test_a_stranger_declares_a_policy(install, build) -> None:
    install()
    alibi(build("gpt2"), 40)
    assert "acme_policies" not in sys.modules  # only where its class is in the model
    model, (changed,) = alibi(nn.Sequential(acme()), 40)
    assert str(changed) == "0.table.place: Place -> NoPositions"
    assert model[0].config.num_attention_heads == 3
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))  # more than the 16 it learned
    with torch.no_grad():
        got = model(tokens)
        hidden = model[0].words(tokens)
        distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
        for _ in range(2):
            heads = hidden.unflatten(-1, (3, 4)).transpose(1, 2)
            scores = heads @ heads.mT / 2 - alibi_slopes(3)[:, None, None] * distance
            hidden = (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, hidden, rtol=1e-5, atol=1e-6)


def test_another_implementation_is_noticed_where_layers_have_no_configuration(install) -> None:
    install()
    model, _ = alibi(acme(), 40)
    check_unchanged(model)
    with pytest.warns(NoEffectWarning):
        assert alibi(model, 40)[1] == []
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="AcmeModel now uses the attention implementation 'sdpa'"):
        check_unchanged(model)


def test_without_a_policy_a_class_is_not_supported(install) -> None:
    with pytest.raises(TypeError, match=r"none in AcmeModel\. .*entry-point group hocket_nlp\.v1\.alibi_policies"):
        alibi(acme(), 40)


def test_a_policy_counts_for_subclasses_and_before_those_of_this_package(install, build, monkeypatch) -> None:
    install(name="transformers.models.llama.modeling_llama.LlamaPreTrainedModel")
    with pytest.raises(ValueError, match=r"no module model\.table\.place"):
        alibi(nn.ModuleDict({"model": build("llama").model}), 40)
    assert alibi_policies.policy_of(build("qwen3").model) is alibi_policies._ROTARY


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "acme_gone:policy",
            "cannot be loaded from acme_gone:policy: ModuleNotFoundError: .*Upgrade or uninstall acme",
        ),
        ("acme_policies:gone", "cannot be loaded from acme_policies:gone: AttributeError"),
        ("acme_policies:nothing", "is None, not a hocket_nlp.AlibiPolicy"),
    ],
)
def test_broken_policies_name_their_distribution(install, target, said) -> None:
    install(target=target)
    with pytest.raises(RuntimeError, match=f"ALiBi policy of acme for acme_model.AcmeModel {said}"):
        alibi(acme(), 40)


def test_two_policies_for_one_class_are_an_error(install) -> None:
    install()
    install("acme-copy")
    alibi(acme(), 40)  # the same object
    install("other", "acme_policies:nothing")
    with pytest.raises(
        RuntimeError, match=r"Several .* acme_model\.AcmeModel: acme, acme-copy, other\. Uninstall all but one"
    ):
        alibi(acme(), 40)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"positions": "table.here"}, ValueError, r"no module table\.here: .*It has words, table, layers"),
        ({"kind": nn.Linear}, ValueError, r"table\.place is Place, not Linear"),
        ({"attention": lambda module: False}, ValueError, "finds no attention in AcmeModel: correct `attention`"),
        ({"attention": lambda module: isinstance(module, nn.Embedding)}, RuntimeError, "ALiBi has not seen it"),
        (
            {"attention": lambda module: isinstance(module, nn.ModuleDict) or hasattr(module, "mixes")},
            RuntimeError,
            "called the biased attention in 2 of 3 layers of AcmeModel",
        ),
        ({"heads": lambda config: 4}, RuntimeError, "3 of 4 attention heads"),
        ({"heads": lambda config: None}, ValueError, "None attention heads"),
        ({"causal": lambda module: True}, RuntimeError, "its weights differ by"),
        ({"replacement": lambda old: nn.Identity()}, TypeError, "Identity, which cannot be called as Place can"),
    ],
)
def test_a_wrong_policy_is_an_error_and_changes_nothing(install, monkeypatch, wrong, error, said) -> None:
    import acme_policies

    right = vars(acme_policies)["policy"]
    fields = {name: getattr(right, name) for name in ("positions", "attention", "causal", "heads")}
    monkeypatch.setattr(acme_policies, "policy", AlibiPolicy(**{**fields, **wrong}))
    install()
    model = acme()
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        before = model(tokens)
        with pytest.raises(error, match=said):
            alibi(model, 40)
        assert torch.equal(model(tokens), before)
    assert not any(hasattr(layer, "hocket_alibi") for layer in model.layers)


SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 61, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: Classes beyond those of conftest.py, with options that make them small or their windows short.
MORE: dict[str, dict[str, Any]] = {
    "Camembert": {},
    "Cohere2": {"sliding_window": 8},
    "Electra": {},
    "EuroBert": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},  # a soft cap, with eager attention
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8},  # a rotary embedding for each type of layer
    "Glm": {},  # rotates a part of each head
    "Granite": {},
    "Mixtral": {},
    "ModernBert": {},
    "Olmo2": {},
    "Phi": {},
    "Phi3": {},
    "Qwen2": {},
    "SmolLM3": {},
    "Starcoder2": {},
    "XLMRoberta": {},
}


@pytest.mark.parametrize("name", MORE)
def test_further_classes_get_past_the_trial_and_know_the_order_of_tokens(name) -> None:
    kind = getattr(transformers, f"{name}Model")
    config = kind.config_class(**{**SIZES, **MORE[name]})
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager" if name == "Gemma2" else "sdpa").eval()
    model = model if name == "Mixtral" else model.double()  # whose experts compute in float32 at most
    tokens = torch.randint(5, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    swapped = torch.arange(40)
    swapped[[36, 38]] = swapped[[38, 36]]
    with torch.no_grad():
        alibi(model, 64)
        got = model(input_ids=tokens).last_hidden_state[:, -1]
        assert (model(input_ids=tokens[:, swapped]).last_hidden_state[:, -1] - got).abs().max() > 1e-6


def test_transformers_of_images_are_passed_over() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = nn.Identity()

        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert alibi_policies.policy_of(Images()) is None
