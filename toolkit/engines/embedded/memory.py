"""Memory for tensors on the CPU, in pages that suit what lies in it.

KV caches take small pages, which cost nothing until they are written. Weights take huge ones: every
forward reads all of them, and in pages of 4 KiB even 10 MB are 2,500 addresses to look up, more
than a processor remembers beside those of everything else that runs between two forwards.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HUGE_PAGE_BYTES", "unused_zeros", "zeros_in_huge_pages"]

HUGE_PAGE_BYTES = 2 << 20  # on x86-64


def unused_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written, page by page. They begin at a page."""
    num_bytes = math.prod(size) * dtype.itemsize
    # Where the kernel gives huge pages to everybody, a byte would take 2 MiB.
    return _zeros(max(num_bytes, 1), "MADV_NOHUGEPAGE")[:num_bytes].view(dtype).view(size)


def zeros_in_huge_pages(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages from the first byte to the last, as far as the kernel has them to give.
    Fewer than fill one lie anywhere.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(size, dtype=dtype)
    # Some kernels begin a mapping at any small page. What is not written takes no memory.
    whole_pages = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = _zeros(whole_pages + HUGE_PAGE_BYTES, "MADV_HUGEPAGE")
    begin = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[begin : begin + num_bytes].view(dtype).view(size)


def _zeros(num_bytes: int, advice: str) -> Tensor:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)
