"""Settings: one declaration, three sources, and refusals that say what was given where."""

from pathlib import Path

import pytest

from service.config import Settings, changed, flag, parse_settings, setting_rows, variable
from service.errors import StartupError

MODELS = ["--models", "/models"]
README = Path(__file__).parents[2] / "README.md"


def refusal(arguments: list[str], environment: dict[str, str]) -> str:
    with pytest.raises(StartupError) as caught:
        parse_settings(arguments, environment)
    return str(caught.value)


def test_the_defaults_need_only_the_models() -> None:
    assert parse_settings(MODELS, {}) == Settings(models=Path("/models"))


def test_a_variable_beats_the_default() -> None:
    assert parse_settings(MODELS, {"MHSA_GRPC_PORT": "9001"}).grpc_port == 9001


def test_a_flag_beats_the_variable() -> None:
    assert parse_settings([*MODELS, "--grpc-port", "9002"], {"MHSA_GRPC_PORT": "9001"}).grpc_port == 9002


def test_a_flag_that_repeats_the_default_beats_the_variable() -> None:
    assert parse_settings([*MODELS, "--grpc-port", "8001"], {"MHSA_GRPC_PORT": "9001"}).grpc_port == 8001


def test_a_flag_spares_a_bad_variable() -> None:
    assert parse_settings([*MODELS, "--grpc-port", "9002"], {"MHSA_GRPC_PORT": "x"}).grpc_port == 9002


def test_the_models_may_come_from_the_environment() -> None:
    assert parse_settings([], {"MHSA_MODELS": "/elsewhere"}).models == Path("/elsewhere")


def test_without_models_the_start_is_refused() -> None:
    assert "--models (MHSA_MODELS) is missing" in refusal([], {})


OTHERS = {
    "models": ("/elsewhere", Path("/elsewhere")),
    "host": ("::1", "::1"),
    "grpc_port": ("1", 1),
    "metrics_port": ("2", 2),
    "device": ("cpu", "cpu"),
    "precision": ("int8", "int8"),
    "threads": ("3", 3),
    "runners": ("7", 7),
    "max_batch_tokens": ("4", 4),
    "max_queued_tokens": ("5", 5),
    "max_queued_sequences": ("15", 15),
    "max_requests_in_flight": ("16", 16),
    "max_bytes_in_flight": ("5001", 5001),
    "max_wait_seconds": ("0.01", 0.01),
    "max_request_tokens": ("9", 9),
    "max_request_sequences": ("6", 6),
    "max_request_bytes": ("5000", 5000),
    "max_message_bytes": ("4096", 4096),
    "max_stream_requests": ("7", 7),
    "auth_token_file": ("/tokens", Path("/tokens")),
    "fairness": ("tenant", "tenant"),
    "tenant_weights": ("a=2,b=0.5", {"a": 2.0, "b": 0.5}),
    "tls_cert": ("/cert", Path("/cert")),
    "tls_key": ("/key", Path("/key")),
    "drain_seconds": ("0.5", 0.5),
    "grace_seconds": ("1.5", 1.5),
    "max_connection_age_seconds": ("60", 60.0),
    "max_connection_age_grace_seconds": ("90.5", 90.5),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "otlp_endpoint": ("http://collector:4317", "http://collector:4317"),
}


def test_every_setting_can_be_given_as_a_flag() -> None:
    arguments = [part for name, (text, _) in OTHERS.items() for part in (flag(name), text)]
    settings = parse_settings(arguments, {})
    assert {name: getattr(settings, name) for name in OTHERS} == {name: value for name, (_, value) in OTHERS.items()}


def test_every_setting_can_be_given_as_a_variable() -> None:
    settings = parse_settings([], {variable(name): text for name, (text, _) in OTHERS.items()})
    assert {name: getattr(settings, name) for name in OTHERS} == {name: value for name, (_, value) in OTHERS.items()}


def test_the_two_tests_above_leave_no_setting_out() -> None:
    assert [row.flag for row in setting_rows()] == [flag(name) for name in OTHERS]


def test_flags_and_variables_are_named_after_the_field() -> None:
    row = setting_rows()[2]
    assert (row.flag, row.variable, row.default) == ("--grpc-port", "MHSA_GRPC_PORT", "8001")


def test_every_setting_says_what_it_is() -> None:
    assert all(len(row.help) > 10 for row in setting_rows())


def test_help_shows_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--help"], {})
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for row in setting_rows():
        assert row.flag in shown
        assert f"{row.variable})" in shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--grpc-port", "x"], ["--grpc-port", "'x'", "int"]),
        (["--drain-seconds", "soon"], ["--drain-seconds", "'soon'", "float"]),
        (["--device", "tpu"], ["--device", "'tpu'", "auto", "cpu", "cuda"]),
        (["--grpc", "1"], ["--grpc"]),
    ],
)
def test_a_bad_flag_ends_with_its_name_and_value(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings([*MODELS, *arguments], {})
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(part in message for part in parts)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("MHSA_GRPC_PORT", "x", "MHSA_GRPC_PORT is 'x'; it takes a whole number"),
        ("MHSA_GRPC_PORT", "1.5", "MHSA_GRPC_PORT is '1.5'; it takes a whole number"),
        ("MHSA_DRAIN_SECONDS", "soon", "MHSA_DRAIN_SECONDS is 'soon'; it takes a number of seconds"),
        ("MHSA_DEVICE", "tpu", "MHSA_DEVICE is 'tpu'; it takes one of auto, cpu, cuda"),
        ("MHSA_LOG_LEVEL", "INFO", "MHSA_LOG_LEVEL is 'INFO'; it takes one of debug, info, warning, error"),
        ("MHSA_GRPC_PORT", "", "MHSA_GRPC_PORT is empty; unset it or give it a value"),
        # Path("") is the working directory: without this, a token file that somebody forgot to name would be that.
        ("MHSA_AUTH_TOKEN_FILE", "", "MHSA_AUTH_TOKEN_FILE is empty; unset it or give it a value"),
        ("MHSA_HOST", "", "MHSA_HOST is empty; unset it or give it a value"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(name: str, text: str, message: str) -> None:
    assert refusal(MODELS, {name: text}) == message


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("grpc_port", 0, 65535),
        ("metrics_port", 0, 65535),
        ("threads", 0, 1024),
        ("max_batch_tokens", 0, 2147483647),
        ("max_queued_tokens", 1, 2147483647),
        ("max_queued_sequences", 1, 2147483647),
        ("max_requests_in_flight", 1, 2147483647),
        ("max_bytes_in_flight", 4096, 2**63 - 1),
        ("max_wait_seconds", 0, 10),
        ("max_request_sequences", 1, 2147483647),
        ("max_message_bytes", 4096, 2147483647),
        ("max_stream_requests", 1, 2147483647),
        ("drain_seconds", 0, 86400),
        ("grace_seconds", 0, 86400),
        ("max_connection_age_seconds", 0, 86400),
        ("max_connection_age_grace_seconds", 1, 86400),
    ],
)
def test_a_number_out_of_range_is_named_with_its_limits(name: str, least: int, most: int) -> None:
    assert getattr(parse_settings([*MODELS, flag(name), str(least)], {}), name) == least
    assert getattr(parse_settings([*MODELS, flag(name), str(most)], {}), name) == most
    for value in (least - 1, most + 1):
        message = refusal([*MODELS, f"{flag(name)}={value}"], {})
        assert message.startswith(f"{flag(name)} ({variable(name)}) is {value}")
        assert message.endswith(f"; it takes {least} to {most}")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_seconds_are_finite(text: str) -> None:
    assert f"is {text}; it takes 0 to 86400" in refusal(MODELS, {"MHSA_DRAIN_SECONDS": text})


@pytest.mark.parametrize("source", ["flag", "variable"])
def test_weights_that_are_none_are_refused_by_what_is_wrong_with_them(source: str) -> None:
    arguments, environment = (
        (["--tenant-weights", "a=0"], {}) if source == "flag" else ([], {"MHSA_TENANT_WEIGHTS": "a=0"})
    )
    assert refusal([*MODELS, *arguments], environment) == (
        "--tenant-weights (MHSA_TENANT_WEIGHTS) has 'a=0': a weight is 0.001 to 1000"
    )


def test_weights_of_shares_that_there_are_not_are_refused() -> None:
    assert "--fairness none has none" in refusal([*MODELS, "--fairness", "none", "--tenant-weights", "a=2"], {})


@pytest.mark.parametrize(
    "endpoint", ["a:4317", "grpc://a:4317", "http://", "http://:4317", "http://[::1", "http://a:b", "http://a b:1"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    assert f"is {endpoint!r}; it takes http://HOST:PORT, or https://" in refusal(
        [*MODELS, f"--otlp-endpoint={endpoint}"], {}
    )


@pytest.mark.parametrize("given", ["--tls-cert", "--tls-key"])
def test_a_certificate_without_its_key_is_refused(given: str) -> None:
    assert "--tls-cert and --tls-key go together" in refusal([*MODELS, given, "/x"], {})


@pytest.mark.parametrize(
    "name", ["MHSA_GRPC_PROT", "MHSA_MODEL", "MHSA_", "MHSA_SERVICE", "MHSA_PORT", "MHSA_GRPC_port"]
)
def test_a_variable_that_is_no_setting_is_refused_by_name(name: str) -> None:
    assert refusal(MODELS, {name: "1"}) == f"no setting has the environment variable {name}; see mhsa-serve --help"


def test_the_value_of_an_unknown_variable_is_not_repeated() -> None:
    assert "hunter2" not in refusal(MODELS, {"MHSA_TOKEN": "hunter2"})


def test_the_log_shows_what_differs_from_the_defaults_and_no_password() -> None:
    endpoint = "http://user:hunter2@collector:4317"
    arguments = ["--models", "m", "--threads", "2", "--grpc-port", "8001", "--otlp-endpoint", endpoint]
    settings = parse_settings(arguments, {"MHSA_TENANT_WEIGHTS": "acme=3,globex=0.5", "MHSA_FAIRNESS": "tenant"})
    assert changed(settings) == {
        "--models": "m",
        "--threads": "2",
        "--fairness": "tenant",
        "--tenant-weights": "acme=3,globex=0.5",
        "--otlp-endpoint": "http://collector:4317",
    }


def test_other_programs_variables_are_none_of_ours() -> None:
    assert parse_settings(MODELS, {"PATH": "/bin", "XMHSA_X": "1", "mhsa_x": "1", "MHSAX": "1"}) == parse_settings(
        MODELS, {}
    )


def service_links(name: str, address: str = "10.96.0.7") -> dict[str, str]:
    """What the kubelet puts into every pod's environment for a Service with ports grpc 8001 and metrics 8002."""
    links = {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": "8001",
        f"{name}_SERVICE_PORT_GRPC": "8001",
        f"{name}_SERVICE_PORT_METRICS": "8002",
        f"{name}_PORT": f"tcp://{address}:8001",
    }
    for port in ("8001", "8002"):
        links |= {
            f"{name}_PORT_{port}_TCP": f"tcp://{address}:{port}",
            f"{name}_PORT_{port}_TCP_PROTO": "tcp",
            f"{name}_PORT_{port}_TCP_PORT": port,
            f"{name}_PORT_{port}_TCP_ADDR": address,
        }
    return links


# Services called mhsa, mhsa-serve, mhsa-grpc, mhsa-metrics: the last two give a setting's own variable.
@pytest.mark.parametrize("name", ["MHSA", "MHSA_SERVE", "MHSA_GRPC", "MHSA_METRICS"])
@pytest.mark.parametrize("address", ["10.96.0.7", "fd00::7"])
def test_kubernetes_service_links_change_nothing(name: str, address: str) -> None:
    assert parse_settings(MODELS, service_links(name, address)) == parse_settings(MODELS, {})


def test_no_setting_of_ours_has_the_form_of_a_service_link() -> None:
    for row in setting_rows():
        with pytest.raises(StartupError, match=f"{row.variable} is empty"):
            parse_settings([] if row.flag == "--models" else MODELS, {row.variable: ""})


def test_the_readme_has_the_table_of_settings() -> None:
    lines = ["| flag | variable | default | what |", "|---|---|---|---|"]
    lines += [f"| `{row.flag}` | `{row.variable}` | `{row.default}` | {row.help} |" for row in setting_rows()]
    table = "\n".join(lines).replace("<", "\\<")
    assert README.exists(), (
        f"README.md is missing; between <!-- settings --> and <!-- /settings --> it needs\n\n{table}\n"
    )
    found = README.read_text().partition("<!-- settings -->\n")[2].partition("<!-- /settings -->")[0].strip()
    assert found == table, f"between <!-- settings --> and <!-- /settings --> README.md needs\n\n{table}\n"


@pytest.mark.parametrize("age", ["0.001", "0.099"])
def test_an_age_at_which_no_call_would_get_through_is_refused(age: str) -> None:
    assert f"is {age}; it takes 0, or at least 0.1" in refusal([*MODELS, "--max-connection-age-seconds", age], {})
