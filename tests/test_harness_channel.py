"""The judge's pipe: what arrives, and what is not believed."""

import json
import os

import pytest

from harness.channel import Channel, ClosedError, ForgedError, LateError


@pytest.fixture
def ends():
    """The two ends of a channel, and the descriptor that writes to the first."""
    here_reads, there_writes = os.pipe()
    there_reads, here_writes = os.pipe()
    here = Channel(here_reads, here_writes, "n")
    there = Channel(there_reads, there_writes, "n")
    yield here, there, there_writes
    for descriptor in (here_reads, there_writes, there_reads, here_writes):
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_messages_arrive_in_order_with_their_bytes(ends):
    here, there, _ = ends
    there.send("outputs", [b"ab\n", memoryview(b"cd")], tag="x")
    there.send("done", ms=1.5)
    first = here.receive(5, limit=5)
    assert (first.kind, first.fields, first.payload) == ("outputs", {"tag": "x"}, b"ab\ncd")
    assert here.receive(5).fields == {"ms": 1.5}
    here.send("go")
    assert there.receive(5).kind == "go"


@pytest.mark.parametrize(
    "text",
    [
        b"chain_equal,PASS,0.001\n",
        b"{}\n",
        b"[1]\n",
        b"null\n",
        json.dumps({"nonce": "m", "kind": "done", "bytes": 0}).encode() + b"\n",
        json.dumps({"nonce": "n", "kind": "done", "bytes": 1}).encode() + b"\nx",
        json.dumps({"nonce": "n", "kind": "done", "bytes": -1}).encode() + b"\n",
        json.dumps({"nonce": "n", "kind": "done", "bytes": "0"}).encode() + b"\n",
    ],
)
def test_what_is_not_of_the_protocol_is_forged(ends, text):
    here, _, descriptor = ends
    os.write(descriptor, text)
    with pytest.raises(ForgedError):
        here.receive(5)


def test_silence_is_late(ends):
    with pytest.raises(LateError):
        ends[0].receive(0.01)


def test_half_a_message_is_late(ends):
    here, _, descriptor = ends
    os.write(descriptor, b'{"nonce": "n"')
    with pytest.raises(LateError):
        here.receive(0.01)


def test_a_closed_end_is_closed(ends):
    here, _, descriptor = ends
    os.close(descriptor)
    with pytest.raises(ClosedError):
        here.receive(5)
