"""Who calls, by every sort of metadata, and what a file of tokens may hold."""

import hashlib
from pathlib import Path

import pytest

from service.callers import Callers, read_callers
from service.config import Settings
from service.errors import InvalidRequestError, StartupError, UnauthenticatedError
from service.tokens import Token

ALICE = Token.of("alices-token", "alice")
NAMELESS = Token.of("another-token")
AS_ALICE = ("authorization", "Bearer alices-token")


def callers(path: Path, text: str | None = None, **settings: object) -> Callers:
    """As a server with this token file reads them."""
    if text is not None:
        path.write_text(text, "utf-8")
    fixed = {"models": path.parent, "auth_token_file": path}
    return read_callers(Settings(**(fixed | settings)))  # type: ignore[arg-type]  # checked by Settings' tests


def test_without_tokens_everybody_is_one() -> None:
    assert Callers([], "token").name([AS_ALICE]) == ""
    assert Callers([], "token").name([]) == ""


def test_the_holder_of_a_token_is_called_as_the_file_has_it() -> None:
    assert Callers([ALICE, NAMELESS], "token").name([("user-agent", "x"), AS_ALICE]) == "alice"


def test_the_holder_of_a_token_without_a_name_is_called_by_its_digest() -> None:
    name = Callers([ALICE, NAMELESS], "token").name([("authorization", "bearer another-token")])

    assert name == "token-" + hashlib.sha256(b"another-token").hexdigest()[:12]


def test_a_token_is_not_kept() -> None:
    assert "alices-token" not in repr(vars(Callers([ALICE], "token")))


@pytest.mark.parametrize("fairness", ["token", "tenant", "none"])
@pytest.mark.parametrize("metadata", [[], [("authorization", "Bearer x")], [("mhsa-tenant", "alice")]])
def test_whatever_is_shared_by_a_token_is_needed(fairness: object, metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(UnauthenticatedError):
        Callers([ALICE], fairness).name(metadata)  # type: ignore[arg-type]  # one of the three


def test_a_tenant_counts_where_tenants_share() -> None:
    metadata = [AS_ALICE, ("mhsa-tenant", "acme")]

    assert Callers([ALICE], "tenant").name(metadata) == "acme"
    assert Callers([ALICE], "token").name(metadata) == "alice"
    assert Callers([ALICE], "none").name(metadata) == ""


def test_without_a_tenant_the_tokens_holder_has_the_share() -> None:
    assert Callers([ALICE], "tenant").name([AS_ALICE]) == "alice"
    assert Callers([], "tenant").name([]) == ""


@pytest.mark.parametrize("name", ["", "two words", "x" * 65, "a=b", "a,b", "quote'", "line\nbreak", "é", b"bytes"])
def test_a_tenants_name_that_could_forge_a_log_line_is_refused(name: str | bytes) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        Callers([], "tenant").name([("mhsa-tenant", name)])
    assert str(refusal.value) == f"mhsa-tenant is {name[:64]!r}; it takes 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"


def test_two_tenants_are_refused_since_one_of_them_is_forged() -> None:
    with pytest.raises(InvalidRequestError, match="the metadata has mhsa-tenant 2 times; it takes one"):
        Callers([], "tenant").name([("mhsa-tenant", "mine"), ("mhsa-tenant", "yours")])


def test_a_name_that_is_not_asked_for_is_not_looked_at() -> None:
    assert Callers([], "token").name([("mhsa-tenant", "two words")]) == ""


def test_a_file_has_a_token_a_line_with_or_without_a_name(tmp_path: Path) -> None:
    found = callers(tmp_path / "tokens", "alices-token alice\n\n  another-token  \r\nbobs-token\tbob")

    shown = ["alices-token", "another-token", "bobs-token"]
    assert [found.name([("authorization", f"Bearer {token}")]) for token in shown] == ["alice", NAMELESS.name, "bob"]


def test_two_tokens_of_one_holder_share_his_share(tmp_path: Path) -> None:
    found = callers(tmp_path / "tokens", "old-token alice\nnew-token alice")

    assert {found.name([("authorization", f"Bearer {token}-token")]) for token in ("old", "new")} == {"alice"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, ": No such file or directory"),
        (" \n", " holds no token"),
        ("schl\u00fcssel", ": not ASCII, as gRPC metadata is"),
        ("good\none two hunter2", ", line 2: 3 words; it takes <token> [name]"),
        ("one hunter2=", ", line 1: the name is not 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"),
        ("hunter2 alice\nhunter2 bob", ", line 2: a token from above, with another name"),
        ("hunter2 alice\nhunter2", ", line 2: a token from above, with another name"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_and_nothing_of_it_told(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    with pytest.raises(StartupError) as refusal:
        callers(tmp_path / "tokens", text)
    assert str(refusal.value) == f"--auth-token-file {tmp_path / 'tokens'}{complaint}"


def test_a_weight_of_a_holder_that_there_is_not_is_refused(tmp_path: Path) -> None:
    callers(tmp_path / "tokens", "one alice", tenant_weights={"alice": 2.0})
    with pytest.raises(StartupError, match="--tenant-weights has 'alcie', which no token of --auth-token-file is"):
        callers(tmp_path / "tokens", tenant_weights={"alice": 2.0, "alcie": 2.0})


def test_a_weight_of_a_tenant_may_be_of_anybody(tmp_path: Path) -> None:
    callers(tmp_path / "tokens", "one alice", fairness="tenant", tenant_weights={"acme": 2.0})


def test_tenants_that_anybody_may_name_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    read_callers(Settings(models=Path("/models"), fairness="tenant"))
    assert any("every caller may say that it is any tenant" in message for message in caplog.messages)
