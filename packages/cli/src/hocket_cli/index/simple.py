"""Read a simple index of distributions, as HTML or JSON: packaging.python.org/specifications/simple-repository-api."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import sys
import urllib.error
import urllib.request
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import urldefrag, urljoin, urlsplit

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from hocket.basics.safe_files import printable
from hocket.errors import MissingFile, WrongFile, WrongValue
from hocket_cli.index.wheels import About, of_wheel

#: Maximum sizes of pages and of wheels in bytes, and seconds without an answer.
_PAGE, _WHEEL, _TIMEOUT = 32_000_000, 200_000_000, 30.0
_EXAMPLE = "such as https://packages.example.org/simple/"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


class File(NamedTuple):
    """A file of a project, or a project of the index."""

    name: str
    url: str
    sha256: str = ""
    yanked: bool = False


def check(index: str, option: str) -> None:
    """Raise WrongValue unless an option is an address that can be read and shown."""
    secret = "@" in index
    try:
        parts = urlsplit(index)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # in brackets without an end, or with a port that is not a number
        valid = False
    if secret:
        raise WrongValue(f"{option} is not read with a password, because it would be shown. Write it without.")
    if not valid:
        raise WrongValue(f"{option} takes the address of a simple index, {_EXAMPLE}, not {index!r}.")


def plugins(index: str, pattern: str = "hocket-") -> list[About]:
    """Return what the newest wheel of each project says whose name begins with the pattern. Raises WrongFile, MissingFile.

    A project that cannot be read is omitted, and named on stderr.
    """
    abouts = []
    for name in sorted({canonicalize_name(each.name) for each in _links(_directory(index))}):
        try:
            about = _newest(index, name) if name.startswith(pattern) else None
        except (WrongFile, MissingFile) as error:
            print(printable(f"hocket: {name} is omitted: {error}"), file=sys.stderr)
            continue
        if about is not None:
            abouts.append(about)
    return abouts


def has(index: str, name: str) -> bool:
    """Whether an index has a project of a name."""
    try:
        return bool(_links(urljoin(_directory(index), f"{canonicalize_name(name)}/")))
    except MissingFile:
        return False


def _newest(index: str, name: str) -> About | None:
    wheels = []
    for file in _links(urljoin(_directory(index), f"{name}/")):
        try:
            _, version, build, _ = parse_wheel_filename(file.name)
        except InvalidWheelFilename:  # a source distribution
            continue
        if not file.yanked:
            wheels.append((not version.is_prerelease, version, build, file))
    if not wheels:
        return None
    file = max(wheels)[-1]
    data, _, _ = _get(file.url, _WHEEL)
    if file.sha256 and hashlib.sha256(data).hexdigest() != file.sha256:
        raise WrongFile(
            f"{file.url} does not have the checksum that the index states. Do not install it; tell its author."
        )
    return of_wheel(data)


def _directory(index: str) -> str:
    return index.rstrip("/") + "/"


def _links(url: str) -> list[File]:
    data, kind, url = _get(url, _PAGE)
    if "json" not in kind:
        page = _Page(url)
        page.feed(data.decode(errors="replace"))
        return page.links
    try:
        content = json.loads(data)
        if "files" in content:
            return [
                File(each["filename"], urljoin(url, each["url"]), each.get("hashes", {}).get("sha256", ""),
                     bool(each.get("yanked")))
                for each in content["files"]
            ]  # fmt: skip
        return [File(each["name"], "") for each in content["projects"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongFile(f"{url} is not a page of a simple index: {type(error).__name__} {error}.") from error


class _Page(HTMLParser):
    """Collects the links of a page."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.links = url, list[File]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and (target := given.get("href")):
            url, fragment = urldefrag(urljoin(self.url, target))
            name = urlsplit(url).path.rstrip("/").rpartition("/")[2]
            digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
            self.links.append(File(name, url, digest, "data-yanked" in given))


def _reason(error: object) -> str:
    """Return in words why a server did not answer."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing answers there (connection refused)"
    if isinstance(error, socket.gaierror):
        return "there is no host of this name"
    if isinstance(error, TimeoutError):
        return f"no answer in {_TIMEOUT:.0f} seconds"
    return str(error).strip(".") or type(error).__name__


def _get(url: str, limit: int) -> tuple[bytes, str, str]:
    """Return the content of a URL, its media type, and the URL that it was redirected to."""
    if "@" in urlsplit(url).netloc or urlsplit(url).scheme not in ("http", "https"):
        raise WrongFile(
            f"{printable(url.rpartition('@')[2])} is not read: it has a password, or is not of http or https."
        )
    request = urllib.request.Request(url, headers={"Accept": _ACCEPT, "User-Agent": "hocket"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            data = answer.read(limit + 1)
            kind, url = answer.headers.get_content_type(), answer.url
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise MissingFile(f"{url} does not exist. Write the address of a simple index, {_EXAMPLE}.") from error
        raise WrongFile(
            f"{url} cannot be read: the server answers {error.code} {error.reason}. Try again later."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        why = _reason(error.reason if isinstance(error, urllib.error.URLError) else error)
        raise WrongFile(
            f"{url} cannot be read: {why}. Check that the index runs, and its address, {_EXAMPLE}."
        ) from error
    if len(data) > limit:
        raise WrongFile(f"{url} has more than {limit:,} bytes, which is the limit.")
    return data, kind, url
