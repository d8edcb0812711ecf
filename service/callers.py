"""Who calls, by the call's metadata: bearer tokens, tenants, and the name whose fair share a call counts for.

A caller's token is hashed and looked up: the time this takes does not depend on how much of a token was right, nor on
the number of tokens.

A tenant's name is believed. It is meant for gateways that know their users and hold the only token: callers who could
name themselves would get one more share with every name that they invent.
"""

import logging
from collections.abc import Callable, Iterable

from service.caller_weights import CALLER_NAME, NAME_RULE
from service.config import Fairness, Settings
from service.errors import InvalidRequestError, StartupError, UnauthenticatedError
from service.tokens import Token, TokenFile, digest

Metadata = Iterable[tuple[str, str | bytes]]

TOKEN_KEY = "authorization"
TENANT_KEY = "mhsa-tenant"
# The name of callers without one.
EVERYBODY = ""
_BEARER = "bearer "

log = logging.getLogger(__name__)


class Callers:
    """Whom the server knows, and what they share it by. Without tokens every caller is served.

    `renewed` is asked at each call for other tokens from now on; None where they are the same.
    """

    def __init__(
        self,
        tokens: Iterable[Token],
        fairness: Fairness,
        *,
        renewed: Callable[[], Iterable[Token] | None] = lambda: None,
    ) -> None:
        self._names = _names(tokens)
        self._fairness = fairness
        self._renewed = renewed

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
        if (tokens := self._renewed()) is not None:
            self._names = _names(tokens)
        if not self._names:
            return EVERYBODY
        for key, value in metadata:
            if key == TOKEN_KEY and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
                name = self._names.get(digest(value[len(_BEARER) :].strip()))
                if name is not None:
                    return name
        raise UnauthenticatedError("the metadata has no 'authorization: Bearer <token>' with a token this server knows")


def read_callers(settings: Settings) -> Callers:
    """Callers as the settings have them. Raises `StartupError` for a file or a weight that cannot be right."""
    file = TokenFile(settings.auth_token_file) if settings.auth_token_file else None
    tokens = file.read() if file else []
    names = {token.name for token in tokens}
    if settings.fairness == "token" and (unknown := sorted(settings.tenant_weights.keys() - names)):
        raise StartupError(
            f"--tenant-weights has {unknown[0]!r}, which no token of --auth-token-file is called; "
            "--fairness tenant weighs tenants"
        )
    if settings.fairness == "tenant" and not tokens:
        log.warning("--fairness tenant without --auth-token-file: every caller may say that it is any tenant")
    return Callers(tokens, settings.fairness, renewed=file.renewed) if file else Callers(tokens, settings.fairness)


def _names(tokens: Iterable[Token]) -> dict[bytes, str]:
    return {token.digest: token.name for token in tokens}


def _tenant(values: list[str | bytes]) -> str:
    if len(values) > 1:
        text = f"the metadata has {TENANT_KEY} {len(values)} times; it takes one"
        raise InvalidRequestError(text, log_text=text)
    (value,) = values
    if not isinstance(value, str) or not CALLER_NAME.fullmatch(value):
        text = f"{TENANT_KEY} is {value[:64]!r}; it takes {NAME_RULE}"
        raise InvalidRequestError(text, log_text=f"{TENANT_KEY} is not {NAME_RULE}")
    return value
