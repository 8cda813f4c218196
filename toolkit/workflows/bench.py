"""What `toolkit bench CONFIG` can measure of a deployment: which arms, and how plain decoding is
served for the comparison. All of it is decided before a server starts.

A run compares arms that are measured in turns, block by block. So plain decoding is measured
where the same server or one beside it serves it, and not where it takes a restart.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.checkpoints.hub import fetch
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import BackendUnavailable, CheckpointError, UsageError
from toolkit.workflows.serve import PlainServed, plain_served

__all__ = ["chat_folder", "check_measurable", "plain_for_bench", "unmeasured_plain"]


def chat_folder(config: DeploymentConfig) -> Path:
    """The target's folder, whose chat template writes messages: the YAML's, or the hub's cache. The
    path as it is written if the cache does not have it.
    """
    target = config.target
    if target.hub_id is None:
        return target.checkpoint
    try:
        return fetch(target.hub_id, target.revision, download=False)
    except (BackendUnavailable, CheckpointError):
        return target.checkpoint


def check_measurable(config: DeploymentConfig, *, against_plain: bool | None) -> None:
    """Raises UsageError for a deployment that cannot be measured, or not as asked. against_plain
    None: plain decoding is measured where it can be.
    """
    if config.capabilities.server == "tritonserver" and not config.triton.decoupled:
        raise UsageError(
            "bench times the chunks of streams, and triton.decoupled: false answers each request"
            " once",
            hint=(
                "Set triton.decoupled: true, or time whole answers with validate_latency.py of the"
                " repository."
            ),
        )
    if not against_plain:
        return
    if not config.speculation.is_enabled:
        raise UsageError(
            "--against-plain compares with speculation, and this deployment does not speculate",
            hint="Leave --against-plain out.",
        )
    if config.capabilities.plain_arm == "restart":
        raise UsageError(
            f"--against-plain: engine.kind {config.engine.kind} decodes plainly only after a"
            " restart",
            hint=(
                "Leave --against-plain out; toolkit validate measures both arms, restarted in"
                " turns. Or serve the target alone on a second machine and name it with --baseline."
            ),
        )


def plain_for_bench(
    config: DeploymentConfig, repository: Path, *, speculates: bool, against_plain: bool | None
) -> PlainServed | None:
    """How plain decoding is served: `by request` or `beside`; None if only the deployment as it is
    is measured. speculates: of the packaged repository, where `max_draft_len: auto` is resolved.

    Raises UsageError if it was asked for and there is no memory for a second server.
    """
    if against_plain is False or not speculates or config.capabilities.plain_arm == "restart":
        return None
    plain = plain_served(config, repository)
    if plain != "in turns":
        return plain
    if against_plain:
        raise UsageError(
            f"--against-plain: there is no memory for a second server of engine.kind"
            f" {config.engine.kind} beside the first",
            hint="Leave it out; toolkit validate measures both arms, restarted in turns.",
        )
    return None


def unmeasured_plain(config: DeploymentConfig) -> str:
    """Why the run has one arm, and what measures the other."""
    how = "takes a restart"
    if config.capabilities.plain_arm == "server":
        how = "takes a second server, and there is no memory for one"
    return f"plain decoding {how}, so speculation is measured alone; toolkit validate measures both"
