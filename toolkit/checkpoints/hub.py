"""A hub id -> the folder of its files on this machine, downloaded once into the hub's own cache.

Only what the toolkit reads is fetched: safetensors, JSON and tokenizer files; no pickles and no
code. Whether all shards are there is checked where they are read, against their index.
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
    """The snapshot's folder. download: False looks into the cache alone. bars: draw the hub
    library's progress on stderr.

    with_code: the checkpoint's Python modules too. cache, endpoint: others than the hub library's
    own.

    Raises CheckpointError where it cannot be had: unknown, not granted, or not here and out of
    reach.
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
    by_hand = f"or get it yourself (hf download {hub_id}) and name the folder"
    try:
        found = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=[*PATTERNS, *(("*.py",) if with_code else ())],
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
            "is not on the hub, or not for you", where=where, hint=hint
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            "is no hub id", where=where, hint="write OWNER/NAME, or a folder that exists"
        ) from error
    except (
        OSError,
        errors.HfHubHTTPError,
    ) as error:  # not cached and the hub is out of reach; a full disk
        reason = (
            str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        )
        here = "is not on this machine" if not download else f"could not be fetched ({reason})"
        raise CheckpointError(
            here, where=where, hint=f"check the network and the disk, {by_hand}"
        ) from error
    return Path(str(found))
