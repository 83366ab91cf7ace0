"""The JavaScript of Vega and Vega-Lite, to embed in a page."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hocket.errors import MissingPackage, WrongValue

#: The last line of a complete file.
_END = "\n// complete\n"


def bundle() -> str:
    """Return the libraries as one script. Making it takes seconds, so that it is kept in the user's cache folder.

    Raises:
        ImportError: vl-convert is missing; the message says how to install it.
    """
    try:
        version = metadata.version("vl-convert-python")
    except metadata.PackageNotFoundError:
        raise MissingPackage(
            "Reports are drawn by Vega-Lite, which comes with vl-convert-python. Type: pip install vl-convert-python."
        ) from None
    kept = _cache() / f"vega-{version}.js"
    with suppress(OSError, UnicodeDecodeError):
        if (script := kept.read_text(encoding="utf-8")).endswith(_END):
            return script
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if "</script" in script.lower() or "<!--" in script:
        raise WrongValue(
            f"The script of vl-convert-python {version} cannot be embedded in a page; use another version."
        )
    script += _END
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=kept.parent, delete=False) as file:
            file.write(script)
        Path(file.name).replace(kept)
    return script


def _cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "hocket"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/hocket"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket"
