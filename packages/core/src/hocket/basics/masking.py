"""Secrets in configurations: replace them wherever a configuration is written or shown.

A secret is a text whose name says so, such as ``api_key`` or the ``url`` of a webhook, or the part of a URL that lets
somebody in. Names of data and of special tokens (``pad_token``, ``image_key``, ``key_padding``) are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: What stands in place of a secret.
MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


#: Words that make a name that of a secret, wherever they stand in it …
_ALWAYS = frozenset(
    _words(
        "password passwords passwd pwd passphrase secret secrets credential credentials apikey apikeys authtoken accesstoken "
        "authorization bearer dsn"
    )
)
#: … or as its last word …
_LAST = frozenset(_words("cookie cookies jwt otp totp"))
#: … unless it ends with one of these.
_ABOUT = frozenset(
    _words("file path folder dir directory env variable length len size policy column columns field type name")
)
#: Words before ``key``, or beside ``token``, that make it a secret …
_KEYS = frozenset(
    _words(
        "api access secret private auth signing signature encryption account license licence client session ssh deploy "
        "subscription admin storage service app master hmac aws azure gcp openai anthropic wandb comet neptune hf huggingface "
        "github gitlab slack stripe sentry datadog"
    )
)
_TOKENS = _KEYS | {*_words("bearer refresh bot login oauth jwt sas hub pypi npm telegram discord")}
#: … and words that make ``key`` the name of something in data or a model.
_DATA = frozenset(
    _words(
        "image images label labels target targets input inputs output outputs sort group batch primary foreign public "
        "monitor metric loss dict text audio video data column feature sample index cache prompt response question answer "
        "caption mask id weight state checkpoint param layer head query value padding num n dim x y join partition cross"
    )
)
_LOGIN_PASSES = frozenset(_words("db user smtp mail email ftp http proxy basic login redis mongo postgres mysql admin"))
#: Words around the ``url`` of a webhook, which lets anybody post who knows it.
_HOOKS = frozenset(_words("webhook webhooks slack discord mattermost teams"))
#: Further names in the query of a URL.
_QUERIES = frozenset(_words("key sig signature auth code"))

_SPECIFICATION = re.compile(r"\s*([\w./-]+)\s*\(.*", re.DOTALL)
_HEADER = re.compile(r"([A-Za-z_][\w-]*): (.+)", re.DOTALL)
#: A name before its value: ``name=``, ``'name': ``, ``{name: ``, ``--name=`` or ``--name `` …
_NAME = re.compile(
    r"""(?:([{,]\s?)|(?<![\w-]))(--)?(["'])?([A-Za-z_][\w-]*)(?(3)(?:\3\s*[:=]|:\s)|(?(2)[=\s]|\s*(?(1)[:=]|=)))\s*"""
)
#: … and the value: quoted, or up to the next name.
_VALUE = re.compile(
    r"""(["'])(?:\\.|(?!\1)[^\\])*\1|.{1,500}?(?=[;)\]}"']*$|,?[\s,;&](?:--|["']?[A-Za-z_][\w-]*["']?\s*[=:]))|.+""",
    re.DOTALL,
)
_USER = re.compile(r"(?<![\w+.-])(\w[\w+.-]*)://([^/\s@?#:]*)(:[^/\s?#]*@|:(?!\d+(?:[/?#\s]|$))\S*?@|[^/\s?#:]*@)")
_ADDRESS = re.compile(r"""https?://[^\s"',)]*""")
_MASKED = re.compile(
    r"""^\*{3}$|[:/]\*{3}@|(?:=\s*|[{,]\s?[\w-]+: |--[\w-]+ )\*{3}(?![\w*])|(["'])\*{3}\1|(?:^|["'])[\w-]+: \*{3}(?:$|["'])"""
)
#: A credential of one of a few known kinds of credentials.
_KNOWN = re.compile(r"(hf|gh[a-z]|github_pat|glpat|pypi|npm|sk|xox[a-z])[_-]\w[\w-]{7,}|AKIA\w+|eyJ[\w-]+\..*")


def masked(value: Any, *names: str) -> Any:
    """Return a value with `MASK` in place of each secret in it, at any depth; the same object if it has none.

    ``names``: the name of the value, after those of the values that it is in.
    """
    if isinstance(value, str):
        text = _masked_text(value, names)
        return value if text == value else text
    if isinstance(value, Mapping):
        inside = {key: masked(item, *names, str(key)) for key, item in value.items()}
        return value if all(inside[key] is item for key, item in value.items()) else inside
    if type(value) in (list, tuple):
        flags = ["", *(item.strip() if isinstance(item, str) else "" for item in value)]  # as in ["--password", "abc"]
        items = [
            masked(item, *names, flag[2:]) if flag and re.fullmatch(r"--[a-zA-Z][\w-]*", flag) else masked(item, *names)
            for flag, item in zip(flags, value, strict=False)
        ]
        return value if all(shown is other for shown, other in zip(items, value, strict=True)) else type(value)(items)
    return value


def is_masked(value: object) -> bool:
    """Whether a value is a text in which `masked` has replaced a secret."""
    return isinstance(value, str) and bool(_MASKED.search(value))


def _masked_text(text: str, names: tuple[str, ...]) -> str:
    if text and names and _is_secret(text, names):
        return MASK
    if len(names) < 50 and (specified := _SPECIFICATION.fullmatch(text)):
        from hocket.basics.plugin_errors import PluginConfigError
        from hocket.basics.specification import parse_spec

        try:
            name, config = parse_spec(text, hides=False)
        except PluginConfigError:
            names = (*names, specified[1])
        else:
            hidden = masked(config, *names, name)
            return text if hidden is config else f"{name}({', '.join(f'{key}={hidden[key]!r}' for key in hidden)})"
    if (header := _HEADER.fullmatch(text)) and _is_secret(header[2], (header[1],)):
        return f"{header[1]}: {MASK}"
    text = _assigned(text, names)
    return _masked_urls(text, names) if "://" in text else text


def _assigned(text: str, names: tuple[str, ...]) -> str:
    """Return a text with `MASK` in place of the values of secrets that it names, such as ``--password=abc``."""
    parts, end, is_url = [], 0, "://" in text
    for match in _NAME.finditer(text):
        value = _VALUE.match(text, match.end()) if match.start() >= end else None
        if value is None or (given := value[0].strip("\"'")) in ("", "…"):
            continue
        in_query = is_url and text[max(match.start() - 1, 0)] in "?&;#" and not _QUERIES.isdisjoint(_words(match[4]))
        if in_query or _is_secret(given, (*names, match[4])):
            quote = value[1] or ""
            parts.append(f"{text[end : match.end()]}{quote}{MASK}{quote}")
            end = value.end()
    return "".join(parts) + text[end:]


def _masked_urls(text: str, names: tuple[str, ...]) -> str:
    def user(match: re.Match[str]) -> str:
        if ":" in match[3]:
            return f"{match[1]}://{match[2]}:{MASK}@"
        return f"{match[1]}://{MASK}@" if match[1] in ("http", "https") else match[0]

    def address(match: re.Match[str]) -> str:
        return MASK if is_hook or re.match(r"\w+://(hooks\.|[^?#]*webhook)", match[0]) else match[0]

    is_hook = any(_SPECIFICATION.match(text) and _HOOKS.intersection(_words(name)) for name in names[-1:])
    return _USER.sub(user, _ADDRESS.sub(address, text))


def _is_secret(text: str, names: tuple[str, ...]) -> bool:
    words = _words(names[-1])
    bag = set(words)
    if not words or words[-1] in _ABOUT:
        return False
    around = [_words(name) for name in names if ":" not in name]  # without import paths
    if words[-1] in _LAST or any(_has_secret(others) for others in around):
        return True
    if words[-1] in ("pass", "pw") and bag & _LOGIN_PASSES:
        return True
    if words[-1] == "auth" and re.fullmatch(r"[^\s:/]+:\S+", text):  # a user and a password
        return True
    is_address = words[-1] in ("url", "uri", "endpoint") or (bag & _HOOKS and text.startswith(("http://", "https://")))
    if is_address and any(_HOOKS.intersection(_words(name)) for name in names):
        return True
    if {"token", "tokens"} & bag:
        is_special = text[0] in "<[/~." and (text[0] in "/~." or text[-1] in ">]")  # or a path
        is_one = bag == {"token"} or bag == {"token", "value"}
        return (not is_special and (is_one or bool(bag & _TOKENS))) or _is_credential(text, 20)
    if {"key", "keys", "pat"} & bag:
        before = set(words[: next(i for i, word in enumerate(words) if word in ("key", "keys", "pat"))])
        if before & _KEYS:
            return True
        return not bag & _DATA and _is_credential(text, 8 if before and words[-1] == "key" else 16)
    return False


def _has_secret(words: list[str]) -> bool:
    if not words or words[-1] in _ABOUT:
        return False
    return any(word in _ALWAYS or word.endswith(("password", "secret", "apikey")) for word in words)


def _is_credential(text: str, length: int) -> bool:
    """Whether a text is of a known form, or looks drawn by chance: long, of letters and digits."""
    drawn = len(text) >= length and re.fullmatch(r"[\w+/=-]+", text) and not {*"0123456789"}.isdisjoint(text)
    return bool(drawn or _KNOWN.fullmatch(text))
