"""From engine directories to text: what the server process and `toolkit generate` load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import EOS_ID
from tests.support.runtimes import make_request, serve, serve_one
from toolkit.engines.stage import compile_engine
from toolkit.errors import CheckpointError, PairingError, UsageError
from toolkit.inprocess import eos_token_ids, load_runtime
from toolkit.interfaces import EngineSpec
from toolkit.records.build import QuantizedCheckpoint


def build(role: str, checkpoint: Path, out_dir: Path, dtype: str = "float32") -> Path:
    config = json.loads((checkpoint / "config.json").read_text())
    record = QuantizedCheckpoint(
        role=role,
        path=checkpoint,
        quant_algo=None,
        kv_cache_quant_algo=None,
        architecture=config["architectures"][0],
        vocab_size=config["vocab_size"],
        weight_bytes=0,
        quality=None,
        checks=(),
    )
    limits: dict[str, Any] = {
        "max_batch_size": 2,
        "max_input_len": 40,
        "max_seq_len": 96,
        "mode": "eager",
        "dtype": dtype,
    }
    spec = EngineSpec(role=role, max_draft_len=3 if role == "target" else 0, **limits)
    compile_engine("torch", record, spec, out_dir, lambda done, total, what: None)
    return out_dir


@pytest.fixture(scope="module")
def engines(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("engines")
    return build("target", tiny_pair[0], folder / "target"), build(
        "draft", tiny_pair[1], folder / "draft"
    )


def copy(engine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(engine, tmp_path / engine.name)


def test_engine_directories_become_a_runtime_that_speaks(engines: tuple[Path, Path]) -> None:
    threads = torch.get_num_threads()
    try:
        runtime = load_runtime(*engines, threads=1, max_draft_len=3)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    prompt = runtime.codec.encode("def read(path):")
    speculative = serve_one(runtime, make_request(prompt, 20))
    plain = serve_one(runtime, make_request(prompt, 20, draft_len=0))
    assert speculative.ids == plain.ids
    assert speculative.text == plain.text
    assert speculative.stats.drafted > 0
    assert runtime.settings.eos_token_ids == (EOS_ID,)
    assert runtime.settings.max_input_len == 40
    runtime.close()


def test_without_a_draft_or_with_draft_length_0_decoding_is_plain(
    engines: tuple[Path, Path],
) -> None:
    for draft, draft_len in ((None, 3), (engines[1], 0)):
        runtime = load_runtime(engines[0], draft, max_draft_len=draft_len)
        assert runtime.settings.max_draft_len == 0
        assert serve_one(runtime, make_request(max_tokens=4)).stats.drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompt_lookup_serves_what_plain_decoding_does(
    tiny_pair: tuple[Path, Path], tmp_path: Path, temperature: float
) -> None:
    """Without a draft engine; greedy, and seeded under `coupled`, the texts are the same, and in
    float64 to the last one.
    """
    target = build("target", tiny_pair[0], tmp_path / "target", dtype="float64")
    looked_up = load_runtime(
        target, None, max_draft_len=4, ngram_size=3, draft_len_schedule=[(1, 4), (2, 1)]
    )
    plain = load_runtime(target, None)
    prompt = tuple(plain.codec.encode("one two one two one two one"))
    sampling = (
        {"temperature": temperature}
        if temperature == 0.0
        else {"temperature": temperature, "seed": 3}
    )
    requests = [
        make_request(prompt[: len(prompt) - index], 32, str(index), **sampling)
        for index in range(4)
    ]
    served = serve(looked_up, requests)
    assert [each.ids for each in served] == [each.ids for each in serve(plain, requests)]
    assert sum(each.stats.drafted for each in served) > 0


def test_adaptive_lengths_serve_what_plain_decoding_does(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """The engines are timed first. In float64 the texts are the same to the last one."""
    target = build("target", tiny_pair[0], tmp_path / "target", dtype="float64")
    draft = build("draft", tiny_pair[1], tmp_path / "draft", dtype="float64")
    adaptive = load_runtime(target, draft, max_draft_len=3, adaptive={"probe_every_tokens": 8})
    plain = load_runtime(target, None)
    prompts = [tuple(plain.codec.encode(f"one two {index}")) for index in range(4)]
    samplings = ({}, {"temperature": 0.9, "seed": 5})
    requests = [
        make_request(prompt, 60, f"{index} {len(sampling)}", **sampling)
        for index, prompt in enumerate(prompts)
        for sampling in samplings
    ]
    served = serve(adaptive, requests)
    assert [each.ids for each in served] == [each.ids for each in serve(plain, requests)]
    for each in served:
        assert set(each.stats.steps_by_reason) <= {"pays", "acceptance", "load", "measuring"}


def test_a_draft_with_another_tokenizer_is_refused(
    engines: tuple[Path, Path], tmp_path: Path
) -> None:
    foreign = copy(engines[1], tmp_path)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[7:9]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PairingError, match="first at id 7"):
        load_runtime(engines[0], foreign, max_draft_len=3)


def test_a_draft_length_beyond_the_engines_is_refused(engines: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="too few to verify 500"):
        load_runtime(*engines, max_draft_len=500)


def test_a_folder_that_is_no_engine_is_refused(engines: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not an engine directory"):
        load_runtime(tmp_path, None)
    lame = copy(engines[0], tmp_path)
    (lame / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_runtime(lame, None)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [5, 6]}, [7], (5, 6)),
        ({"eos_token_id": 5}, [7], (5,)),
        ({}, [7, 8], (7, 8)),
        (None, [0], (0,)),
        (None, [], ()),
    ],
)
def test_eos_ids_are_read_where_they_stand(
    tmp_path: Path, generation: dict[str, Any] | None, model: list[int], expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"toolkit": {"shape": {"eos_token_ids": model}}})
    )
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == expected


def test_a_model_without_generation_config_still_knows_its_eos(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_pair[0], tmp_path / "source")
    (source / "generation_config.json").unlink()
    assert eos_token_ids(build("target", source, tmp_path / "engine")) == (EOS_ID,)
