"""Copies of checkpoints and files behind a URL."""

from __future__ import annotations

import difflib
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import Checkpoints, Logger, State
from hocket.basics.run_folder import is_url
from hocket.errors import CheckpointError, MissingPackage, WrongValue
from hocket.help import installing
from hocket_loggers.vendor_records import relative, require

if TYPE_CHECKING:
    from hocket_checkpoints.storage.manifest import File
    from hocket_checkpoints.storage.remote import Remote

#: Seconds between two looks at the run's checkpoints.
_INTERVAL = 10.0


class ArtifactsLogger(Logger):
    """Copy the run's checkpoints and logged files to any URL that fsspec reaches, while training goes on.

    Checkpoints are copied from the local folder of ``checkpoints=`` to ``url/run-name/checkpoints``, in the form in which
    hocket reads them: ``hocket.Trainer(resume="s3://bucket/run/checkpoints/latest")``. A checkpoint is looked for at logging
    intervals, at most every 10 seconds, and at the end. Those that are removed locally meanwhile are skipped; nothing is
    removed behind the URL. Files that plug-ins log go to ``url/run-name/artifacts``; a second file of a name replaces the
    first. Every upload is verified and repeated up to four times. Metrics, images, tables and texts are not written.

    Checkpoints that are written to a URL anyway, with ``checkpoints="s3://…"``, need no copies.

    Args:
        url: where to, such as ``"s3://bucket/experiments"``. The logger ``artifacts`` needs the extra ``remote``,
            and for addresses other than S3 fsspec's package for these.
        checkpoints: whether to copy checkpoints.
        deadline: seconds that the end of a fit waits for uploads.
        options: for the file system, as in ``fsspec.filesystem``.

    Raises:
        ModuleNotFoundError: the package fsspec is not installed, or the one that it needs for the URL.
        ValueError: the address is not a URL, or fsspec does not know its protocol.

    Example:
        >>> import hocket, hocket_loggers, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu", duration="1ep",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 10, checkpoints="runs/a",
        ...     loggers=[hocket_loggers.ArtifactsLogger("memory://experiments")],
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self, url: str, checkpoints: bool = True, deadline: float = 60.0, options: Mapping[str, Any] | None = None
    ) -> None:
        require("artifacts", "fsspec", "remote")
        if not is_url(url):
            raise WrongValue(
                f"The logger 'artifacts' copies to a URL, and {url!r} is none. Write 's3://bucket/folder', or "
                f"'{Path(url).absolute().as_uri()}' for a folder."
            )
        for part in url.split("::"):
            _check_protocol(url, part.partition("://")[0])
        self._url, self._checkpoints, self._options = url.rstrip("/"), checkpoints, dict(options or {})
        self.deadline = deadline
        self._places: dict[str, Remote] = {}
        #: The checksums of the manifests of copied checkpoints, by name; None until they were looked up.
        self._there: dict[str, str] | None = None
        self._looked = 0.0

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Copy a file, or all files of a folder, to ``artifacts/name``."""
        local, files = (path.parent, [path]) if path.is_file() else (path, sorted(path.rglob("*")))
        stated = {file.relative_to(local).as_posix(): _stated(file) for file in files if file.is_file()}
        self._place(state, "artifacts").put(relative(name), local, stated)

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Copy new checkpoints, unless this was done less than 10 seconds ago."""
        if time.monotonic() - self._looked >= _INTERVAL:
            self._copy(state)

    def flush(self, state: State) -> None:
        """Copy new checkpoints."""
        self._copy(state)

    def close(self, state: State) -> None:
        """Copy new checkpoints."""
        self._copy(state)

    def _copy(self, state: State) -> None:
        """Copy the run's checkpoints that are not behind the URL."""
        self._looked = time.monotonic()
        for attachment in state.bus.attachments if self._checkpoints else ():
            store = attachment.obj.store if isinstance(attachment.obj, Checkpoints) else None
            if store is None or is_url(store.folder):
                continue
            for name, about in store.abouts().items():
                if about.get("run", {}).get("id") == state.run.id:
                    self._copy_checkpoint(state, Path(store.folder) / name)

    def _copy_checkpoint(self, state: State, folder: Path) -> None:
        from hocket_checkpoints.storage import manifest as manifests

        place = self._place(state, "checkpoints")
        if self._there is None:
            there = place.manifests()
            self._there = {name: each.sha256 for name, each in there.items() if not isinstance(each, str)}
        try:
            sha256 = manifests.load(folder).sha256
            if self._there.get(folder.name) != sha256:
                place.copy(folder)
                place.point(folder.name)
                self._there[folder.name] = sha256
        except CheckpointError:
            if (folder / manifests.NAME).exists():
                raise  # else it was removed meanwhile, because there are newer ones

    def _place(self, state: State, what: str) -> Remote:
        from hocket_checkpoints.storage.remote import Remote

        if what not in self._places:
            self._places[what] = Remote(f"{self._url}/{state.run_name}/{what}", **self._options)
        return self._places[what]


def _check_protocol(url: str, protocol: str) -> None:
    import fsspec

    if protocol not in (known := fsspec.available_protocols()):
        near = difflib.get_close_matches(protocol, known, 1)
        raise WrongValue(
            f"The logger 'artifacts' was given {url!r}, but fsspec knows no protocol {protocol!r}. Write "
            f"'{near[0] if near else 's3'}://…', or one of {', '.join(sorted(known))}."
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        write = (
            f"Type: {installing.command('remote')}"
            if protocol == "s3"
            else f"Install fsspec's package for {protocol}:// with pip"
        )
        raise MissingPackage(f"The logger 'artifacts' cannot reach {url!r}: {error}. {write}.") from error


def _stated(file: Path) -> File:
    """Return size and checksum of a file, which the upload has to have."""
    from hocket_checkpoints.storage.manifest import File

    with file.open("rb") as opened:
        return File(file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())
