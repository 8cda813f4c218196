"""Download a hub id once, into the hub library's own cache, and return the folder of its files.

Only files that the toolkit reads are fetched: safetensors, JSON and tokenizer files, no pickles,
and code only on request. The reader of the shards checks against their index that all are present.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import BackendUnavailable, CheckpointError

__all__ = ["PATTERNS", "fetch"]

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def fetch(
    hub_id: str,
    revision: str | None = None,
    *,
    download: bool = True,
    bars: bool = False,
    with_code: bool = False,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the folder of the snapshot.

    download: False looks into the cache only. bars: draw the hub library's progress on stderr.
    with_code: also fetch the checkpoint's Python modules. cache, endpoint: replace the hub
    library's own.

    Raises CheckpointError if the checkpoint is unknown, if access is not granted, or if it is not
    in the cache and cannot be downloaded; BackendUnavailable without huggingface_hub.
    """
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise BackendUnavailable(
            "huggingface_hub", hint="pip install huggingface_hub, or name a folder"
        ) from error
    if not bars:
        disable_progress_bars()
    where = hub_id if revision is None else f"{hub_id} at {revision}"
    by_hand = f"or download it yourself (hf download {hub_id}) and name the folder"
    patterns = [*PATTERNS, "*.py"] if with_code else [*PATTERNS]
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            local_files_only=not download,
            cache_dir=cache,
            endpoint=endpoint,
            token=None,
        )
    except errors.GatedRepoError as error:
        hint = f"accept its licence on huggingface.co and log in (hf auth login), {by_hand}"
        raise CheckpointError("access has not been granted", where=where, hint=hint) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            "has no such revision", where=where, hint="name a branch, tag or commit of it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        hint = f"check the spelling; if it is private, log in (hf auth login), {by_hand}"
        raise CheckpointError(
            "is not on the hub, or you have no access to it", where=where, hint=hint
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            "is not a hub id", where=where, hint="write OWNER/NAME, or a folder that exists"
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        # It is not in the cache and the hub cannot be reached, or the disk is full.
        text = str(error).strip()
        reason = text.splitlines()[0][:200] if text else type(error).__name__
        message = f"could not be fetched ({reason})" if download else "is not on this machine"
        raise CheckpointError(
            message, where=where, hint=f"check the network and the disk, {by_hand}"
        ) from error
    return Path(str(folder))
