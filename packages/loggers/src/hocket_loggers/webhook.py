"""Messages to a chat."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from hocket import Logger, State
from hocket.errors import WrongValue

#: Requests for one message, with a wait of 0.5 s and 1 s between them.
_ATTEMPTS = 3
_TIMEOUT_SECONDS = 3.0
#: Seconds after which a message is not tried again. A request takes a multiple of the timeout if a host has several addresses.
_MESSAGE_SECONDS = 9.0
#: Seconds after a message failed in which the metrics of evaluations are not posted, so that the end of the run is.
_PAUSE_SECONDS = 30.0
#: Characters of an error in a message; Slack cuts texts at 40,000.
_LONGEST = 2000


class WebhookLogger(Logger):
    """Post a message when a run starts, has evaluated, fails or finishes: JSON ``{"text": …}``, as Slack takes it.

    Slack, Mattermost, Rocket.Chat, Google Chat and ntfy accept this body. A request that fails because of the network or the
    server is repeated twice. After that, the metrics of evaluations are dropped for 30 seconds, so that the last message is
    tried before the run ends. No metrics are sent between evaluations, and no images, tables or files.

    ``HOCKET_WEBHOOK_URL`` is the address of the logger `webhook` if it is given none. A repeated run finds it again.

    Args:
        url: the address, which is a secret and is not recorded; None for that of the environment.
        events: which messages to send.

    Raises:
        ValueError: there is no http address, or an unknown event.

    Example:
        >>> import hocket_loggers
        >>> logger = hocket_loggers.WebhookLogger("https://hooks.example.com/services/T0/B0/secret", events=["failed"])
    """

    EVENTS = ("started", "evaluated", "failed", "finished")

    deadline = 30.0  # enough for a message that is under way and the last one, if nobody answers

    def __init__(self, url: str | None = None, events: Sequence[str] = EVENTS) -> None:
        self._url = os.environ.get("HOCKET_WEBHOOK_URL", "") if url is None else url
        if not self._url.startswith(("https://", "http://")):
            given = (
                "no url was given, and HOCKET_WEBHOOK_URL is not set" if not self._url else "url is not a web address"
            )
            raise WrongValue(
                f"The logger 'webhook' posts to a web address, but {given}. Set HOCKET_WEBHOOK_URL=https://…, or pass "
                "{'webhook': {'url': 'https://…'}}."
            )
        if isinstance(events, str) or (unknown := [event for event in events if event not in self.EVENTS]):
            wrong = repr(events) if isinstance(events, str) else repr(unknown[0])
            raise WrongValue(
                f"events has {wrong}; give a list of {', '.join(self.EVENTS)}, such as «events=['failed', 'finished']»."
            )
        self._events = frozenset(events)
        #: When a message last failed.
        self._failed = float("-inf")

    def fit_start(self, state: State) -> None:
        """Post where the run starts or continues."""
        at = f" continues at {_position(state)}" if state.timestamp.batch else " started"
        self._post("started", state, f"{at} on {socket.gethostname()}: {state.run_folder}")

    def eval_after_all(self, state: State) -> None:
        """Post the metrics of an evaluation."""
        self._post("evaluated", state, f" at {_position(state)}: {_numbers(state)}")

    def exception(self, state: State) -> None:
        """Post the error that ends the run."""
        error = state.exception
        text = f"{type(error).__name__}: {error}"[:_LONGEST]
        self._post("failed", state, f" failed at {_position(state)}: {text}")

    def fit_end(self, state: State) -> None:
        """Post the metrics at the end."""
        because = f" ({state.stop_reason})" if state.stop_reason else ""
        self._post("finished", state, f" finished at {_position(state)}{because}: {_numbers(state)}")

    def _post(self, event: str, state: State, text: str) -> None:
        if event not in self._events:
            return
        body = json.dumps({"text": f"{state.run_name}{text.rstrip(' :')}"}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        began = time.monotonic()
        if event == "evaluated" and began - self._failed < _PAUSE_SECONDS:
            raise ConnectionError("the message before could not be delivered")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
                    return
            except OSError as error:
                code = error.code if isinstance(error, urllib.error.HTTPError) else 500
                last = attempt == _ATTEMPTS or time.monotonic() - began > _MESSAGE_SECONDS
                if last or (code < 500 and code != 429):
                    self._failed = time.monotonic()
                    raise
            time.sleep(attempt / 2)


def _position(state: State) -> str:
    return f"epoch {state.timestamp.epoch}, batch {state.timestamp.batch}"


def _numbers(state: State) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
