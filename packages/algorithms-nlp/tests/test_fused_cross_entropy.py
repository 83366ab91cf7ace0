"""Language models without logits in training, against the same models as transformers makes them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import transformers
from language import LABELS, TOKENS, gradients, tiny
from torch import Tensor, nn

import hocket
from hocket.surgery import NoEffectWarning
from hocket_nlp import FusedCrossEntropy
from hocket_nlp.functional import fused_cross_entropy
from hocket_testkit import run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
FAMILIES = ["gpt2", "llama", "qwen2", "qwen3", "gemma", "opt", "neox", "mixtral", "bert decoder"]


def pair(family: str = "gpt2", **options: Any) -> tuple[Any, Any]:
    """A model with fused cross entropy, and its plain twin."""
    plain = tiny(family, **options).train()
    fused, changed = fused_cross_entropy(copy.deepcopy(plain), chunk_rows=5)
    assert len(changed) == 1
    return fused, plain


def assert_same_gradients(fused: Any, plain: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    ours, theirs = gradients(fused), gradients(plain)
    assert ours.keys() == theirs.keys() and any(each.any() for each in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_models_and_evaluation_has_logits(family) -> None:
    fused, plain = pair(family)
    batch = {"input_ids": TOKENS, "labels": LABELS}
    for model in (fused, plain):
        loss = model(**batch).loss
        loss.backward()
    torch.testing.assert_close(fused(**batch).loss, plain(**batch).loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(fused, plain)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(fused(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=0)  # without labels
    fused.eval()
    plain.eval()
    ours, theirs = fused(**batch), plain(**batch)
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_get_both_gradients(tied) -> None:
    fused, plain = pair("llama", tie_word_embeddings=tied)
    assert (fused.lm_head.weight is fused.model.embed_tokens.weight) is tied
    for model in (fused, plain):
        model(TOKENS, labels=LABELS).loss.backward()
    assert_same_gradients(fused, plain)


def test_labels_that_are_all_ignored_have_no_gradient() -> None:
    fused, plain = pair()
    ignored = torch.full_like(TOKENS, -100)
    loss = fused(TOKENS, labels=ignored).loss
    loss.backward()
    assert loss.isnan() and plain(TOKENS, labels=ignored).loss.isnan()
    assert all(not gradient.any() for gradient in gradients(fused).values())


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_the_number_of_items_in_a_batch_and_shifted_labels(items) -> None:
    fused, plain = pair("llama")
    shifted = LABELS.roll(-2, 1).contiguous()  # not by one
    for more in ({"num_items_in_batch": items}, {"shift_labels": shifted}):
        for model in (fused, plain):
            model.zero_grad()
            loss = model(TOKENS, labels=LABELS, **more).loss
            loss.backward()
        assert_same_gradients(fused, plain)
        torch.testing.assert_close(fused(TOKENS, labels=LABELS, **more).loss, loss)
    positional = fused(TOKENS, None, None, None, None, LABELS).loss
    torch.testing.assert_close(positional, plain(TOKENS, labels=LABELS).loss)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant) -> None:
    fused, plain = pair("llama")
    fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    fused.enable_input_require_grads()
    for model in (fused, plain):
        model(TOKENS, labels=LABELS).loss.backward()
    assert_same_gradients(fused, plain)


def test_autocast_to_bfloat16() -> None:
    fused, plain = pair("llama")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(TOKENS, labels=LABELS).loss for model in (fused, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.cat([each.flatten() for each in gradients(model).values()]) for model in (fused, plain))
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_two_losses_of_one_model_add_up() -> None:
    fused, plain = pair()
    for model in (fused, plain):
        loss = model(TOKENS, labels=LABELS).loss + 2 * model(TOKENS[:1], labels=TOKENS[:1]).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(fused, plain, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # of peft
def test_adapters_train_and_the_frozen_head_gets_no_gradient() -> None:
    peft = pytest.importorskip("peft")
    fused, plain = pair("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    fused = peft.get_peft_model(fused, config)
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, config)
    for model in (fused, plain):
        model(input_ids=TOKENS, labels=LABELS).loss.backward()
    assert_same_gradients(fused, plain)
    assert fused.base_model.model.lm_head.weight.grad is None
    wrapped = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert str(fused_cross_entropy(wrapped)[1][0]) == "base_model.model.lm_head: Linear -> FusedHead"
    on_head = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"lm_head, is Linear and not torch\.nn\.Linear|adapters"):
        fused_cross_entropy(on_head)
    late = peft.get_peft_model(pair("llama")[0], peft.LoraConfig(r=2, target_modules=["lm_head"])).train()
    with pytest.raises(ValueError, match=r"was replaced after fused-cross-entropy.*after adapters"):
        late(input_ids=TOKENS, labels=LABELS)
    assert late.eval()(input_ids=TOKENS, labels=LABELS).logits.shape == (3, 9, 61)


# --- what is in the place of logits


def test_logits_that_were_not_computed_say_so() -> None:
    fused, _ = pair()
    outputs = fused(TOKENS, labels=LABELS)
    uses: list[Any] = [
        lambda logits: logits.argmax(-1), lambda logits: logits[:, 0], lambda logits: logits + 1, lambda logits: logits.shape,
        lambda logits: torch.softmax(logits, -1), lambda logits: -logits, lambda logits: 2 * logits, list,
        lambda logits: torch.nn.functional.cross_entropy(logits, LABELS),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(
            (AttributeError, TypeError), match=r"without holding logits.*metrics that need logits in evaluation"
        ):
            use(outputs.logits)
    assert not hasattr(outputs.logits, "shape") and outputs["logits"] is outputs.logits is outputs[1]
    loss, logits, *_ = fused(TOKENS, labels=LABELS, return_dict=False)
    assert loss.requires_grad and not isinstance(logits, Tensor)


def test_the_head_alone_is_linear_again_after_each_forward_pass() -> None:
    fused, _ = pair()
    hidden = torch.randn(2, 24)
    want = nn.functional.linear(hidden, fused.lm_head.weight)
    fused(TOKENS, labels=LABELS)
    assert torch.equal(fused.lm_head(hidden), want)
    with pytest.raises(ValueError, match="do not fit together"):
        fused(TOKENS, labels=LABELS[:, :5])
    assert torch.equal(fused.lm_head(hidden), want)


def test_copies_pickles_and_folders(tmp_path) -> None:
    fused, plain = pair("llama")
    want = plain(TOKENS, labels=LABELS).loss
    other = copy.deepcopy(fused)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    fused(TOKENS, labels=LABELS)
    for model in (fused, pickle.loads(pickle.dumps(fused)), torch.load(_saved(fused), weights_only=False)):
        torch.testing.assert_close(model(TOKENS, labels=LABELS).loss, want)
        assert not isinstance(model(TOKENS, labels=LABELS).logits, Tensor)
    assert not torch.allclose(other(TOKENS, labels=LABELS).loss, want)
    fused.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).train()
    torch.testing.assert_close(loaded(TOKENS, labels=LABELS).loss, want)


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_generation_is_unchanged() -> None:
    fused, plain = pair("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(TOKENS, **options), plain.generate(TOKENS, **options))


# --- what is refused


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("gemma2", {}, "changes the logits between the output layer and the loss, as soft-capping"),
        ("cohere", {}, "changes the logits"),
        ("granite", {"logits_scaling": 1.0}, "changes the logits"),
        ("bert", {}, "does not pass its logits unchanged to self.loss_function"),
        ("t5", {}, "is an encoder-decoder"),
        ("GPT2DoubleHeadsModel", {}, "does not pass its logits unchanged"),
    ],
)
def test_models_with_another_loss_are_refused_unchanged(family, options, why) -> None:
    model = tiny(family, **options)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(
        ValueError, match=rf"cannot compute the loss of .*{why}.*It supports models .* GPT-2, Llama, Qwen"
    ):
        fused_cross_entropy(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_another_loss_function_is_noticed() -> None:
    model = tiny("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    with pytest.raises(ValueError, match="is not the mean cross entropy of the next tokens"):
        fused_cross_entropy(model)
    smoothed = tiny("llama")
    smoothed.loss_function = lambda logits, labels, vocab_size, **_: torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )
    with torch.no_grad():
        smoothed.lm_head.weight.mul_(50)
    with pytest.raises(ValueError, match="is not the mean cross entropy of the next tokens"):
        fused_cross_entropy(smoothed)


def test_what_has_no_head_or_no_storage_is_refused() -> None:
    with pytest.raises(TypeError, match="no language model of transformers, with an output layer, in Linear"):
        fused_cross_entropy(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="in GPT2Model"):
        fused_cross_entropy(tiny("gpt2").transformer)
    with pytest.raises(ValueError, match="meta device"):
        fused_cross_entropy(tiny("gpt2").to("meta"))


def test_twice_is_once_and_warns() -> None:
    fused, plain = pair()
    with pytest.warns(NoEffectWarning, match="is already applied to this GPT2LMHeadModel"):
        _, changed = fused_cross_entropy(fused)
    assert changed == []
    torch.testing.assert_close(fused(TOKENS, labels=LABELS).loss, plain(TOKENS, labels=LABELS).loss)


def test_nothing_is_drawn_and_modes_stay() -> None:
    model = tiny("gpt2", resid_pdrop=0.5).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    fused_cross_entropy(model)
    assert torch.equal(torch.get_rng_state(), state) and [module.training for module in model.modules()] == modes


@pytest.mark.long
def test_importing_loads_no_transformers() -> None:
    code = (
        "import sys, hocket_nlp; hocket_nlp.functional.pack, hocket_nlp.FusedCrossEntropy, hocket_nlp.Packing, "
        "hocket_nlp.ZLoss; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- memory


def test_a_step_at_a_vocabulary_of_50_000_takes_at_most_0_4_of_the_memory(peak_memory) -> None:
    tokens = torch.randint(50_000, (2, 512), generator=torch.Generator().manual_seed(0))
    found = []
    plain = tiny("gpt2", vocab_size=50_000, max_position_embeddings=512).train()
    for model in (fused_cross_entropy(copy.deepcopy(plain))[0], plain):

        def step(model: Any = model) -> Tensor:
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            return loss.detach()

        found.append(peak_memory(step))
    (fused_peak, fused_loss), (plain_peak, plain_loss) = found
    assert fused_peak <= 0.4 * plain_peak
    torch.testing.assert_close(fused_loss, plain_loss, rtol=1e-5, atol=0)


# --- in a Trainer


def run(fused: bool, **changes: Any) -> hocket.Trainer:
    """Two steps on batches of four rows, of which the numbers of labels differ much."""
    model = tiny("llama").train()
    labels = TOKENS.repeat(2, 1)[:4].clone()
    labels[0, 2:] = -100
    labels[1] = -100
    labels[3, :5] = -100
    batch = {"input_ids": TOKENS.repeat(2, 1)[:4], "labels": labels}
    arguments = {
        "model": model, "train_data": [batch, {**batch, "labels": labels.flip(0)}], "optimizer": "sgd(lr=1.0)",
        "device": "cpu", "duration": "1ep", "seed": 1, "algorithms": ["fused-cross-entropy"] if fused else [],
    }  # fmt: skip
    trainer = hocket.Trainer(**{**arguments, **changes})
    trainer.fit()
    trainer.close()
    return trainer


def assert_same_weights(one: hocket.Trainer, other: hocket.Trainer) -> None:
    for name, value in other.model_state_dict().items():
        torch.testing.assert_close(one.model_state_dict()[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("microbatch", [None, 1, 3])
def test_steps_with_microbatches_are_those_of_the_plain_model(microbatch) -> None:
    plain, fused = run(False), run(True, microbatch=microbatch)
    assert_same_weights(fused, plain)
    torch.testing.assert_close(fused.state.loss, plain.state.loss)
    batch = fused.state.train_data[0]
    assert fused.evaluate([batch])["eval/loss"] == pytest.approx(plain.evaluate([batch])["eval/loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_are_one(strategy) -> None:
    """Under fsdp the head's weight is gathered only within its forward pass."""
    pytest.importorskip("hocket_strategies")
    plain = {name: value.clone() for name, value in run(False).model_state_dict().items()}

    def rank_main(rank: int) -> dict[str, Tensor]:
        options: dict[str, Any] = {"wrap": ["LlamaDecoderLayer", "FusedHead"]} if strategy == "fsdp" else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Every rank reads all")
            return run(True, strategy={strategy: options}, microbatch=1, global_batch=4).model_state_dict()

    for found in run_ranks(rank_main, 2):
        for name, value in plain.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


class Language(hocket.Task):
    """Returns the model's loss and a weight."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.lm, self.weight = tiny("llama").train(), weight

    def forward(self, batch: Any) -> Any:
        return self.lm(**batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.loss, self.weight(batch)


def test_a_task_that_returns_its_own_weight_keeps_it() -> None:
    fused = run(True, model=Language(lambda batch: (batch["labels"][:, 1:] != -100).sum()), microbatch=1)
    for name, value in run(False).model_state_dict().items():
        torch.testing.assert_close(fused.model_state_dict()[f"lm.{name}"], value, rtol=0, atol=1e-6, msg=name)
    other = run(
        True, model=Language(lambda batch: 2.0), microbatch=1, train_data=[{"input_ids": TOKENS, "labels": LABELS}]
    )
    plain = tiny("llama").train()
    rows = [plain(row[None], labels=labels[None]).loss for row, labels in zip(TOKENS, LABELS, strict=True)]
    torch.stack(rows).mean().backward()
    moved = {f"lm.{name}": (each - each.grad).detach() for name, each in plain.named_parameters()}
    for name, value in moved.items():
        torch.testing.assert_close(other.model_state_dict()[name], value, rtol=0, atol=2e-6, msg=name)


def test_a_loss_over_another_number_of_items_needs_a_weight() -> None:
    batch = {"input_ids": TOKENS, "labels": LABELS, "num_items_in_batch": 5}
    with pytest.raises(ValueError, match="not certain what that is a mean over"):
        run(True, train_data=[batch], microbatch=1)
    run(True, train_data=[batch])


def test_metrics_of_training_say_that_there_are_no_logits() -> None:

    class Accuracy:
        def reset(self) -> None: ...

        def update(self, logits: Any, labels: Any) -> None:
            (logits.argmax(-1) == labels).sum()

        def compute(self) -> float:
            return 0.0

    with pytest.raises(AttributeError, match="without holding logits"):
        run(True, train_metrics={"accuracy": Accuracy()})


def test_batches_without_labels_for_the_model_warn() -> None:
    def loss(outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["input_ids"].flatten())

    with pytest.warns(NoEffectWarning, match=r"got no labels in the first batch.*mappings with 'labels'") as caught:
        run(True, train_data=[{"input_ids": TOKENS}] * 2, loss=loss, eval_data=[{"input_ids": TOKENS}])
    assert sum("got no labels" in str(each.message) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        run(True)


def test_the_plan_names_the_head() -> None:
    assert FusedCrossEntropy().touches(tiny("gpt2")) == ["lm_head: Linear -> FusedHead"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FusedCrossEntropy().touches(pair()[0]) == []


def test_a_kept_library_is_used_on_cuda_only(monkeypatch) -> None:
    from hocket_nlp import linear_cross_entropy as module

    monkeypatch.setattr(module, "_liger", lambda: pytest.fail("Liger's kernel is not for the CPU."))
    fused, _ = pair()
    fused(TOKENS, labels=LABELS).loss.backward()


def test_transformers_calls_the_loss_function_that_is_set() -> None:
    """The public setter that fused cross entropy relies on."""
    model = tiny("llama")
    model.loss_function = lambda *args, **kwargs: torch.tensor(7.0)
    assert model(TOKENS, labels=LABELS).loss == 7 and transformers.__version__.split(".")[0] >= "5"
