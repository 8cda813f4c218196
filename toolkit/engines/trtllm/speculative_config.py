"""What `LLM()` takes as `speculative_config` in the version that is there.

The engine directory and model.yaml hold a mapping with `decoding_type`, which is how TensorRT-LLM's
own YAML files spell it. Up to 1.2 `LLM(**arguments)` refuses that mapping: the classes forbid the
key `decoding_type`, which is theirs and no field, and only `trtllm-serve` turns the mapping into an
object first. The candidates of 1.3 take the mapping itself, since there the key is a field that
tells the classes apart. The server's model, the trial load, the check of the arguments and the
plan's printed call all ask this module.

Source: TRT tensorrt_llm/llmapi/llm_args.py, DecodingBaseConfig and update_llm_args_with_extra_dict
(B).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["printing_module", "with_speculative_config"]

KEY = "speculative_config"


def with_speculative_config(args: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """The arguments as this version's `LLM()` takes them. module: `tensorrt_llm.llmapi.llm_args`.

    Raises what its classes raise for a wrong value: ValueError, TypeError, or AttributeError.
    """
    config = args.get(KEY)
    base = module.DecodingBaseConfig
    if config is None or not hasattr(base, "from_dict"):
        return dict(args)
    # from_dict removes a key from what it is given.
    return {**args, KEY: base.from_dict(dict(config))}


def printing_module(*, takes_mapping: bool) -> SimpleNamespace:
    """Stands for the module of a version that is not installed, and writes what would be called.

    takes_mapping: as `Version.speculative_config` says.
    """
    return SimpleNamespace(DecodingBaseConfig=None if takes_mapping else _PrintedBase)


class _PrintedBase:
    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> _Call:
        return _Call(f"tensorrt_llm.llmapi.llm_args.DecodingBaseConfig.from_dict({config!r})")


class _Call(str):
    """Python code, which is printed without quotes."""

    __slots__ = ()
    __repr__ = str.__str__
