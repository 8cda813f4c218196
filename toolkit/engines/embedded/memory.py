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
    # Where the kernel gives huge pages to everybody, a byte would take 2 MiB.
    return _zeros(size, dtype, "MADV_NOHUGEPAGE")


def zeros_in_huge_pages(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages, as far as they fill some and the kernel has them to give."""
    if math.prod(size) * dtype.itemsize < HUGE_PAGE_BYTES:
        return torch.zeros(size, dtype=dtype)
    return _zeros(size, dtype, "MADV_HUGEPAGE")


def _zeros(size: tuple[int, ...], dtype: torch.dtype, advice: str) -> Tensor:
    num_bytes = math.prod(size) * dtype.itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(size)
