"""Where log records go, and what becomes of a log file that is moved, or cannot be written."""

import io
import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from gfgen import log
from gfgen.errors import InputError

logger = logging.getLogger("gfgen.test")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def configure():
    """Configures logging for a test."""

    def configure(**options):
        stream = options.pop("stream", None) or io.StringIO()
        log.configure(stream=stream, **options)
        return stream

    return configure


def test_lines_have_date_and_level_where_no_terminal_is(configure):
    stream = configure()
    logger.info("ready")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    ready\n", stream.getvalue())


def test_a_terminal_gets_the_time_alone(configure):
    stream = configure(stream=Terminal())
    logger.info("ready")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    ready\n", stream.getvalue())


def test_the_file_gets_what_quiet_keeps_from_the_stream(configure, tmp_path):
    stream = configure(level="warning", file=tmp_path / "logs" / "run.log")
    logger.info("ready")
    logger.debug("details")
    logger.warning("odd")
    text = (tmp_path / "logs" / "run.log").read_text()
    assert [line.split()[2] for line in text.splitlines()] == ["INFO", "WARNING"]
    assert "ready" not in stream.getvalue()


def test_a_record_for_the_file_only_does_not_reach_the_stream(configure, tmp_path):
    stream = configure(file=tmp_path / "run.log")
    logger.info("done fox", extra=log.FILE_ONLY)
    assert stream.getvalue() == ""
    assert "done fox" in (tmp_path / "run.log").read_text()


def test_a_file_is_appended_to(configure, tmp_path):
    for _ in range(2):
        configure(file=tmp_path / "run.log")
        logger.info("ready")
    assert len((tmp_path / "run.log").read_text().splitlines()) == 2


def test_json_goes_to_both(configure, tmp_path):
    stream = configure(as_json=True, file=tmp_path / "run.log")
    logger.info("ready")
    for text in (stream.getvalue(), (tmp_path / "run.log").read_text()):
        assert json.loads(text)["message"] == "ready"


def test_a_file_that_is_rotated_away_begins_anew(configure, tmp_path):
    configure(file=tmp_path / "run.log")
    logger.info("before")
    (tmp_path / "run.log").rename(tmp_path / "run.log.1")
    logger.info("after")
    assert "before" in (tmp_path / "run.log.1").read_text()
    assert "after" in (tmp_path / "run.log").read_text()


def test_a_folder_that_goes_away_costs_the_log_file_and_not_the_run(configure, tmp_path):
    stream = configure(file=tmp_path / "logs" / "run.log")
    shutil.rmtree(tmp_path / "logs")
    logger.info("one")
    logger.info("two")
    assert stream.getvalue().count("the run goes on without it") == 1
    assert "two" in stream.getvalue()


def test_a_full_disk_costs_the_log_file_and_not_the_run(configure):
    stream = configure(file=Path("/dev/full"))
    logger.info("one")
    logger.info("two")
    assert stream.getvalue().count("cannot write --log-file /dev/full (No space left on device)") == 1


def test_a_file_that_cannot_be_opened_is_refused(configure, tmp_path):
    with pytest.raises(InputError, match=r"--log-file .*name another"):
        configure(file=tmp_path)
