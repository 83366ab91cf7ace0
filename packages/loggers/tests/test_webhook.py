"""What a server on this machine receives."""

from __future__ import annotations

import json
import urllib.error

import pytest
import torch

import hocket
from hocket.plugins.delivery import LoggerWarning
from hocket_loggers import WebhookLogger, webhook


def trainer(folder, url, **arguments):
    data = [(torch.ones(4, 3), torch.zeros(4, 1))] * 4
    return hocket.Trainer(
        **{
            "model": torch.nn.Linear(3, 1), "loss": torch.nn.MSELoss(), "optimizer": "sgd(lr=0.1)", "train_data": data,
            "eval_data": {"test": data}, "duration": "1ep", "device": "cpu", "folder": folder, "run_name": "digits",
            "loggers": [{"webhook": {"url": url}}], **arguments,
        }
    )  # fmt: skip


def test_a_run_and_its_end(tmp_path, chat):
    with trainer(tmp_path, chat.url) as run:
        result = run.fit()
        run.fit("1ba")
    texts = [body.pop("text") for body in chat.bodies]
    assert not any(chat.bodies), "nothing but a text, which is what Slack takes"
    started, evaluated, finished, continued = texts[:4]
    assert started.startswith("digits started on ") and str(tmp_path / "digits") in started
    value = f"test/loss {result.metrics['test/loss']:.4g}"
    assert evaluated == f"digits at epoch 1, batch 4: {value}"
    assert finished == f"digits finished at epoch 1, batch 4: {value}"
    assert continued.startswith("digits continues at epoch 1, batch 4 on ")


def test_a_failure_arrives_before_the_process_can_end(tmp_path, chat):
    class Break(hocket.Callback):
        def batch_end(self, state):
            if state.timestamp.batch == 2:
                raise ValueError("the data of step 2 is broken")

    with pytest.raises(ValueError, match="broken"):
        trainer(tmp_path, chat.url, callbacks=[Break()]).fit()
    assert chat.bodies[-1] == {"text": "digits failed at epoch 0, batch 2: ValueError: the data of step 2 is broken"}
    assert not any("finished" in body["text"] for body in chat.bodies)


def test_only_some_events(tmp_path, chat):
    with trainer(tmp_path, "", loggers=[WebhookLogger(chat.url, events=["finished"])]) as run:
        run.fit()
    assert [body["text"].split()[1] for body in chat.bodies] == ["finished"]


def test_retries_are_bounded(tmp_path, monkeypatch, state_in, chat):
    monkeypatch.setattr(webhook.time, "sleep", lambda seconds: None)
    logger, state = WebhookLogger(chat.url), state_in(tmp_path, 3)
    chat.answers = [503, 429]
    logger.fit_start(state)
    assert len(chat.bodies) == 3, "the third time it was taken"
    chat.answers = [500, 500, 500]
    with pytest.raises(urllib.error.HTTPError):
        logger.fit_start(state)
    assert len(chat.bodies) == 6
    chat.answers = [404]
    with pytest.raises(urllib.error.HTTPError) as raised:
        logger.fit_start(state)
    assert len(chat.bodies) == 7 and "secret" not in str(raised.value), "what is wrong will be wrong again"


def test_a_server_that_hangs_gets_the_last_message_before_the_deadline(tmp_path, monkeypatch, silent_server, state_in):
    """Everything is ten times as fast as for a user."""
    tried = []
    opened = webhook.urllib.request.urlopen

    def urlopen(request, timeout):
        tried.append(json.loads(request.data)["text"].split()[1])
        return opened(request, timeout=timeout)

    monkeypatch.setattr(webhook.urllib.request, "urlopen", urlopen)
    sleep = webhook.time.sleep
    monkeypatch.setattr(webhook.time, "sleep", lambda seconds: sleep(seconds / 10))
    monkeypatch.setattr(webhook, "_TIMEOUT_SECONDS", webhook._TIMEOUT_SECONDS / 10)
    monkeypatch.setattr(WebhookLogger, "deadline", WebhookLogger.deadline / 10)
    with pytest.warns(LoggerWarning) as told, trainer(tmp_path, silent_server, eval_every="1ba") as run:
        run.fit()
    assert tried == ["started"] * 3 + ["finished"] * 3
    texts = [str(each.message) for each in told]
    assert any("6 events dropped" in text for text in texts) and not any("is still in" in text for text in texts)


def test_a_message_that_was_not_delivered_is_counted(tmp_path, chat):
    chat.answers = [404]
    with (
        pytest.warns(LoggerWarning) as told,
        trainer(tmp_path, "", loggers=[WebhookLogger(chat.url, ["failed", "finished"])]) as run,
    ):
        run.fit()
    assert any("incomplete: 1 event dropped." in str(each.message) for each in told)


def test_nobody_listens(tmp_path, monkeypatch, chat):
    monkeypatch.setattr(webhook.time, "sleep", lambda seconds: None)
    chat.server_close()
    with pytest.warns(LoggerWarning, match="refused"), trainer(tmp_path, chat.url) as run:
        assert run.fit().timestamp.batch == 4


def test_the_address_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOCKET_WEBHOOK_URL", "https://example.com/hook")
    assert WebhookLogger()._url == "https://example.com/hook"
    monkeypatch.delenv("HOCKET_WEBHOOK_URL")
    with pytest.raises(ValueError, match="HOCKET_WEBHOOK_URL is not set"):
        WebhookLogger()
    with pytest.raises(ValueError, match="events has 'evaluate'; give a list of started, evaluated"):
        WebhookLogger("https://example.com", events=["evaluate"])
    with pytest.raises(ValueError, match="events has 'failed'"):
        WebhookLogger("https://example.com", events="failed")
