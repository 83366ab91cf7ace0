"""What belongs to hocket: the distributions that are parts of it, and its import packages."""

from __future__ import annotations

#: The distributions of what every run may use, and their import packages: the names of their plug-ins take precedence, and
#: nothing switches them off.
PARTS = {
    "hocket": "hocket",
    "hocket-checkpoints": "hocket_checkpoints",
    "hocket-cli": "hocket_cli",
    "hocket-data": "hocket_data",
    "hocket-insight": "hocket_insight",
    "hocket-loggers": "hocket_loggers",
    "hocket-testkit": "hocket_testkit",
}
#: The import packages of all of hocket's distributions, and which distribution each is in.
PACKAGES = {
    **{package: name for name, package in PARTS.items()},
    "hocket_general": "hocket-algorithms-general",
    "hocket_migration": "hocket-migration",
    "hocket_nlp": "hocket-algorithms-nlp",
    "hocket_report": "hocket-report",
    "hocket_streaming": "hocket-streaming",
    "hocket_strategies": "hocket-strategies",
    "hocket_tools": "hocket-tools",
    "hocket_vision": "hocket-algorithms-vision",
}


def is_ours(module: object) -> bool:
    """Whether a module, by its name, is of one of hocket's own packages.

    Example:
        >>> from hocket.help.ours import is_ours
        >>> is_ours("hocket.run.trainer"), is_ours("hocket_project.model")
        (True, False)
    """
    return str(module).partition(".")[0] in PACKAGES
