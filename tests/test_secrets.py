"""Secrets in a configuration: no file of a run and no line of a terminal has them, and a repeated run asks for them again."""

from __future__ import annotations

import http.server
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

import hocket
from hocket.basics.masking import is_masked, masked
from hocket_cli import main

SECRETS = [f"s3cr3t{letter}" for letter in "ABCDEFGH"]
MINE = """
import hocket, torch
class Net(torch.nn.Linear):
    def __init__(self, api_key: str = "", key_padding: str = "", tokenizer: str = "", pad_token: str = ""):
        super().__init__(3, 1)
def loader(url: str, storage: dict | None = None):
    return [(torch.ones(4, 3), torch.ones(4, 1))] * 2
class Spy(hocket.Callback):
    def __init__(self, password: str, monitor: str = "", keys: list | None = None, headers: dict | None = None):
        pass
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def address() -> Iterator[str]:
    """Serve a webhook, and return its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            posted.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    posted: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    assert posted and set(posted) == {f"/{SECRETS[0]}"}, "the logger has the secret"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "secret_mine", raising=False)
    Path("secret_mine.py").write_text(MINE)

    def call(*arguments: str) -> tuple[int, str, str]:
        return main([*arguments]), *capsys.readouterr()

    return call


def config(address: str) -> str:
    given = {
        "model": {"secret_mine:Net": {"api_key": SECRETS[1], "key_padding": "left", "tokenizer": "gpt2", "pad_token": "<pad>"}},
        "loss": "mse_loss",
        "train_data": {"secret_mine:loader": {
            "url": f"https://me:{SECRETS[2]}@example.com/a?access_token={SECRETS[3]}&page=2",
            "storage": {"key": "AKIA0123456789ABCDEF", "secret": SECRETS[4]},
        }},
        "optimizer": "sgd(lr=0.1)",
        "duration": "2ba",
        "device": "cpu",
        "run_name": "a",
        "checkpoints": "runs/a/stored",
        "loggers": ["jsonl", {"webhook": {"url": f"{address}/{SECRETS[0]}"}}],
        "callbacks": [{"secret_mine:Spy": {
            "password": SECRETS[5], "monitor": "keys", "keys": [1, 2], "headers": {"Authorization": f"Bearer {SECRETS[6]}"},
        }}],
    }  # fmt: skip
    return yaml.safe_dump(given, sort_keys=False)


def leaked(text: str) -> list[str]:
    return re.findall("s3cr3t[A-H]|AKIA0123456789ABCDEF", text)


def test_no_file_and_no_line_has_a_secret_and_a_repeated_run_asks_for_them(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hocket_loggers")
    Path("c.yaml").write_text(config(address))
    monkeypatch.setenv("HOCKET_OVERRIDES", f"callbacks.0.password={SECRETS[7]}")
    overrides = [f"model.api_key={SECRETS[1]}", f"loggers=[jsonl, webhook(url={address}/{SECRETS[0]})]"]
    for command in (["plan", "c.yaml"], ["train", "c.yaml", "--print-config"], ["train", "c.yaml"]):
        code, out, said = run(*command, *overrides)
        assert code == 0 and not leaked(out + said), (out, said)
    files = [each for each in Path("runs/a").rglob("*") if each.is_file()]
    assert {"config.yaml", "metrics.jsonl", "summary.json"} <= {each.name for each in files}
    for each in files:
        assert not leaked(each.read_bytes().decode("latin-1")), each
    recorded = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert recorded["model"] == {
        "secret_mine:Net": {"api_key": "***", "key_padding": "left", "tokenizer": "gpt2", "pad_token": "<pad>"}
    }
    data = recorded["train_data"]["secret_mine:loader"]
    assert data["url"] == "https://me:***@example.com/a?access_token=***&page=2"
    monkeypatch.delenv("HOCKET_OVERRIDES")

    for command in (
        ["train", "--from", "runs/a"],
        ["train", "--from", "runs/a/stored"],
        ["plan", "runs/a/config.yaml"],
    ):
        code, out, said = run(*command)
        assert code == 2 and not out and said.count("\n") == 1, said
        names = ["model.api_key", "train_data.url", "train_data.storage.key", "train_data.storage.secret",
                 "loggers.1.webhook.url", "callbacks.0.password", "callbacks.0.headers.Authorization"]  # fmt: skip
        assert f"{', '.join(names[:4])}, callbacks" in said and f"{names[4]}=…" in said and "HOCKET_WEBHOOK_URL" in said
    again = [f"{name}={SECRETS[1]}" for name in names if name != "loggers.1.webhook.url"]
    monkeypatch.setenv("HOCKET_WEBHOOK_URL", f"{address}/{SECRETS[0]}")
    code, out, said = run("train", "--from", "runs/a", *again, "loggers.1.webhook.url=null")
    assert code == 0 and not leaked(out + said) and Path("runs/a-2/weights.safetensors").exists()
    weights = "runs/a/weights.safetensors"
    code, _, said = run(
        "evaluate", "runs/a/config.yaml", "--weights", weights, "eval_data={test: [[[[1.0, 1.0, 1.0]], [[1.0]]]]}"
    )
    assert "loggers" not in said, "they are not made, and need no url"


@pytest.mark.parametrize(
    "change",
    ["model.api_key='***'", "model={secret_mine:Net: {api_key: '***'}}", "optimizer=sgd(lr=0.1, password='***')",
     "loggers=[jsonl, {webhook: {url: '***'}}]", "train_data.url=https://me:***@example.com/a",
     "train_data.storage={key: '***'}"],
)  # fmt: skip
def test_no_override_has_a_mask(run: Run, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    Path("c.yaml").write_text(config("http://localhost"))
    code, _, said = run("train", "c.yaml", change)
    assert code == 2 and "a secret, which runs do not record" in said
    monkeypatch.setenv("HOCKET_OVERRIDES", shlex.quote(change))
    code, _, again = run("plan", "c.yaml")
    assert code == 2 and "a secret, which runs do not record" in again and "HOCKET_OVERRIDES" in again


def test_what_a_run_says_to_type_next_has_no_mask(run: Run) -> None:
    given = {**yaml.safe_load(config("http://localhost")), "loggers": ["jsonl"]}
    Path("c.yaml").write_text(yaml.safe_dump(given))
    code, out, said = run("train", "c.yaml", f"model.api_key={SECRETS[1]}", "seed=3")
    assert code == 0 and "hocket train c.yaml" in said and "***" not in said
    assert "model.api_key=… seed=3" in said.replace("'", "") and not leaked(out + said)


def test_an_unclosed_quote_in_the_environment_shows_no_value(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.yaml").write_text(config("http://localhost"))
    monkeypatch.setenv("HOCKET_OVERRIDES", f"model.api_key='{SECRETS[1]}")
    code, out, said = run("plan", "c.yaml")
    assert code == 2 and "HOCKET_OVERRIDES" in said and "Close each quote" in said and not leaked(out + said)


def test_a_refused_value_is_not_shown(run: Run) -> None:
    Path("c.yaml").write_text(config("http://localhost"))
    for change in ('loggers=[webhook("https://a:s3cr3tA@b/c")]', "optimizer=sgd(lr=0.1, password=s3cr3tA, password=s3cr3tB)",
                   "optimizer=sgd(password=s3cr3tA", "optimizer={sgd: {lr: 0.1, api_token: s3cr3tA}}",
                   "loggers=[webhook(url=s3cr3tA)]", "model.api_keys=s3cr3tA",
                   "callbacks.0.password=[s3cr3tA]", "loggers=[{webhook: {url: [s3cr3tA]}}]"):  # fmt: skip
        code, out, said = run("plan", "c.yaml", change)
        assert code == 2 and not leaked(out + said), said


def test_two_webhooks_differ_and_a_plan_in_python_shows_neither() -> None:
    pytest.importorskip("hocket_loggers")
    urls = [f"https://example.com/{each}" for each in SECRETS[:2]]
    given = {
        "model": torch.nn.Linear(1, 1),
        "loss": "mse_loss",
        "optimizer": "sgd(lr=0.1)",
        "train_data": [],
        "device": "cpu",
    }
    trainer = hocket.Trainer(**given, loggers=[{"webhook": {"url": each}} for each in urls])
    assert not leaked(str(trainer.plan()) + repr(trainer.plan()))
    assert not leaked(repr(trainer.settings.hyperparameters(trainer.state.bus.attachments)))
    with pytest.raises(ValueError, match=r"twice\. Both have the same"):
        hocket.Trainer(**given, loggers=[{"webhook": {"url": urls[0]}}] * 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("api_key", "a"), ("apiKey", "a"), ("WANDB_API_KEY", "a"), ("token", "abc"), ("hf_token", "a"), ("access_tokens", "a"),
     ("db_password", "a"), ("client_secret", "a"), ("passphrase", "a"), ("Authorization", "Bearer a"), ("smtp_pass", "a"),
     ("key", "AKIA0123456789ABCDEF"), ("deploy_key", "a"), ("my_key", "sk-12345678"), ("webhook_url", "https://a.b/c"),
     ("address", "https://hooks.slack.com/services/T0/B0/x"), ("to", "https://discord.com/api/webhooks/1/x"),
     ("url", "https://ghp_x@github.com/a"), ("path", "s3://key:secret@bucket/a"), ("env", "API_KEY=a"),
     ("url", "https://a.b/c?X-Amz-Signature=12&X-Amz-Date=3"), ("logger", "mine(api_key='a b', n=3)"), ("credentials", "a"),
     ("password", "pass(word)"), ("password", "a***b"), ("passwords", ["a"]), ("secrets", {"db": "a"})],
)  # fmt: skip
def test_what_is_a_secret(name: str, value: object) -> None:
    hidden = masked({"list": [{name: value}], "other": 1}, "of")
    inside = hidden["list"][0][name]
    inside = (
        next(iter(inside.values())) if isinstance(inside, dict) else inside[0] if isinstance(inside, list) else inside
    )
    assert is_masked(inside) and not is_masked(value)
    assert masked(hidden) is hidden and hidden["other"] == 1


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("a", 'artifacts(url="memory://b/x", options={"secret": "s3cr3tA"})',
      "artifacts(url='memory://b/x', options={'secret': '***'})"),
     ("a", '[jsonl, artifacts(n=1, options={"secret": "s3cr3tA"})]', '[jsonl, artifacts(n=1, options={"secret": "***"})]'),
     ("a", "outer(inner=mine(api_key=s3cr3tA), n=2)", '''outer(inner="mine(api_key='***')", n=2)'''),
     ("a", "x(api_key=[s3cr3tA, s3cr3tB], n=3)", "x(api_key='***', n=3)"),
     ("a", 'x("p", api_key=[s3cr3tA, s3cr3tB], n=3)', 'x("p", api_key=***, n=3)'),
     ("a", 'webhook("https://user:s3cr3tA@h/x")', 'webhook("***")'), ("a", 'mine("https://user:s3cr3tA@h/x")', 'mine("https://user:***@h/x")'),
     ("a", "webhook(url=https://h/s3cr3tA", "webhook(url=***"),
     ("a", '{"secret": "s3cr3tA", "n": 3}', '{"secret": "***", "n": 3}'),
     ("args", "--user me --password s3cr3tA --n 3", "--user me --password *** --n 3"),
     ("args", "--password=s3cr3tA", "--password=***"),
     ("a", "Server=x;Password=s3cr3tA;", "Server=x;Password=***;"),
     ("a", "curl -H 'X-Api-Key: s3cr3tA'", "curl -H 'X-Api-Key: ***'"),
     ("a", "AccountName=x;AccountKey=s3cr3tA==;Suffix=core", "AccountName=x;AccountKey=***;Suffix=core"),
     ("a", "{n: 1, api_key: s3cr3tA", "{n: 1, api_key: ***"),
     ("a", "PGPASSWORD=s3cr3tA psql", "PGPASSWORD=***"), ("sas_token", "a", "***"),
     ("auth", "user:s3cr3tA", "***"), ("jwt", "a", "***"), ("github_pat", "a", "***"), ("otp", "a", "***"),
     ("session_cookie", "a", "***"),
     ("user_token", "ghp_s3cr3tAAAAAAAA", "***"), ("my_token", "hf_s3cr3tAbcdefgh", "***"), ("hub_token", "a", "***"),
     ("url", "https://user:p@s3cr3tA@h/x", "https://user:***@h/x"), ("url", "https://user:p/s3cr3tA@h/x", "https://user:***@h/x"),
     ("url", "s3://k:s3cr3tA@b/a@b and http://h:80/a@b", "s3://k:***@b/a@b and http://h:80/a@b")],
)  # fmt: skip
def test_what_is_left_of_a_text(name: str, value: str, shown: str) -> None:
    hidden = masked({name: value})
    assert hidden == {name: shown} and is_masked(shown) and not is_masked(value)
    assert masked(hidden) is hidden


@pytest.mark.parametrize("value", ["a", "yes", "<x>", "newline", "[IMG]"])
@pytest.mark.parametrize(
    "name",
    ["answer_token", "yes_token", "no_token", "user_token", "assistant_token", "system_token", "img_token", "think_token",
     "tool_token", "title_token", "newline_token", "space_token", "cookie_cutter", "license_key_column",
     "password_strength_column", "access_token_column", "secret_type", "auth"],
)  # fmt: skip
def test_a_word_of_a_secret_does_not_make_one(name: str, value: str) -> None:
    assert masked({name: value}) == {name: value}


def test_a_flag_names_what_follows_it() -> None:
    hidden = masked({"args": ["--password", "s3cr3tA", "--user", "me", "--seed", 3]})
    assert hidden == {"args": ["--password", "***", "--user", "me", "--seed", 3]}


def test_a_long_text_is_looked_through_once() -> None:
    for text in ("a", "a=", " ", "x(", "--a ", ")", "://", "secret=a;"):
        started = time.monotonic()
        masked({"text": text * 20_000})
        assert time.monotonic() - started < 5, text
    nested = "x(a=" * 3000 + "y(api_key=s3cr3tA)" + ")" * 3000
    assert not leaked(str(masked({"text": nested})))


@pytest.mark.parametrize(
    ("name", "value"),
    [("key_padding", "left"), ("num_tokens", "5"), ("tokenizer", "gpt2"), ("max_token_length", "512"), ("monkey", "see"),
     ("pad_token", "<pad>"), ("eos_token", "x"), ("token", "[MASK]"), ("token_type", "bpe"), ("initializer_token", "cat"),
     ("token", "/run/a.json"), ("sort_key", "length"),
     ("image_key", "image_224x224"), ("key", "input_ids"), ("keys", ["a", "b"]), ("keys", [1, 2]), ("token", 5),
     ("api_key", None), ("password_file", "/run/a"), ("keyframe", "a"), ("public_key", "ssh-rsa1234567"),
     ("run_name", "secretary"),
     ("url", "https://example.com/a.tar"), ("path", "s3://bucket/a@b"), ("repository", "git+ssh://git@github.com/x"),
     ("optimizer", "adamw(lr=0.1)"), ("schedule", "cosine(warmup=0.1dur)"), ("url", "https://a.b/c?monkey=d")],
)  # fmt: skip
def test_what_is_none(name: str, value: object) -> None:
    given = {name: value}
    assert masked(given) is given and not is_masked(value)


@pytest.mark.parametrize(
    "change",
    ["model.api_key=s3cr3tA,s3cr3tB", "train_data.storage.secret=[s3cr3tA],[s3cr3tB]", "callbacks.0.password=int(1,3),s3cr3tA",
     "train_data.url=https://a:s3cr3tA@b/c,https://a:s3cr3tB@b/c", "model={secret_mine:Net: {api_key: s3cr3tA}},null",
     "loggers=webhook(url=https://b/s3cr3tA),webhook(url=https://b/s3cr3tB)"],
)  # fmt: skip
def test_a_sweep_tries_no_secrets(run: Run, change: str) -> None:
    Path("c.yaml").write_text(config("http://localhost"))
    code, out, said = run("sweep", "c.yaml", change, "--metric", "train/loss", "--mode", "min")
    assert code == 2 and not leaked(out + said) and not Path("runs").exists()
    assert f"'{change.partition('=')[0]}' has secrets among its values" in said
    key, _, values = change.partition("=")
    if ":" not in values and "(" not in values:
        given = {"config": "c.yaml", "metric": "train/loss", "mode": "min", "parameters": {key: values.split(",")}}
        Path("s.yaml").write_text(yaml.safe_dump(given))
        code, out, said = run("sweep", "s.yaml")
        assert code == 2 and not leaked(out + said) and not Path("runs").exists()
