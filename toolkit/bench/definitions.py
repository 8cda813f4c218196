"""What every figure means: its formula, numerator and denominator, printed beside it on demand."""

from __future__ import annotations

from toolkit.records.measured import Definition
from toolkit.resampling import (
    CONFIDENCE,
)

__all__ = ["DEFINITIONS", "LOAD_DEFINITIONS"]

DEFINITIONS: dict[str, Definition] = {
    "tokens_per_s": Definition(
        "output tokens / request time",
        "output tokens of all requests of the arm, counted by the server",
        "e2e of the same requests, summed; they run one at a time",
        "prefill, queueing and streaming are inside; the warm-up is not",
    ),
    "speedup": Definition(
        "tokens_per_s(speculative) / tokens_per_s(plain)",
        "tokens_per_s of the speculative arm",
        "tokens_per_s of the plain arm: the same server, engine and prompts with draft length 0",
        f"pairs run back to back in random order; {CONFIDENCE:.0%} bootstrap interval over prompts"
        " and rounds. Rounds are added while it straddles its gate, which makes a verdict at the"
        " very edge a little more likely than stated",
    ),
    "ttft": Definition(
        "first tokens received - request sent",
        "time of the first chunk with tokens - time of sending",
        "1 request",
        "closed loop",
    ),
    "tpot": Definition(
        "(last token - first token) / (output tokens - 1)",
        "time of the last chunk with tokens - time of the first",
        "output tokens - 1",
        "one number per request; none below two tokens",
    ),
    "itl": Definition(
        "gap between chunks / tokens of the later chunk, weighted by those tokens",
        "time between two chunks with tokens",
        "tokens that the later one carries",
        "inter-token latency: a chunk of four tokens counts as four short gaps",
    ),
    "icl": Definition(
        "gap between chunks",
        "time between two chunks with tokens",
        "1 gap",
        "inter-chunk latency: what a reader sees",
    ),
    "e2e": Definition(
        "last token received - request sent",
        "time of the last chunk with tokens - time of sending",
        "1 request",
    ),
    "percentiles": Definition(
        "numpy's linear percentile",
        "samples of all rounds",
        "",
        "printed when at least 10 samples lie beyond it: 20 for p50, 100 for p90, 1000 for p99."
        f" Rounds repeat the prompts, so the {CONFIDENCE:.0%} interval of p90 resamples whole"
        " prompts",
    ),
    "acceptance_rate": Definition(
        "accepted / drafted tokens",
        "draft tokens that the target kept",
        "draft tokens proposed",
        "everything behind the first rejection of a block counts as drafted and not accepted",
    ),
    "acceptance_length": Definition(
        "1 + accepted / verify steps",
        "tokens out of verify steps",
        "verify steps: target forwards after prefill",
        "with bonus token",
    ),
    "acceptance_by_position": Definition(
        "joint: accepted[i] / drafted[i]; conditional: joint[i] / joint[i - 1]",
        "verify steps that kept the draft token at position i",
        "verify steps that drafted one there",
        "a conditional rate is among steps that kept all tokens before i",
    ),
    "acceptance_alpha": Definition(
        "accepted / looked at",
        "draft tokens that the target kept",
        "draft tokens whose predecessors in the block were all kept: sum over positions of"
        " drafted[i] x joint[i - 1]",
        "maximum likelihood for drafts that are kept alike and independently (a truncated"
        " geometric distribution); where only totals are counted, the alpha with alpha + ... +"
        " alpha^k = accepted / verify steps, k tokens a block. Blocks last longer in easy places,"
        f" so it may lie above the mean over all. {CONFIDENCE:.0%} bootstrap interval over prompts",
    ),
    "distinct_4grams": Definition(
        "distinct / all 4-grams of output tokens, averaged over requests",
        "different runs of four tokens in a text",
        "all runs of four tokens in it",
        "below 0.5 the texts loop: loops are easy to draft and flatter the speed-up",
    ),
    "parity": Definition(
        "prompts that diverge / prompts",
        "prompts whose speculative text differs from the plain one in any round, at any draft"
        " length, or with nothing accepted",
        "prompts compared",
        f"judged by its exact (Clopper-Pearson) one-sided upper bound at {CONFIDENCE:.0%}"
        " confidence. A divergence is numerically equivalent when the reference scores both chosen"
        " tokens within near_tie_margin of its best, suspicious when it lies between the"
        " reference's two best at up to ten times that, broken otherwise",
    ),
    "agreement": Definition(
        "tokens that are the reference's own choice / output tokens",
        "tokens of the plain greedy texts with the reference's largest logit, teacher-forced on the"
        " text before them",
        "output tokens of the plain greedy texts",
        "the compiled engine outside the server should agree up to rounding, the unquantized"
        f" checkpoint as often as quantization leaves it; {CONFIDENCE:.0%} bootstrap interval over"
        " prompts",
    ),
    "distribution": Definition(
        "G = 2 sum(observed ln(observed / expected)) over 16 equal bins of the tokens' points; p"
        " from chi-squared, 15 degrees",
        "second and later tokens whose point falls in a bin; a token's point lies where it stands"
        " within the distribution that the reference gives for its place, tokens laid side by side"
        " by probability, or by draft / target probability",
        "as many in every bin: the points of tokens that are drawn from these distributions are"
        " uniform and independent",
        "p-values are adjusted for all tests (Holm). Seen: the total variation of the bins that the"
        " test rejects with the stated power. Control: the same points, tilted by that much towards"
        " the likeliest token, or the draft's",
    ),
    "continuations": Definition(
        "energy distance between the arms' unigram and bigram counts, summed over prompts",
        "2 E|X - Y| - E|X - X'| - E|Y - Y'| in the L1 metric",
        "1 prompt",
        "p-value by 19,999 permutations of the arms within a prompt; control: a share of one arm's"
        " texts replaced by one text",
    ),
    "draft_check": Definition(
        "first drafts kept, beside those that the draft engine proposes right",
        "verify steps that kept their first draft",
        "verify steps at whose first place the draft engine, teacher-forced, chooses the token that"
        " came",
        "greedy requests whose chunks are steps; a draft whose cache is damaged changes no text,"
        " only this",
    ),
    "seeded_parity": Definition(
        "as parity, at temperature > 0 with a seed per prompt",
        "prompts whose speculative text differs from the plain one under the same seed",
        "prompts compared",
        "under the coupled rule a seed fixes the noise of every position, so the next token is the"
        " largest of logits + temperature * noise, drafted or not. Margins are of that sum: a"
        " rounding error of a logit moves it by as much",
    ),
    "kl_mean": Definition(
        "mean over tokens of KL(source || quantized), nats",
        "sum of KL over held-out tokens, teacher-forced",
        "held-out tokens",
        "measured before export",
    ),
    "top1_agreement": Definition(
        "tokens whose most likely token stays the same / tokens",
        "held-out tokens with the same argmax",
        "held-out tokens",
    ),
    "layer_error": Definition(
        "||quantized output - source output|| / ||source output||",
        "Frobenius norm of the difference of one linear's outputs",
        "Frobenius norm of the source's output",
    ),
    "layer_kl": Definition(
        "mean over tokens of KL(source || source with this decoder layer quantized), nats",
        "sum of KL over the first held-out tokens, teacher-forced",
        "these tokens",
        "all other layers, and the KV cache of theirs, are as in the source; layers may make up for"
        " one another, so the sum need not be the KL of all together",
    ),
}


# Figures of a load, where several requests run at once and an open loop has a schedule.
LOAD_DEFINITIONS: dict[str, Definition] = {
    "tokens_per_s": Definition(
        "output tokens / window",
        "output tokens of all answered requests, counted by the server",
        "first request sent (open loop: due) to the end of the last, summed over blocks",
        "of all requests together; the warm-up is outside",
    ),
    "requests_per_s": Definition(
        "answered requests / window", "requests that were answered in full", "the same window"
    ),
    "goodput": Definition(
        "requests that met every stated limit / window",
        "answered requests whose latencies all kept within --goodput; itl and icl by the"
        " largest gap",
        "the same window",
        "a failed request, and a latency that was not measured, meet none",
    ),
    "speed": Definition(
        "(output tokens / e2e) of one arm over the other's",
        "output tokens of the last arm / e2e of its requests, both summed",
        "the same of the first arm, in pairs of the same prompt and round",
        f"{CONFIDENCE:.0%} bootstrap interval over prompts and rounds; at a fixed concurrency also"
        " the ratio of throughputs",
    ),
    "ratio": Definition(
        "percentile of the last arm / percentile of the first",
        "a latency's percentile in the last arm",
        "the same percentile in the first",
        f"above 1 is slower; {CONFIDENCE:.0%} bootstrap interval over prompts and rounds, drawn"
        " alike for both arms",
    ),
    "ttft": Definition(
        "first tokens received - request sent (open loop: due)",
        "time of the first chunk with tokens, or with text where none are counted",
        "1 request",
    ),
    "e2e": Definition(
        "last tokens received - request sent (open loop: due)",
        "time of the last chunk with tokens or text",
        "1 request",
    ),
    "lag": Definition(
        "request sent - request due",
        "time at which it was handed to the network",
        "1 request",
        "open loop",
    ),
    "errors": Definition(
        "failed / sent requests", "refused, broken, late or contradictory answers", "requests sent"
    ),
}


# Figures of a report that validation itself does not measure: of the plan, the advisor, and a sweep
# over concurrency.
DEFINITIONS |= {
    "latency_ratio": Definition(
        "percentile(speculative) / percentile(plain)",
        "a latency's percentile in the speculative arm",
        "the same percentile in the plain arm",
        f"above 1 is slower; {CONFIDENCE:.0%} bootstrap interval over prompts and rounds, drawn"
        " alike for both arms",
    ),
    "stop_words": Definition(
        "requests whose text went past their stop word",
        "requests whose text does not end right before the first place of their stop word",
        "requests sent with a stop word taken from their own plain text",
    ),
    "counters": Definition(
        "counter after - counter before",
        "the server's counter, read before the first request and after the last",
        "the client's own count of the same, from its requests' answers",
    ),
    "peak_memory": Definition(
        "largest resident memory, summed over a tree of processes",
        "bytes, sampled four times a second; exact for a peak of this process alone",
        "",
        "pages that processes share count in each; `serve` is the server's own tree while it was"
        " measured",
    ),
    "planned_memory": Definition(
        "sum over the parts of a stage at its peak",
        "bytes of weights, caches, activations and the stated margins, by arithmetic before"
        " anything runs",
        "",
        "the table of memory names every part with its arithmetic; libraries are in it where it"
        " says so",
    ),
    "alpha": Definition(
        "mean over output tokens of the probability that a draft token is kept there",
        "greedy: places where both models choose alike; rejection: sum over tokens of min(target,"
        " draft)",
        "places of target-generated texts, both models teacher-forced",
        f"{CONFIDENCE:.0%} bootstrap interval over prompts",
    ),
    "predicted_speedup": Definition(
        "formula x dependence x verify cost x host",
        "formula: (1 - alpha^(k + 1)) / ((1 - alpha)(k c + 1)), Leviathan et al. 2023, k the draft"
        " length and c a draft step's time over a target step's; dependence: tokens per step of the"
        " replayed accept indicators over the formula's",
        "verify cost: what a forward of k + 1 tokens takes beyond one of 1; host: its work per"
        " step, prefill, and blocks cut short at the end of a text",
        "measured stands beside it where such a length was run",
    ),
    "break_even": Definition(
        "tokens per step at which speculation costs nothing",
        "time of a step: drafting, verifying and the host's work",
        "time of a plain token",
        "break-even alpha: the acceptance that gives so many tokens per step",
    ),
    "grid": Definition(
        "output tokens / time of requests, of every pair of precisions at its best draft length",
        "output tokens, greedy, one request at a time",
        "time of these requests, in turns with the other pairs; or as predicted for the GPU that is"
        " named",
        "best: the fastest pair whose target keeps validation.quality.max_kl by the upper bound of"
        " its KL",
    ),
    "throughput": LOAD_DEFINITIONS["tokens_per_s"],
    "load_speed": LOAD_DEFINITIONS["speed"],
}
