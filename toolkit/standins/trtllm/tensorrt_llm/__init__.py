"""A stand-in for TensorRT-LLM's Python package, as far as the PyTorch flow uses it: `LLM`,
`SamplingParams` and the classes of their arguments, which refuse what upstream's refuse.

The environment variable TENSORRT_LLM_STAND_IN chooses the release; without it, 1.2.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .llmapi import llm_args
from .releases import RELEASE
from .toy import SamplingParams, Toy

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = RELEASE.name
DRAFT_LEN = 2  # of the toy, whatever the arguments say
CONTAINER_FOLDER = "/models/"


class LLM(Toy):
    """TRT llmapi/llm.py: the arguments by name, then `cls(**kwargs)` of their class (LA
    from_kwargs). A mapping is not turned into an object here; `trtllm-serve` does that before.
    """

    def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
        args = llm_args.LlmArgs(model=model, tokenizer=tokenizer, **kwargs)
        speculative = args.speculative_config
        draft = None if speculative is None else speculative.draft_model
        here = [
            str(folder)
            for folder in (model, draft)
            if folder is not None and not str(folder).startswith(CONTAINER_FOLDER)
        ]
        if missing := [folder for folder in here if not Path(folder).is_dir()]:
            raise FileNotFoundError(f"no checkpoint at {missing}")
        is_in_target = getattr(speculative, "is_one_model", False)  # a head, or MTP layers
        super().__init__(
            0 if speculative is None else DRAFT_LEN,
            samples=_samples(args) if not is_in_target else _samples_with_head(speculative),
            one_model=RELEASE.one_model or is_in_target,
        )
        self.args = args
        if not RELEASE.is_pytorch:
            print("stand-in LLM: compiles an engine", flush=True)
        kind = "plain" if speculative is None else "speculative"
        print(f"stand-in LLM: {kind}", flush=True)


def _samples(args: Any) -> bool:
    """Whether requests without a head are sampled at all."""
    return bool(not RELEASE.has_mixed_sampler or args.enable_mixed_sampler)


def _samples_with_head(speculative: Any) -> bool:
    return RELEASE.head_sampling == "requests" or (
        RELEASE.head_sampling == "option" and speculative.allow_advanced_sampling
    )
