"""A separate program that loads an `LLM` from a file of arguments and generates one token.

It is not part of the build's process, since TensorRT-LLM starts processes that import the main
module again, and since only the end of a process surely frees a GPU's memory. The last line of its
output is {"tokens": N, "gpu": NAME}.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main(file: str) -> None:
    tensorrt_llm = importlib.import_module("tensorrt_llm")
    import torch

    args = json.loads(Path(file).read_text(encoding="utf-8"))
    speculative = args.get("speculative_config")
    if speculative is not None:
        schedule = speculative.get("draft_len_schedule")
        if schedule is not None:  # JSON has no whole numbers as keys
            speculative["draft_len_schedule"] = {
                int(batch): length for batch, length in schedule.items()
            }
        base = tensorrt_llm.llmapi.llm_args.DecodingBaseConfig
        if hasattr(base, "from_dict"):
            args["speculative_config"] = base.from_dict(speculative)
    llm = tensorrt_llm.LLM(**args)
    done = llm.generate([[1, 2, 3]], tensorrt_llm.SamplingParams(max_tokens=1, end_id=-1))
    tokens = len(done[0].outputs[0].token_ids)
    llm.shutdown()
    print(json.dumps({"tokens": tokens, "gpu": torch.cuda.get_device_name(0)}))


if __name__ == "__main__":
    main(sys.argv[1])
