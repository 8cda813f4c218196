"""A separate program that loads an `LLM` with the arguments in a folder and generates one token.

It is not part of the build's process, since TensorRT-LLM starts processes that import the main
module again, and since only the end of a process surely frees a GPU's memory. The last line of its
output is {"tokens": N, "gpu": NAME}.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from toolkit.engines.trtllm.llm_args import read_llm_args
from toolkit.engines.trtllm.speculative_config import with_speculative_config


def main(folder: str) -> None:
    tensorrt_llm = importlib.import_module("tensorrt_llm")
    import torch

    args = with_speculative_config(read_llm_args(Path(folder)), tensorrt_llm.llmapi.llm_args)
    llm = tensorrt_llm.LLM(**args)
    done = llm.generate([[1, 2, 3]], tensorrt_llm.SamplingParams(max_tokens=1, end_id=-1))
    tokens = len(done[0].outputs[0].token_ids)
    llm.shutdown()
    print(json.dumps({"tokens": tokens, "gpu": torch.cuda.get_device_name(0)}))


if __name__ == "__main__":
    main(sys.argv[1])
