"""What can go wrong, in the server's own words: no gRPC and no ONNX Runtime in here.

Two families. A `RequestError` ends one request and its text goes to the caller, so it names the value seen and the
limit and nothing else; `servicers/status.py` holds the one table that turns each class into a gRPC status. A
`StartupError` stops the process before it serves; its text is the one line that says what to do.
"""

import os


def unreadable(error: OSError) -> str:
    """Why a file cannot be read, in the words of a `StartupError`; where it is a matter of rights, whose."""
    if isinstance(error, PermissionError):
        return f"{error.filename}: user {os.geteuid()} may not read it; let that user"
    return f"{error.filename}: {error.strerror}"


class RequestError(Exception):
    """One request failed. `reason` is its label in `mhsa_errors_total`; `retry_seconds` above 0: when to come back.

    `log_text`: what the log may say where the text quotes the caller.
    """

    reason = "internal"
    retry_seconds = 0.0
    log_text = ""


class InvalidRequestError(RequestError):
    """The request can never be served as it is."""

    reason = "invalid"

    def __init__(self, message: str, *, log_text: str = "") -> None:
        super().__init__(message)
        self.log_text = log_text


class NotFoundError(RequestError):
    """No such model or version."""

    reason = "not_found"


class UnavailableError(RequestError):
    """The model is loading, the server is draining or the engine is dead: another server, or later, may do."""

    reason = "unavailable"


class DrainingError(UnavailableError):
    """The server, or a stream's connection, was told to end: nobody's fault, and there are others."""

    reason = "draining"


class UnauthenticatedError(RequestError):
    """The caller showed no credentials, or none that we know."""

    reason = "unauthenticated"


class QueueFullError(RequestError):
    """The queue's bound is reached; by our own rate there is room after `retry_seconds`."""

    reason = "queue_full"

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class DeadlineError(RequestError):
    """The caller's deadline has passed, or passes before the request could be done."""

    reason = "deadline"


class EngineError(RequestError):
    """The engine failed on this sequence alone, or gave numbers that are not finite."""

    reason = "engine"


class OutOfMemoryError(EngineError):
    """The device has no memory left for this sequence, even alone."""

    reason = "out_of_memory"


class StoppedError(EngineError):
    """The run was stopped: nobody waited for it any more, or it would not end."""


class StartupError(Exception):
    """The process cannot start; the text is one line that says what to do."""


class BundleError(StartupError):
    """A bundle is missing, damaged, or was made for another version of this server."""
