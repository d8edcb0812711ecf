"""The log's writer: what becomes of lines that nobody reads."""

import io
import logging
import os
import re
import threading

from service.log_writer import MAX_LINES, LogWriter

NUM_LINES = 5 * MAX_LINES


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "test", "levelname": "INFO", "levelno": logging.INFO, "msg": text})


def test_who_does_not_read_holds_nobody_up_and_is_told_later_how_much_is_missing() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, os.fdopen(writing, "w") as stream:
        writer = LogWriter(stream)
        for number in range(NUM_LINES):
            writer.handle(record(f"line {number} {'x' * 200}"))
        num_read = num_lost = 0
        while num_read + num_lost < NUM_LINES:
            if missing := re.match(r"(\d+) lines of the log are missing here", lines.readline()):
                num_lost += int(missing[1])
            else:
                num_read += 1
        assert num_lost > 0
        writer.flush()


def test_lines_keep_their_order() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, os.fdopen(writing, "w") as stream:
        writer = LogWriter(stream)
        for number in range(10):
            writer.handle(record(f"line {number}"))
        assert [lines.readline() for _ in range(10)] == [f"line {number}\n" for number in range(10)]


class Disk(io.StringIO):
    """Full, until told otherwise; `written` and `refused` tell what has become of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True
        self.refused, self.written = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        if self.is_full:
            self.refused.set()
            raise OSError("No space left on device")
        super().write(text)
        self.written.set()
        return len(text)


def test_a_stream_that_fails_costs_its_lines_alone() -> None:
    disk = Disk()
    writer = LogWriter(disk)
    writer.handle(record("lost"))
    assert disk.refused.wait(60)
    disk.is_full = False
    writer.handle(record("kept"))
    assert disk.written.wait(60)
    assert disk.getvalue() == "kept\n"
