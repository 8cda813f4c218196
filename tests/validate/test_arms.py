"""What a validation does with an endpoint that misbehaves: every fault ends it with an error,
and none becomes a figure.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stub import StubServer
from toolkit.client import Client
from toolkit.errors import StageError
from toolkit.validate.arms import Sender

FAULTS = {
    "refuse": "the server refused a request: no, on purpose",
    "stall": "no answer within 1 s",
    "die": "died on purpose",
    "garbage": "the answer is not one of Triton",
    "fewer": "7 output tokens were counted and 8 token ids returned",
    "down": "12 output tokens were counted while they came and 8 at the end",
    "more": "10000 output tokens were counted and 8 token ids returned",
    "silent": "None output tokens were counted",
    "endless": "the stream ended before the answer was complete",
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with StubServer() as stub, Client(stub.grpc, timeout_s=10.0) as client:
        yield client


def test_a_sound_answer_is_taken(client: Client) -> None:
    sender = Sender(client, 64)
    timing = sender.send(0, "sound", "speculative", temperature=0.0)
    assert (timing.output_tokens, timing.finish_reason, sender.sent) == (8, "length", [timing])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_an_endpoint_is_an_error_that_names_the_prompt(
    client: Client, fault: str
) -> None:
    sender = Sender(client, 64)
    client.timeout_s = 1.0 if fault == "stall" else 10.0
    with pytest.raises(StageError, match="prompt 3, plain arm: ") as caught:
        sender.send(2, f"fault:{fault} prompt", "plain", temperature=0.0)
    assert FAULTS[fault] in str(caught.value)
    assert caught.value.hint is not None
    assert sender.sent == []
