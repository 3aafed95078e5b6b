import contextlib
import os
import threading
from dataclasses import MISSING, fields, is_dataclass

import pytest

from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import Channel, ForgetJob


@pytest.fixture
def ends():
    left, right = map(Channel, Channel.pair())
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_whole_and_in_order(ends):
    left, right = ends
    for name in ("a", "b"):
        left.send(ForgetJob(name))
    assert [right.receive()[0].job_id for _ in range(2)] == ["a", "b"]


def test_a_descriptor_arrives_as_one_of_the_receivers_own(ends):
    left, right = ends
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    left.send(ForgetJob("a"), (fd,))
    os.close(fd)
    _, (received,) = right.receive()
    assert os.pread(received, 6, 0) == b"shared"
    os.close(received)


def test_what_was_said_before_the_end_is_heard_though_something_was_left_unread(ends):
    """Linux tells of what was left unread first, and of the messages only when asked again."""
    left, right = ends
    right.send(ForgetJob("unread"))
    left.send(ForgetJob("last words"))
    left.close()
    assert right.receive()[0].job_id == "last words"
    assert right.receive() is None


def test_the_end_of_the_other_side_is_none(ends):
    left, right = ends
    left.close()
    assert right.receive() is None


def test_a_message_waits_for_room_unless_it_may_not(ends):
    left, right = ends
    assert left.sent_bytes == 0
    num_sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            left.send(ForgetJob("a"), wait=False)
            num_sent += 1
    reader = threading.Timer(0.05, lambda: [right.receive() for _ in range(num_sent)])
    reader.start()
    left.send(ForgetJob("last"))
    reader.join()
    assert right.receive()[0].job_id == "last"


def test_what_a_message_leaves_out_is_nothing():
    own = [kind for kind in vars(messages).values() if getattr(kind, "__module__", "") == messages.__name__]
    defaults = {}
    for kind in own:
        found = {each.name: each.default for each in fields(kind)} if is_dataclass(kind) else {}
        found |= getattr(kind, "_field_defaults", {})
        defaults |= {(kind.__name__, name): value for name, value in found.items() if value is not MISSING}
    assert len(defaults) > 20
    assert {name: value for name, value in defaults.items() if value} == {}
