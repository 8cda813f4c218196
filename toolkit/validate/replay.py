"""One divergence as a file, and the file put to an endpoint again.

A replay holds everything that the two requests said and what came back, and the deployment that
said it, so that a fault found in a long run can be looked at alone: `toolkit validate --replay
FILE` sends both requests again and judges them as the run did.
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
    """One divergence with its texts. temperature 0: greedy; else seeded under `coupled`.
    deployment: what its YAML says, with the overrides that it was built with, and paths that are
    absolute.
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
    """What came this time. divergence None: the texts are the same now. as_before: both texts
    are those of the file.
    """

    divergence: Divergence | None
    plain_ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    as_before: bool


def replay_of(
    config: ValidationConfig, one: Divergence, plain: RequestTiming, other: RequestTiming
) -> Replay:
    temperature = 0.0 if one.seed is None else config.temperature
    return Replay(
        one,
        config.max_tokens,
        temperature,
        config.parity.near_tie_margin,
        tuple(plain.token_ids),
        tuple(other.token_ids),
    )


def write_replay(folder: Path, found: Replay) -> str:
    """The file's name in `folder`, which is made."""
    one = found.divergence
    check = "greedy" if one.seed is None else "seeded"
    name = f"{check}-{one.arm}{one.draft_len}-prompt{one.prompt_index + 1}.json"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(found), indent=2, ensure_ascii=False) + "\n"
    (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return f"{folder.name}/{name}"


def read_replay(path: Path) -> Replay:
    """Raises UsageError when it is not one."""
    try:
        return from_json(Replay, read_saved(path))
    except (OSError, ValueError) as error:
        hint = (
            "They lie in build/reports/NAME/replay/; toolkit validate CONFIG writes them, one per"
            " divergence."
        )
        raise UsageError(f"not a replay file: {error}", where=path, hint=hint) from error


def replay(
    found: Replay,
    endpoint: Endpoint | Alternating,
    reference: Reference | None,
    can: Capabilities = EMBEDDED,
) -> Replayed:
    """Send both requests again, one after the other, and judge them. Raises StageError as
    validation does.

    Without a reference they are sent once more for their log-probabilities, where they differ and
    the endpoint tells them.
    """
    one = found.divergence
    options: dict[str, Any] = {"temperature": found.temperature}
    if one.seed is not None:
        options |= {"seed": one.seed, "acceptance": "coupled"}
    hint = "It was built with other limits since then: toolkit validate CONFIG writes new files."
    sender = Sender(endpoint, found.max_tokens, hint=hint)
    plain = sender.send(one.prompt_index, one.prompt, "plain", **options)
    drafted = {"num_draft_tokens": one.draft_len} if can.draft_len_per_request else {}
    other = sender.send(one.prompt_index, one.prompt, one.arm, **options, **drafted)
    arms = [ArmTexts(one.arm, one.draft_len, [[other]])]
    ask = reference is None and can.log_probs > 0
    again = ask_again(sender, [plain], arms, draft_lens=can.draft_len_per_request) if ask else {}
    judge = Judge(
        reference,
        found.near_tie_margin,
        found.temperature,
        None if one.seed is None else [one.seed],
        again,
    )
    parity = compare([plain], arms, judge)
    as_before = (plain.token_ids, other.token_ids) == (found.plain_ids, found.other_ids)
    divergence = parity.divergences[0] if parity.divergences else None
    return Replayed(divergence, plain.token_ids, other.token_ids, as_before)
