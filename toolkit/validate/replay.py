"""Store one divergence in a file, and send the requests of such a file again.

A replay holds the two requests, their answers and the deployment that gave them. So a fault from a
long run can be examined alone: `toolkit validate --replay FILE` sends both requests again and
judges them as the run did.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ValidationConfig
from toolkit.errors import UsageError
from toolkit.facts.capabilities import EMBEDDED, Capabilities
from toolkit.pipeline.saved import read_saved
from toolkit.records.codec import from_json, to_json
from toolkit.records.judged import Divergence
from toolkit.validate.arms import Alternating, Endpoint, Sender
from toolkit.validate.parity import ArmTexts, Judge, compare
from toolkit.validate.reference import Reference
from toolkit.validate.requery import ask_again

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["Replay", "Replayed", "read_replay", "replay", "replay_of", "write_replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """One divergence with its texts. temperature 0: greedy; otherwise seeded under `coupled`.
    deployment: its YAML with the overrides of the build, and with absolute paths.
    """

    divergence: Divergence
    max_tokens: int
    temperature: float
    near_tie_margin: float
    plain_ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    deployment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay. divergence None: the two texts are the same now. as_before: both
    texts are those of the file.
    """

    divergence: Divergence | None
    plain_ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    as_before: bool


def replay_of(
    config: ValidationConfig, divergence: Divergence, plain: RequestTiming, other: RequestTiming
) -> Replay:
    temperature = 0.0 if divergence.seed is None else config.temperature
    return Replay(
        divergence,
        config.max_tokens,
        temperature,
        config.parity.near_tie_margin,
        tuple(plain.token_ids),
        tuple(other.token_ids),
    )


def write_replay(folder: Path, stored: Replay) -> str:
    """Write a replay into `folder`, which is created. Return FOLDER/FILE without the parents."""
    divergence = stored.divergence
    check = "greedy" if divergence.seed is None else "seeded"
    name = (
        f"{check}-{divergence.arm}{divergence.draft_len}-prompt{divergence.prompt_index + 1}.json"
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(stored), indent=2, ensure_ascii=False) + "\n"
    (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return f"{folder.name}/{name}"


def read_replay(path: Path) -> Replay:
    """Read a replay. Raises UsageError if the file is not one."""
    try:
        return from_json(Replay, read_saved(path))
    except (OSError, ValueError) as error:
        hint = (
            "Replay files are in build/reports/NAME/replay/; toolkit validate CONFIG writes one per"
            " divergence."
        )
        raise UsageError(f"not a replay file: {error}", where=path, hint=hint) from error


def replay(
    stored: Replay,
    endpoint: Endpoint | Alternating,
    reference: Reference | None,
    can: Capabilities = EMBEDDED,
) -> Replayed:
    """Send both requests again, one after the other, and judge them. Raises StageError as
    validation does.

    If there is no reference and the texts differ, both are sent once more for their
    log-probabilities, provided that the endpoint returns them.
    """
    original = stored.divergence
    options: dict[str, Any] = {"temperature": stored.temperature}
    if original.seed is not None:
        options |= {"seed": original.seed, "acceptance": "coupled"}
    hint = "It has been built with other limits since: toolkit validate CONFIG writes new files."
    sender = Sender(endpoint, stored.max_tokens, hint=hint)
    plain = sender.send(original.prompt_index, original.prompt, "plain", **options)
    drafted = {"num_draft_tokens": original.draft_len} if can.draft_len_per_request else {}
    other = sender.send(original.prompt_index, original.prompt, original.arm, **options, **drafted)
    arms = [ArmTexts(original.arm, original.draft_len, [[other]])]
    ask = reference is None and can.log_probs > 0
    again = ask_again(sender, [plain], arms, draft_lens=can.draft_len_per_request) if ask else {}
    judge = Judge(
        reference,
        stored.near_tie_margin,
        stored.temperature,
        None if original.seed is None else [original.seed],
        again,
    )
    parity = compare([plain], arms, judge)
    as_before = (plain.token_ids, other.token_ids) == (stored.plain_ids, stored.other_ids)
    divergence = parity.divergences[0] if parity.divergences else None
    return Replayed(divergence, plain.token_ids, other.token_ids, as_before)
