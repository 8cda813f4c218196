"""Rules about the models' shapes and the engine's sizes."""

from __future__ import annotations

from toolkit.plan.rules.findings import Check, Findings, RuleFinding, refuse
from toolkit.plan.subject import Subject, can_split, length_limit, max_num_tokens

# Two vocabularies that differ by more rows than this are not the same one with different padding.
MAX_PADDING_ROWS = 1024

__all__ = ["CHECKS"]


def _heads_divide_tp(subject: Subject) -> Findings:
    tp = 1 if subject.parallel is None else subject.parallel.tp_size
    for role, shape in subject.shapes.items():
        if can_split(shape, tp):
            continue
        fitting = [
            size
            for size in (1, 2, 4, 8, 16)
            if all(can_split(other, size) for other in subject.shapes.values())
        ]
        yield refuse(
            "engine.tp_size",
            f"the {role}'s {shape.num_heads} attention heads and {shape.num_kv_heads} KV heads"
            f" cannot be split over {tp} ranks",
            f"set tp_size: {' or '.join(map(str, fitting))}",
        )


def _mlp_divides_tp(subject: Subject) -> Findings:
    tp = 1 if subject.parallel is None else subject.parallel.tp_size
    for role, shape in subject.shapes.items():
        # Where the heads cannot be split either, _heads_divide_tp has refused already.
        if shape.intermediate_size % tp and can_split(shape, tp):
            fitting = [size for size in (1, 2, 4, 8, 16) if shape.intermediate_size % size == 0]
            yield refuse(
                "engine.tp_size",
                f"the {role}'s MLP (intermediate_size {shape.intermediate_size}) cannot be split"
                f" over {tp} ranks",
                f"set tp_size: {' or '.join(map(str, fitting))}",
            )


def _layers_for_pp(subject: Subject) -> Findings:
    pp = 1 if subject.parallel is None else subject.parallel.pp_size
    for role, shape in subject.shapes.items():
        if pp > shape.num_layers:
            what = f"the {role} has only {shape.num_layers} layers for {pp} pipeline ranks"
            yield refuse("engine.pp_size", what, f"set pp_size: {shape.num_layers} or less")


def _even_pipeline(subject: Subject) -> Findings:
    engine = subject.engine_flow
    if engine is None:
        return
    for role, shape in subject.shapes.items():
        if engine.pp_size <= shape.num_layers and shape.num_layers % engine.pp_size:
            what = (
                f"the {role}'s {shape.num_layers} layers cannot be divided evenly among"
                f" {engine.pp_size} pipeline ranks"
            )
            fitting = [str(size) for size in range(1, 17) if shape.num_layers % size == 0]
            yield refuse("engine.pp_size", what, f"set pp_size: {' or '.join(fitting)}")


def _length_within_model(subject: Subject) -> Findings:
    if "target" not in subject.shapes:
        return
    limit = length_limit(subject.shapes["target"])
    if subject.config.engine.max_seq_len > limit:
        what = (
            f"max_seq_len {subject.config.engine.max_seq_len} is beyond the target's {limit}"
            " positions"
        )
        yield refuse("engine.max_seq_len", what, f"set max_seq_len: {limit} or less")


def _draft_seq_len(subject: Subject) -> Findings:
    if "draft" not in subject.shapes:
        return
    limit, wanted = length_limit(subject.shapes["draft"]), subject.config.engine.max_seq_len
    if wanted > limit and (
        "target" not in subject.shapes or wanted <= length_limit(subject.shapes["target"])
    ):
        what = (
            f"max_seq_len {wanted} is beyond the draft's {limit} positions, and the draft has to"
            " reach as far as the target"
        )
        yield refuse(
            "engine.max_seq_len",
            what,
            f"set max_seq_len: {limit}, or take a draft with a longer context",
        )


def _same_vocab(subject: Subject) -> Findings:
    has_head = subject.config.speculation.head is not None  # its vocabulary is a part: pairing/
    if has_head or {"target", "draft"} - set(subject.shapes):
        return
    target, draft = subject.shapes["target"].vocab_size, subject.shapes["draft"].vocab_size
    if abs(target - draft) > MAX_PADDING_ROWS:
        what = (
            f"the draft has {draft} tokens in its vocabulary and the target {target}: they use"
            " different tokenizers"
        )
        yield refuse("draft.checkpoint", what, "take a draft of the target's family")
    elif target != draft:
        what = (
            f"the vocabularies have {target} and {draft} rows: if only the padding differs, the"
            " larger one is trimmed before the build"
        )
        yield RuleFinding("adjusted", "draft.checkpoint", what)


def _input_within_num_tokens(subject: Subject) -> Findings:
    engine = subject.trtllm
    if engine is not None and engine.max_input_len > max_num_tokens(engine):
        yield refuse(
            "engine.max_input_len",
            f"a prompt of {engine.max_input_len} tokens is read in one forward, and max_num_tokens"
            f" allows {max_num_tokens(engine)}",
            f"set max_num_tokens: {engine.max_input_len} or more, or set a smaller max_input_len",
        )


def _draft_within_num_tokens(subject: Subject) -> Findings:
    engine = subject.pytorch_flow
    if engine is None or not subject.speculates:
        return
    needed, allowed = engine.max_batch_size * (subject.draft_len + 1), max_num_tokens(engine)
    if needed > allowed:
        fits = max(1, allowed // (subject.draft_len + 1))
        what = (
            f"verifying {subject.draft_len} + 1 tokens of {engine.max_batch_size} requests takes"
            f" {needed} tokens per step"
        )
        hint = f"set max_num_tokens: {needed} or more, or max_batch_size: {fits}"
        yield refuse("engine.max_num_tokens", f"{what}, and max_num_tokens allows {allowed}", hint)


def _spec_raises_num_tokens(subject: Subject) -> Findings:
    engine = subject.engine_flow
    if engine is None or not subject.has_draft_model:
        return
    needed = engine.max_batch_size * (subject.draft_len + 1)
    if needed > max_num_tokens(engine):
        steps = f"{engine.max_batch_size} requests x ({subject.draft_len} + 1) tokens"
        yield RuleFinding(
            "adjusted",
            "engine.max_num_tokens",
            f"max_num_tokens is raised from {max_num_tokens(engine)} to {needed}: {steps}",
        )


def _spec_extends_seq_len(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.has_draft_model:
        length = subject.config.engine.max_seq_len
        what = (
            f"the target's engine is built for {length + subject.draft_len} tokens: max_seq_len"
            f" {length} + max_draft_len {subject.draft_len}"
        )
        yield RuleFinding("adjusted", "engine.max_seq_len", what)


def _tokens_per_block(subject: Subject) -> Findings:
    if subject.trtllm is not None and subject.trtllm.tokens_per_block.bit_count() != 1:
        what = f"tokens_per_block {subject.trtllm.tokens_per_block} is not a power of two"
        yield refuse("engine.tokens_per_block", what, "set tokens_per_block: 32 or 64")


def _profiles_with_opt_tokens(subject: Subject) -> Findings:
    if (
        subject.engine_flow is not None
        and subject.engine_flow.multiple_profiles
        and subject.engine_flow.opt_num_tokens is not None
    ):
        what = "trtllm-build refuses opt_num_tokens together with multiple_profiles"
        yield refuse("engine.opt_num_tokens", what, "remove one of the two")


CHECKS: dict[str, Check] = {
    "heads-divide-tp": _heads_divide_tp,
    "mlp-divides-tp": _mlp_divides_tp,
    "layers-for-pp": _layers_for_pp,
    "toolkit-even-pipeline": _even_pipeline,
    "length-within-model": _length_within_model,
    "draft-seq-len": _draft_seq_len,
    "same-vocab": _same_vocab,
    "input-within-num-tokens": _input_within_num_tokens,
    "draft-within-num-tokens": _draft_within_num_tokens,
    "tokens-per-block-power-of-two": _tokens_per_block,
    "profiles-with-opt-tokens": _profiles_with_opt_tokens,
    "spec-extends-seq-len": _spec_extends_seq_len,
    "spec-raises-num-tokens": _spec_raises_num_tokens,
}
