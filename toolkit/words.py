"""The closed sets of words that fields hold. Each set is defined here once.

If code writes a word that is not in its set, the type checker fails; if a file holds one, reading
it fails. Records, config, interfaces and working packages import the sets from here. A set that
only one package uses stays in that package.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = [
    "DRAFT_LEN_REASONS",
    "ROLES",
    "SAMPLING_RULES",
    "AcceptanceChoice",
    "AcceptanceSource",
    "ActivationScales",
    "AgreementSource",
    "AlphaRule",
    "AttnBackend",
    "BuilderChoice",
    "BuiltMode",
    "ComputeDtype",
    "CostSource",
    "DecodingMode",
    "DeployedRule",
    "Device",
    "DivergenceJudge",
    "DivergenceKind",
    "DraftLenReason",
    "DraftVerdict",
    "Drafter",
    "EngineKind",
    "EngineMode",
    "FinishReason",
    "Fp8Compute",
    "GateOutcome",
    "Head",
    "JudgementSeverity",
    "KeyChangeStep",
    "KvCacheQuantAlgo",
    "KvDtype",
    "Layout",
    "LogProbSource",
    "MemoryPlace",
    "ModelPy",
    "ParityArm",
    "ParityKind",
    "QuantAlgo",
    "ReportedPlainArm",
    "RequestAcceptance",
    "RequestOutcome",
    "Role",
    "RunMode",
    "RuntimeRule",
    "SamplingRule",
    "SeedScope",
    "SentArm",
    "ServedLayout",
    "Severity",
    "SpecDtype",
    "SpeculationKind",
    "SpeedBound",
    "TextSource",
    "Verdict",
    "VllmDtype",
    "WireProtocol",
]

# What is built.
Role: TypeAlias = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")
QuantAlgo: TypeAlias = Literal["FP8", "W8A8_SQ_PER_CHANNEL", "W8A16", "NO_QUANT"]
KvCacheQuantAlgo: TypeAlias = Literal["FP8", "INT8"]
EngineKind: TypeAlias = Literal["torch", "trt_engine", "trtllm_pytorch", "vllm"]
BuiltMode: TypeAlias = Literal["compiled", "eager"]  # of the kind torch
EngineMode: TypeAlias = Literal["auto", BuiltMode]  # as the YAML states it
# Of any kind. `engine` and `not built` belong to trt_engine; `runtime` to trtllm_pytorch and vllm,
# which compile when they load.
RunMode: TypeAlias = Literal[BuiltMode, "engine", "not built", "runtime"]
Device: TypeAlias = Literal["cpu", "cuda"]
ComputeDtype: TypeAlias = Literal["float64", "float32", "bfloat16"]
KvDtype: TypeAlias = Literal[ComputeDtype, "fp8"]  # of a KV cache
VllmDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
SpecDtype: TypeAlias = Literal[ComputeDtype, "auto"]  # auto: the checkpoint's own
# How INT8 activations get their scale in vLLM's format
ActivationScales: TypeAlias = Literal["dynamic per token", "static per tensor"]
Fp8Compute: TypeAlias = Literal["native", "dequantized"]
BuilderChoice: TypeAlias = Literal["auto", "local", "container"]
Layout: TypeAlias = Literal["llmapi", "bls"]  # of models that are ours
# vllm: Triton's backend of that name; this machine serves the same arguments by vLLM's own server
ServedLayout: TypeAlias = Literal[Layout, "vllm"]
# Of an engine behind BLS. Its noise is keyed by seed and position, or begins anew with every call.
# Its log-probabilities come from the target's logits, or from a tensor of its own.
SeedScope: TypeAlias = Literal["request", "call"]
LogProbSource: TypeAlias = Literal["logits", "engine"]
AttnBackend: TypeAlias = Literal["TRTLLM", "FLASHINFER", "VANILLA"]
ModelPy: TypeAlias = Literal["ours", "container"]

# How it speculates. auto: coupled for a request with a seed, rejection for one without.
Drafter: TypeAlias = Literal["draft_target", "ngram"]  # of the toolkit's own runtime
# A small network that reads the target's hidden states, so it cannot run on its own.
Head: TypeAlias = Literal["eagle3"]
# mtp: multi-token prediction, by layers of the target's own checkpoint.
SpeculationKind: TypeAlias = Literal[Drafter, Head, "mtp", "none"]
SamplingRule: TypeAlias = Literal["rejection", "coupled", "sample_match"]
SAMPLING_RULES: tuple[SamplingRule, ...] = ("rejection", "coupled", "sample_match")
AcceptanceChoice: TypeAlias = Literal["auto", SamplingRule]
RequestAcceptance: TypeAlias = Literal[AcceptanceChoice, "verify_only"]
RuntimeRule: TypeAlias = Literal["greedy", SamplingRule, "verify_only"]
DeployedRule: TypeAlias = Literal[SamplingRule, "sample_match_greedy_draft"]
AlphaRule: TypeAlias = Literal["greedy", DeployedRule]
DecodingMode: TypeAlias = Literal["greedy", "sampled"]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "error"]
# Why a request has the draft length that it has. fixed: it is not chosen while the request runs.
# request: the request states it. prompt length: its prompt is too long. seed: its text would depend
# on the length. measuring: what lengths cost is being tried out. pays, or not because of the
# acceptance, or at the load. probe: whether it would pay again. draft failed: it raised an error,
# gave no answer, or numbers that are not finite.
DraftLenReason: TypeAlias = Literal[
    "fixed",
    "request",
    "prompt length",
    "seed",
    "measuring",
    "pays",
    "acceptance",
    "load",
    "probe",
    "draft failed",
]
DRAFT_LEN_REASONS: tuple[DraftLenReason, ...] = get_args(DraftLenReason)
RequestOutcome: TypeAlias = Literal[FinishReason, "refused", "overloaded"]  # in a server's metrics

# What is planned and advised.
JudgementSeverity: TypeAlias = Literal["refused", "adjusted", "warning"]
# What happens to a key when a deployment goes to another kind; elsewhere: it is not in the YAML.
KeyChangeStep: TypeAlias = Literal["changed", "removed", "elsewhere"]
MemoryPlace: TypeAlias = Literal["each GPU", "the machine"]
SpeedBound: TypeAlias = Literal["bandwidth", "arithmetic"]
CostSource: TypeAlias = Literal["measured", "measured on the server", "predicted"]
TextSource: TypeAlias = Literal["written by the target", "completions", "held-out text", "prompts"]
DraftVerdict: TypeAlias = Literal["pays", "costs more than it saves", "makes no difference seen"]

# What is measured and judged.
Severity: TypeAlias = Literal["ok", "note", "warning", "error"]
Verdict: TypeAlias = Literal["PASS", "FAIL", "INCONCLUSIVE"]
GateOutcome: TypeAlias = Literal[Verdict, "NOT JUDGED"]
ParityArm: TypeAlias = Literal["verify", "speculative"]
SentArm: TypeAlias = Literal["plain", ParityArm]
ReportedPlainArm: TypeAlias = Literal["request", "restarts", "server"]
DivergenceKind: TypeAlias = Literal["equivalent", "suspicious", "broken", "unexplained"]
ParityKind: TypeAlias = Literal["identical", DivergenceKind]
DivergenceJudge: TypeAlias = Literal["reference", "log_probs"]
AgreementSource: TypeAlias = Literal["engine", "source"]
AcceptanceSource: TypeAlias = Literal["requests", "counters"]
WireProtocol: TypeAlias = Literal["triton-grpc", "triton-http", "openai-chat", "openai-completions"]
