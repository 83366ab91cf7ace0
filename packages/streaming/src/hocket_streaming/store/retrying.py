"""Attempts: how often and for how long the store is asked again, and what the failure of the last attempt says."""

from __future__ import annotations

import random
import re
import time

from hocket.basics.masking import masked
from hocket.errors import MissingPackage, Mistake
from hocket_streaming.errors import AccessDenied, DamagedData, MissingData, StreamError, Unreachable

#: Seconds after which no further attempt begins, except for the second one and for those after an answer.
SECONDS = 4.5
#: Seconds without a byte from the store after which an attempt has failed. Two silent attempts take less than 10 s.
SILENCE = 4.0


class Attempts:
    """Says whether to try once more, and waits before it: exponential back-off with jitter, limited in number and in time.

    Args:
        most: the largest number of attempts.
        seconds: after which no further attempt begins, except for the second one.
    """

    def __init__(self, most: int = 5, seconds: float = SECONDS) -> None:
        self.most = most
        self.number = 1
        self._until = time.monotonic() + seconds

    def again(self, error: BaseException | None = None, most: int | None = None) -> bool:
        """Wait, and return True; or return False if the attempt that failed was the last one.

        Args:
            error: of a store that answered, as with 503 or half a body. Only the number limits attempts then: a process that
                waits long for its turn on a busy machine tries as often as another one. None where time counts: for damage.
            most: allows fewer attempts.
        """
        late = self.number > 1 and time.monotonic() >= self._until and (error is None or _is_timeout(error))
        if late or self.number >= (most or self.most):
            return False
        time.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2**self.number, 1.5))
        self.number += 1
        return True


def final(error: BaseException, url: str) -> Exception | None:
    """Return the error to raise at once, without another attempt, or None for an error that may pass."""
    if isinstance(error, Mistake):
        return error
    if isinstance(error, ImportError):
        return MissingPackage(f"{url} cannot be read: {error}. Install the package that it names: {_install(url)}.")
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # of http: any failure of a HEAD
        error = error.__cause__
    text, status = f"{type(error).__name__} {error} {error.__cause__}", _status(error)
    if re.search(r"expired", text, re.IGNORECASE):
        return AccessDenied(
            f"{url} cannot be read, because the credentials have expired: {_short(error)}. "
            "Renew them, or use credentials that renew themselves, such as a role of the machine."
        )
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return MissingData(
            f"{url} does not exist ({_short(error)}). Check the path, or write the index of the data again."
        )
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return AccessDenied(
            f"{url} may not be read: {_short(error)}. Check the credentials of this machine and their rights on this path."
        )
    if status == 416 or "InvalidRange" in text:
        return DamagedData(f"{url} is shorter than its index says. Write this file, or the index of the data, again.")
    if status and 400 <= status < 500 and status not in (408, 425, 429) and "Timeout" not in text:
        return StreamError(f"{url} cannot be read: {_short(error)}. Check the URL, and what its server allows.")
    if isinstance(error, (IsADirectoryError, NotADirectoryError, TypeError, ValueError, NotImplementedError)):
        return StreamError(f"{url} cannot be read: {_short(error)}. Check the path and storage_options.")
    return None


def failed(error: BaseException, url: str, attempts: Attempts) -> Exception:
    """Return the error to raise after the last attempt."""
    return final(error, url) or Unreachable(
        f"{url} could not be read in {attempts.number} attempts: {_short(error)}. Check the network and the state of the store."
    )


def _is_timeout(error: BaseException) -> bool:
    return any(re.search(r"time(d )?out", f"{type(one).__name__} {one}", re.I) for one in (error, error.__cause__))


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that an error of a client library carries."""
    for about in (error, error.__cause__):
        response = getattr(about, "response", None)
        if isinstance(response, dict):  # of botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if isinstance(code := getattr(response, "status_code", None), int):
            return code
        # of aiohttp: an incomplete body has code 400, and no status
        name = "status" if type(about).__module__.startswith("aiohttp") else "code"
        if isinstance(code := getattr(about, name, None), int):
            return code
    return None


def _short(error: BaseException) -> str:
    said = (
        f"{error} ({error.__cause__})" if error.__cause__ and not isinstance(error, FileNotFoundError) else str(error)
    )
    text = masked(" ".join(said.split()).rstrip("."))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _install(url: str) -> str:
    scheme = url.partition("://")[0]
    packages = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub", "http": "aiohttp"}
    packages |= {"s3a": "s3fs", "gcs": "gcsfs", "abfs": "adlfs", "https": "aiohttp"}
    return f"pip install {packages[scheme]}" if scheme in packages else f"the one that fsspec needs for {scheme}://"
