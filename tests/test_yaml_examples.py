"""The configuration files in examples/: the commands in their first lines run, on less data and for a few steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from hocket.plugins import registry
from hocket_cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(each.name for each in EXAMPLES.glob("*.yaml"))
LANGUAGE = ("gpt.yaml", "rope.yaml", "lora.yaml")
SHORT = ["duration=2ba", "limit_eval=1", "device=cpu"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with copies of the examples that read a small part of the text, in batches of an eighth of the size."""
    (tmp_path / "examples").mkdir()
    for name in FILES:
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        text = re.sub(r"(hocket_nlp:(?:text_python|python_tokenizer): \{)", r"\1max_bytes: 300000, ", text)
        text = re.sub(r"batch_size: (\d+)", lambda found: f"batch_size: {int(found[1]) // 8}", text)
        (tmp_path / "examples" / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def commands(name: str) -> list[list[str]]:
    """The words of the commands in the first lines of a file, without optional arguments in brackets."""
    lines = re.findall(r"^# +(?:`)?hocket (.*?)(?:`|$)", (EXAMPLES / name).read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(re.sub(r" \[\w+=.*\]$", "", line)) for line in lines]


def others(words: list[str]) -> list[str]:
    """The algorithms that a command names and that are not installed."""
    named = re.findall(r"rope-scaling|seq-length-warmup", " ".join(words))
    return [name for name in named if name not in registry.names("algorithms")]


@pytest.mark.parametrize("name", FILES)
def test_the_first_line_with_a_command_trains_the_file_itself(name: str) -> None:
    assert ["train", f"examples/{name}"] in commands(name)


def test_every_file_is_covered() -> None:
    assert set(FILES) == {"digits.yaml", *LANGUAGE}
    assert [len(commands(name)) for name in LANGUAGE] == [4, 2, 3]


@pytest.mark.filterwarnings("ignore:PeftModel was in eval mode")  # as from_pretrained returns it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long if each == "lora.yaml" else ()) for each in FILES]
)
def test_the_commands_of_the_first_lines_run(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for library in {"digits.yaml": ("sklearn", "torchmetrics"), "lora.yaml": ("peft",)}.get(name, ("transformers",)):
        pytest.importorskip(library)
    for words in commands(name):
        if others(words):
            continue
        code = main([*words, *(SHORT if words[0] == "train" else SHORT[1:])])
        printed, failed = capsys.readouterr()
        assert code == 0, failed
        if name in ("gpt.yaml", "rope.yaml"):
            assert {f"{times}x/perplexity" for times in (1, 2, 4)} <= set(re.findall(r"^(\S+) ", printed, re.MULTILINE))
    if name == "lora.yaml":
        check_adapters(here / "runs" / "lora")
    else:
        assert main(["plan", f"examples/{name}", "run_name=plan"]) == 0
        assert ("alibi" in capsys.readouterr().out) == (name == "gpt.yaml")


def check_adapters(run: Path) -> None:
    """Adapters are trained and saved, and nothing else."""
    from safetensors import safe_open

    with safe_open(run / "huggingface" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * 4 * 4 and all("lora_" in name for name in names)  # four matrices in each of four layers
    (checkpoint,) = [each for each in (run / "checkpoints").iterdir() if each.is_dir() and not each.is_symlink()]
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert size < 1.1e6, "adapters and their two moments; the model alone is 3.7 MB"


def test_gpt_and_rope_differ_in_positions_and_model_only() -> None:
    gpt, rope = (yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8")) for name in ("gpt.yaml", "rope.yaml"))
    differ = {key for key in {*gpt, *rope} if gpt.get(key) != rope.get(key)}
    assert differ == {"model", "algorithms", "callbacks", "run_name"}
    (tiny,), (other,) = (
        each["model"]["hocket_nlp:HuggingFaceTask"]["model"].values() for each in (gpt, rope)
    )  # fmt: skip
    tiny, other = tiny["config"]["transformers:GPT2Config"], other["config"]["transformers:LlamaConfig"]
    same = {
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size", "vocab_size": "vocab_size"
    }  # fmt: skip
    assert all(tiny[ours] == other[theirs] for ours, theirs in same.items())
    assert tiny["n_positions"] == 4 * other["max_position_embeddings"] == 4 * 128
