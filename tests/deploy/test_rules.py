"""Recording rules and alerts: valid, tested by promtool both ways, true to the code, with a runbook each.

promtool's own cases are in rules/: for each alert one where it fires and ends, and one where it does not fire.
"""

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.interceptors import METHODS
from service.metrics import SECONDS_BUCKETS
from service.servicers.status import CODES, REASONS
from tests.deploy.exported import exported_names
from tests.deploy.paths import ALERTS, GUIDE, PROMETHEUS, RECORDING, ROOT
from tests.deploy.programs import need
from tests.deploy.promql import selectors
from tests.deploy.rule_files import Rule, alerting_rules, recording_rules

CASES = sorted((Path(__file__).parent / "rules").glob("*.yml"))
ALL_RULES = [*recording_rules(), *alerting_rules()]
each_rule = pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
each_alert = pytest.mark.parametrize("alert", alerting_rules(), ids=lambda alert: alert.name)

# Who is to blame for each reason that a request may end for. A new one has to be put on a side.
NOT_OURS = {"invalid", "not_found", "unauthenticated", "cancelled", "draining"}
OURS = {"unavailable", "queue_full", "deadline", "out_of_memory", "engine", "internal"}
CARRY_SEQUENCES = {"Encode", "EncodeStream", "ModelInfer"}


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_configuration_and_rules() -> None:
    run(need("promtool"), "check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_amtool_finds_nothing_wrong_with_the_routes() -> None:
    run(need("amtool"), "check-config", str(PROMETHEUS / "alertmanager.yml"))


@pytest.mark.parametrize(("severity", "receiver"), [("page", "pages"), ("ticket", "tickets")])
def test_alerts_go_to_those_who_are_to_look(severity: str, receiver: str) -> None:
    path = str(PROMETHEUS / "alertmanager.yml")
    command = ("config", "routes", "test", f"--config.file={path}", f"--verify.receivers={receiver}")
    run(need("amtool"), *command, f"severity={severity}")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_promtools_cases_pass(path: Path) -> None:
    run(need("promtool"), "test", "rules", str(path))


@each_alert
def test_an_alert_has_cases_where_it_fires_where_it_ends_and_where_it_does_not_fire(alert: Rule) -> None:
    cases = _per_test(alert.name)
    assert any(not moment for case in cases for moment in case), "none where it does not fire"
    assert any(now and not later for case in cases for now, later in itertools.pairwise(case)), "none where it ends"


@each_alert
def test_an_alert_says_who_is_to_look_what_is_wrong_and_what_to_do_first(alert: Rule) -> None:
    assert alert.labels["severity"] in {"page", "ticket"}
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert re.match(r"(Add|Call|Compare|Look|Read|Renew|See) ", alert.annotations["description"]), (
        "an action comes first"
    )


@each_alert
def test_an_alert_has_a_runbook_of_its_name(alert: Rule) -> None:
    path, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert ROOT / path == GUIDE
    assert anchor == alert.name.lower(), "as GitHub and GitLab make anchors of headings"
    section = re.search(rf"^#+ {alert.name}\n\n(.+?)(?=^#|\Z)", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert section, f"deploy/README.md has no section {alert.name}"
    assert len(section[1].split()) > 30


def test_no_runbook_has_outlived_its_alert() -> None:
    headings = set(re.findall(r"^#+ (Mhsa\w+)$", GUIDE.read_text(), re.MULTILINE))
    assert headings == {alert.name for alert in alerting_rules()}


def test_what_the_runbooks_quote_from_the_log_is_logged() -> None:
    """A quote is two words or more in the log's own case; N and cuda stand for what is filled in."""
    runbooks = GUIDE.read_text().partition("### Alerts")[2].partition("## Kubernetes")[0]
    quoted = {" ".join(text.split()) for text in re.findall(r"`((?:a|the|cuda) [^`]+)`", runbooks)}
    sources = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    logged = re.sub(r"%\w", "*", re.sub(r'"\s*\n\s*"', "", sources))
    assert len(quoted) >= 4
    assert {text for text in quoted if re.sub(r"\bN\b|\bcuda\b", "*", text) not in logged} == set()


@each_alert
def test_an_alerts_text_uses_only_labels_that_it_has(alert: Rule) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(alert.annotations.values())))
    for labels in (labels for case in _per_test(alert.name) for moment in case for labels in moment):
        assert used <= set(re.findall(r"(\w+)=", labels)), labels


@each_rule
def test_a_rule_reads_only_what_is_exported_or_recorded(rule: Rule) -> None:
    known = exported_names() | {recorded.name for recorded in recording_rules()}
    for selector in selectors(rule.expression):
        assert selector.name in known


@each_rule
def test_a_rule_reads_series_of_one_job(rule: Rule) -> None:
    """Recorded ones too: two releases in one Prometheus have the rules twice, and each is to mind its own."""
    for selector in selectors(rule.expression):
        assert 'job="mhsa-serve"' in selector.matchers, selector


@each_rule
def test_a_rule_matches_only_methods_codes_and_reasons_that_there_are(rule: Rule) -> None:
    known = {"method": set(METHODS.values()), "code": {code.name for code in CODES}, "reason": set(REASONS)}
    for selector in selectors(rule.expression):
        for matcher in selector.matchers:
            label, _, values = re.match(r'(\w+)([!=~]+)"(.*)"', matcher).groups()  # type: ignore[union-attr]  # always
            if label in known:
                assert set(values.split("|")) <= known[label], matcher


def test_every_reason_is_either_the_servers_fault_or_not() -> None:
    assert set(REASONS) == OURS | NOT_OURS
    assert not OURS & NOT_OURS
    (bad,) = [rule for rule in recording_rules() if rule.name == "job:mhsa_requests_bad:rate5m"]
    (selector,) = selectors(bad.expression)
    (excluded,) = [matcher for matcher in selector.matchers if matcher.startswith("reason")]
    operator, values = re.fullmatch(r'reason(!~)"(.*)"', excluded).groups()  # type: ignore[union-attr]  # fails loudly
    assert (operator, set(values.split("|"))) == ("!~", NOT_OURS)


def test_only_methods_that_carry_sequences_count() -> None:
    written = set(re.findall(r'method=~"([^"]*)"', RECORDING.read_text()))
    assert {frozenset(value.split("|")) for value in written} == {frozenset(CARRY_SEQUENCES)}


@pytest.mark.parametrize("text", ["0.999 * group", "0.99 * group", "0.5 * group", 'le="0.5"'])
def test_each_objective_stands_once_where_the_chart_puts_its_value(text: str) -> None:
    assert RECORDING.read_text().split("groups:")[1].count(text) == 1
    assert "0.99" not in ALERTS.read_text().split("groups:")[1]


def test_the_thresholds_edge_is_a_bucket_of_the_histogram() -> None:
    (threshold,) = re.findall(r'\ble="([0-9.]+)"\}', RECORDING.read_text())
    assert threshold in {str(edge) for edge in SECONDS_BUCKETS}


def test_recorded_names_say_their_level_and_operation() -> None:
    for rule in recording_rules():
        assert re.fullmatch(r"(job|instance|model):mhsa_[a-z_]+:[a-z0-9_]+", rule.name)


# Of two alerts with one cause the one that says more; the others say nothing while it fires.
MUTED = {
    "MhsaErrorBudgetBurnsFast": {"MhsaErrorBudgetBurnsSlowly", "MhsaRefusingRequests", "MhsaDeadlinesMissed"},
    "MhsaLatencyBudgetBurnsFast": {"MhsaLatencyBudgetBurnsSlowly", "MhsaQueueWaitHigh"},
    "MhsaModelDown": {"MhsaModelNotReady"},
    "MhsaEngineUnhealthy": {"MhsaModelNotReady"},
    "MhsaAllDown": {"MhsaReplicaDown", "MhsaModelDown", "MhsaModelNotReady"},
    "MhsaCertificateExpiresNow": {"MhsaCertificateExpires"},
}


def test_one_cause_is_one_message_and_mutes_no_other_place() -> None:
    muted = {}
    for rule in yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["inhibit_rules"]:
        (source,), (targets,) = (
            re.findall(r"[\w|]+", " ".join(rule[f"{of}_matchers"]))[1:] for of in ("source", "target")
        )
        muted[source] = set(targets.split("|"))
        for target in muted[source]:
            assert set(rule["equal"]) == _labels(source) & _labels(target), f"{source} mutes {target}"
    assert muted == MUTED


def test_pages_come_sooner_and_more_often_than_tickets() -> None:
    route = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["route"]
    (pages,) = route["routes"]
    assert (pages["group_wait"], route["group_wait"]) == ("10s", "30s")
    assert (pages["repeat_interval"], route["repeat_interval"]) == ("1h", "12h")
    assert route["group_interval"] == "5m"
    assert route["group_by"] == ["alertname", "namespace", "job"], "one message for a deployment"
    assert not pages.keys() & {"group_by", "group_interval", "continue"}


def _labels(alert: str) -> set[str]:
    """What tells one alert of this name from another."""
    found = [set(re.findall(r"(\w+)=", labels)) for case in _per_test(alert) for moment in case for labels in moment]
    return max(found, key=len) - {"alertname", "alertstate", "severity"}


def _per_test(alert: str) -> list[list[list[str]]]:
    """For each of promtool's cases, one moment after the other: the labels that the alert is to fire with."""
    cases = [test for path in CASES for test in yaml.safe_load(path.read_text())["tests"]]
    return [[_of(alert, moment) for moment in case["promql_expr_test"] if _asks_for(alert, moment)] for case in cases]


def _of(alert: str, moment: dict[str, Any]) -> list[str]:
    return [sample["labels"] for sample in moment["exp_samples"] if f'alertname="{alert}"' in sample["labels"]]


def _asks_for(alert: str, moment: dict[str, Any]) -> bool:
    (selector, *_) = selectors(moment["expr"])
    asked = [found[1] for matcher in selector.matchers if (found := re.fullmatch(r'alertname=~?"(.*)"', matcher))]
    return selector.name == "ALERTS" and all(re.fullmatch(pattern, alert) for pattern in asked)
