"""Hugging Face folders and adapters: what is written is what from_pretrained of transformers and peft read."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from language import SAMPLES, adamw, batch, tiny, tokenizer, trainer
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import hocket
from hocket.checkpoints import read_weights
from hocket_nlp import HuggingFaceTask, SavePretrained
from hocket_nlp.adapters import read_config
from hocket_nlp.functional import gated_linear_units, qk_norm
from hocket_testkit import run_ranks


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "llama"])
def test_a_folder_gives_the_model_back_bitwise(family: str, tmp_path: Any) -> None:
    task = HuggingFaceTask(tiny(family), tokenizer())
    trainer(task, [batch(family)], tmp_path / "run", callbacks=["save-pretrained"]).fit()
    (folder,) = (tmp_path / "run").glob("**/huggingface")
    loaded = type(task.network).from_pretrained(folder)
    torch.testing.assert_close(loaded.state_dict(), task.network.state_dict(), rtol=0, atol=0)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words("w3 w4")["input_ids"] == [3, 4]


def test_a_folder_is_replaced_at_each_interval(tmp_path: Any) -> None:
    task = HuggingFaceTask(tiny("gpt2"))
    found = []

    class Read(hocket.Callback):
        def batch_end(self, state: Any) -> None:
            found.append(read_weights(tmp_path / "mine")["transformer.wte.weight"])

    save = SavePretrained(str(tmp_path / "mine"), every="1ba")
    trainer(task, [batch("gpt2")] * 3, tmp_path, callbacks=[save, Read()]).fit()
    assert not torch.equal(found[0], found[1]) and torch.equal(found[2], task.network.transformer.wte.weight)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".mine")] == []


@pytest.mark.parametrize("strategy", ["ddp", {"fsdp": {"wrap": ["GPT2Block"]}}])
def test_sharded_weights_are_gathered(strategy: Any, tmp_path: Any) -> None:
    pytest.importorskip("hocket_strategies")

    def train(rank: int) -> None:
        whole = batch("gpt2")
        samples: Any = [{name: value[i] for name, value in whole.items()} for i in range(SAMPLES)]
        hocket.Trainer(
            model=HuggingFaceTask(tiny("gpt2")), train_data=DataLoader(samples, SAMPLES), global_batch=SAMPLES,
            optimizer=adamw, strategy=strategy, duration="1ba", device="cpu", folder=tmp_path / "run",
            callbacks=[SavePretrained(str(tmp_path / "mine"))],
        ).fit()  # fmt: skip

    run_ranks(train, 2)
    plain = tiny("gpt2")
    trainer(HuggingFaceTask(plain), [batch("gpt2")], tmp_path).fit()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "mine")
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_the_averages_of_ema_are_what_is_written(tmp_path: Any) -> None:
    pytest.importorskip("hocket_general")
    task = HuggingFaceTask(tiny("gpt2"))
    made = trainer(
        task, [batch("gpt2")] * 3, tmp_path, algorithms=[{"ema": {"half_life": "1ba"}}],
        callbacks=[SavePretrained(str(tmp_path / "mine"), every="1ba")],
    )  # fmt: skip
    made.fit()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "mine")
    torch.testing.assert_close(loaded.state_dict(), made.model_state_dict(evaluated=True), rtol=0, atol=0)


def test_a_model_that_transformers_does_not_know(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"save-pretrained' writes models of transformers, and this is Linear"):
        hocket.Trainer(model=torch.nn.Linear(2, 2), callbacks=["save-pretrained"], device="cpu", folder=tmp_path)


@pytest.mark.parametrize("what", ["checkpoints", "a file", "other files"])
def test_another_folder_is_not_replaced(what: str, tmp_path: Any) -> None:
    mine = tmp_path / "mine"
    if what == "a file":
        mine.write_text("precious")
    else:
        (mine / "inside").mkdir(parents=True)
        (mine / "config.json" if what == "checkpoints" else mine / "precious.txt").write_text("{}")
    with pytest.raises(FileExistsError, match=r"mine is there, and is not an earlier Hugging Face folder"):
        trainer(HuggingFaceTask(tiny("gpt2")), [batch("gpt2")], tmp_path, callbacks=[SavePretrained(mine)])
    assert mine.exists()


def test_weights_of_another_model(tmp_path: Any) -> None:
    task = HuggingFaceTask(tiny("gpt2"))
    with pytest.raises(ValueError, match=r"not those of GPT2LMHeadModel, which has or lacks"):
        task.save_pretrained(tmp_path / "mine", {"foo": torch.ones(1)})
    assert not (tmp_path / "mine").exists()


# --- adapters


def test_the_new_head_of_a_classifier_is_trained_and_saved(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    task = HuggingFaceTask(tiny("classifier"), peft={"r": 2, "target_modules": ["query"]})
    trainer(task, [batch("classifier")] * 3, tmp_path, callbacks=[SavePretrained(tmp_path / "mine")]).fit()
    base = tiny("classifier")
    with torch.no_grad():
        base.classifier.weight.normal_()
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "mine")).eval()
    task.network.eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch("classifier")).logits, task.network(**batch("classifier")).logits)
    assert not torch.equal(task.network.classifier.weight, tiny("classifier").classifier.weight)


def lora(**options: Any) -> HuggingFaceTask:
    pytest.importorskip("peft")
    torch.manual_seed(4)
    return HuggingFaceTask(tiny("llama"), tokenizer(), peft={"r": 2, "target_modules": ["q_proj", "v_proj"], **options})


def test_adapters_alone_are_trained(tmp_path: Any) -> None:
    task, before = lora(), tiny("llama").state_dict()
    trainer(task, [batch("llama")] * 3, tmp_path, microbatch=2).fit()
    state = task.network.state_dict()
    for name, value in state.items():
        plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
        assert "lora" in name or torch.equal(value, before[plain])
    assert all(value.abs().sum() for name, value in state.items() if "lora_B" in name)


def test_a_step_of_adapters_is_that_of_peft(tmp_path: Any) -> None:
    expected = lora().network
    optimizer = adamw([parameter for parameter in expected.parameters() if parameter.requires_grad])
    expected(**batch("llama")).loss.backward()
    optimizer.step()
    task = lora()
    trainer(task, [batch("llama")], tmp_path, microbatch=1).fit()
    torch.testing.assert_close(task.network.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)


def test_checkpoints_hold_adapters_alone_and_continue(tmp_path: Any) -> None:
    data = [batch("llama")] * 4
    whole = lora()
    trainer(whole, data, tmp_path / "a").fit()
    first = trainer(lora(), data, tmp_path / "b", checkpoints=str(tmp_path / "saved"))
    first.fit("2ba")
    first.close()
    saved = read_weights(tmp_path / "saved" / "latest")
    assert saved and all("lora" in name for name in saved)
    second = lora()
    trainer(second, data, tmp_path / "c", checkpoints=str(tmp_path / "saved"), resume="auto").fit()
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_another_configuration_of_adapters_than_the_checkpoints_is_said(tmp_path: Any) -> None:
    data = [batch("llama")] * 2
    first = trainer(lora(lora_alpha=4), data, tmp_path / "a")
    first.fit()
    saved = first.state_dict()
    other = trainer(lora(lora_alpha=64, lora_dropout=0.1), data, tmp_path / "b")
    with pytest.warns(
        UserWarning, match=r"lora_alpha of the adapter 'default' was 4, is 64; lora_dropout .*same peft="
    ):
        other.load_state_dict(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        same = lora(lora_alpha=4, target_modules=["v_proj", "q_proj"])
        trainer(same, data, tmp_path / "c").load_state_dict(saved)
        del saved["components"]["hocket-nlp-adapters"]  # as of an older version
        other.load_state_dict(saved)


def test_the_folder_of_adapters_is_that_of_peft(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    task = lora()
    trainer(task, [batch("llama")] * 2, tmp_path, callbacks=[SavePretrained(str(tmp_path / "mine"))]).fit()
    weights = load_file(tmp_path / "mine" / "adapter_model.safetensors")
    assert weights and all("lora" in name for name in weights)
    assert not (tmp_path / "mine" / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "mine"))
    torch.testing.assert_close(loaded.state_dict(), task.network.state_dict(), rtol=0, atol=0)
    again = HuggingFaceTask(peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "mine"), is_trainable=True))
    assert again.checkpoints_only == "trainable"


@pytest.mark.parametrize("surgery", [qk_norm, gated_linear_units])
@pytest.mark.parametrize("given", [True, False])
def test_adapters_whose_merged_weights_compute_something_else_are_refused(surgery: Any, given: bool) -> None:
    peft = pytest.importorskip("peft")
    made, _ = surgery(tiny("gpt2"))
    names, targets = list(made.state_dict()), ["c_attn", "c_fc"]
    settings = {"r": 2, "fan_in_fan_out": True, "init_lora_weights": False, "target_modules": targets}
    with pytest.raises(ValueError, match=r"an adapter there would .*without c_(attn|fc), such as"):
        if given:
            HuggingFaceTask(peft.get_peft_model(made, peft.LoraConfig(**settings)))
        else:
            HuggingFaceTask(made, peft=settings)
    if not given:
        assert list(made.state_dict()) == names and all(each.requires_grad for each in made.parameters())
        task = HuggingFaceTask(made, peft={**settings, "target_modules": ["attn.c_proj"]})
        logits = task.network.eval()(**batch("gpt2")).logits
        merged = task.network.merge_and_unload()(**batch("gpt2")).logits
        torch.testing.assert_close(merged, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "config, error, match",
    [
        ({"rank": 4}, TypeError, r"no arguments of peft\.LoraConfig: .*'rank'. Did you mean 'r'\?.*'target_modules'"),
        ("lora", TypeError, r"is str\. Give the arguments of LoRA"),
    ],
)
def test_configurations_that_are_none(config: Any, error: Any, match: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(error, match=match):
        HuggingFaceTask(tiny("llama"), peft=config)


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_a_name_that_matches_nothing_is_answered_with_modules_that_fit(key: str) -> None:
    pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'q_proj' matches nothing.*such as '0', '3'\.$"):
        read_config({"target_modules": ["3"], key: ["q_proj"]}, model)


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'peft>="):
        HuggingFaceTask(tiny("llama"), peft={"r": 2})
