"""The process in which the backend (backend.cpp) runs a model.

The model is the same file that Triton's Python backend runs. It finds there what it imports as
`triton_python_backend_utils`, as far as our models use it: requests, responses, errors, metrics and
the log. The names are Triton's.

The main thread reads requests and calls the model's `execute`. Any thread may send responses. If
the connection ends, tritonserver is gone, and this process ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from toolkit.triton.native import wire

__all__ = ["Connection", "main", "utilities"]

INFO, WARN, ERROR = range(3)  # TRITONSERVER_LogLevel
ERROR_CODES = (
    *("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG"),
    *("UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"),
)  # in the order of TRITONSERVER_Error_Code
TRIM_PERIOD_S = 10.0


class Connection:
    """Sends frames, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._local = threading.local()  # frames: those that the thread keeps back

    def send(self, frame: bytes) -> None:
        """Raises OSError if the backend is gone."""
        frames: list[bytes] | None = getattr(self._local, "frames", None)
        if frames is not None:
            frames.append(frame)
            return
        with self._lock:
            self._socket.sendall(frame)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What this thread sends inside goes out at the end, at once. Else the backend may be run
        after each frame, on the core of this thread, which then holds up what is still to be sent.
        Not to be nested. Raises OSError if the backend is gone.
        """
        frames: list[bytes] = []
        self._local.frames = frames
        try:
            yield
        finally:
            self._local.frames = None
            if frames:
                self.send(b"".join(frames))


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError(Exception):
    """code: of TRITONSERVER_Error_Code, by the names that this class has."""

    def __init__(self, message: str, code: int = ERROR_CODES.index("INTERNAL")) -> None:
        super().__init__(message)
        self.code = code


for _number, _name in enumerate(ERROR_CODES):
    setattr(TritonError, _name, _number)


class TritonModelException(Exception):
    """Why a model cannot be loaded."""


class InferenceResponse:
    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        self.output_tensors, self.error = output_tensors, error


class ResponseSender:
    """Sends the responses to one request. It must not be used after the last one."""

    def __init__(self, connection: Connection, senders: dict[int, ResponseSender], number: int):
        self._connection, self._senders, self._number = connection, senders, number
        self.was_cancelled = False
        senders[number] = self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        is_error = response is not None and response.error is not None
        if flags & wire.FINAL or is_error:
            self._senders.pop(self._number, None)
        if response is None:
            frame = wire.response_frame(self._number, flags, None)
        elif response.error is not None:
            frame = wire.error_frame(self._number, response.error.code, str(response.error))
        else:
            outputs = [(tensor.name(), tensor.as_numpy()) for tensor in response.output_tensors]
            frame = wire.response_frame(self._number, flags, outputs)
        self._connection.send(frame)

    def is_cancelled(self) -> bool:
        return self.was_cancelled


class InferenceRequest:
    """One request, as read from its frame."""

    def __init__(self, reader: wire.Reader, sender: ResponseSender) -> None:
        self._sender = sender
        self._id = reader.text()
        self.named_parameters = dict([reader.parameter() for _ in range(reader.size())])
        self._inputs = [reader.tensor() for _ in range(reader.size())]

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self.named_parameters)

    def inputs(self) -> list[wire.Received]:
        return self._inputs

    def get_response_sender(self) -> ResponseSender:
        return self._sender


class Metric:
    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number

    def increment(self, value: float) -> None:
        self._connection.send(wire.change_frame(self._number, 0, value))

    def set(self, value: float) -> None:
        self._connection.send(wire.change_frame(self._number, 1, value))

    def observe(self, value: float) -> None:
        self._connection.send(wire.change_frame(self._number, 2, value))


def utilities(connection: Connection) -> types.ModuleType:
    """What a model imports as `triton_python_backend_utils`."""

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = range(3)  # TRITONSERVER_MetricKind
        families = metrics = 0

        def __init__(self, name: str, description: str, kind: int) -> None:
            MetricFamily.families += 1
            self._number = MetricFamily.families
            connection.send(wire.family_frame(self._number, kind, name, description))

        def Metric(  # noqa: N802 - Triton's name
            self, labels: Mapping[str, str], buckets: Sequence[float] = ()
        ) -> Metric:
            MetricFamily.metrics += 1
            number = MetricFamily.metrics
            connection.send(wire.metric_frame(number, self._number, labels, buckets))
            return Metric(connection, number)

    class Logger:
        @staticmethod
        def log_info(message: str) -> None:
            connection.send(wire.log_frame(INFO, message))

        @staticmethod
        def log_warn(message: str) -> None:
            connection.send(wire.log_frame(WARN, message))

        @staticmethod
        def log_error(message: str) -> None:
            connection.send(wire.log_frame(ERROR, message))

    module = types.ModuleType("triton_python_backend_utils")
    vars(module).update(
        InferenceResponse=InferenceResponse,
        Logger=Logger,
        MetricFamily=MetricFamily,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=wire.FINAL,
        Tensor=Tensor,
        TritonError=TritonError,
        TritonModelException=TritonModelException,
        together=connection.together,
        values_of=wire.values_of,
    )
    return module


def main() -> NoReturn:
    """Run the model of the folder in sys.argv[1] until the backend says stop."""
    # tritonserver decides when this process ends; a Ctrl-C in its terminal reaches both.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ.pop("TOOLKIT_WORKER_LIBRARY_PATH", None)
    backend = socket.socket(fileno=wire.SOCKET)
    backend.set_inheritable(False)
    connection = Connection(backend)
    threading.Thread(target=_give_back_memory, name="trim", daemon=True).start()
    try:
        stream = cast(BinaryIO, backend.makefile("rb", buffering=1 << 16))
        _serve(connection, wire.Reader(stream))
    except (EOFError, OSError):
        pass  # tritonserver is gone
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # the threads of a model that was not finalized would go on


def _give_back_memory() -> None:
    """Every TRIM_PERIOD_S, let the system have what large requests left free on malloc's heaps. It
    takes about a millisecond, without the interpreter's lock. Returns if the C library is not
    glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        time.sleep(TRIM_PERIOD_S)
        trim(0)


def _serve(connection: Connection, reader: wire.Reader) -> None:
    reader.next_kind()  # INIT
    repository, version, config = reader.text(), reader.text(), reader.text()
    sys.modules["triton_python_backend_utils"] = utilities(connection)
    try:
        model = _load(Path(repository) / version / "model.py")
        model.initialize(
            {
                "model_repository": repository,
                "model_version": version,
                "model_config": config,
            }
        )
    except Exception as error:
        import traceback

        if not isinstance(error, TritonModelException):
            traceback.print_exc()
        connection.send(wire.simple_frame(wire.FAILED, str(error) or repr(error)))
        return
    connection.send(wire.simple_frame(wire.READY))
    senders: dict[int, ResponseSender] = {}
    while (kind := reader.next_kind()) != wire.STOP:
        number = reader.number("Q")
        if kind == wire.CANCELLED:
            sender = senders.get(number)
            if sender is not None:
                sender.was_cancelled = True
            continue
        sender = ResponseSender(connection, senders, number)
        try:
            request = InferenceRequest(reader, sender)
        except ValueError as error:
            refusal = TritonError(f"[refused] {error}", ERROR_CODES.index("INVALID_ARG"))
            sender.send(InferenceResponse(error=refusal), wire.FINAL)
            continue
        model.execute([request])
    model.finalize()


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    return module.TritonPythonModel()
