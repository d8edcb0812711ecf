"""Bearer tokens and the file that they are in, which is read again when it changes.

Of a token only its digest is kept, for what is not in memory is in no dump and no log. A file that is wrong changes
nothing: the server goes on with the tokens that it has, and says so in its log.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

from service.caller_weights import CALLER_NAME, NAME_RULE
from service.errors import StartupError, unreadable
from service.logs import fields
from service.watched_files import WatchedFiles

# Of a digest, in the name of a token that the file gives none: told apart among millions, and of no other use.
_NAME_DIGITS = 12
# How soon a token that was taken out of the file is refused.
LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """One bearer token, by its SHA-256, and what its holder is called."""

    digest: bytes
    name: str

    @classmethod
    def of(cls, secret: str, name: str | None = None) -> "Token":
        """What to keep of a token; without a name, one is made of its digest."""
        found = digest(secret)
        return cls(found, name or f"token-{found.hex()[:_NAME_DIGITS]}")


class TokenFile:
    """A file of tokens. `clock`: monotonic seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._files = WatchedFiles(path)
        self._next_look = 0.0

    def read(self) -> list[Token]:
        """What is in it. Raises `StartupError`."""
        self._files.have_changed()
        self._next_look = self._clock() + LOOK_SECONDS
        return _read_tokens(self._path)

    def renewed(self) -> list[Token] | None:
        """What is in it if that has changed; looked at once a second, however often this is asked."""
        if self._clock() < self._next_look:
            return None
        self._next_look = self._clock() + LOOK_SECONDS
        if not self._files.have_changed():
            return None
        # The lines of the log are not about the call that happened to come first.
        return Context().run(self._reread)

    def _reread(self) -> list[Token] | None:
        try:
            tokens = _read_tokens(self._path)
        except StartupError as error:
            log.warning("the tokens are not renewed: %s", error, extra=fields(event="not_renewed"))
            return None
        log.info("the tokens are renewed: there are %d", len(tokens), extra=fields(event="renewed"))
        return tokens


def digest(secret: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(secret.encode()).digest()


def _read_tokens(path: Path) -> list[Token]:
    """Lines of `<token> [name]`. No message has any of it: what stands there may be a token by mistake."""
    try:
        lines = path.read_text("ascii").splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"--auth-token-file {path}: not ASCII, as gRPC metadata is") from None
    except OSError as error:
        raise StartupError(f"--auth-token-file {unreadable(error)}") from None
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(lines, 1):
        if words := line.split():
            token = _read_token(f"--auth-token-file {path}, line {number}", words)
            if tokens.setdefault(token.digest, token) != token:
                raise StartupError(f"--auth-token-file {path}, line {number}: a token from above, with another name")
    if not tokens:
        raise StartupError(f"--auth-token-file {path} holds no token")
    return list(tokens.values())


def _read_token(where: str, words: list[str]) -> Token:
    if len(words) > 2:
        raise StartupError(f"{where}: {len(words)} words; it takes <token> [name]")
    if len(words) == 2 and not CALLER_NAME.fullmatch(words[1]):
        raise StartupError(f"{where}: the name is not {NAME_RULE}")
    return Token.of(*words)
