"""GPUs: memory, bandwidth and dense tensor-core rates, as their vendor states them.

Datasheets advertise rates with 2:4 sparsity; the rates here are without it. `memory_mib` is the
memory that the driver leaves to a program, a bit less than advertised. The FP8 or INT8 rate is None
if the GPU has no such unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.facts.source import Confidence, Source

__all__ = ["DRIVER_NAMES", "GPUS", "PUBLISHED", "Gpu", "Published"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """sm: compute capability times ten. Bandwidth in GB/s, rates in dense TFLOP/s or TOP/s, with
    decimal prefixes.
    """

    name: str
    sm: int
    memory_mib: int
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    int8_tops: float | None
    source: Source

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20


def _sheet(name: str, confidence: Confidence = "A") -> Source:
    return Source(f"NVIDIA {name}; memory as nvidia-smi lists it", confidence)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 80, 40536, 1555.0, 312.0, None, 624.0, _sheet("A100 datasheet")),
        Gpu("A100", 80, 81920, 2039.0, 312.0, None, 624.0, _sheet("A100 datasheet (80 GB, SXM)")),
        Gpu("A30", 80, 24576, 933.0, 165.0, None, 330.0, _sheet("A30 datasheet")),
        Gpu("A10", 86, 23028, 600.0, 125.0, None, 250.0, _sheet("A10 datasheet")),
        Gpu("L4", 89, 23034, 300.0, 121.0, 242.5, 242.5, _sheet("L4 datasheet")),
        Gpu("L40S", 89, 46068, 864.0, 362.0, 733.0, 733.0, _sheet("L40S datasheet")),
        Gpu(
            "RTX4090",
            89,
            24564,
            1008.0,
            165.2,
            330.3,
            660.6,
            _sheet("Ada architecture whitepaper (FP32 accumulation)"),
        ),
        Gpu(
            "RTX5090",
            120,
            32607,
            1792.0,
            209.5,
            419.0,
            838.0,
            _sheet("RTX Blackwell whitepaper (FP32 accumulation)"),
        ),
        Gpu("H100", 90, 81559, 3350.0, 989.4, 1978.9, 1978.9, _sheet("H100 datasheet (SXM)")),
        Gpu("H100-NVL", 90, 95830, 3900.0, 835.5, 1670.5, 1670.5, _sheet("H100 datasheet (NVL)")),
        Gpu("H200", 90, 143771, 4800.0, 989.4, 1978.9, 1978.9, _sheet("H200 datasheet (SXM)")),
        Gpu(
            "GH200",
            90,
            97871,
            4000.0,
            989.4,
            1978.9,
            1978.9,
            _sheet("GH200 datasheet (96 GB HBM3)"),
        ),
        Gpu(
            "B200",
            100,
            183359,
            7700.0,
            2250.0,
            4500.0,
            4500.0,
            _sheet("Blackwell architecture brief, table 3 (HGX)"),
        ),
        Gpu("B300", 103, 275040, 8000.0, 2250.0, 4500.0, 150.0, _sheet("HGX B300 datasheet", "C")),
    )
}


@dataclass(frozen=True, slots=True)
class Published:
    """A serving speed that a vendor states, at batch size 1. share: its ratio to the upper bound
    that bandwidth sets.
    """

    model: str
    quant_algo: str
    gpu: str
    tokens_per_s: float
    share: float
    source: Source

    @property
    def detail(self) -> str:
        """The end of a sentence about the bound: it refers to the bound as "it"."""
        speed = (
            f"{self.tokens_per_s:.0f} tokens/s for {self.model} in {self.quant_algo} on one"
            f" {self.gpu}"
        )
        return f"NVIDIA's {speed} are {self.share:.0%} of it"


PUBLISHED = Published(
    "Llama 3.3 70B",
    "FP8",
    "H200",
    51.14,
    0.75,
    Source(
        "NVIDIA developer blog, Boost Llama 3.3 70B Inference Throughput 3x with TensorRT-LLM"
        " Speculative Decoding",
        "A",
    ),
)

# Words of the driver's name -> row. The first match counts, so narrower names come first.
DRIVER_NAMES = {
    "GH200": "GH200",
    "B300": "B300",
    "B200": "B200",
    "H200": "H200",
    "H100 NVL": "H100-NVL",
    "H100": "H100",
    "A100 40GB": "A100-40GB",
    "A100": "A100",
    "A30": "A30",
    "A10": "A10",
    "L40S": "L40S",
    "L4": "L4",
    "RTX 4090": "RTX4090",
    "RTX 5090": "RTX5090",
}
