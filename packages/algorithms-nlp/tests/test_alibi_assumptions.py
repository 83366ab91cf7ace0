"""The ten assumptions behind ALiBi in a model of somebody else: each is checked, or the case is supported."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    T5Config,
    T5EncoderModel,
    T5Model,
)

import hocket
from hocket.surgery import update_optimizer
from hocket_nlp import ALiBi, AlibiPolicy, alibi_policies, alibi_sites, flex_bias, linear_bias
from hocket_nlp.alibi_positions import NoPositions, check_replacement, no_rotation
from hocket_nlp.functional import alibi, alibi_slopes
from hocket_nlp.linear_bias import biased_mask

Use = Callable[[str, AlibiPolicy], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Let a class of transformers have another policy."""
    return lambda name, policy: monkeypatch.setitem(alibi_policies._BY_CLASS, name, policy)


def state_of(model: nn.Module) -> list[Any]:
    """Everything that surgery may change."""
    parts = [(name, module, getattr(module, "config", None)) for name, module in model.named_modules()]
    return [*parts, model.config._attn_implementation, copy.deepcopy(model.config.to_dict())]


# --- 1: heads, shapes, and sequences beyond the longest


def test_assumption_1_layers_with_other_heads_than_declared_are_refused(build) -> None:
    model = build("llama")
    model.config.num_attention_heads = 12
    before = state_of(model)
    with pytest.raises(RuntimeError, match="given 6 of 12 attention heads"):
        alibi(model, 40)
    assert state_of(model) == before
    assert not any(hasattr(module, "hocket_alibi") for module in model.modules())


@pytest.mark.parametrize("keys", [4, 5])
def test_assumption_1_heads_of_keys_divide_those_of_queries(build, keys) -> None:
    model, _ = alibi(build("llama"), 40)
    query, key = torch.zeros(1, 6, 3, 4), torch.zeros(1, keys, 3, 4)
    for attention in (linear_bias.sdpa_attention, linear_bias.eager_attention, flex_bias.flex_attention):
        with pytest.raises(NotImplementedError, match=f"6 of 6 attention heads, {keys} of keys"):
            attention(model.model.layers[0].self_attn, query, key, key, None)


def test_assumption_1_a_bias_of_a_model_that_has_one_and_sinks_are_refused(build) -> None:
    model, _ = alibi(build("gpt2"), 40)
    query = torch.zeros(1, 6, 3, 4)
    for name, said in (("s_aux", "attention sinks"), ("position_bias", "a position_bias"), ("cache", "a paged cache")):
        with pytest.raises(NotImplementedError, match=said):
            linear_bias.eager_attention(model.transformer.h[0].attn, query, query, query, None, **{name: query})


def test_assumption_1_sequences_grow_beyond_the_longest(build, family) -> None:
    model, _ = alibi(build(family), 8)
    assert model.config.max_position_embeddings == (10 if family == "roberta" else 8)
    tokens = torch.randint(5, 61, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = model(tokens).logits
        alibi(model, 90)
        assert torch.equal(model(tokens).logits, got)


# --- 2: replacements


class _Takes(nn.Module):
    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        return input * scale


class _RenamesIt(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x


class _TakesLess(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input


class _TakesItByName(nn.Module):
    def forward(self, input: Tensor, *, scale: float = 1.0) -> Tensor:
        return input


class _NeedsMore(nn.Module):
    def forward(self, input: Tensor, scale: float, offset: int) -> Tensor:
        return input


class _TakesMore(nn.Module):
    def forward(self, input: Tensor, scale: float = 1.0, *, offset: int = 0) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (_RenamesIt(), "cannot be called as _Takes can: .*signature .x: 'Tensor'"),
        (_TakesLess(), "cannot be called as _Takes can"),
        (_TakesItByName(), "cannot be called as _Takes can: too many positional arguments"),
        (_NeedsMore(), "cannot be called as _Takes can: missing a required argument: 'scale'"),
        (nn.Module(), "has no forward"),
        (lambda input: input, "not a module"),
        (None, "is None, not a module"),
    ],
)
def test_assumption_2_a_replacement_takes_the_same_arguments(new, said) -> None:
    with pytest.raises(TypeError, match=rf"replacement of body\.place \(_Takes\) .*{said}"):
        check_replacement("body.place", _Takes(), new)


def test_assumption_2_a_replacement_may_take_more() -> None:
    check_replacement("place", _Takes(), _TakesMore())
    check_replacement("place", _Takes(), NoPositions())
    check_replacement("place", nn.Embedding(3, 2), NoPositions())


def test_assumption_2_is_checked_before_anything_changes(build, use) -> None:
    use("GPT2Model", AlibiPolicy("wpe", replacement=lambda old: _RenamesIt()))
    model = build("gpt2")
    before = state_of(model)
    with pytest.raises(TypeError, match=r"replacement of transformer\.wpe \(Embedding\) is _RenamesIt"):
        alibi(model, 40)
    assert state_of(model) == before


class _Complex(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return torch.polar(torch.ones(1, 2, 4), torch.zeros(1, 2, 4))


class _Sections(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(3, 1, 2, 4), torch.zeros(3, 1, 2, 4)


class _Fails(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        raise IndexError("three axes")


@pytest.mark.parametrize(
    ("rotary", "said"), [(_Complex(), "not"), (_Sections(), "not"), (_Fails(), "not .IndexError: three axes")]
)
def test_assumption_2_rotary_embeddings_of_another_kind_are_refused(rotary, said) -> None:
    with pytest.raises(ValueError, match=f"return .cos, sin.*{type(rotary).__name__} does {said}.*AlibiPolicy"):
        no_rotation(rotary)


# --- 3: optimizers


def test_assumption_3_an_optimizer_without_state_forgets_positions(build) -> None:
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    positions = model.transformer.wpe.weight
    _, changed = alibi(model, 40)
    update_optimizer(optimizer, changed)
    (group,) = optimizer.param_groups
    assert all(parameter is not positions for parameter in group["params"])
    assert {id(each) for each in group["params"]} == {id(each) for each in model.parameters()}


def test_assumption_3_an_optimizer_with_state_is_refused(build, tokens) -> None:
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"AdamW already has state .* Do surgery before the first step"):
        trainer(model, optimizer=optimizer)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    _, changed = alibi(model, 40)
    with pytest.raises(RuntimeError, match="AdamW already has state"):
        update_optimizer(optimizer, changed)


# --- 4: direction, encoder-decoders, sizes


def test_assumption_4_direction_comes_from_the_model(build, family, tokens) -> None:
    model, _ = alibi(build(family), 40)
    changed = tokens.clone()
    changed[:, -1] = 60 - changed[:, -1] + 5
    with torch.no_grad():
        same = torch.allclose(model(changed).logits[:, :6], model(tokens).logits[:, :6], atol=1e-4)
    assert same == ("bert" not in family)


def test_assumption_4_a_configuration_can_make_a_decoder_bidirectional(build) -> None:
    model = build("llama", is_causal=False).double()
    alibi(model, 40)  # the trial compares both directions
    assert all(layer.self_attn.hocket_alibi == (6, False) for layer in model.model.layers)
    query = torch.zeros(1, 6, 3, 4, dtype=torch.float64)
    value = torch.eye(3, 4, dtype=torch.float64).expand(1, 2, 3, 4)
    _, weights = linear_bias.eager_attention(model.model.layers[0].self_attn, query, value, value, None)
    assert weights[0, 0, 0, 1] > 0 and weights[0, 0, 1, 0] == weights[0, 0, 1, 2]


@pytest.mark.parametrize("side", ["T5Model", "T5EncoderModel", "BartModel", "encoder", "decoder"])
def test_assumption_4_encoder_decoders_and_relative_biases_are_refused_by_name(side) -> None:
    size = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 61}
    bart = BartModel(BartConfig(encoder_attention_heads=2, decoder_attention_heads=2, **size))
    t5 = T5Config(d_model=24, d_kv=4, d_ff=24, num_layers=1, num_heads=2, vocab_size=61, decoder_start_token_id=0)
    model = {
        "T5Model": lambda: T5Model(t5),
        "T5EncoderModel": lambda: T5EncoderModel(t5),
        "BartModel": lambda: bart,
        "encoder": lambda: bart.encoder,
        "decoder": lambda: bart.decoder,
    }[side]()
    said = (
        "T5Attention: it has learned relative position biases" if side == "T5EncoderModel" else "is an encoder-decoder"
    )
    with pytest.raises(TypeError, match=said):
        alibi(model, 40)


@pytest.mark.parametrize(
    ("family", "option", "value", "said"),
    [
        ("gpt2", "n_head", 5, "5 attention heads do not divide the hidden size 24"),
        ("gpt2", "n_head", 0, "has 0 attention heads"),
        ("bert", "num_attention_heads", None, "has None attention heads"),
        ("llama", "num_key_value_heads", 4, "4 heads of keys do not divide the 6 attention heads"),
    ],
)
def test_assumption_4_heads_divide_the_hidden_size(build, family, option, value, said) -> None:
    model = build(family)
    object.__setattr__(model.config, option, value)  # some versions of transformers refuse it themselves
    with pytest.raises(ValueError, match=said):
        alibi(model, 40)


def test_assumption_4_a_head_dimension_of_its_own_need_not_divide(build) -> None:
    alibi(build("qwen3", head_dim=6, hidden_size=26), 40)


# --- 5: memory


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(("family", "options", "masks"), [("gpt2", {}, 1), ("mistral", {}, 1), ("qwen3", MIXED, 2)])
def test_assumption_5_biases_above_the_limit_are_refused(build, family, options, masks) -> None:
    model = build(family, **options)
    before = state_of(model)
    taken = masks * 7 * 100_000**2 * 4 / 2**30
    with pytest.raises(
        ValueError, match=rf"take {taken:.2f} GiB .* 100000 tokens.*max_bias_memory=2\b.*flex_attention"
    ):
        alibi(model, 100_000)
    assert state_of(model) == before
    with pytest.raises(ValueError, match=r"more than max_bias_memory=260\b"):
        alibi(model, 100_000, max_bias_memory=260)


def test_assumption_5_confirmed_biases_are_mentioned_and_small_ones_not(build, capsys) -> None:
    alibi(build("gpt2"), 3000)
    assert capsys.readouterr().err == ""
    alibi(build("gpt2").bfloat16(), 4000)
    assert capsys.readouterr().err == ""
    alibi(build("gpt2"), 4000)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(
        "hocket: ALiBi's biases take 0.42 GiB for one sequence of 4000 tokens"
    )
    alibi(build("gpt2"), 20_000, max_bias_memory=11)
    assert "10.43 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "options"), [("gpt2", {}), ("qwen3", MIXED)])
def test_assumption_5_the_estimate_is_what_a_forward_pass_makes(build, tokens, monkeypatch, family, options) -> None:
    model = build(family, **options)
    (site,) = alibi_sites.find(model)
    made: list[Tensor] = []
    monkeypatch.setattr(linear_bias, "biased_mask", lambda **given: made.append(biased_mask(**given)) or made[-1])
    alibi(model, 40)
    made.clear()  # those of the trial
    model(tokens)
    assert sum(mask.nbytes for mask in made) == alibi_sites.bias_bytes(site, 10)


@pytest.mark.long
def test_assumption_5_flex_attention_stores_no_biases(build, capsys) -> None:
    alibi(build("llama", "flex_attention"), 10**6)
    assert capsys.readouterr().err == ""


# --- 6: devices


@pytest.mark.parametrize("mask", [None, "ours", "theirs"])
def test_assumption_6_biases_are_made_where_the_queries_are(build, implementation, mask) -> None:
    """The meta device stands for a second GPU, on which a layer may be."""
    model, _ = alibi(build("gpt2", implementation), 40)
    layer = model.transformer.h[1].attn.to("meta")
    given = {
        None: None,
        "ours": biased_mask(batch_size=1, q_length=5, kv_length=5, config=model.config),
        "theirs": torch.ones(1, 1, 5, 5, dtype=torch.bool),
    }[mask]
    query = torch.empty(1, 6, 5, 4, device="meta")
    attention = linear_bias.sdpa_attention if implementation == "sdpa" else linear_bias.eager_attention
    output, _ = attention(layer, query, query, query, given)
    assert output.device.type == "meta" and output.shape == (1, 5, 6, 4)


def test_assumption_6_a_layer_without_storage_is_named(build) -> None:
    model = build("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ValueError, match=r"LlamaModel, whose layers\.1\.mlp\.gate_proj\.weight is on the meta device"):
        alibi(model, 40)


def test_assumption_6_modules_without_parameters(build, tokens) -> None:
    model = build("llama")
    model.model.norm = nn.Identity()
    model.model.layers[0].input_layernorm = nn.Identity()
    alibi(model, 40)
    with torch.no_grad():
        assert model(tokens).logits.isfinite().all()


# --- 7: position embeddings


@pytest.mark.parametrize(
    ("family", "where", "name"),
    [
        ("gpt2", "transformer", "wpe"),
        ("bert", "bert.embeddings", "position_embeddings"),
        ("opt", "model.decoder", "embed_positions"),
    ],
)
def test_assumption_7_positions_have_their_name_and_class(build, family, where, name) -> None:
    model = build(family)
    holder = model.get_submodule(where)
    old = getattr(holder, name)
    setattr(holder, name, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=rf"{where}\.{name} is Linear, not Embedding"):
        alibi(model, 40)
    delattr(holder, name)
    holder.renamed = old
    with pytest.raises(ValueError, match=rf"it has no module {where}\.{name}"):
        alibi(model, 40)


def test_assumption_7_a_rotary_embedding_has_its_name(build) -> None:
    model = build("llama")
    del model.model.rotary_emb
    with pytest.raises(TypeError, match="none in LlamaForCausalLM"):
        alibi(model, 40)


def test_assumption_7_positions_of_a_second_embedding_are_noticed(build, use) -> None:
    class Two(nn.Module):
        def __init__(self, old: nn.Module) -> None:
            super().__init__()
            self.old = old

        def forward(self, input: Tensor) -> Tensor:
            return self.old(input)

    use("GPT2Model", AlibiPolicy("wpe", replacement=Two))
    model = build("gpt2")
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"GPT2Model still has positions after transformer\.wpe was replaced"):
        alibi(model, 40)
    assert state_of(model) == before


def test_assumption_7_rotations_that_stay_are_noticed(build, monkeypatch) -> None:
    monkeypatch.setattr(alibi_policies, "_ROTARY", AlibiPolicy("rotary_emb", nn.Module, copy.deepcopy))
    with pytest.raises(RuntimeError, match="LlamaModel still has positions"):
        alibi(build("llama"), 40)


# --- 8: changes after surgery


def trainer(model: nn.Module, **options: Any) -> hocket.Trainer:
    tokens = torch.randint(5, 61, (4, 10), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": tokens, "labels": tokens}]
    options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01), **options}
    return hocket.Trainer(
        model=model.train(), train_data=data, duration="1ba", device="cpu", algorithms=[ALiBi(40)], seed=0, **options
    )


def _positions(model: Any) -> None:
    model.transformer.wpe = nn.Embedding(32, 24)


def _implementation(model: Any) -> None:
    model.set_attn_implementation("eager")


def _layer(model: Any) -> None:
    model.transformer.h[1] = type(model.transformer.h[1])(model.config, layer_idx=1)


def _layer_of_another(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    model.transformer.h[1].attn.config = config


def _heads(model: Any) -> None:
    model.config.n_head = 3


def _everything(model: Any) -> None:
    model.transformer = nn.Identity()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_positions, r"transformer\.wpe is Embedding again"),
        (_implementation, "GPT2Model now uses the attention implementation 'eager'"),
        (_layer, "GPT2Attention in GPT2Model was not there"),
        (_layer_of_another, "GPT2Attention in GPT2Model now uses the attention implementation 'sdpa'"),
        (_heads, "had 6 causal heads, and now has 3 causal heads"),
        (_everything, "the transformer that it changed is gone"),
    ],
)
def test_assumption_8_changes_after_surgery_are_noticed_when_a_fit_begins(build, change, said) -> None:
    made = trainer(build("gpt2"))
    change(made.state.model)
    with pytest.raises(RuntimeError, match=f"ALiBi was applied to GPT2LMHeadModel, and .*{said}"):
        made.fit()


def test_assumption_8_rotary_positions_that_come_back_are_noticed(build) -> None:
    made = trainer(build("llama"))
    made.state.model.model.rotary_emb = build("llama").model.rotary_emb
    with pytest.raises(RuntimeError, match=r"model\.rotary_emb is LlamaRotaryEmbedding again"):
        made.fit()
    assert len(alibi(made.state.model, 40)[1]) == 1
    made.fit()


def test_assumption_8_an_unchanged_model_trains(build, family) -> None:
    trainer(build(family)).fit()


# --- 9: slopes


@pytest.mark.parametrize("heads", [3, 12, 71, 128, 200])
def test_assumption_9_biases_in_bfloat16_are_distinct_and_fall_with_distance(heads) -> None:
    config = BertConfig(num_attention_heads=heads, hidden_size=heads)
    mask = biased_mask(batch_size=1, q_length=129, kv_length=129, config=config, dtype=torch.bfloat16)
    near = mask[0, :heads, 128].float().flip(-1)  # distances 0 to 128 from the last query
    assert (near[:, 0] == 0).all() and (near.diff(dim=1) < 0).all()
    assert near[:, 1].unique().numel() == heads
    exact = -alibi_slopes(heads)[:, None] * torch.arange(129)
    torch.testing.assert_close(near, exact, rtol=2**-8, atol=0)


def test_assumption_9_slopes_are_exact_in_float64() -> None:
    slopes = alibi_slopes(96, dtype=torch.float64)
    assert slopes.dtype == torch.float64
    want = [2 ** (-8 * (i + 1) / 64) for i in range(64)] + [2 ** (-8 * (2 * i + 1) / 128) for i in range(32)]
    torch.testing.assert_close(slopes, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)
    mask = biased_mask(
        batch_size=1,
        q_length=2,
        kv_length=2,
        config=BertConfig(num_attention_heads=96, hidden_size=96),
        dtype=torch.float64,
    )
    assert torch.equal(-mask[0, :96, 1, 0], slopes)


@pytest.mark.parametrize("heads", [1, 65, 71])
def test_assumption_9_models_with_any_number_of_heads(build, heads) -> None:
    alibi(build("gpt2", heads=heads), 40)  # the trial compares with the formula


# --- 10: transformers


@pytest.mark.long
def test_assumption_10_without_transformers_only_this_package_is_affected() -> None:
    code = """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "transformers":
                    raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        sys.meta_path.insert(0, Missing())
        import hocket, torch
        data = [(torch.zeros(2, 4), torch.zeros(2, 1))]
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        common = dict(model=torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss, train_data=data, duration="1ba")
        hocket.Trainer(**common, optimizer=sgd, device="cpu").fit()
        assert "alibi" in hocket.plugins.names("algorithms")
        try:
            hocket.Trainer(**common, device="cpu", algorithms=[{"alibi": {"max_sequence_length": 8}}])
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True, timeout=120
    )
    assert "ALiBi changes models of transformers, which cannot be imported here" in done.stdout
    assert "pip install 'transformers>=5'" in done.stdout


def test_assumption_10_untested_versions_are_judged_by_their_effect(build, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.1.0")
    alibi(build("llama"), 40)
    monkeypatch.setattr(linear_bias, "alibi_slopes", lambda heads, **options: 2 * alibi_slopes(heads, **options))
    with pytest.raises(
        RuntimeError, match=r"transformers 6\.1\.0 .* weights differ by .*hocket-algorithms-nlp is tested with"
    ):
        alibi(build("llama"), 40)
