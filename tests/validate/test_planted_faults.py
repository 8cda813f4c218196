"""One fault at a time is planted in a real runtime, and the whole stage has to name it, and nothing
else.

The engines are tables with a token cache: exact, so that in a sound run everything is identical,
and quick.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.support.runtime_endpoint import RuntimeEndpoint, reference_of
from tests.support.runtimes import CODEC, make_runtime
from tests.support.step_engines import LOOK_BACK, ForgetfulRewind, TableEngine
from toolkit.client import RequestTiming
from toolkit.config.schema import DistributionGates, LatencyGates, ValidationConfig
from toolkit.errors import UsageError
from toolkit.facts.capabilities import EMBEDDED
from toolkit.interfaces import Progress, Sampling
from toolkit.records.build import Quality
from toolkit.records.codec import to_json
from toolkit.records.measured import Speedup
from toolkit.records.report import ValidationReport
from toolkit.report.html import render_html
from toolkit.report.markdown import render_markdown
from toolkit.report.render import print_report
from toolkit.speculative.acceptance import RULES, Greedy
from toolkit.speculative.adaptive import AdaptiveSettings
from toolkit.speculative.costs import Figures, StepCosts
from toolkit.speculative.drafters import ModelDrafter
from toolkit.speculative.request_state import Sequence as Running
from toolkit.speculative.sampling import Floats
from toolkit.speculative.text import TextCodec, TextStream
from toolkit.validate import diagnose
from toolkit.validate.replay import Replay, read_replay, replay, write_replay
from toolkit.validate.stage import Origin, References, Served, rounds_wanted, validate

PROMPTS = [
    f"{i:03d}" for i in range(60)
]  # shorter than the tables look back, so that every token of a prompt matters
DRAFT_LEN = 3
NOT_DRAWN = DistributionGates(enabled=False)  # test_sampled.py draws
ENGINE: dict[str, Any] = {
    "vocab_size": 256,
    "closeness": 0.9,
    "max_step_tokens": 16,
    "max_seq_len": 64,
}


def table(seed: int, kind: type[TableEngine] = TableEngine, **settings: Any) -> TableEngine:
    return kind(seed, **{**ENGINE, **settings})


def judged(
    folder: Path,
    *,
    target: TableEngine | None = None,
    draft: TableEngine | None = None,
    encode: Callable[[str], list[int]] = CODEC.encode,
    overrides: dict[str, Any] | None = None,
    sharpness: float = 2.0,
    keep_replay: Callable[[Replay], str] | None = None,
    gates: DistributionGates = NOT_DRAWN,
    progress: Progress | None = None,
    kind: type[RuntimeEndpoint] = RuntimeEndpoint,
    settings: dict[str, Any] | None = None,
    **runtime: Any,
) -> tuple[ValidationReport, RuntimeEndpoint]:
    """The report on a runtime of these parts; the reference is always sound."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    sound = (table(1, sharpness=sharpness), table(2, sharpness=sharpness))
    engines = (target or sound[0], draft or sound[1])
    endpoint = kind(
        make_runtime(*engines, max_draft_len=DRAFT_LEN, **runtime), encode, overrides or {}
    )
    measuring = {
        "rounds": 1,
        "max_rounds": 1,
        "latency": LatencyGates(min_speedup=None),
        **(settings or {}),
    }
    config = ValidationConfig(prompts=path, max_tokens=16, distribution=gates, **measuring)
    report = validate(
        Served(
            endpoint,
            DRAFT_LEN,
            dataclasses.replace(EMBEDDED, reuses_prefixes=runtime.get("reuse_prefixes", False)),
        ),
        config,
        References(reference_of(table(1, sharpness=sharpness), table(2, sharpness=sharpness))),
        Origin("tables", Quality(None, None), {}, {}),
        keep_replay=keep_replay,
        progress=progress,
    )
    return report, endpoint


def named(report: ValidationReport) -> list[str]:
    return [finding.check for finding in report.findings if finding.severity == "error"]


def outcomes(report: ValidationReport) -> dict[str, str]:
    return {gate.name: gate.outcome for gate in report.gates}


def test_lengths_that_adapt_do_not_look_like_a_draft_that_loses_tokens(tmp_path: Path) -> None:
    """Where nothing was drafted, nothing was lost: the draft is judged by texts that state their
    length.
    """
    rows = [1000.0] * 9
    costs = StepCosts(Figures([rows] * 5, *[[400.0] * 9] * 2), 10.0)
    fixed, _ = judged(tmp_path)
    adaptive, _ = judged(tmp_path, adaptive=AdaptiveSettings(probe_every_tokens=8), costs=costs)
    assert named(adaptive) == named(fixed) == []
    assert adaptive.draft_check == fixed.draft_check
    assert adaptive.verdict == fixed.verdict


class RotsWhenCut(TableEngine):
    """Loses the first token of what a slot is cut back to by more than a rejected block."""

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if 0 < length < self._lengths[slot] - DRAFT_LEN - 1:
                self._cache[slot][LOOK_BACK] += 1
        super().rewind(slots, lengths)


def test_a_fault_in_what_is_reused_shows_though_no_timed_request_reuses(tmp_path: Path) -> None:
    sound, _ = judged(tmp_path, reuse_prefixes=True)
    assert (named(sound), sound.verdict) == ([], "PASS")
    assert sound.parity is not None
    assert all(arm.identical == 60 for arm in sound.parity.arms)
    slices = {part.of: part for part in sound.acceptance_slices}
    # Neighbouring prompts have two tokens in common. The 60 timed requests reuse none.
    reused, new = slices["reused_prefix"].requests, slices["new_prefix"].requests
    assert reused > 30 and new >= 60 and reused + new == 120
    rotten, _ = judged(tmp_path, reuse_prefixes=True, target=table(1, RotsWhenCut))
    assert outcomes(rotten)["parity"] == "FAIL"


def test_a_sound_runtime_is_identical_everywhere_and_nothing_is_named(tmp_path: Path) -> None:
    report, _ = judged(tmp_path)
    assert named(report) == []
    assert set(outcomes(report).values()) == {"PASS"}
    assert (
        report.parity is not None
        and report.draft_check is not None
        and report.stop_check is not None
    )
    assert [(arm.arm, arm.draft_len, arm.identical) for arm in report.parity.arms] == [
        ("speculative", 3, 60),
        ("verify", 3, 60),
        ("speculative", 1, 60),
        ("speculative", 2, 60),
    ]
    assert report.parity.arms_equal == 60
    check = report.draft_check
    assert check.after_full > 50 and check.earlier > 50
    assert (check.after_full_kept, check.earlier_kept) == (
        check.after_full_expected,
        check.earlier_expected,
    )
    assert (report.stop_check.requests, report.stop_check.wrong) == (24, 0)
    (agreement,) = report.agreements
    assert (agreement.kind, agreement.agreeing, agreement.tokens) == ("identical", 960, 960)


class Merging(RuntimeEndpoint):
    """Two steps in a chunk, as a stream interval makes them."""

    def _answer(self, prompt: str, options: dict[str, Any]) -> RequestTiming:
        answer = super()._answer(prompt, options)
        pairs = itertools.zip_longest(answer.chunks[::2], answer.chunks[1::2])
        merged = tuple(
            ((two or one)[0], (one[1] or 0) + (two[1] or 0 if two else 0)) for one, two in pairs
        )
        return dataclasses.replace(answer, chunks=merged)


def test_merged_chunks_leave_the_draft_unjudged_and_say_so_everywhere(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, kind=Merging)
    assert report.draft_check is None
    assert outcomes(report)["draft"] == "NOT JUDGED"
    assert set(outcomes(report).values()) == {"PASS", "NOT JUDGED"} and report.verdict == "PASS"
    for rendered in (
        render_markdown(report),
        render_html(report),
        str(to_json(report)),
        printed(report),
    ):
        assert "NOT JUDGED" in rendered and re.search(r"stream\\?_interval\\?_ms", rendered)


def printed(report: ValidationReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_sound_runtime_that_is_drawn_from_passes_and_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int | None, str]] = []
    gates = DistributionGates(effect=0.1)
    report, _ = judged(
        tmp_path,
        gates=gates,
        sharpness=1.5,
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    assert outcomes(report)["distribution"] == "PASS"
    assert named(report) == []
    drawn = [
        (done, total)
        for done, total, what in told
        if what == "drawing tokens" and total is not None
    ]
    assert drawn[0][0] < drawn[-1][0] and drawn[-1][0] == drawn[-1][1]
    sent = [
        (done, total)
        for done, total, what in told
        if total is not None and what.endswith(", requests")
    ]
    assert {total for _, total in sent} == {4 * (2 + 60) + 5 * 60 + 24}
    assert "Distribution of sampled tokens" in render_markdown(report)


def test_rounds_that_are_added_are_told_with_their_reason(tmp_path: Path) -> None:
    told: list[tuple[int, int | None, str]] = []
    settings = {"max_rounds": 3, "latency": LatencyGates(min_speedup=None, precision=1e-6)}
    judged(
        tmp_path,
        settings=settings,
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    greedy = [
        (total, what)
        for _, total, what in told
        if "temperature 0" in what and "0.8" not in what and total is not None
    ]
    assert [what for _, what in dict.fromkeys(greedy)] == [
        "measuring at temperature 0, requests",
        "measuring at temperature 0, about 2 more rounds for the wanted precision, requests",
        "measuring at temperature 0, about 1 more round for the wanted precision, requests",
    ]
    first, *more = dict.fromkeys(total for total, _ in greedy)
    assert more == [first + 2 * 2 * 60]  # at once, and true


@pytest.mark.parametrize(
    ("found", "limit", "wanted"),
    [
        ((1.5, 1.4, 1.6), None, 0),
        ((1.5, 1.4, 1.6), 1.15, 0),
        ((1.5, 1.05, 1.95), None, 9),  # half a width of 0.45 to 0.225: four times the rounds
        ((1.3, 1.1, 1.5), 1.15, 3),  # straddles: 0.2 to the 0.15 up to the limit
        ((1.15, 1.05, 1.25), 1.15, 29997),  # on the limit
    ],
)
def test_rounds_are_wanted_until_the_interval_is_narrow_or_clear_of_its_limit(
    found: tuple[float, float, float], limit: float | None, wanted: int
) -> None:
    assert rounds_wanted(Speedup(*found, 0.95, 60, 3), LatencyGates(min_speedup=limit)) == wanted


def test_a_cache_that_is_not_rewound_is_named(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, target=table(1, ForgetfulRewind))
    assert named(report) == [diagnose.CACHE]
    assert (outcomes(report)["parity"], outcomes(report)["agreement_engine"]) == ("FAIL", "PASS")


class ForgetfulDrafter(ModelDrafter):
    """Takes the last draft of a block for fed, though it was only proposed."""

    def propose(self, sequences: Sequence[Running]) -> None:
        super().propose(sequences)
        for sequence in sequences:
            self._valid_tokens[sequence.slot] += 1
            engine = self._engine
            engine.forward(
                [sequence.slot], torch.zeros((1, 1), dtype=torch.int64)
            )  # whatever lies there


def test_a_draft_cache_that_is_not_caught_up_is_named_though_every_text_is_right(
    tmp_path: Path,
) -> None:
    report, _ = judged(tmp_path, drafter=ForgetfulDrafter(table(2)))
    assert named(report) == [diagnose.DRAFT_CACHE]
    found = outcomes(report)
    assert (found["parity"], found["seeded_parity"], found["draft"]) == ("PASS", "PASS", "FAIL")


def test_another_draft_model_is_named(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, draft=table(3, closeness=0.3))
    assert named(report) == [diagnose.DRAFT_MODEL]
    assert outcomes(report)["parity"] == "PASS"


class ShiftedVerify(TableEngine):
    """A forward of several tokens behind a cache writes them one place too far."""

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        shift = tokens.shape[1] > 1 and all(self._lengths[slot] for slot in slots)
        for slot in slots if shift else ():
            self._cache[slot, 4 + self._lengths[slot]] = 7
            self._lengths[slot] += 1
        logits = super().forward(slots, tokens, last_only=last_only)
        for slot in slots if shift else ():
            self._lengths[slot] -= 1
        return logits


def test_an_off_by_one_position_in_the_verify_forward_is_named(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, target=table(1, ShiftedVerify))
    assert named(report) == [diagnose.VERIFY]
    assert outcomes(report)["parity"] == "FAIL"


class ShiftedDecode(TableEngine):
    """Every forward behind a cache, plain decoding's too, writes one place too far."""

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        behind = [slot for slot in slots if self._lengths[slot]]
        for slot in behind:
            self._cache[slot, 4 + self._lengths[slot]] = 7
            self._lengths[slot] += 1
        logits = super().forward(slots, tokens, last_only=last_only)
        for slot in behind:
            self._lengths[slot] -= 1
        return logits


def test_an_off_by_one_position_in_every_decode_is_named_though_all_arms_agree(
    tmp_path: Path,
) -> None:
    report, _ = judged(tmp_path, target=table(1, ShiftedDecode))
    assert named(report)[0] == diagnose.DECODE
    assert outcomes(report)["agreement_engine"] == "FAIL"


class NextRow(Greedy):
    """Takes each row of the target's logits for the one before it."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self.is_argmax = False

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        rows = logits if not drafts else np.concatenate([logits[1:], logits[-1:]])
        return super().decide(rows, position, drafts)


class KeepsAll(Greedy):
    """Keeps every draft."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self.is_argmax = False

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        return len(drafts), int(logits[-1].argmax())


@pytest.mark.parametrize(
    ("rule", "name"), [(NextRow, diagnose.ROWS), (KeepsAll, diagnose.ACCEPT_RULE)]
)
def test_a_wrong_accept_rule_is_named(rule: Any, name: str, tmp_path: Path) -> None:
    report, _ = judged(tmp_path, rules={**RULES, "greedy": rule})
    assert named(report)[0] == name
    assert outcomes(report)["parity"] == "FAIL"
    assert report.parity is not None
    assert next(arm for arm in report.parity.arms if arm.arm == "verify").identical == 60


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
def test_a_dropped_bos_is_named_though_all_arms_agree(counted: bool, tmp_path: Path) -> None:
    class Uncounted(RuntimeEndpoint):
        def measure(self, prompts: Any, **options: Any) -> Any:
            answers = super().measure(prompts, **options)
            return [
                dataclasses.replace(
                    one, statistics=dataclasses.replace(one.statistics, input_tokens=None)
                )
                for one in answers
            ]

    short = lambda prompt: CODEC.encode(prompt)[1:]  # noqa: E731
    if counted:
        report, _ = judged(tmp_path, encode=short)
        assert outcomes(report)["parity"] == "PASS"
    else:
        endpoint = Uncounted(make_runtime(table(1), table(2), max_draft_len=DRAFT_LEN), short)
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        report = validate(
            Served(endpoint, DRAFT_LEN),
            ValidationConfig(
                prompts=path,
                max_tokens=16,
                rounds=1,
                max_rounds=1,
                latency=LatencyGates(min_speedup=None),
                distribution=NOT_DRAWN,
            ),
            References(reference_of(table(1), table(2))),
            Origin("tables", Quality(None, None), {}, {}),
        )
    assert named(report) == [diagnose.BOS]


class BlockEnds(TextStream):
    """Looks for stop words at the end of a block alone."""

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        self.shown = getattr(self, "shown", "") + self._decoder.decode_many([tokens])[0]
        if ends := [word for word in self._stop if self.shown.endswith(word)]:
            self.stopped_by = ends[0]
        return len(tokens), self.shown if self.stopped_by else ""

    def finish(self) -> str:
        return "" if self.stopped_by else self.shown


class BlockEndsCodec(TextCodec):
    def stream(self, prompt_ids: Sequence[int], stop: Sequence[str]) -> TextStream:
        return BlockEnds(self, prompt_ids, stop) if stop else super().stream(prompt_ids, stop)


def test_a_stop_word_missed_inside_a_block_is_named(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, codec=BlockEndsCodec(CODEC._tokenizer))
    assert named(report) == [diagnose.STOP]
    assert (outcomes(report)["parity"], outcomes(report)["stop_words"]) == ("PASS", "FAIL")


def test_more_tokens_than_asked_for_are_named(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, overrides={"max_tokens": 18})
    assert named(report) == [diagnose.OVERRUN]


class Noisy(TableEngine):
    """Logits are off by up to 1e-3, otherwise in every forward."""

    def __init__(self, seed: int, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self.noise = np.random.default_rng(8)

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        logits = super().forward(slots, tokens, last_only=last_only)
        return logits + 1e-3 * torch.from_numpy(self.noise.uniform(-1, 1, size=tuple(logits.shape)))


def test_noise_of_a_thousandth_is_numerically_equivalent(tmp_path: Path) -> None:
    report, _ = judged(tmp_path, target=table(1, Noisy, sharpness=0.3), sharpness=0.3)
    assert named(report) == []
    assert report.parity is not None
    assert report.parity.equivalent > 0
    assert (report.parity.suspicious, report.parity.broken) == (0, 0)
    assert report.agreements[0].kind == "equivalent"


def test_a_wrong_weight_is_named_though_all_arms_agree(tmp_path: Path) -> None:
    wrong = table(1)
    wrong._tables[1] *= 0.5  # one of four tables, as if its scale had been lost
    report, _ = judged(tmp_path, target=wrong)
    assert named(report)[0] == diagnose.WEIGHTS
    assert outcomes(report)["parity"] == "PASS"
    assert outcomes(report)["agreement_engine"] == "FAIL"


def test_a_replay_file_is_read_back_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    kept: list[Replay] = []
    report, _ = judged(
        tmp_path, target=table(1, ForgetfulRewind), keep_replay=lambda one: kept.append(one) or ""
    )
    name = write_replay(tmp_path / "replay", kept[0])
    assert read_replay(tmp_path / name) == kept[0]
    assert report.parity is not None and len(kept) >= len(report.parity.divergences)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match="not a replay file"):
        read_replay(tmp_path / "bad.json")


def test_a_replay_shows_the_fault_again_and_its_hint(tmp_path: Path) -> None:
    kept: list[Replay] = []
    _, broken = judged(
        tmp_path,
        target=table(1, ForgetfulRewind),
        keep_replay=lambda one: kept.append(one) or "file",
    )
    again = replay(kept[0], broken, reference_of(table(1)))
    assert again.as_before
    assert again.divergence is not None
    assert (
        dataclasses.replace(
            again.divergence, prompt_index=kept[0].divergence.prompt_index, replay=None
        )
        == kept[0].divergence
    )
    sound = RuntimeEndpoint(make_runtime(table(1), table(2), max_draft_len=DRAFT_LEN))
    fixed = replay(kept[0], sound, reference_of(table(1)))
    assert (fixed.divergence, fixed.as_before) == (None, False)
