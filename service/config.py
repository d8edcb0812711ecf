"""Every setting, declared once: a field here is the flag, the environment variable, the help text and the README row.

A flag wins over its environment variable (`--grpc-port`, `MHSA_GRPC_PORT`), which wins over the default. An unknown
variable that starts with MHSA_ stops the start, as a typing error. Ignored are those that Kubernetes sets in every pod
for Services called mhsa-serve or mhsa-grpc: MHSA_SERVE_SERVICE_HOST, or MHSA_GRPC_PORT=tcp://10.0.0.7:8001.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.caller_weights import parse_weights
from service.errors import StartupError
from service.version import installed_version

Device = Literal["auto", "cpu", "cuda"]
PrecisionChoice = Literal["auto", "fp32", "fp16", "int8"]
Fairness = Literal["token", "tenant", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def _setting(help_text: str, **kwargs: Any) -> Any:  # Any: a field's declared type is what callers see
    return field(metadata={"help": help_text}, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the server was told. Sizes in tokens, sequences or bytes; times in seconds."""

    models: Path = _setting(
        "directory of bundles, DIR/<name>/<version>/; every one is served, the highest version is the default"
    )
    host: str = _setting("address to listen on, for gRPC and metrics", default="0.0.0.0")
    grpc_port: int = _setting("port of the gRPC server; 0 takes a free one", default=8001)
    metrics_port: int = _setting("port of Prometheus' /metrics, and of /health; 0 takes a free one", default=8002)
    device: Device = _setting(
        "cuda: start only if CUDA works; auto: use CUDA if it works, and log the choice",
        default="auto",
    )
    precision: PrecisionChoice = _setting(
        "auto takes the fastest in the bundle that suits the device: fp16 or fp32 on cuda, int8 or fp32 on cpu",
        default="auto",
    )
    threads: int = _setting("CPU threads for inference; 0 takes the container's quota", default=0)
    runners: int = _setting(
        "runs that go on at once and share the threads, on a CPU; 0 takes what is fastest, measured at load", default=0
    )
    max_batch_tokens: int = _setting(
        "tokens in one run; 0 takes the smallest at this model's best rate, measured at load", default=0
    )
    max_queued_tokens: int = _setting("tokens waiting per model, beyond which requests are refused", default=131072)
    max_queued_sequences: int = _setting("sequences waiting per model, likewise", default=16384)
    max_requests_in_flight: int = _setting("requests per model that have come and are not answered", default=4096)
    max_bytes_in_flight: int = _setting(
        "bytes that these requests and their answers hold per model", default=512 * 1024 * 1024
    )
    max_wait_seconds: float = _setting(
        "how long a run that is not full may wait for company; 0 starts it as soon as a runner is free", default=0.0
    )
    max_request_tokens: int = _setting("tokens in one request, at most what the queue holds", default=32768)
    max_request_sequences: int = _setting("sequences in one request, at most what the queue holds", default=2048)
    max_request_bytes: int = _setting("bytes in one message to the server", default=16 * 1024 * 1024)
    max_message_bytes: int = _setting("bytes in one answer", default=64 * 1024 * 1024)
    max_stream_requests: int = _setting(
        "requests of one EncodeStream in flight, which hold at most about --max-message-bytes; more wait unread",
        default=256,
    )
    auth_token_file: Path | None = _setting(
        "file of bearer tokens, a line each: <token> [name of its holder]; read again when it changes; without it "
        "every caller is served",
        default=None,
    )
    fairness: Fairness = _setting(
        "who gets a fair share: token: each holder of a token; tenant: each tenant, named by a gateway in the metadata "
        "key mhsa-tenant, else the token's holder; none: all callers together",
        default="token",
    )
    tenant_weights: Mapping[str, float] = _setting(
        "NAME=WEIGHT,...: share of each of these holders or tenants, from 0.001 to 1000; the others have 1",
        default_factory=dict,
    )
    tls_cert: Path | None = _setting(
        "PEM certificate chain; with --tls-key turns TLS on. Both are read again when the files change", default=None
    )
    tls_key: Path | None = _setting("PEM private key", default=None)
    drain_seconds: float = _setting(
        "after SIGTERM: time to go on serving while load balancers see NOT_SERVING", default=5.0
    )
    grace_seconds: float = _setting("after the drain: time for accepted requests to finish", default=30.0)
    max_connection_age_seconds: float = _setting(
        "after this time, give or take a tenth, a connection is asked to end, so that the client looks up the servers "
        "again; 0: never",
        default=300.0,
    )
    max_connection_age_grace_seconds: float = _setting(
        "time for the calls of such a connection to end; an EncodeStream is asked to end after half of it",
        default=600.0,
    )
    log_level: LogLevel = _setting("least severe level that is logged: debug, info, warning or error", default="info")
    log_format: LogFormat = _setting("json writes one object a line, text is for people", default="text")
    otlp_endpoint: str | None = _setting(
        "OTLP collector for traces by gRPC: http://HOST:4317, or https:// for TLS; without it nothing is traced",
        default=None,
    )

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise StartupError(f"{flag(name)} ({variable(name)}) is {value}; it takes {low} to {high}")
        if 0 < (age := self.max_connection_age_seconds) < 0.1:  # each would end before it has carried a call
            raise StartupError(f"--max-connection-age-seconds is {age}; it takes 0, or at least 0.1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartupError("--tls-cert and --tls-key go together; one of them is missing")
        if self.otlp_endpoint is not None and not _ENDPOINT.fullmatch(self.otlp_endpoint):
            raise StartupError(
                f"--otlp-endpoint (MHSA_OTLP_ENDPOINT) is {self.otlp_endpoint!r}; it takes http://HOST:PORT, or https://"
            )
        if self.tenant_weights and self.fairness == "none":
            raise StartupError("--tenant-weights weighs shares, and --fairness none has none")


# gRPC keeps sizes in 32 bits, and so do the indices of a batch.
_MOST = 2**31 - 1
_RANGES = {
    "grpc_port": (0, 65535),
    "metrics_port": (0, 65535),
    "threads": (0, 1024),
    "runners": (0, 1024),
    "max_batch_tokens": (0, _MOST),
    "max_queued_tokens": (1, _MOST),
    "max_queued_sequences": (1, _MOST),
    "max_requests_in_flight": (1, _MOST),
    "max_bytes_in_flight": (4096, 2**63 - 1),
    "max_wait_seconds": (0, 10),
    "max_request_tokens": (1, _MOST),
    "max_request_sequences": (1, _MOST),
    "max_request_bytes": (4096, _MOST),
    "max_message_bytes": (4096, _MOST),
    "max_stream_requests": (1, _MOST),
    "drain_seconds": (0, 86400),
    "grace_seconds": (0, 86400),
    "max_connection_age_seconds": (0, 86400),
    "max_connection_age_grace_seconds": (1, 86400),
}

# Scheme, perhaps a password, host, port.
_ENDPOINT = re.compile(r"https?://([^\s/]*@)?(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+)(:[0-9]{1,5})?(/\S*)?")

# Source: Kubernetes' pkg/kubelet/envvars, the form of Docker's container links.
_LINK_NAME = re.compile(r"MHSA_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.+")


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as the README's table shows it."""

    flag: str
    variable: str
    default: str
    help: str


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return f"MHSA_{name.upper()}"


def setting_rows() -> list[SettingRow]:
    """Every setting, in the order of declaration."""
    return [SettingRow(flag(f.name), variable(f.name), _shown_default(f), f.metadata["help"]) for f in _fields()]


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, then environment. Raises `StartupError` for a bad value; --help and unknown flags exit."""
    parser = argparse.ArgumentParser(
        prog="mhsa-serve",
        description="Serve exported transformer encoders over gRPC.",
        epilog="Other commands, each with its own --help: mhsa-serve calibrate, mhsa-serve healthcheck.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    add_flags(parser, [f.name for f in _fields()])
    return settings_from(vars(parser.parse_args(arguments)), environment)


def add_flags(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Give a command the flags of these settings."""
    types = get_type_hints(Settings)
    for row, f in zip(setting_rows(), _fields(), strict=True):
        if f.name in names:
            parser.add_argument(
                row.flag,
                dest=f.name,
                choices=_choices(types[f.name]),
                type=_parser_of(types[f.name]),
                help=f"{row.help} (default: {row.default}; {row.variable})",
                default=argparse.SUPPRESS,
            )


def settings_from(given: dict[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from what flags gave, then environment. Raises `StartupError` for a bad value."""
    types = get_type_hints(Settings)
    ours = {name: text for name, text in environment.items() if name.startswith("MHSA_") and not _is_link(name, text)}
    if unknown := ours.keys() - {row.variable for row in setting_rows()}:
        raise StartupError(
            f"no setting has the environment variable {', '.join(sorted(unknown))}; see mhsa-serve --help"
        )
    given = dict(given)
    for f in _fields():
        if f.name not in given and (text := ours.get(variable(f.name))) is not None:
            given[f.name] = _from_environment(f, types[f.name], text)
    if "models" not in given:
        raise StartupError("--models (MHSA_MODELS) is missing: the directory that holds <name>/<version>/ bundles")
    return Settings(**given)


def read_setting(name: str, environment: Mapping[str, str] = os.environ) -> Any:
    """A field as the environment or its default has it, for what starts no server. Raises `StartupError`."""
    [f] = (f for f in _fields() if f.name == name)
    text = environment.get(variable(name))
    if text is None or _is_link(variable(name), text):
        return f.default
    return _from_environment(f, get_type_hints(Settings)[name], text)


def changed(settings: Settings) -> dict[str, str]:
    """What was told in place of a default, by flag: for the log. No setting is a secret; some name files of secrets."""
    values = {f.name: getattr(settings, f.name) for f in _fields()}
    return {flag(f.name): _shown(values[f.name]) for f in _fields() if values[f.name] != _default(f)}


def _default(f: "dataclasses.Field[Any]") -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={weight:g}" for name, weight in value.items())
    return re.sub("//[^/]*@", "//", str(value))  # a collector's address may have a password in it


def _is_link(name: str, text: str) -> bool:
    return bool(_LINK_NAME.fullmatch(name) or _LINK_VALUE.fullmatch(text))


def _from_environment(f: "dataclasses.Field[Any]", hint: Any, text: str) -> Any:
    if not text:
        raise StartupError(f"{variable(f.name)} is empty; unset it or give it a value")
    try:
        value = _parser_of(hint)(text)
    except ValueError:
        raise StartupError(f"{variable(f.name)} is {text!r}; it takes {_KINDS[_parser_of(hint)]}") from None
    if (choices := _choices(hint)) and value not in choices:
        raise StartupError(f"{variable(f.name)} is {text!r}; it takes one of {', '.join(choices)}")
    return value


_KINDS = {int: "a whole number", float: "a number of seconds"}


def _choices(hint: Any) -> tuple[str, ...] | None:
    return get_args(hint) if get_origin(hint) is Literal else None


def _parser_of(hint: Any) -> Any:
    """int, float, str or Path, for a field's type with or without None; of the one mapping, its own parser."""
    if _choices(hint):
        return str
    if get_origin(hint) is Mapping:
        return parse_weights
    return next((option for option in get_args(hint) if option is not type(None)), hint)


def _fields() -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(Settings)


def _shown_default(f: "dataclasses.Field[Any]") -> str:
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
        return "required"
    return "none" if f.default in (None, dataclasses.MISSING) else str(f.default)
