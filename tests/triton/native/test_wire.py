"""Frames say what was put into them, and nothing else is read out of a frame that is too short."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from toolkit.triton.native import wire

NUMBERS = [dtype for dtype in wire.TYPES.values() if dtype != np.object_]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0)
arrays = st.one_of(
    st.sampled_from(NUMBERS).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)),
    st.lists(st.binary(max_size=40), max_size=4).map(lambda rows: np.array(rows, dtype=object)),
)


def tensor_head(name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    """Behind its length."""
    return wire._tensor_head(name, wire.NUMBERS[np.dtype(dtype)], shape)


def framed(head: bytes, content: bytes) -> bytes:
    """A frame of one tensor."""
    body = wire.REQUEST + head + struct.pack("=I", len(content)) + content
    return struct.pack("=I", len(body)) + body


def reader_of(*frames: bytes) -> wire.Reader:
    return wire.Reader(io.BytesIO(b"".join(frames)))


@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from((0, wire.FINAL)),
    st.lists(st.tuples(st.text(max_size=12), arrays), max_size=3),
)
def test_a_response_reads_back(number: int, flags: int, outputs: list[tuple[str, Any]]) -> None:
    reader = reader_of(wire.response_frame(number, flags, outputs))
    assert reader.next_kind() == wire.RESPONSE
    assert (reader.number("Q"), reader.number("B")) == (number, flags)
    assert reader.number("B") == wire.OUTPUTS
    assert reader.number("I") == len(outputs)
    for name, array in outputs:
        tensor = reader.tensor()
        assert tensor.name() == name
        assert str(tensor.elements()) == str(array.reshape(-1).tolist())  # as texts, for NaN
        read = tensor.as_numpy()
        assert read.dtype == array.dtype
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes() or read.tolist() == array.tolist()


@given(arrays)
def test_elements_are_written_as_an_array_of_them(array: Any) -> None:
    flat = array.reshape(-1)
    values = wire.values_of(array.dtype)(flat.tolist())
    frames = [wire.response_frame(1, 0, [("name", content)]) for content in (flat, values)]
    assert frames[0] == frames[1]


@given(st.text(max_size=30), st.integers(0, 7))
def test_an_error_reads_back(message: str, code: int) -> None:
    reader = reader_of(wire.error_frame(7, code, message), wire.simple_frame(wire.READY))
    assert reader.next_kind() == wire.RESPONSE
    assert (reader.number("Q"), reader.number("B"), reader.number("B")) == (
        7,
        wire.FINAL,
        wire.ERROR,
    )
    assert (reader.number("I"), reader.text()) == (code, message)
    assert reader.next_kind() == wire.READY


def test_a_metric_reads_back() -> None:
    reader = reader_of(
        wire.family_frame(1, 2, "seconds", "how long"),
        wire.metric_frame(3, 1, {"model": "m", "le": "+Inf"}, (0.5, 1.0)),
        wire.change_frame(3, 2, 0.25),
    )
    assert reader.next_kind() == wire.FAMILY
    assert [reader.number("I"), reader.number("B"), reader.text(), reader.text()] == [
        *(1, 2),
        *("seconds", "how long"),
    ]
    assert reader.next_kind() == wire.METRIC
    assert [reader.number("I"), reader.number("I"), reader.number("I")] == [3, 1, 2]
    assert [reader.text() for _ in range(4)] == ["model", "m", "le", "+Inf"]
    assert [reader.number("I"), reader.number("d"), reader.number("d")] == [2, 0.5, 1.0]
    assert reader.next_kind() == wire.VALUE
    assert [reader.number("I"), reader.number("B"), reader.number("d")] == [3, 2, 0.25]


def test_bytes_that_are_no_text_survive() -> None:
    reader = reader_of(wire.simple_frame(wire.FAILED, "caf\udcff"))
    reader.next_kind()
    assert reader.text() == "caf\udcff"


def test_a_frame_that_ends_early_is_an_error() -> None:
    reader = reader_of(struct.pack("=I", 5) + wire.FAILED + struct.pack("=I", 9))
    reader.next_kind()
    with pytest.raises(IndexError):
        reader.text()
    with pytest.raises(EOFError):
        reader_of(struct.pack("=I", 5) + b"F").next_kind()
    with pytest.raises(EOFError):
        reader_of().next_kind()


@pytest.mark.parametrize(
    ("dtype", "content", "shape"),
    [
        (object, b"\x05\0\0\0abc", (1,)),  # shorter than it says
        (object, b"\x01\0\0\0a\x01", (1,)),  # a length that ends early
        (object, b"\xff\xff\xff\xffa", (1,)),
        (object, b"\x01\0\0\0a\x01\0\0\0b", (1,)),  # more than the shape says
        (object, b"", (1,)),
        (np.int32, bytes(7), (2,)),
        (np.int32, bytes(8), (1,)),
        (np.int32, bytes(8), (-1, -2)),
        (np.bool_, bytes(2), (2, 2)),
    ],
)
def test_content_that_is_not_whole_is_an_error_that_names_the_tensor(
    dtype: Any, content: bytes, shape: tuple[int, ...]
) -> None:
    reader = reader_of(framed(tensor_head("text_input", dtype, shape), content))
    reader.next_kind()
    with pytest.raises(ValueError, match="text_input"):
        reader.tensor().elements()


@pytest.mark.parametrize(("dtype", "size", "element"), [(object, 4, b""), (np.int64, 8, 0)])
def test_elements_are_not_read_one_by_one_where_there_are_many(
    dtype: Any, size: int, element: object
) -> None:
    def of(count: int) -> wire.Received:
        content = bytes(size * count)
        reader = reader_of(framed(tensor_head("stop", dtype, (1, count)), content))
        reader.next_kind()
        return reader.tensor()

    assert of(wire.MAX_ELEMENTS).elements() == [element] * wire.MAX_ELEMENTS
    with pytest.raises(ValueError, match="stop holds 16385 elements; 16384 at most are read"):
        of(wire.MAX_ELEMENTS + 1).elements()
