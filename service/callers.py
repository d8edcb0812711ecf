"""Who calls, by what a call's metadata shows: bearer tokens, tenants, and the name under which a caller has its share.

Of a token only its digest is kept, for what is not in memory is in no dump and no log. What a caller shows is digested
and looked up, so the time taken tells nothing of a token that came close, and a thousand tokens cost what one does.

A tenant's name is believed as it comes. It is for gateways that know their users and hold the one token; where callers
could name themselves, each would have as many shares as it makes up names.
"""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from service.caller_weights import CALLER_NAME, NAME_RULE
from service.config import Fairness, Settings
from service.errors import InvalidRequestError, StartupError, UnauthenticatedError, unreadable

Metadata = Iterable[tuple[str, str | bytes]]

TOKEN_KEY = "authorization"
TENANT_KEY = "mhsa-tenant"
# The name of everybody who has none.
EVERYBODY = ""
_BEARER = "bearer "
# Of a digest, in the name of a token that the file gives none: told apart among millions, and of no other use.
_NAME_DIGITS = 12

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """One bearer token, by its SHA-256, and what its holder is called."""

    digest: bytes
    name: str

    @classmethod
    def of(cls, secret: str, name: str | None = None) -> "Token":
        """What to keep of a token; without a name, one is made of its digest."""
        digest = _digest(secret)
        return cls(digest, name or f"token-{digest.hex()[:_NAME_DIGITS]}")


class Callers:
    """Whom the server knows, and what they share it by. Without tokens every caller is served."""

    def __init__(self, tokens: Iterable[Token], fairness: Fairness) -> None:
        self._names = {token.digest: token.name for token in tokens}
        self._fairness = fairness

    def name(self, metadata: Metadata) -> str:
        """The name under which a call has its share; `EVERYBODY` where there is none.

        Raises `UnauthenticatedError`, or `InvalidRequestError` for a tenant's name that cannot be one.
        """
        name = self._authenticate(metadata)
        if self._fairness == "none":
            return EVERYBODY
        if self._fairness == "tenant" and (tenants := [value for key, value in metadata if key == TENANT_KEY]):
            return _tenant(tenants)
        return name

    def _authenticate(self, metadata: Metadata) -> str:
        if not self._names:
            return EVERYBODY
        for key, value in metadata:
            if key == TOKEN_KEY and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
                name = self._names.get(_digest(value[len(_BEARER) :].strip()))
                if name is not None:
                    return name
        raise UnauthenticatedError("the metadata has no 'authorization: Bearer <token>' with a token this server knows")


def read_callers(settings: Settings) -> Callers:
    """Callers as the settings have them. Raises `StartupError` for a file or a weight that cannot be right."""
    tokens = _read_tokens(settings.auth_token_file) if settings.auth_token_file else []
    names = {token.name for token in tokens}
    if settings.fairness == "token" and (unknown := sorted(settings.tenant_weights.keys() - names)):
        raise StartupError(
            f"--tenant-weights has {unknown[0]!r}, which no token of --auth-token-file is called; "
            "--fairness tenant weighs tenants"
        )
    if settings.fairness == "tenant" and not tokens:
        log.warning("--fairness tenant without --auth-token-file: every caller may say that it is any tenant")
    return Callers(tokens, settings.fairness)


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


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _tenant(values: list[str | bytes]) -> str:
    if len(values) > 1:
        text = f"the metadata has {TENANT_KEY} {len(values)} times; it takes one"
        raise InvalidRequestError(text, log_text=text)
    (value,) = values
    if not isinstance(value, str) or not CALLER_NAME.fullmatch(value):
        text = f"{TENANT_KEY} is {value[:64]!r}; it takes {NAME_RULE}"
        raise InvalidRequestError(text, log_text=f"{TENANT_KEY} is not {NAME_RULE}")
    return value
