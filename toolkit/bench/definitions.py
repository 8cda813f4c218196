"""The one table of metrics: the name of every figure, what it counts, and what it means.

Gates, reports, benches and docs/metrics.md read titles and units from it. Only a ratio of two arms
has another unit than its metric (`gate.py`): "x".
"""

from __future__ import annotations

from toolkit.records.measured import Metric
from toolkit.resampling import CONFIDENCE

__all__ = ["LATENCIES", "LATENCY_PERCENTILES", "METRICS", "PERCENTILES", "heading"]

LATENCIES = ("ttft", "tpot", "itl", "icl", "e2e")
PERCENTILES = (50, 90, 99)
# ttft_p90 -> (ttft, 90)
LATENCY_PERCENTILES = {f"{name}_p{q}": (name, q) for name in LATENCIES for q in PERCENTILES}

_TABLE = (
    Metric(
        name="tokens_per_s",
        title="output tokens/s",
        unit="tokens/s",
        better="higher",
        formula="output tokens / request time",
        numerator="output tokens of all requests of the arm, counted by the server",
        denominator="e2e of the same requests, summed; they run one at a time",
        note="includes prefill, queueing and streaming, but not the warm-up",
    ),
    Metric(
        name="speedup",
        title="speed-up",
        unit="x",
        better="higher",
        formula="tokens_per_s(speculative) / tokens_per_s(plain)",
        numerator="tokens_per_s of the speculative arm",
        denominator=(
            "tokens_per_s of the plain arm: the same engine and prompts with draft length 0, by the"
            " same server, or by a second one where no request can turn speculation off"
        ),
        note=(
            f"pairs run back to back in random order; {CONFIDENCE:.0%} bootstrap interval over"
            " prompts and rounds. Rounds are added while it straddles its gate, which makes a"
            " verdict at the very edge a little more likely than stated"
        ),
    ),
    Metric(
        name="ttft",
        title="TTFT",
        spelled_out="time to first token",
        unit="ms",
        better="lower",
        formula="first tokens received - request sent (open loop: due)",
        numerator=(
            "time of the first chunk with tokens (with text, where none are counted) - time of"
            " sending"
        ),
        denominator="1 request",
        note="a validation is a closed loop",
    ),
    Metric(
        name="tpot",
        title="TPOT",
        spelled_out="time per output token after the first",
        unit="ms",
        better="lower",
        formula="(last token - first token) / (output tokens - 1)",
        numerator="time of the last chunk with tokens - time of the first",
        denominator="output tokens - 1",
        note="one number per request; none if the answer has fewer than two tokens",
    ),
    Metric(
        name="itl",
        title="ITL",
        spelled_out="inter-token latency, the gap between tokens",
        unit="ms",
        better="lower",
        formula="gap between chunks / tokens of the later chunk, weighted by those tokens",
        numerator="time between two chunks with tokens",
        denominator="tokens in the later chunk",
        note="inter-token latency: a chunk of four tokens counts as four short gaps",
    ),
    Metric(
        name="icl",
        title="ICL",
        spelled_out="inter-chunk latency, the gap that a reader sees",
        unit="ms",
        better="lower",
        formula="gap between chunks",
        numerator="time between two chunks with tokens",
        denominator="1 gap",
        note="inter-chunk latency: what a reader sees",
    ),
    Metric(
        name="e2e",
        title="e2e",
        spelled_out="the whole request",
        unit="ms",
        better="lower",
        formula="last tokens received - request sent (open loop: due)",
        numerator=(
            "time of the last chunk with tokens (with text, where none are counted) - time of"
            " sending"
        ),
        denominator="1 request",
    ),
    Metric(
        name="percentiles",
        title="percentiles",
        unit="",
        better="none",
        formula="numpy's linear percentile",
        numerator="samples of all rounds",
        denominator="",
        note=(
            "printed if at least 10 samples lie beyond it: 20 samples for p50, 100 for p90,"
            f" 1000 for p99. Rounds repeat the prompts, so the {CONFIDENCE:.0%} interval of p90"
            " resamples whole prompts; in an open loop, runs of consecutive requests, since they"
            " wait in the same queue"
        ),
    ),
    Metric(
        name="acceptance_rate",
        title="acceptance rate",
        unit="share",
        better="higher",
        formula="accepted / drafted tokens",
        numerator="draft tokens that the target accepted",
        denominator="draft tokens proposed",
        note="draft tokens after the first rejection of a block count as drafted and not accepted",
    ),
    Metric(
        name="acceptance_length",
        title="acceptance length",
        unit="tokens/step",
        better="higher",
        formula="1 + accepted / verify steps",
        numerator="tokens that verify steps give",
        denominator="verify steps: target forwards after prefill",
        note="the bonus token is included",
    ),
    Metric(
        name="acceptance_by_position",
        title="acceptance by position",
        unit="share",
        better="higher",
        formula="joint: accepted[i] / drafted[i]; conditional: joint[i] / joint[i - 1]",
        numerator="verify steps that accepted the draft token at position i",
        denominator="verify steps with a draft token at position i",
        note="a conditional rate counts only steps that accepted all tokens before i",
    ),
    Metric(
        name="acceptance_alpha",
        title="alpha",
        unit="share",
        better="higher",
        formula="accepted / looked at",
        numerator="draft tokens that the target accepted",
        denominator=(
            "draft tokens whose predecessors in the block were all accepted: sum over positions of"
            " drafted[i] x joint[i - 1]"
        ),
        note=(
            "maximum likelihood, if every draft token is accepted independently and with the same"
            " probability (a truncated geometric distribution); if only totals are counted, the"
            " alpha with alpha + ... + alpha^k = accepted / verify steps, for blocks of k tokens."
            " Blocks are longer in easy places, so alpha may be above the mean over all places."
            f" {CONFIDENCE:.0%} bootstrap interval"
            " over prompts"
        ),
    ),
    Metric(
        name="distinct_4grams",
        title="distinct 4-grams",
        unit="share",
        better="higher",
        formula="distinct / all 4-grams of output tokens, averaged over requests",
        numerator="different runs of four tokens in a text",
        denominator="all runs of four tokens in it",
        note="below 0.5 the texts loop: loops are easy to draft, which makes the speed-up too high",
    ),
    Metric(
        name="parity",
        title="same text",
        unit="share",
        better="lower",
        formula="prompts that diverge / prompts",
        numerator=(
            "prompts whose speculative text differs from the plain one in any round; where a"
            " request can ask for it, also at other draft lengths and when no draft token is"
            " accepted"
        ),
        denominator="prompts compared",
        note=(
            f"judged by its exact (Clopper-Pearson) one-sided upper bound at {CONFIDENCE:.0%}"
            " confidence. A divergence is numerically equivalent when the reference scores both"
            " chosen tokens within near_tie_margin of its best, suspicious when it lies between"
            " the reference's two best at up to ten times that, broken otherwise"
        ),
    ),
    Metric(
        name="agreement",
        title="agreement with a reference",
        unit="share",
        better="higher",
        formula="tokens that are the reference's own choice / output tokens",
        numerator=(
            "tokens of the plain greedy texts with the reference's largest logit, teacher-forced"
            " on the text before them"
        ),
        denominator="output tokens of the plain greedy texts",
        note=(
            "the compiled engine outside the server should agree up to rounding, the unquantized"
            f" checkpoint as often as quantization leaves it; {CONFIDENCE:.0%} bootstrap interval"
            " over prompts"
        ),
    ),
    Metric(
        name="wrong_tokens",
        title="wrong tokens",
        unit="tokens",
        better="lower",
        formula="tokens that rounding cannot explain",
        numerator=(
            "tokens of the plain greedy texts that lie more than near_tie_margin below the"
            " reference's best logit"
        ),
        denominator="",
        note=(
            "of a reference in the same precision: the compiled engine, or a source that was not"
            " quantized"
        ),
    ),
    Metric(
        name="wrong_choices",
        title="wrong choices",
        unit="share",
        better="lower",
        formula="tokens other than the reference's choice / tokens, where the reference is certain",
        numerator=(
            "tokens of the plain greedy texts other than the reference's best, at these places"
        ),
        denominator=(
            "output tokens at places where the reference's margin exceeds the estimated change of"
            " its logits by quantization"
        ),
        note=f"judged by its exact upper bound at {CONFIDENCE:.0%} confidence",
    ),
    Metric(
        name="distribution",
        title="distribution of sampled tokens",
        unit="p-value",
        better="higher",
        formula=(
            "G = 2 sum(observed ln(observed / expected)) over 16 equal bins of the tokens' points;"
            " p from chi-squared, 15 degrees"
        ),
        numerator=(
            "second and later tokens whose point falls in a bin; a token's point lies where it"
            " stands within the distribution that the reference gives for its place, tokens laid"
            " side by side by probability, or by draft / target probability"
        ),
        denominator=(
            "as many in every bin: the points of tokens that are drawn from these distributions"
            " are uniform and independent"
        ),
        note=(
            "p-values are adjusted for all tests (Holm). Seen: the total variation of the bins"
            " that the test rejects with the stated power. Control: the same points, tilted by"
            " that much towards the likeliest token, or the draft's"
        ),
    ),
    Metric(
        name="continuations",
        title="continuations",
        unit="p-value",
        better="higher",
        formula="energy distance between the arms' unigram and bigram counts, summed over prompts",
        numerator="2 E|X - Y| - E|X - X'| - E|Y - Y'| in the L1 metric",
        denominator="1 prompt",
        note=(
            "p-value by 19,999 permutations of the arms within a prompt; control: a share of one"
            " arm's texts replaced by one text"
        ),
    ),
    Metric(
        name="draft_check",
        title="draft proposes as compiled",
        unit="tokens",
        better="higher",
        formula="first draft tokens accepted, and those that the draft engine proposes correctly",
        numerator="verify steps that accepted their first draft token",
        denominator=(
            "verify steps at whose first place the draft engine, teacher-forced, chooses the token"
            " of the text"
        ),
        note=(
            "greedy requests whose chunks are steps; if the draft's cache is damaged, no text"
            " changes, only this count"
        ),
    ),
    Metric(
        name="seeded_parity",
        title="same text, seeded",
        unit="share",
        better="lower",
        formula="as parity, at temperature > 0 with a seed per prompt",
        numerator="prompts whose speculative text differs from the plain one under the same seed",
        denominator="prompts compared",
        note=(
            "under the coupled rule a seed fixes the noise of every position, so the next token is"
            " the largest of logits + temperature * noise, drafted or not. Margins are of that"
            " sum: a rounding error of a logit moves it by as much"
        ),
    ),
    Metric(
        name="kl_mean",
        title="KL to source",
        unit="nats",
        better="lower",
        formula="mean over tokens of KL(source || quantized), nats",
        numerator="sum of KL over held-out tokens, teacher-forced",
        denominator="held-out tokens",
        note="measured before export",
    ),
    Metric(
        name="top1_agreement",
        title="top-1 agreement",
        unit="share",
        better="higher",
        formula="tokens whose most likely token stays the same / tokens",
        numerator="held-out tokens with the same argmax",
        denominator="held-out tokens",
    ),
    Metric(
        name="layer_error",
        title="relative error",
        unit="share",
        better="lower",
        formula="||quantized output - source output|| / ||source output||",
        numerator="Frobenius norm of the difference of one linear's outputs",
        denominator="Frobenius norm of the source's output",
    ),
    Metric(
        name="layer_kl",
        title="KL of one layer alone",
        unit="nats",
        better="lower",
        formula="mean over tokens of KL(source || source with this decoder layer quantized), nats",
        numerator="sum of KL over the first held-out tokens, teacher-forced",
        denominator="these tokens",
        note=(
            "all other layers and their KV cache are as in the source; errors of layers may cancel,"
            " so the sum need not be the KL of all layers together"
        ),
    ),
    # Metrics of a load: several requests run at once, and an open loop has a schedule.
    Metric(
        name="throughput",
        title="output tokens/s of all requests",
        unit="tokens/s",
        better="higher",
        formula="output tokens / window",
        numerator="output tokens of all answered requests, counted by the server",
        denominator=(
            "first request sent (open loop: due) to the end of the last, summed over blocks"
        ),
        note="of all requests together, without the warm-up",
    ),
    Metric(
        name="requests_per_s",
        title="requests/s",
        unit="requests/s",
        better="higher",
        formula="answered requests / window",
        numerator="requests that were answered in full",
        denominator="the same window",
    ),
    Metric(
        name="goodput",
        title="goodput",
        unit="requests/s",
        better="higher",
        formula="requests that met every stated limit / window",
        numerator=(
            "answered requests whose latencies are all within --goodput; for itl and icl, the"
            " largest gap counts"
        ),
        denominator="the same window",
        note="a failed request and a latency that was not measured meet no limit",
    ),
    Metric(
        name="goodput_share",
        title="requests within the limits",
        unit="share",
        better="higher",
        formula="requests that met every stated limit / requests sent",
        numerator="as of goodput",
        denominator="requests sent, failed ones included",
        note=(
            "its interval draws runs of consecutive requests, since neighbours wait in the same"
            f" queue, and is never narrower than the exact bounds at {CONFIDENCE:.0%}"
        ),
    ),
    Metric(
        name="speed",
        title="speed",
        unit="x",
        better="higher",
        formula="(output tokens / e2e) of one arm over the other's",
        numerator="output tokens of the last arm / e2e of its requests, both summed",
        denominator="the same of the first arm, in pairs of the same prompt and round",
        note=(
            f"{CONFIDENCE:.0%} bootstrap interval over prompts and rounds; at a fixed concurrency"
            " also the ratio of throughputs"
        ),
    ),
    Metric(
        name="lag",
        title="send lag",
        unit="ms",
        better="lower",
        formula="request sent - request due",
        numerator="time at which the request was handed to the network",
        denominator="1 request",
        note="open loop",
    ),
    Metric(
        name="errors",
        title="failed requests",
        unit="share",
        better="lower",
        formula="failed / sent requests",
        numerator="refused, broken, late or contradictory answers",
        denominator="requests sent",
    ),
    Metric(
        name="comparison",
        title="comparison of two runs",
        unit="x",
        better="none",
        formula="a figure of run B / the same figure of run A",
        numerator="speed, or a latency's percentile, of run B",
        denominator="the same of run A",
        note="paired by prompt where both runs sent the same prompts",
    ),
    # Metrics of the plan, the advisor and the counters, which no load measures.
    Metric(
        name="latency_ratio",
        title="latency ratio",
        unit="x",
        better="lower",
        formula="percentile(speculative) / percentile(plain); a bench: last arm / first arm",
        numerator="a latency's percentile in the speculative arm, or the last",
        denominator="the same percentile in the plain arm, or the first",
        note=(
            f"above 1 is slower; {CONFIDENCE:.0%} bootstrap interval over prompts and rounds, drawn"
            " alike for both arms"
        ),
    ),
    Metric(
        name="stop_words",
        title="stop words inside blocks",
        unit="requests",
        better="lower",
        formula="requests whose text went past their stop word",
        numerator=(
            "requests whose text does not end right before the first place of their stop word"
        ),
        denominator="requests sent with a stop word taken from their own plain text",
    ),
    Metric(
        name="counters",
        title="counters",
        unit="",
        better="none",
        formula="counter after - counter before",
        numerator="the server's counter, read before the first request and after the last",
        denominator="the client's own count of the same, from its requests' answers",
    ),
    Metric(
        name="peak_memory",
        title="peak memory",
        unit="bytes",
        better="lower",
        formula="largest resident memory, summed over a tree of processes",
        numerator="bytes, sampled four times a second; exact for a peak of this process alone",
        denominator="",
        note=(
            "pages that processes share are counted in each of them; `serve` is the server's own"
            " tree while it was measured"
        ),
    ),
    Metric(
        name="planned_memory",
        title="planned memory",
        unit="bytes",
        better="none",
        formula="sum over the parts of a stage at its peak",
        numerator=(
            "bytes of weights, caches, activations and the stated margins, by arithmetic before"
            " anything runs"
        ),
        denominator="",
        note=(
            "the table of memory shows every part with its arithmetic; libraries are included only"
            " where it says so"
        ),
    ),
    Metric(
        name="alpha",
        title="alpha",
        unit="share",
        better="higher",
        formula="mean over output tokens of the probability that a draft token is accepted there",
        numerator=(
            "greedy: places where both models choose the same token; rejection: sum over tokens of"
            " min(target, draft)"
        ),
        denominator="places of target-generated texts, both models teacher-forced",
        note=f"{CONFIDENCE:.0%} bootstrap interval over prompts",
    ),
    Metric(
        name="predicted_speedup",
        title="predicted speed-up",
        unit="x",
        better="higher",
        formula="formula x dependence x verify cost x host",
        numerator=(
            "formula: (1 - alpha^(k + 1)) / ((1 - alpha)(k c + 1)), Leviathan et al. 2023, k the"
            " draft length and c a draft step's time over a target step's; dependence: tokens per"
            " step of the replayed accept indicators over the formula's"
        ),
        denominator=(
            "verify cost: what a forward of k + 1 tokens takes beyond one of 1; host: its work per"
            " step, prefill, and blocks cut short at the end of a text"
        ),
        note="the measured speed-up is shown next to it for draft lengths that were run",
    ),
    Metric(
        name="break_even",
        title="break-even",
        unit="tokens/step",
        better="lower",
        formula="tokens per step at which speculation costs nothing",
        numerator="time of a step: drafting, verifying and the host's work",
        denominator="time of a plain token",
        note="break-even alpha: the acceptance that gives this number of tokens per step",
    ),
    Metric(
        name="grid",
        title="speed of a pair of precisions",
        unit="tokens/s",
        better="higher",
        formula=(
            "output tokens / time of requests, of every pair of precisions at its best draft length"
        ),
        numerator="output tokens, greedy, one request at a time",
        denominator=(
            "time of these requests, in turns with the other pairs; or as predicted for the GPU"
            " that is named"
        ),
        note=(
            "best: the fastest pair whose target keeps validation.quality.max_kl by the upper"
            " bound of its KL"
        ),
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def heading(name: str) -> str:
    """The heading of a row or column: the title, and the unit if the cells do not show it."""
    metric = METRICS[name]
    if metric.unit in ("", "x", "share"):  # cells show these units
        return metric.title
    return f"{metric.title}, {metric.unit}"
