"""Exports compute what ``trainer.predict`` computes, and what cannot be exported is refused before anything is written."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
import hocket_tools
from hocket.errors import ExistingFile, MissingPackage, Unsupported, WrongValue
from hocket_testkit import compare

sys.path.append(str(Path(__file__).parent))
import exported_models as models

from hocket_tools.compression.libraries import imported
from hocket_tools.exporting.exporter import export_trainer
from hocket_tools.exporting.named_tensors import named_tensors
from hocket_tools.exporting.preparing import Options
from hocket_tools.exporting.verification import ExportDiffers, difference


def digits_trainer() -> hocket.Trainer:
    vision = pytest.importorskip("hocket_vision")
    trainer = hocket.Trainer(
        models.Net(), vision.digits("train"), eval_data=vision.digits("test"), loss="cross_entropy", device="cpu",
        duration="1ep", optimizer="adamw(lr=1e-2)", algorithms=[{"ema": {"half_life": "5ba"}}, "blurpool"], seed=1,
    )  # fmt: skip
    trainer.fit()
    return trainer


def run_file(folder: Path, to: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run an exported graph without hocket."""
    if to == "torch-export":
        output = torch.export.load(folder / "model.pt2").module()(**inputs)
        return {"output": output} if isinstance(output, torch.Tensor) else output
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    described = json.loads((folder / "export.json").read_text())
    for found, key in ((session.get_inputs(), "inputs"), (session.get_outputs(), "outputs")):
        assert {each.name: each.shape for each in found} == {each["name"]: each["shape"] for each in described[key]}
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return {name: torch.from_numpy(output) for name, output in zip(names, outputs, strict=True)}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


# --- graphs


@pytest.mark.parametrize("to", ["torch-export", pytest.param("onnx", marks=pytest.mark.long)])
def test_digits_net_with_blurpool_and_ema(tmp_path, to):
    trainer = digits_trainer()
    exported = hocket_tools.export(trainer, to, tmp_path / "export")
    images, labels = next(iter(trainer.state.eval_sets["eval"].data))
    for count in (1, 7, 13):
        [expected] = trainer.predict([(images[:count], labels[:count])])
        actual = run_file(exported.folder, to, {"images": images[:count]})["output"]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    trained = copy.deepcopy(trainer.state.model).eval()
    assert (trained(images[:13]) - actual).abs().max() > 1e-3, "the averages are exported, not the weights of training"
    assert [replaced.partition(":")[0] for replaced in exported.manifest["origin"]["surgery"]] == ["stem.3"]
    assert exported.manifest["inputs"] == [{"name": "images", "dtype": "float32", "shape": ["batch", 1, 8, 8]}]
    saved = json.loads((exported.folder / "verification.json").read_text())
    assert [batch["samples"] for batch in saved["batches"]] == [1, 7]
    assert saved["difference"] == exported.difference <= 1e-4


@pytest.mark.parametrize("to", ["torch-export", pytest.param("onnx", marks=pytest.mark.long)])
def test_task_that_normalises_and_returns_a_dict(tmp_path, to):
    trainer = models.trainer_of(models.HeadsTask(), models.rows())
    trainer.fit()
    exported = hocket_tools.export(trainer, to, tmp_path / "export")
    batch = models.rows(11)[1]
    [expected] = trainer.predict([batch])
    actual = run_file(exported.folder, to, {"x": batch["x"]})
    assert list(actual) == ["logits", "sizes_0", "sizes_1"]
    assert_close(actual, named_tensors(expected, "output"))
    assert exported.manifest["left_out"]["inputs"] == ["y"], "what the loss alone needs is no input"


@pytest.mark.long
@pytest.mark.parametrize("to", ["torch-export", "onnx"])
def test_unet_at_another_resolution(tmp_path, to):
    trainer = models.trainer_of(models.UNet(), models.images(), loss="cross_entropy")
    trainer.fit()
    exported = hocket_tools.export(trainer, to, tmp_path / "export", dynamic={"image": [2, 3]})
    assert exported.manifest["inputs"][0]["shape"] == ["batch", 3, "image_2", "image_3"]
    images = torch.randn(7, 3, 24, 32)
    [expected] = trainer.predict([(images, torch.zeros(7, 24, 32, dtype=torch.long))])
    torch.testing.assert_close(run_file(exported.folder, to, {"image": images})["output"], expected, rtol=0, atol=1e-4)


def language_trainer(**arguments):
    pytest.importorskip("hocket_nlp")
    task = models.language_task(arguments.pop("peft", None))
    trainer = models.trainer_of(task, models.texts(), **arguments)
    trainer.fit()
    return trainer


def check_text(trainer, exported, to):
    for count, length in ((1, 20), (7, 20), (3, 9)):
        batch = {name: tensor[:count, :length] for name, tensor in models.tokens().items()}
        [expected] = trainer.predict([batch])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        assert_close(run_file(exported.folder, to, inputs), {"logits": expected["logits"]})
    assert [each["shape"] for each in exported.manifest["inputs"]] == [["batch", "length"]] * 2
    assert exported.manifest["outputs"][0]["shape"] == ["batch", "length", 64]
    sizes = [comparison.sizes for comparison in exported.comparisons]
    assert {"length": 10}.items() <= sizes[2].items(), "another length was verified"


@pytest.mark.long
@pytest.mark.parametrize("to", ["torch-export", "onnx"])
def test_gpt2_with_alibi(tmp_path, to):
    trainer = language_trainer(algorithms=[{"alibi": {"max_sequence_length": 48}}])
    check_text(trainer, hocket_tools.export(trainer, to, tmp_path / "export"), to)
    with pytest.raises(Unsupported, match=r"Surgery replaced transformer\.wpe"):
        hocket_tools.export(trainer, "huggingface", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "adapters"), [("onnx", "merged"), ("torch-export", "merged"), ("torch-export", "apart")]
)
def test_graphs_of_lora(tmp_path, to, adapters):
    trainer = language_trainer(peft={"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True})
    exported = hocket_tools.export(trainer, to, tmp_path / "export", adapters=adapters)
    check_text(trainer, exported, to)
    assert exported.manifest["adapters"] == adapters


# --- weights


def test_safetensors_load_into_a_new_model(tmp_path):
    from safetensors.torch import load_file

    trainer = models.trainer_of(models.HeadsTask(), models.rows(), algorithms=[{"ema": {"half_life": "1ba"}}])
    trainer.fit()
    folder = hocket_tools.export(trainer, "safetensors", tmp_path / "export").folder
    model = models.HeadsTask()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    batch = models.rows(11)[1]
    [expected] = trainer.predict([batch])
    assert_close(named_tensors(model(batch), "output"), named_tensors(expected, "output"))


@pytest.mark.parametrize("adapters", ["merged", "apart"])
def test_folders_of_lora(tmp_path, adapters):
    from safetensors.torch import load_file

    trainer = language_trainer(peft={"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True})
    folder = hocket_tools.export(trainer, "huggingface", tmp_path / "export", adapters=adapters).folder
    network = trainer.state.model
    if adapters == "merged":
        loaded = type(network.get_base_model()).from_pretrained(folder).eval()
    else:
        import peft

        base = copy.deepcopy(network).unload()
        loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    batch = {name: tensor[:3, :9] for name, tensor in models.tokens().items()}
    [expected] = trainer.predict([batch])
    del batch["labels"]
    torch.testing.assert_close(loaded(**batch).logits, expected["logits"], rtol=0, atol=1e-4)

    files = hocket_tools.export(trainer, "safetensors", tmp_path / "weights", adapters=adapters).folder
    names = {file.name: load_file(file).keys() for file in files.glob("*.safetensors")}
    is_apart = adapters == "apart"
    assert names.keys() == {"model.safetensors", *(["adapters.safetensors"] if is_apart else [])}
    assert not any("lora" in name for name in names["model.safetensors"])
    assert all("lora" in name for name in names.get("adapters.safetensors", ()))


# --- refusals


def test_data_dependent_control_flow_is_refused_with_its_line(tmp_path):
    trainer = models.trainer_of(models.Undecided(), models.pairs(), loss="cross_entropy")
    lines, first = inspect.getsourcelines(models.Undecided.forward)
    number = first + next(index for index, line in enumerate(lines) if "if y.sum()" in line)
    with pytest.raises(Unsupported) as raised:
        hocket_tools.export(trainer, "torch-export", tmp_path / "export")
    assert f"{models.__file__}, line {number}, in forward: `if y.sum() > 0:" in str(raised.value)
    assert not any(tmp_path.iterdir())


class SizeDependent(models.Undecided):
    def forward(self, x):
        return self.linear(x) * 2 if len(x) > 4 else self.linear(x)


def test_a_decision_by_the_number_of_samples_is_refused(tmp_path):
    trainer = models.trainer_of(SizeDependent(), models.pairs(), loss="cross_entropy")
    with pytest.raises(Unsupported, match=r"any number of samples.*axis 0 of 'x'"):
        hocket_tools.export(trainer, "torch-export", tmp_path / "export")
    assert not any(tmp_path.iterdir())


class Counting(models.Undecided):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return self.linear(x) + 0.01 * Counting.calls


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_an_export_that_differs_is_not_left(tmp_path, to):
    trainer = models.trainer_of(Counting(), models.pairs(), loss="cross_entropy")
    with pytest.raises(ExportDiffers, match=r"does not compute what the run predicts.* 0\.0001 is allowed"):
        hocket_tools.export(trainer, to, tmp_path / "export")
    assert not any(tmp_path.iterdir())


def test_control_c_leaves_the_earlier_export(tmp_path):
    trainer = models.trainer_of(
        models.Heads(), models.rows(), inputs="x", targets="y", outputs="logits", loss="cross_entropy"
    )
    first = hocket_tools.export(trainer, "safetensors", tmp_path / "export")
    before = {file.name: file.read_bytes() for file in first.folder.iterdir()}
    trainer.fit()

    def stage(name: str) -> None:
        if name == "running what was written":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_trainer(trainer, Options("safetensors", stage=stage), tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert {file.name: file.read_bytes() for file in first.folder.iterdir()} == before
    hocket_tools.export(trainer, "safetensors", tmp_path / "export")
    assert (first.folder / "model.safetensors").read_bytes() != before["model.safetensors"], (
        "an earlier export is replaced"
    )


def test_mistakes_are_named(tmp_path):
    trainer = models.trainer_of(models.Undecided(), models.pairs(), loss="cross_entropy")
    (tmp_path / "mine").write_text("x")
    for arguments, error, text in (
        ({"to": "tflite"}, WrongValue, "'torch-export', 'onnx', 'safetensors' or 'huggingface'"),
        ({"out": tmp_path}, ExistingFile, "is not an earlier export"),
        ({"to": "huggingface"}, Unsupported, "Undecided is not a model of transformers"),
        ({"to": "safetensors", "adapters": "apart"}, WrongValue, "Undecided has none"),
        ({"to": "safetensors", "adapters": "both"}, WrongValue, "'merged' or 'apart'"),
        ({"to": "safetensors", "dynamic": {"y": [1]}}, WrongValue, "here the shapes x "),
    ):
        with pytest.raises(error, match=text):
            hocket_tools.export(trainer, **{"to": "safetensors", "out": tmp_path / "export", **arguments})
    with pytest.raises(MissingPackage, match=r"hocket_absent.* pip install"):
        imported("hocket_absent", "onnx")


def test_exporting_changes_nothing(tmp_path):
    trainer = models.trainer_of(
        models.Heads(), models.rows(), inputs="x", targets="y", outputs="logits", loss="cross_entropy"
    )
    trainer.fit()
    before, random = copy.deepcopy(trainer.state_dict()), torch.get_rng_state()
    hocket_tools.export(trainer, "torch-export", tmp_path / "export")
    after = trainer.state_dict()
    assert torch.equal(torch.get_rng_state(), random)
    assert compare.difference(after, before, at="the state") is None
    assert "export-observer" not in [attachment.name for attachment in trainer.state.bus.attachments]


# --- precision and preprocessing


def test_preprocessing_is_listed(tmp_path):
    class Scaled(torch.utils.data.Dataset):
        classes = ("cat", "dog", "emu")

        def __init__(self, transform):
            self.transform = transform

        def __len__(self):
            return 16

        def __getitem__(self, index):
            return self.transform(torch.full((6,), float(index))), index % 3

    data = torch.utils.data.DataLoader(Scaled(nn.Dropout(0.0)), batch_size=8)
    trainer = models.trainer_of(
        models.Undecided(), data, loss="cross_entropy", batch_transform=_halved, precision="bf16"
    )
    exported = hocket_tools.export(trainer, "safetensors", tmp_path / "export")
    assert exported.manifest["preprocessing"] == [
        {"where": "Scaled.transform", "what": "Dropout(p=0.0, inplace=False)"},
        {"where": "batch_transform", "what": "_halved"},
    ]
    assert exported.manifest["classes"] == ["cat", "dog", "emu"]
    saved = json.loads((exported.folder / "verification.json").read_text())
    assert saved["compared_with"] == "the model on the CPU" and 0 < saved["difference_of_precision"] < 0.1


def _halved(batch):
    return batch[0] / 2, batch[1]


@pytest.mark.parametrize(
    ("actual", "expected", "apart"),
    [
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), 0.0),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), torch.inf),
        (torch.tensor([3, 1]), torch.tensor([1, 1]), 2.0),
        (torch.zeros(2), torch.zeros(3), torch.inf),
    ],
)
def test_difference(actual, expected, apart):
    assert difference(actual, expected) == apart


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("broken", ["weight", "bias", "inputs", "neither"])
def test_nan_verifies_nothing(tmp_path, broken, value):
    class Root(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (-y.abs() - 1).sqrt() if broken == "neither" else y

    model = Root(6, 3)
    x, y = models.pairs()[0]
    said = "'output', which verifies nothing, for samples whose input 'x' is not finite"
    if broken == "neither":
        said = "'output', which verifies nothing, for finite weights and inputs"
    elif broken != "inputs":
        said = f"NaN or infinity, in {broken}. Load those of an earlier"
        model.get_parameter(broken).data.view(-1)[0] = value
    else:
        x[0, 0], x[0, 1] = value, -value
        torch.nn.init.ones_(model.weight)
    trainer = hocket.Trainer(model, eval_data=[(x, y)], loss="cross_entropy", device="cpu")
    with pytest.raises((ExportDiffers, WrongValue), match=said):
        hocket_tools.export(trainer, "safetensors", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_masked_outputs_are_verified(tmp_path):
    class Masked(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.tensor([False, True, False]), -torch.inf)

    trainer = hocket.Trainer(Masked(6, 3), eval_data=models.pairs(), loss="cross_entropy", device="cpu")
    assert hocket_tools.export(trainer, "safetensors", tmp_path / "out").difference == 0


def test_data_that_do_not_suit_and_folders_named_like_files_are_explained(tmp_path: Path) -> None:
    trainer = hocket.Trainer(nn.Linear(4, 2), loss="mse_loss", eval_data=[(torch.ones(9, 4), torch.ones(9, 2))])
    for data, said in (
        (torch.ones(9, 4), r"^data is one Tensor, and not batches\. Give a loader: data=torch"),
        ([(torch.ones(9, 3), torch.ones(9, 2))], r"The prediction raised RuntimeError: .* shape \(5, 3\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            hocket_tools.export(trainer, "safetensors", tmp_path / "e", data=data)
    with pytest.raises(OSError, match=r"model\.onnx is named like a file, and a folder is written\. Give .*model\.$"):
        hocket_tools.export(trainer, "torch-export", tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())


def test_rounding_of_training_is_not_traced(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    data = [(torch.ones(9, 4), torch.ones(9, 2))]
    trainer = hocket.Trainer(
        nn.Sequential(nn.Linear(4, 2)), loss="mse_loss", eval_data=data, device="cpu",
        algorithms=["quantization-aware-training"],
    )  # fmt: skip
    with pytest.raises(
        Unsupported, match=r"whose rounding torch\.export does not write\. Write `hocket compress RUN --to int8"
    ):
        hocket_tools.export(trainer, "torch-export", tmp_path / "e")
