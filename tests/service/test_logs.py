"""What a line of the log looks like, in both formats, and what it says of the call it was written in."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextvars import copy_context
from datetime import datetime

import pytest

from service import logs
from service.logs import JsonFormatter, TextFormatter, fields


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What a logger of its own writes; its formatter is set by `formatted`."""
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("test.logs")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    logger.propagate = False
    yield handler.stream
    logger.removeHandler(handler)
    logger.propagate = True


def formatted(formatter: logging.Formatter) -> logging.Logger:
    logger = logging.getLogger("test.logs")
    logger.handlers[0].setFormatter(formatter)
    return logger


def write_in_a_call(logger: logging.Logger) -> None:
    """As the interceptor does: what a line is about is set in the call's own context."""
    logs.request_id.set("call-1")
    logs.trace_id.set("0af7651916cd43dd8448eb211c80319c")
    logs.method.set("Encode")
    logs.name_model("minilm", "3")
    logger.warning("not served: %s", "queue_full", extra=fields(code="RESOURCE_EXHAUSTED", seconds=0.25))


def test_a_json_line_is_an_object_with_time_level_logger_message_and_facts(stream: io.StringIO) -> None:
    copy_context().run(write_in_a_call, formatted(JsonFormatter()))

    (text,) = stream.getvalue().splitlines()
    line = json.loads(text)
    assert datetime.fromisoformat(line.pop("ts")).utcoffset() is not None
    assert line == {
        "level": "warning",
        "logger": "test.logs",
        "message": "not served: queue_full",
        "request_id": "call-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "method": "Encode",
        "model": "minilm",
        "version": "3",
        "code": "RESOURCE_EXHAUSTED",
        "seconds": 0.25,
    }


def test_a_line_outside_of_a_call_names_none(stream: io.StringIO) -> None:
    formatted(JsonFormatter()).info("serving", extra=fields(event="serving"))

    assert json.loads(stream.getvalue()).keys() == {"ts", "level", "logger", "message", "event"}


def test_a_traceback_and_a_message_of_many_lines_are_one_json_line(stream: io.StringIO) -> None:
    logger = formatted(JsonFormatter())
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("a\nb")

    assert stream.getvalue().count("\n") == 1
    line = json.loads(stream.getvalue())
    assert line["message"] == "a\nb"
    assert line["exception"].endswith("ValueError: first\nsecond")


def test_a_fact_of_any_type_can_be_written(stream: io.StringIO) -> None:
    formatted(JsonFormatter()).info("x", extra=fields(path=io.StringIO))

    assert json.loads(stream.getvalue())["path"] == str(io.StringIO)


def test_a_text_line_ends_with_the_same_facts(stream: io.StringIO) -> None:
    copy_context().run(write_in_a_call, formatted(TextFormatter()))

    assert stream.getvalue().endswith(
        " WARNING test.logs not served: queue_full request_id=call-1 trace_id=0af7651916cd43dd8448eb211c80319c "
        "method=Encode model=minilm version=3 code=RESOURCE_EXHAUSTED seconds=0.25\n"
    )


def test_in_text_a_traceback_follows_the_facts(stream: io.StringIO) -> None:
    logger = formatted(TextFormatter())
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed", extra=fields(reason="internal"))

    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("failed reason=internal")
    assert rest[0].startswith("Traceback")


def test_in_text_a_line_has_its_time_level_and_logger_and_the_level_is_the_least_that_is_written() -> None:
    code = (
        "import logging, sys; from service import logs; logs.configure('info', 'text', sys.stderr); "
        "logging.getLogger('a').debug('no'); logging.getLogger('a').info('yes')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO a yes\n", done.stderr)


CONFIGURED = "import sys, warnings; from service import logs; logs.configure('info', 'json', sys.stderr); "


@pytest.mark.parametrize(
    ("code", "logger", "part"),
    [
        ("warnings.warn('careful')", "py.warnings", "careful"),
        ("1 / 0", "service.logs", "ZeroDivisionError"),
        ("import threading; thread = threading.Thread(target=int, args=['x']); thread.start()", "service.logs", "'x'"),
        ("lost = type('Lost', (), {'__del__': lambda _: 1 / 0})(); del lost", "service.logs", "ZeroDivisionError"),
        ("import logging; logging.getLogger('grpc').error('theirs')", "grpc", "theirs"),
    ],
    ids=["warning", "uncaught", "uncaught in a thread", "uncaught where nothing can be raised", "library"],
)
def test_in_json_every_line_of_the_process_is_an_object(code: str, logger: str, part: str) -> None:
    done = subprocess.run([sys.executable, "-c", CONFIGURED + code], capture_output=True, text=True, check=False)

    (text,) = done.stderr.splitlines()
    line = json.loads(text)
    assert line["logger"] == logger
    assert part in line["message"] + line.get("exception", "")
