"""Models in the cache of Hugging Face on this machine, by the names that they have on the hub: ``hub:org/name``."""

from __future__ import annotations

from pathlib import Path

from hocket.errors import CheckpointError, MissingPackage
from hocket.help import installing
from hocket.help.names import closest

PREFIX = "hub:"
#: The files of weights to download: safetensors if there are any.
_FILES = (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"])


def cached(place: str, network: bool = False) -> Path:
    """Return the folder or the file of ``hub:org/name``, ``hub:org/name@revision`` or ``hub:org/name/file`` in the cache.

    Args:
        network: whether to download what is missing; otherwise nothing is sent.

    Raises:
        CheckpointError: it is not in the cache, or was not downloaded.
        ImportError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"'{place}' needs huggingface_hub, which is not installed. Type: {installing.library('huggingface_hub')}"
        ) from error
    name, file, revision = _parts(place)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError:
        raise CheckpointError(
            f"'{place}' names no model of the hub: write 'hub:org/name', 'hub:org/name@revision' or 'hub:org/name/file'."
        ) from None
    except LocalEntryNotFoundError:
        if not network:
            raise CheckpointError(_not_cached(place, name, revision)) from None
        try:
            folder = _download(name, file, revision)
        except (HfHubHTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, OSError) as error:
            raise CheckpointError(f"'{place}' was not downloaded: {error}") from error
    if file and not (folder / file).exists():
        there = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())
        raise CheckpointError(
            f"The cache has {name} without {file}; it has {', '.join(there) or 'no files'}. To download it, type: hf download "
            f"{name} {file}"
        )
    return folder / file if file else folder


def _parts(place: str) -> tuple[str, str, str | None]:
    """Return the name of the repository, the file in it or an empty text, and the revision or None."""
    parts = place.removeprefix(PREFIX).split("/")
    name, file = "/".join(parts[:2]), "/".join(parts[2:])
    name, _, revision = name.partition("@")
    return name, file, revision or None


def _download(name: str, file: str, revision: str | None) -> Path:
    import huggingface_hub

    folder = Path()
    for patterns in [[file]] if file else _FILES:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
        if any(folder.rglob(patterns[0])):
            break
    return folder


def _not_cached(place: str, name: str, revision: str | None) -> str:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = {each.repo_id: each for each in huggingface_hub.scan_cache_dir().repos if each.repo_type == "model"}
    except CacheNotFound:
        repos = {}
    at = f" --revision {revision}" if revision else ""
    advice = f"To download it, type: hf download {name}{at}; or call hocket.checkpoints.read_weights({place!r}, network=True)."
    if name in repos:
        refs = sorted(
            {ref for each in repos[name].revisions for ref in each.refs}
            | {each.commit_hash for each in repos[name].revisions}
        )
        return (
            f"The cache in {HF_HUB_CACHE} has {name}, but not {revision or 'main'}; it has {', '.join(refs) or 'no revision'}: "
            f"write for instance '{PREFIX}{name}@{refs[0] if refs else 'main'}'. {advice}"
        )
    near = closest(name, repos)
    listed = ", ".join(sorted(repos)[:12]) + (f" and {len(repos) - 12} more" if len(repos) > 12 else "")
    return (
        f"{name} is not in the cache in {HF_HUB_CACHE}, which has {listed or 'no models'}, and nothing is downloaded unless "
        f"asked. {f'Write {PREFIX + near!r}, or: ' if near else ''}{advice}"
    )
