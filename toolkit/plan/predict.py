"""Compute an upper bound on speed, with and without speculation, and estimate the time of each
build stage.

A forward takes at least as long as it takes to read the weights and the KV caches, and at least as
long as its arithmetic takes (the roofline). Published measurements reach about 75 % of this bound
at batch 1. The gain of speculation follows Leviathan et al. 2023, arXiv:2211.17192: if draft_len
tokens are drafted and each is accepted at rate a, a target forward yields
(1 - a^(draft_len + 1)) / (1 - a) tokens.
"""

from __future__ import annotations

from toolkit.checkpoints.shape import ModelShape, linear_params
from toolkit.facts.gpus import Gpu
from toolkit.facts.heads import PUBLISHED
from toolkit.plan.memory import kv_bytes_per_token, parameters, weight_bytes
from toolkit.plan.subject import Subject
from toolkit.records.plan import PredictedSpeed, Prediction, StageTime
from toolkit.words import KvCacheQuantAlgo, QuantAlgo, Role

__all__ = [
    "break_even",
    "forward_seconds",
    "predict",
    "stage_times",
    "tokens_per_step",
]

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
DISK_BYTES_PER_S = 1e9  # assumed
BUS_BYTES_PER_S = 10e9  # assumed: from the host's cache of mapped files to a GPU
MODEL_FLOPS_UTILIZATION = 0.4  # assumed: share of the GPU's peak that calibration forwards reach
BUILD_BYTES_PER_S = 0.1e9  # assumed: trtllm-build, bytes of weights per second of the whole build


def tokens_per_step(acceptance_rate: float, draft_len: int) -> float:
    """Expected tokens per target forward, the recovered or bonus token included.

    acceptance_rate: in [0, 1].
    """
    if acceptance_rate == 1.0:
        return draft_len + 1.0
    return float((1.0 - acceptance_rate ** (draft_len + 1)) / (1.0 - acceptance_rate))


def break_even(draft_len: int, plain_s: float, draft_s: float, verify_s: float) -> float | None:
    """The acceptance rate above which drafting pays; None if it does not even at rate 1.

    plain_s, draft_s, verify_s: seconds of a plain target forward, a draft forward and a verify
    forward.
    """
    needed_tokens = (draft_len * draft_s + verify_s) / plain_s
    return None if needed_tokens >= draft_len + 1 else acceptance_for(needed_tokens, draft_len)


def acceptance_for(tokens: float, draft_len: int) -> float:
    """The acceptance rate at which a step yields so many tokens, at most 1.

    The bisection is written here because importing scipy takes longer than `toolkit plan` may take.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if tokens_per_step(middle, draft_len) < tokens:
            low = middle
        else:
            high = middle
    return high


def forward_seconds(
    shape: ModelShape,
    quant_algo: QuantAlgo,
    kv_algo: KvCacheQuantAlgo | None,
    gpu: Gpu,
    *,
    batch: int,
    tokens: int,
    context: int,
    gpus: int = 1,
) -> tuple[float, bool]:
    """The least seconds of a forward over `tokens` new tokens in each of `batch` sequences, and
    whether arithmetic, not bandwidth, sets this bound.

    context: tokens of each sequence in the KV cache.
    """
    num_bytes = _read_bytes(shape, quant_algo) + batch * context * kv_bytes_per_token(
        shape, kv_algo
    )
    weights = shape.num_layers * linear_params(shape) + shape.vocab_size * shape.hidden_size
    weights += shape.other_params
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * context
    flops = 2.0 * batch * tokens * (weights + attention)
    rates = {"FP8": gpu.fp8_tflops, "W8A8_SQ_PER_CHANNEL": gpu.int8_tops}
    reading = num_bytes / (gpu.bandwidth_gb_s * 1e9 * gpus)
    computing = flops / ((rates.get(quant_algo) or gpu.bf16_tflops) * 1e12 * gpus)
    return max(reading, computing), computing > reading


def predict(subject: Subject) -> tuple[Prediction, ...]:
    """Predict the speed at batch 1 and at max_batch_size.

    Without a known GPU, only the ratio of the two models' bytes can be given. It is the same at
    every batch size, so it is given once.
    """
    if set(subject.shapes) != set(subject.models):
        return ()
    batches = [1]
    if subject.serving_gpu is not None and subject.config.engine.max_batch_size > 1:
        batches.append(subject.config.engine.max_batch_size)
    return tuple(_predict_at(subject, batch) for batch in batches)


def _predict_at(subject: Subject, batch: int) -> Prediction:
    gpu = subject.serving_gpu
    gpus = 1 if subject.parallel is None else subject.parallel.world_size
    context, draft_len = subject.config.engine.max_input_len, subject.draft_len

    def seconds(role: Role, tokens: int) -> tuple[float, bool]:
        shape, quantization = subject.shapes[role], subject.models[role].quantization
        if gpu is None:  # no seconds are known: use the bytes read, relative to the target's
            target_bytes = _read_bytes(
                subject.shapes["target"], subject.models["target"].quantization.quant_algo
            )
            return _read_bytes(shape, quantization.quant_algo) / target_bytes, False
        algo, kv = quantization.quant_algo, quantization.kv_cache_quant_algo
        return forward_seconds(
            shape, algo, kv, gpu, batch=batch, tokens=tokens, context=context, gpus=gpus
        )

    plain, is_compute_bound = seconds("target", 1)
    speeds: list[PredictedSpeed] = []
    ratio = threshold = assumed = assumption = None
    if subject.speculates:
        # Drafting by n-gram lookup takes no forward.
        draft = seconds("draft", 1)[0] if subject.has_draft_model else 0.0
        verify = seconds("target", draft_len + 1)[0]
        ratio, threshold = draft / plain, break_even(draft_len, plain, draft, verify)

        def speed(rate: float) -> PredictedSpeed:
            tokens = tokens_per_step(rate, draft_len)
            step = draft_len * draft + verify
            per_s = None if gpu is None else batch * tokens / step
            return PredictedSpeed(rate, draft_len, tokens, per_s, tokens * plain / step)

        speeds = [speed(rate) for rate in ACCEPTANCE_RATES]
        head = subject.config.speculation.head
        if head is not None:
            assumption = PUBLISHED[head].text
            assumed = speed(acceptance_for(PUBLISHED[head].tokens, PUBLISHED[head].draft_len))
    return Prediction(
        batch_size=batch,
        context_tokens=context,
        bound="arithmetic" if is_compute_bound else "bandwidth",
        plain_tokens_per_s=None if gpu is None else batch / plain,
        cost_ratio=ratio,
        break_even=threshold,
        speculative=tuple(speeds),
        assumed=assumed,
        assumption=assumption,
    )


def stage_times(subject: Subject) -> tuple[StageTime, ...]:
    """Estimate the order of magnitude of the long stages on the configured GPU.

    Empty for a CPU, where the stages are measured instead.
    """
    gpu = subject.serving_gpu
    if gpu is None or set(subject.shapes) != set(subject.models):
        return ()
    times, calibration = [], subject.config.calibration
    for role, shape in subject.shapes.items():
        algo = subject.models[role].quantization.quant_algo
        source, size = 2 * parameters(shape), weight_bytes(shape, algo)
        if algo != "NO_QUANT" and calibration is not None and role not in subject.quantized:
            tokens = calibration.calib_size * calibration.calib_max_seq_length
            computing = (
                2.0
                * parameters(shape)
                * tokens
                / (gpu.bf16_tflops * 1e12 * MODEL_FLOPS_UTILIZATION)
            )
            # Each layer visits the GPU once. All hidden states go there and back for each layer.
            hidden = 2 * tokens * shape.hidden_size
            moved = source + 2 * hidden * shape.num_layers
            seconds = computing + moved / BUS_BYTES_PER_S + (source + size) / DISK_BYTES_PER_S
            # What the host's memory cannot hold of them is read and written for each layer.
            uncached = 2 * hidden * shape.num_layers / DISK_BYTES_PER_S
            formula = (
                f"at most {tokens} tokens at {MODEL_FLOPS_UTILIZATION:.0%} of BF16 peak,"
                f" {moved / 1e9:,.0f} GB of weights and hidden states to the GPU and back at"
                f" 10 GB/s, {(source + size) / 1e9:.0f} GB from and to the disk at 1 GB/s. Until"
                f" the last layer is calibrated, {2 * hidden / 1e9:.0f} GB of hidden states lie on"
                " the disk; with less memory free, up to"
                f" {uncached / 60:,.0f} min more"
            )
            times.append(StageTime(f"quantize/{role}", seconds, formula))
        if subject.engine_flow is not None:
            per_rank = size / subject.engine_flow.world_size
            times.append(
                StageTime(
                    f"compile/{role}",
                    per_rank / BUILD_BYTES_PER_S,
                    f"{per_rank / 1e9:.0f} GB a rank at 0.1 GB/s",
                )
            )
    return tuple(times)


def _read_bytes(shape: ModelShape, quant_algo: QuantAlgo) -> int:
    """Bytes of weights that a forward reads: all but the embedding table, of which it reads only
    one row per token.
    """
    table = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size * 2
    return weight_bytes(shape, quant_algo) - table
