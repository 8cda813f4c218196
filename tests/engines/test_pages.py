"""KV caches take memory as they are used, and weights lie in huge pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from toolkit.engines.embedded.kernels import pack_linear
from toolkit.engines.embedded.memory import HUGE_PAGE_BYTES, unused_zeros, zeros_in_huge_pages
from toolkit.engines.embedded.model import Linear

with_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages"
)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def mapping_of(tensor: torch.Tensor) -> dict[str, str]:
    """What the kernel says of the memory in which a tensor lies."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= tensor.data_ptr() < int(span[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def test_a_cache_takes_memory_only_where_it_has_been_used() -> None:
    before = anonymous_bytes()
    cache = unused_zeros((8, 4, 2**21), torch.bfloat16)  # 128 MiB
    assert anonymous_bytes() - before < 2**23
    assert cache.shape == (8, 4, 2**21)
    assert not cache[3, 0, :100].any()
    cache[5] = 1.0
    assert 2**24 <= anonymous_bytes() - before < 2**25


@with_huge_pages
def test_a_cache_takes_no_huge_pages_even_where_the_kernel_gives_them_to_all() -> None:
    """nh is the kernel's flag for it; what it is set to for all cannot be changed here."""
    assert "nh" in mapping_of(unused_zeros((8, 4, 2**21), torch.bfloat16))["VmFlags"].split()


@with_huge_pages
def test_packed_weights_ask_for_huge_pages() -> None:
    weight = torch.arange(2048 * 1024, dtype=torch.float32).view(2048, 1024)
    packed = pack_linear(Linear(weight), torch.float32).weight
    assert torch.equal(packed.transpose(1, 2).reshape(2048, 1024), weight)
    assert "hg" in mapping_of(packed)["VmFlags"].split()


def test_what_lies_in_huge_pages_begins_and_ends_within_some() -> None:
    """Else its ends lie in small ones."""
    for num_bytes in (HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 3):
        zeros = zeros_in_huge_pages((num_bytes,), torch.int8)
        assert zeros.data_ptr() % HUGE_PAGE_BYTES == 0
        pages = -(-num_bytes // HUGE_PAGE_BYTES)
        beyond = zeros.untyped_storage().nbytes() - zeros.storage_offset()
        assert beyond >= pages * HUGE_PAGE_BYTES


@pytest.mark.parametrize("size", [(0, 3), (7, 5), (3, HUGE_PAGE_BYTES)])
@pytest.mark.parametrize("make", [unused_zeros, zeros_in_huge_pages])
def test_zeros_have_the_size_and_dtype_that_were_asked_for(
    make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], size: tuple[int, ...]
) -> None:
    zeros = make(size, torch.int8)
    assert (tuple(zeros.shape), zeros.dtype) == (size, torch.int8)
    assert not zeros.any()
