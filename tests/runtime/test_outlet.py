"""Output that nobody reads: it waits, is dropped and counted, and delays nobody."""

import fcntl
import json
import logging
import os
import pty
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from gfgen import log
from gfgen.cli.shown.board import Board, Line
from gfgen.system.outlet import drain, unblocked

LINE = "x" * 1000 + "\n"
NUM_LINES = 3000
"""More than pipe and queue hold."""


def ends_of(kind):
    """A descriptor to read from, and one to write to."""
    if kind == "terminal":
        return pty.openpty()
    if kind == "socket":
        return tuple(end.detach() for end in socket.socketpair())
    return os.pipe()


@pytest.fixture(params=["pipe", "socket", "terminal"])
def ends(request):
    """A descriptor that nobody reads, and a stream that writes to its other end."""
    reader, writer = ends_of(request.param)
    stream = unblocked(os.fdopen(writer, "w", encoding="utf-8"))
    yield reader, stream
    os.close(reader)  # its thread ends its write
    drain(stream)


def read_all(reader, *, until):
    content = b""
    while until not in content:
        content += os.read(reader, 65536)
    return content.replace(b"\r\n", b"\n").decode()


def test_what_is_read_comes_whole_and_in_order(ends):
    reader, stream = ends
    for number in range(300):
        print(number, file=stream)
    print("end", file=stream)
    assert read_all(reader, until=b"end").split() == [*map(str, range(300)), "end"]
    drain(stream)
    assert drain(stream, 0.0)


def test_what_nobody_reads_is_dropped_and_counted_once_it_is_read_again(ends, caplog):
    reader, stream = ends
    began_s = time.monotonic()
    for _ in range(NUM_LINES):
        stream.write(LINE)
    assert time.monotonic() < began_s + 5.0
    assert not drain(stream, 0.0)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        num_read = 0
        os.set_blocking(reader, False)
        while not drain(stream, 0.0) or not caplog.text:
            with suppress(BlockingIOError):
                num_read += os.read(reader, 65536).count(b"\n")
            time.sleep(0.001)
    num_dropped = int(caplog.records[0].args[0].split()[0].replace(",", ""))
    assert 1000 < num_dropped < NUM_LINES - 500
    assert num_read <= NUM_LINES - num_dropped


def test_the_end_waits_once_for_a_reader_that_never_comes(ends):
    reader, stream = ends
    for _ in range(500):
        stream.write(LINE)
    assert not stream.buffer.drain(0.05)
    assert not stream.buffer.drain(1e6)
    os.read(reader, 65536)
    assert not stream.buffer.drain(0.05)


def test_files_and_streams_in_memory_are_written_as_before(tmp_path, capsys):
    with (tmp_path / "file").open("w") as file:
        assert unblocked(file) is file
    assert unblocked(sys.stdout) is sys.stdout


def test_a_reader_that_is_gone_ends_the_output_and_nothing_else():
    reader, writer = os.pipe()
    stream = unblocked(os.fdopen(writer, "w"))
    os.close(reader)
    for _ in range(NUM_LINES):
        stream.write(LINE)
    drain(stream)
    assert drain(stream, 0.0)


def test_bars_are_not_drawn_for_a_terminal_that_is_not_read(monkeypatch):
    reader, writer = pty.openpty()
    stream = unblocked(os.fdopen(writer, "w", encoding="utf-8"))
    board = Board(stream, num_slots=1)
    for _ in range(200):
        board.write("done fox")
        stream.write(LINE)
    waiting = len(stream.buffer._waiting)
    assert waiting > 1
    for _ in range(100):
        board.draw([Line("batch", 1, 2, "1/2 jobs")])
    left = list(stream.buffer._waiting)
    assert len(left) <= waiting, "the kernel may take some later"
    assert not any(b"1/2 jobs" in each for each in left)
    os.close(reader)


def test_a_log_file_that_is_a_pipe_without_a_reader_delays_nobody(tmp_path):
    path = tmp_path / "log"
    os.mkfifo(path)
    with open(os.devnull, "w") as stream:
        log.configure(stream=stream, file=path, as_json=True)
        logger = logging.getLogger("gfgen.test")
        logger.info("first")
        with path.open() as reader:
            assert json.loads(reader.readline())["message"] == "first"
            for _ in range(200):
                logger.info("x" * 1000)
            assert not drain(logging.getLogger("gfgen").handlers[-1].stream, 0.0)


CHILD = """
import sys
sys.path.insert(0, {root!r})
from gfgen.system import outlet
outlet.drop_unread()
import os, warnings
for _ in range(200):
    print("y" * 1000)
    warnings.warn("z" * 1000, stacklevel=1)
    sys.stderr.write("x" * 1000 + "\\n")
sys.stderr.flush()
os.write(int(sys.argv[1]), b"ended")
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_processes_that_print_next_to_nothing_drop_what_nobody_reads(kind):
    reader, writer = ends_of(kind)
    told, tell = os.pipe()
    code = CHILD.format(root=os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tell)], stdout=writer, stderr=writer, pass_fds=[tell]
    )
    os.close(tell)
    assert os.read(told, 100) == b"ended"
    assert process.wait(10) == 0
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK, "others wait as before"
    assert os.read(reader, 10)[:1] in b"xyz<"
    for fd in (reader, writer, told):
        os.close(fd)
