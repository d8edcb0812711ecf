"""The format of log lines: text for people, or one JSON object per line for machines.

Request, trace, method, caller and model of a line come from context variables, so that every line written during a call
has them and no function passes them on. Threads that serve many calls have none.
"""

import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO

from service.log_writer import LogWriter

# Set by the interceptor in the task that serves a call.
request_id: ContextVar[str] = ContextVar("request_id", default="")
trace_id: ContextVar[str] = ContextVar("trace_id", default="")
method: ContextVar[str] = ContextVar("method", default="")
# Whose fair share the call counts for: a name from the token file, or a tenant.
caller: ContextVar[str] = ContextVar("caller", default="")
# Set only when the request has named a model that is served, so that clients cannot write names into the log.
model: ContextVar[str] = ContextVar("model", default="")
version: ContextVar[str] = ContextVar("version", default="")
_SUBJECT = (request_id, trace_id, method, caller, model, version)

log = logging.getLogger(__name__)


def fields(**facts: object) -> dict[str, dict[str, object]]:
    """The `extra` of a log call: fields beside the message, for machines."""
    return {"fields": facts}


def name_model(name: str, number: str) -> None:
    """Set model and version for the rest of the call."""
    model.set(name)
    version.set(number)


def configure(level: str, log_format: Literal["text", "json"], stream: TextIO) -> None:
    """Send every logger's lines to `stream`; warnings, and exceptions that nobody caught in whatever thread, too."""
    handler = LogWriter(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda ended: _log_uncaught(ended.exc_type, ended.exc_value, ended.exc_traceback)
    sys.unraisablehook = lambda lost: _log_uncaught(lost.exc_type, lost.exc_value, lost.exc_traceback)


class TextFormatter(logging.Formatter):
    """The message, then the fields as name=value, then a traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        return " ".join([super().formatMessage(record), *(f"{name}={fact}" for name, fact in _facts(record).items())])


class JsonFormatter(logging.Formatter):
    """One object per line; a traceback is a string in it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    subject = {variable.name: value for variable in _SUBJECT if (value := variable.get())}
    return subject | getattr(record, "fields", {})


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=(kind, error or kind(), trace))
