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
    return [each.lower() for each in _WORD.findall(name)]


#: Words that make a name that of a secret, wherever they stand in it …
_ALWAYS = frozenset(
    _words(
        "password passwords passwd pwd passphrase secret secrets credential credentials apikey apikeys authtoken accesstoken "
        "authorization bearer cookie dsn"
    )
)
#: … unless it ends with one of these.
_ABOUT = frozenset(_words("file path folder dir directory env variable length len size policy"))
#: Words before ``key`` that make it a secret …
_KEYS = frozenset(
    _words(
        "api access secret private auth signing signature encryption account license licence client session ssh deploy "
        "subscription admin storage service app master hmac aws azure gcp openai anthropic wandb comet neptune hf huggingface "
        "github gitlab slack stripe sentry datadog"
    )
)
#: … and words that make it the name of something in data or a model.
_DATA = frozenset(
    _words(
        "image images label labels target targets input inputs output outputs sort group batch primary foreign public "
        "monitor metric loss dict text audio video data column feature sample index cache prompt response question answer "
        "caption mask id weight state checkpoint param layer head query value padding num n dim x y join partition cross"
    )
)
#: Words beside ``token`` of tokenizers, models and counts.
_TOKENS = frozenset(
    _words(
        "pad bos eos unk unknown sep cls mask special additional start end stop begin blank image audio video prompt prefix "
        "suffix decoder encoder forced type types id ids length len count size level classification drop dropout index "
        "position pos kind class per max min num n dim pooling mixing split separator column field name file path key "
        "embedding embed merge merging prune pruning word sub next first last new padding masked time mode strategy style text "
        "placeholder initializer trigger instance modifier concept sentinel register memory global language lang task control"
    )
)
#: Words that make tokens in the plural, or any, those of a login.
_LOGINS = frozenset(_words("access auth api bearer refresh secret bot login oauth jwt"))
_LOGIN_PASSES = frozenset(_words("db user smtp mail email ftp http proxy basic login redis mongo postgres mysql admin"))
#: Words around the ``url`` of a webhook, which lets anybody post who knows it.
_HOOKS = frozenset(_words("webhook webhooks slack discord mattermost teams"))
#: Further names in the query of a URL.
_QUERIES = frozenset(_words("key sig signature auth code"))

_SPECIFICATION = re.compile(r"([\w./-]+)\((.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"(\w+)(\s*=\s*)(\"[^\"]*\"|'[^']*'|[^,()]+)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w-]*)(=|: )(.+)", re.DOTALL)
_USER = re.compile(r"(\w[\w+.-]*)://([^/\s@?#:]*)(:[^/\s@?#]*)?@")
_MASKED = re.compile(r"^\*{3}$|[:/]\*{3}@|[?&;#][\w.-]+=\*{3}|=\s*'\*{3}'|^[\w-]+(=|: )\*{3}$")
_QUERY = re.compile(r"(?<=[?&;#])([\w.-]+)=([^&;#\s]+)")


def masked(value: Any, *names: str) -> Any:
    """Return a value with `MASK` in place of each secret in it, at any depth; the same object if it has none.

    ``names``: the name of the value, after those of the values that it is in.
    """
    if isinstance(value, str):
        text = _masked_text(value, names)
        return value if text == value else text
    if isinstance(value, Mapping):
        inside = {key: masked(each, *names, str(key)) for key, each in value.items()}
        return value if all(inside[key] is each for key, each in value.items()) else inside
    if type(value) in (list, tuple):
        items = [masked(each, *names) for each in value]
        return value if all(one is other for one, other in zip(items, value, strict=True)) else type(value)(items)
    return value


def is_masked(value: Any) -> bool:
    """Whether a value is a text in which `masked` has replaced a secret."""
    return isinstance(value, str) and bool(_MASKED.search(value))


def _masked_text(text: str, names: tuple[str, ...]) -> str:
    if text and names and _is_secret(text, names):
        return MASK
    if found := _SPECIFICATION.fullmatch(text):

        def argument(each: re.Match[str]) -> str:
            given = each[3].strip().strip("\"'")
            hidden = _masked_text(given, (*names, found[1], each[1]))
            return each[0] if hidden == given else f"{each[1]}{each[2]}{hidden!r}"

        return _ARGUMENT.sub(argument, text)
    if (pair := _ASSIGNMENT.fullmatch(text)) and _is_secret(pair[3], (pair[1],)):  # of an environment or a header
        return f"{pair[1]}{pair[2]}{MASK}"
    return _masked_url(text) if "://" in text else text


def _masked_url(text: str) -> str:
    if re.match(r"https?://(hooks\.|[^?#]*webhook)", text):
        return MASK

    def user(found: re.Match[str]) -> str:
        if found[3] is not None:
            return f"{found[1]}://{found[2]}:{MASK}@"
        return f"{found[1]}://{MASK}@" if found[1] in ("http", "https") else found[0]

    def query(found: re.Match[str]) -> str:
        secret = set(_words(found[1])) & _QUERIES or _is_secret(found[2], (found[1],))
        return f"{found[1]}={MASK}" if secret else found[0]

    return _QUERY.sub(query, _USER.sub(user, text))


def _is_secret(text: str, names: tuple[str, ...]) -> bool:
    words = _words(names[-1])
    said = set(words)
    if not words or words[-1] in _ABOUT:
        return False
    around = [_words(name) for name in names if ":" not in name]  # without import paths
    if any(_ALWAYS.intersection(each) and each[-1] not in _ABOUT for each in around):
        return True
    if words[-1] == "pass" and said & _LOGIN_PASSES:
        return True
    is_address = words[-1] in ("url", "uri", "endpoint") or (said & _HOOKS and text.startswith(("http://", "https://")))
    if is_address and any(_HOOKS.intersection(_words(name)) for name in names):
        return True
    if {"token", "tokens"} & said:
        if said & _LOGINS:
            return True
        is_special = text[0] in "<[/~." and (text[0] in "/~." or text[-1] in ">]")  # or a path
        is_one = words[-1] in ("token", "value") and not said & _TOKENS
        return (is_one and not is_special) or _is_random(text, 20)
    if {"key", "keys"} & said:
        before = set(words[: next(i for i, word in enumerate(words) if word in ("key", "keys"))])
        if before & _KEYS:
            return True
        return not said & _DATA and _is_random(text, 8 if before and words[-1] == "key" else 16)
    return False


def _is_random(text: str, length: int) -> bool:
    """Whether a text looks drawn by chance: long, of letters and digits."""
    return len(text) >= length and re.fullmatch(r"[\w+/=-]+", text) is not None and not {*"0123456789"}.isdisjoint(text)
