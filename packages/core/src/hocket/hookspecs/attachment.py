"""A plug-in of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Attachment:
    """A plug-in attached to one Trainer: the object, and its name in that Trainer."""

    kind: str
    name: str
    obj: Any
    #: The distribution that provides it and its version, if known.
    dist: str | None = None
    version: str | None = None
    #: The arguments that it was instantiated with, without secrets: they are written and shown.
    config: Mapping[str, Any] = field(default_factory=dict)
    #: Whether it was given as an instance, so that its arguments are unknown.
    instance: bool = False
    #: The same arguments with secrets.
    arguments: Mapping[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.arguments = self.config
        if self.config:
            from hocket.basics.masking import masked  # here, so that importing the Trainer stays cheap

            self.config = masked(self.config, self.name)
