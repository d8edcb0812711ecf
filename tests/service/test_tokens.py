"""A file of tokens that changes while it is in force."""

import json
import logging
import os
from contextvars import copy_context
from pathlib import Path

import pytest

from service.callers import Callers
from service.errors import UnauthenticatedError
from service.logs import JsonFormatter, request_id
from service.tokens import LOOK_SECONDS, TokenFile


class File:
    """A token file with two tokens, the callers it lets in, and a clock that stands still."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.write("first-token alice\nsecond-token bob")
        file = TokenFile(path, lambda: self.now)
        self.callers = Callers(file.read(), "token", renewed=file.renewed)

    def write(self, text: str) -> None:
        """As those do who change files safely: another one in its place."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    def name(self, token: str) -> str:
        try:
            return self.callers.name([("authorization", f"Bearer {token}")])
        except UnauthenticatedError:
            return "refused"


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "tokens")


def test_changed_tokens_are_in_force_after_a_second(file: File, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write("third-token carol\nsecond-token bob")
    assert [file.name("first-token"), file.name("third-token")] == ["alice", "refused"], "looked at once a second"
    file.now = LOOK_SECONDS
    assert [file.name(f"{n}-token") for n in ("first", "second", "third")] == ["refused", "bob", "carol"]
    assert [record.getMessage() for record in caplog.records] == ["the tokens are renewed: there are 2"]


@pytest.mark.parametrize("text", ["", "one two three", None])
def test_a_file_that_is_wrong_changes_nothing_and_is_said_once(
    file: File, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.unlink() if text is None else file.write(text)
    for k in (1, 2):
        file.now = k * LOOK_SECONDS
        assert file.name("first-token") == "alice"
    (record,) = caplog.records
    assert record.getMessage().startswith("the tokens are not renewed: --auth-token-file")
    file.write("third-token")
    file.now = 3 * LOOK_SECONDS
    assert file.name("first-token") == "refused", "what is right again is in force"


def test_the_line_of_a_renewal_is_not_about_the_call_that_came_first(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.INFO)
    file.write("third-token")
    file.now = LOOK_SECONDS

    def call() -> None:
        request_id.set("first")
        file.name("third-token")

    copy_context().run(call)
    assert "request_id" not in json.loads(caplog.text)
