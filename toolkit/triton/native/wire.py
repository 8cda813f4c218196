"""What the backend (backend.cpp) and a model's process say to each other: frames over a socket.

A frame is the u32 length of the rest, a byte that says its kind, and fields in the machine's byte
order: numbers, and texts behind their u32 length. A tensor is two such texts, its head and its
content. Both sides are built from the same sources and run on the same machine, so there is no
version in it.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CANCELLED",
    "FAILED",
    "FINAL",
    "INIT",
    "READY",
    "REQUEST",
    "SOCKET",
    "STOP",
    "TYPES",
    "Reader",
    "Received",
    "Values",
    "change_frame",
    "error_frame",
    "family_frame",
    "log_frame",
    "metric_frame",
    "response_frame",
    "simple_frame",
    "values_of",
]

SOCKET = 3  # the worker's file descriptor
# Kinds. To the worker:
INIT, REQUEST, CANCELLED, STOP = b"I", b"R", b"C", b"S"
# From the worker:
READY, FAILED, RESPONSE, FAMILY, METRIC, VALUE, LOG = b"A", b"F", b"P", b"M", b"N", b"V", b"L"

FINAL: Final = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
NOTHING, OUTPUTS, ERROR = 0, 1, 2  # what a response holds
TEXT, INT, BOOL, DOUBLE = 0, 1, 2, 3  # TRITONSERVER_ParameterType
BYTES = 13  # TRITONSERVER_TYPE_BYTES: elements behind their u32 length
# TRITONSERVER_DataType of what tensors of ours hold, and the type of their elements.
TYPES: Mapping[int, Any] = {
    1: np.dtype(np.bool_),
    5: np.dtype(np.uint64),
    8: np.dtype(np.int32),
    9: np.dtype(np.int64),
    11: np.dtype(np.float32),
    BYTES: np.dtype(np.object_),
}
MAX_DIMS, MAX_DIM = 8, 2**31 - 1  # of what is read; numpy takes no array of any shape
# Of the elements that Python takes one by one, on a thread that reads everybody's requests. A model
# whose tensors are read so takes 64 stop words at most, and refuses more with a better message.
MAX_ELEMENTS = 2**14
NUMBERS = {dtype: number for number, dtype in TYPES.items()}
U32, PAIR, RESPONSE_HEAD = struct.Struct("=I"), struct.Struct("=II"), struct.Struct("=IcQBB")
VALUE_FRAME = struct.Struct("=IcIBd")


class Reader:
    """Reads frames, and the fields of the last one. Raises EOFError at the end of the connection,
    and IndexError for a frame that is too short.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame = b""
        self._at = 0

    def next_kind(self) -> bytes:
        (size,) = U32.unpack(self._exactly(4))
        self._frame, self._at = self._exactly(size), 1
        return self._frame[:1]

    def number(self, code: str) -> Any:
        """A number with this code of `struct`."""
        at, size = self._at, struct.calcsize("=" + code)
        self._skip(size)
        return struct.unpack_from("=" + code, self._frame, at)[0]

    def text(self) -> str:
        return self.raw().decode("utf-8", "surrogateescape")

    def size(self) -> int:
        at = self._at
        self._skip(4)
        size: int = U32.unpack_from(self._frame, at)[0]
        return size

    def raw(self) -> bytes:
        """Bytes behind their u32 length."""
        size = self.size()
        at = self._at
        self._skip(size)
        return self._frame[at : self._at]

    def parameter(self) -> tuple[str, str | int | bool | float]:
        name, kind = self.text(), self.number("B")
        if kind == TEXT:
            return name, self.text()
        if kind == BOOL:
            return name, bool(self.number("B"))
        return name, self.number("q" if kind == INT else "d")

    def tensor(self) -> Received:
        """Raises ValueError for one that no client of ours sends."""
        head, content = self.raw(), self.raw()
        return Received(_read_head(head), content)

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._frame):
            raise IndexError("a frame ends early")

    def _exactly(self, size: int) -> bytes:
        content = self._stream.read(size)
        if len(content) < size:
            raise EOFError
        return content


class Head(NamedTuple):
    """What a tensor is. size: its elements. elements: reads them; None for texts, which are split
    when they are asked for, and for more than are read one by one.
    """

    name: str
    type_number: int
    shape: tuple[int, ...]
    size: int
    elements: struct.Struct | None


# Clients send the same few all the time.
@functools.lru_cache(maxsize=1024)
def _read_head(head: bytes) -> Head:
    """Raises ValueError for a tensor that no client of ours sends."""
    (size,) = U32.unpack_from(head)
    name = head[4 : 4 + size].decode("utf-8", "surrogateescape")
    type_number, dims = PAIR.unpack_from(head, 4 + size)
    shape = struct.unpack_from(f"={dims}q", head, 4 + size + PAIR.size)
    if type_number not in TYPES:
        raise ValueError(f"{name} has a type that no model of ours reads: {type_number}")
    if dims > MAX_DIMS or not all(0 <= dim <= MAX_DIM for dim in shape):
        raise ValueError(f"{name} has a shape that no model of ours reads: {list(shape)}")
    count = math.prod(shape)
    one_by_one = type_number != BYTES and count <= MAX_ELEMENTS
    elements = struct.Struct(f"{count}{TYPES[type_number].char}") if one_by_one else None
    return Head(name, type_number, shape, count, elements)


class Received:
    """A tensor that was read. The names without a docstring are Triton's."""

    __slots__ = ("_content", "_head")

    def __init__(self, head: Head, content: bytes) -> None:
        """Raises ValueError if the content does not fit the head. Texts are not looked at."""
        if head.type_number != BYTES:
            size = head.size * TYPES[head.type_number].itemsize
            if len(content) != size:
                raise ValueError(
                    f"the content of {head.name} does not fit its shape: {len(content)} bytes for"
                    f" {list(head.shape)}"
                )
        self._head, self._content = head, content

    def name(self) -> str:
        return self._head.name

    def elements(self) -> list[Any]:
        """Flat. To make an array of a few takes longer. Raises ValueError for more than
        MAX_ELEMENTS, and for texts that do not fit the shape.
        """
        name, _, _, count, elements = self._head
        if elements is not None:
            return list(elements.unpack(self._content))
        if count > MAX_ELEMENTS:
            raise ValueError(f"{name} holds {count} elements; {MAX_ELEMENTS} at most are read")
        return self._texts(count)

    def as_numpy(self) -> NDArray[Any]:
        """Raises ValueError as `elements` does, where it holds texts."""
        _, type_number, shape, _, _ = self._head
        dtype = TYPES[type_number]
        if type_number != BYTES:
            return np.frombuffer(self._content, dtype).reshape(shape)
        return np.array(self.elements(), dtype).reshape(shape)

    def _texts(self, count: int) -> list[bytes]:
        """Clients write the content: it need not be whole."""
        texts: list[bytes] = []
        content, at = self._content, 0
        while at < len(content) and len(texts) <= count:
            end = at + 4
            size = U32.unpack_from(content, at)[0] if end <= len(content) else len(content)
            at = end + size
            if at > len(content):
                raise ValueError(f"an element of {self.name()} ends early")
            texts.append(content[end:at])
        if len(texts) != count:
            raise ValueError(f"{self.name()} does not hold {count} elements")
        return texts


def simple_frame(kind: bytes, text: str | None = None) -> bytes:
    """A frame without fields, or with one text."""
    body = kind if text is None else kind + _text(text)
    return U32.pack(len(body)) + body


class Values(NamedTuple):
    """A tensor of one dimension, as a frame holds it."""

    type_number: int
    length: int
    content: bytes


def values_of(dtype: np.dtype[Any]) -> Callable[[Sequence[Any]], Values]:
    """What makes a tensor of elements of this type, bytes for texts. To make an array of a few
    takes longer than all else that a response needs. It raises struct.error or OverflowError for
    what does not fit the type.
    """
    number, code = NUMBERS[dtype], dtype.char
    if number == BYTES:
        return lambda elements: Values(number, len(elements), _content(code, elements))
    one = struct.Struct(code).pack  # most tensors hold one

    def values(elements: Sequence[Any]) -> Values:
        content = one(*elements) if len(elements) == 1 else _content(code, elements)
        return Values(number, len(elements), content)

    return values


def response_frame(number: int, flags: int, outputs: Sequence[tuple[str, Any]] | None) -> bytes:
    """A response to request `number`; outputs: (name, array or Values). None: only the flags."""
    if outputs is None:
        return RESPONSE_HEAD.pack(RESPONSE_HEAD.size - 4, RESPONSE, number, flags, NOTHING)
    parts = [U32.pack(len(outputs))]
    for name, array in outputs:
        if isinstance(array, Values):
            head, content = _tensor_head(name, array.type_number, (array.length,)), array.content
        else:
            head = _tensor_head(name, NUMBERS[array.dtype], array.shape)
            is_text = array.dtype == np.object_
            content = _content("O", array.reshape(-1).tolist()) if is_text else array.tobytes()
        parts += (head, U32.pack(len(content)), content)
    body = b"".join(parts)
    size = RESPONSE_HEAD.size - 4 + len(body)
    return RESPONSE_HEAD.pack(size, RESPONSE, number, flags, OUTPUTS) + body


def error_frame(number: int, code: int, message: str) -> bytes:
    """The last response to request `number`. code: TRITONSERVER_Error_Code."""
    body = U32.pack(code) + _text(message)
    size = RESPONSE_HEAD.size - 4 + len(body)
    return RESPONSE_HEAD.pack(size, RESPONSE, number, FINAL, ERROR) + body


def family_frame(family: int, kind: int, name: str, description: str) -> bytes:
    """kind: TRITONSERVER_MetricKind."""
    return _framed(FAMILY + struct.pack("=IB", family, kind) + _text(name) + _text(description))


def metric_frame(
    metric: int, family: int, labels: Mapping[str, str], buckets: Sequence[float]
) -> bytes:
    """buckets: the upper limits of a histogram; else empty."""
    pairs = b"".join(_text(name) + _text(value) for name, value in labels.items())
    return _framed(
        METRIC
        + struct.pack("=III", metric, family, len(labels))
        + pairs
        + struct.pack(f"=I{len(buckets)}d", len(buckets), *buckets)
    )


def change_frame(metric: int, change: int, value: float) -> bytes:
    """change: 0 increments, 1 sets, 2 observes."""
    return VALUE_FRAME.pack(VALUE_FRAME.size - 4, VALUE, metric, change, value)


def log_frame(level: int, message: str) -> bytes:
    """level: TRITONSERVER_LogLevel."""
    return _framed(LOG + struct.pack("=B", level) + _text(message))


def _content(code: str, elements: Sequence[Any]) -> bytes:
    """code: of the type's elements, which numpy and `struct` write alike."""
    if code == "O":
        return b"".join([U32.pack(len(element)) + element for element in elements])
    return struct.pack(f"{len(elements)}{code}", *elements)


def _framed(body: bytes) -> bytes:
    return U32.pack(len(body)) + body


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogateescape")
    return U32.pack(len(content)) + content


@functools.lru_cache(maxsize=1024)
def _tensor_head(name: str, type_number: int, shape: tuple[int, ...]) -> bytes:
    head = _text(name) + struct.pack(f"=II{len(shape)}q", type_number, len(shape), *shape)
    return U32.pack(len(head)) + head
