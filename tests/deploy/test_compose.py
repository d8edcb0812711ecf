"""docker-compose.yml and its overlay, as the real Compose reads them. test_compose_stack.py runs them."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config import read_setting
from tests.deploy.chart import defaults
from tests.deploy.compose import GPU, MAIN, services
from tests.deploy.paths import DOCKERFILE, GRAFANA, GUIDE, PROMETHEUS, ROOT

OURS = ("export", "encoder")
RUNNING = ("encoder", "prometheus", "alertmanager", "grafana")


@pytest.fixture(scope="module", params=[(MAIN,), (MAIN, GPU)], ids=["cpu", "gpu"])
def stack(request: pytest.FixtureRequest) -> dict[str, Any]:
    return services(*request.param)


def seconds(duration: str) -> float:
    """Compose's `1m30s`."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


def test_the_stack_has_these_services(stack: dict[str, Any]) -> None:
    assert set(stack) == {"export", *RUNNING}


def test_every_service_is_hardened(stack: dict[str, Any]) -> None:
    for name, service in stack.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert service["tmpfs"] == ["/tmp"], name
        assert service["init"], "signals reach a process that is PID 1 only if it handles them"
        assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}, name


def test_every_service_has_limits(stack: dict[str, Any]) -> None:
    for name, service in stack.items():
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys(), name


def test_every_image_has_a_version(stack: dict[str, Any]) -> None:
    for name, service in stack.items():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name


def test_our_images_have_the_project_s_version(stack: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in OURS:
        target = stack[name]["build"]["target"]
        assert stack[name]["image"] == f"mhsa-serve:{version}-{target}"


def test_ports_are_this_machine_s_alone(stack: dict[str, Any]) -> None:
    published = {
        port["target"]: (port["host_ip"], port["published"])
        for service in stack.values()
        for port in service.get("ports", [])
    }
    assert published == {number: ("127.0.0.1", str(number)) for number in (8001, 8002, 9090, 9093, 3000)}


def test_the_readme_s_variables_are_all_that_there_are_and_each_takes_effect() -> None:
    values = {
        "TAG": "9.8.7",
        "BIND_ADDRESS": "127.0.0.9",
        "GRPC_PORT": "1001",
        "METRICS_PORT": "1002",
        "PROMETHEUS_PORT": "1003",
        "ALERTMANAGER_PORT": "1004",
        "GRAFANA_PORT": "1005",
        "ENCODER_CPUS": "3",
        "ENCODER_MEMORY": "5g",
        "EXPORT_CPUS": "7",
    }
    readme = GUIDE.read_text()
    named = re.search(r"^- Variables, .*?: (.+?)\. ", readme, re.DOTALL | re.MULTILINE)
    assert named
    assert set(re.findall(r"`(\w+)`", named[1])) == values.keys()
    assert set(re.findall(r"\$\{(\w+)", "".join((ROOT / file).read_text() for file in (MAIN, GPU)))) == values.keys()
    for files, target in (((MAIN,), "cpu"), ((MAIN, GPU), "gpu")):
        stack = services(*files, environment=values)
        ports = {
            port["target"]: f"{port['host_ip']}:{port['published']}"
            for s in stack.values()
            for port in s.get("ports", [])
        }
        assert ports == {
            target: f"127.0.0.9:{number}"
            for target, number in zip((8001, 8002, 9090, 9093, 3000), range(1001, 1006), strict=True)
        }
        limits = {name: service["deploy"]["resources"]["limits"] for name, service in stack.items()}
        assert (limits["encoder"]["cpus"], limits["encoder"]["memory"]) == (3, str(5 * 2**30))
        assert limits["export"]["cpus"] == 7
        assert [stack[name]["image"] for name in OURS] == ["mhsa-serve:9.8.7-demo", f"mhsa-serve:9.8.7-{target}"]


def test_the_encoder_s_ports_are_the_server_s(stack: dict[str, Any]) -> None:
    targets = [port["target"] for port in stack["encoder"]["ports"]]
    assert targets == [read_setting("grpc_port", {}), read_setting("metrics_port", {})]


def test_the_encoder_may_take_longer_to_end_than_it_ever_does(stack: dict[str, Any]) -> None:
    own = read_setting("drain_seconds", {}) + read_setting("grace_seconds", {})
    assert seconds(stack["encoder"]["stop_grace_period"]) > own


def test_what_runs_on_is_asked_for_its_health(stack: dict[str, Any]) -> None:
    for name in RUNNING:
        assert stack[name]["healthcheck"]["test"][0] == "CMD", name
    assert stack["encoder"]["healthcheck"]["test"] == ["CMD", "mhsa-serve", "healthcheck"]
    for name in ("prometheus", "alertmanager", "grafana"):
        [port] = stack[name]["ports"]
        assert f"http://127.0.0.1:{port['target']}/" in stack[name]["healthcheck"]["test"][-1]


def test_the_encoder_is_asked_as_often_as_its_image_says() -> None:
    own = services(MAIN)["encoder"]["healthcheck"]
    [line] = re.findall(r"^HEALTHCHECK (.+) CMD", DOCKERFILE.read_text(), re.MULTILINE)
    said = dict(flag.removeprefix("--").split("=") for flag in line.split())
    assert int(said.pop("retries")) == own["retries"]
    assert {name: seconds(value) for name, value in said.items()} == {
        "interval": seconds(own["interval"]),
        "timeout": seconds(own["timeout"]),
        "start-period": seconds(own["start_period"]),
    }


def test_what_runs_comes_back_by_itself_and_the_export_runs_once(stack: dict[str, Any]) -> None:
    assert {name: service["restart"] for name, service in stack.items()} == {
        "export": "no",
        **dict.fromkeys(RUNNING, "unless-stopped"),
    }


def test_the_export_can_reach_nobody(stack: dict[str, Any]) -> None:
    assert stack["export"]["network_mode"] == "none"


def test_prometheus_and_alertmanager_read_what_is_mounted_and_keep_what_budgets_and_traces_need(
    stack: dict[str, Any],
) -> None:
    for name, storage in (("prometheus", "--storage.tsdb.path"), ("alertmanager", "--storage.path")):
        flags = dict(flag.split("=", 1) for flag in stack[name]["command"])
        mounts = {volume["target"]: volume["type"] for volume in stack[name]["volumes"]}
        assert mounts[flags[storage]] == "volume"
        assert any(flags["--config.file"].startswith(target) for target, kind in mounts.items() if kind == "bind")
    flags = dict(flag.split("=", 1) for flag in stack["prometheus"]["command"])
    assert int(flags["--storage.tsdb.retention.time"].removesuffix("d")) > 30, "an error budget is of 30 days"
    assert flags["--enable-feature"] == "exemplar-storage"


def test_grafana_keeps_its_data_lets_everybody_look_and_nobody_in_and_calls_nobody(stack: dict[str, Any]) -> None:
    assert ("volume", "/var/lib/grafana") in {(v["type"], v["target"]) for v in stack["grafana"]["volumes"]}
    assert stack["grafana"]["environment"] == {
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_PLUGINS_PREINSTALL_DISABLED": "true",
    }


def test_nothing_that_is_mounted_from_here_can_be_written(stack: dict[str, Any]) -> None:
    assert all(v["read_only"] for service in stack.values() for v in service["volumes"] if v["type"] == "bind")


def test_the_encoder_waits_for_the_export_and_cannot_write_models(stack: dict[str, Any]) -> None:
    assert stack["encoder"]["depends_on"]["export"]["condition"] == "service_completed_successfully"
    [models] = stack["encoder"]["volumes"]
    assert (models["source"], models["target"], models["read_only"]) == ("models", "/models", True)


def test_files_are_mounted_where_they_are_looked_for(stack: dict[str, Any]) -> None:
    mounts = {v["target"]: v["source"] for service in stack.values() for v in service["volumes"] if v["type"] == "bind"}
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/mhsa-serve.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert mounts[provider["options"]["path"]] == str(GRAFANA / "dashboards")
    prometheus = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert mounts["/etc/prometheus"] == str(PROMETHEUS)
    assert prometheus["rule_files"] == ["rules/*.yml"]
    assert mounts["/etc/grafana/provisioning"] == str(GRAFANA / "provisioning")


def test_scrapes_rules_and_dashboards_go_by_one_interval_and_one_job() -> None:
    prometheus = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert prometheus["global"] == {"scrape_interval": "15s", "evaluation_interval": "15s"}
    assert source["jsonData"]["timeInterval"] == defaults()["monitoring"]["interval"] == "15s"
    assert [config["job_name"] for config in prometheus["scrape_configs"]] == ["mhsa-serve"], "as the rules select it"


def test_dashboards_find_their_data_source_and_stay_as_their_files_are() -> None:
    files = ("datasources/prometheus.yml", "dashboards/mhsa-serve.yml")
    versions = [yaml.safe_load((GRAFANA / "provisioning" / file).read_text())["apiVersion"] for file in files]
    assert versions == [1, 1], "without it Grafana reads another format"
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/mhsa-serve.yml").read_text())["providers"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert (provider["type"], provider["disableDeletion"], provider["allowUiUpdates"]) == ("file", True, False)


def test_addresses_in_files_are_services_and_their_ports(stack: dict[str, Any]) -> None:
    prometheus = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    configs = [*prometheus["scrape_configs"], *prometheus["alerting"]["alertmanagers"]]
    named = {target for config in configs for group in config["static_configs"] for target in group["targets"]}
    named.add(source["url"].removeprefix("http://"))
    listening = {f"{name}:{port['target']}" for name, service in stack.items() for port in service.get("ports", [])}
    assert named <= listening


def test_the_gpu_overlay_asks_for_one_gpu_and_keeps_the_rest() -> None:
    cpu, gpu = services(MAIN)["encoder"], services(MAIN, GPU)["encoder"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    changed = {key for key in cpu | gpu if cpu.get(key) != gpu.get(key)}
    assert changed == {"build", "deploy", "healthcheck", "image"}
    assert int(gpu["deploy"]["resources"]["limits"]["memory"]) > int(cpu["deploy"]["resources"]["limits"]["memory"])
    assert seconds(gpu["healthcheck"]["start_period"]) > seconds(cpu["healthcheck"]["start_period"])


def test_the_readme_s_own_override_is_what_compose_takes(tmp_path: Path) -> None:
    text = GUIDE.read_text().partition("\n## Compose\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```yaml\n(.+?) *```", text, re.DOTALL)
    override = tmp_path / "override.yml"
    override.write_text(textwrap.dedent(block))
    encoder = services(MAIN, str(override))["encoder"]
    assert [volume["target"] for volume in encoder["volumes"]] == ["/models", "/tls"]
    assert "depends_on" not in encoder


@pytest.mark.parametrize(
    ("manifest", "wanted"),
    [
        (None, "export"),
        ('{"format": "mhsa-bundle/1"}', "export"),
        ("as it was", "all-MiniLM-L6-v2 is there"),
    ],
    ids=["nothing", "another version's", "ours"],
)
def test_what_is_exported_is_what_the_volume_lacks_or_has_in_another_format(
    stack: dict[str, Any], tiny_bundle: Path, tmp_path: Path, manifest: str | None, wanted: str
) -> None:
    """With `mhsa-export` as it is, but for the export itself."""
    bundle = tmp_path / "all-MiniLM-L6-v2" / "1"
    if manifest is not None:
        shutil.copytree(tiny_bundle, bundle)
    if manifest not in (None, "as it was"):
        (bundle / "model.json").write_text(str(manifest))
    stub = tmp_path / "mhsa-export"
    stub.write_text(
        f'#!/bin/sh\ntest "$1" = inspect || exec echo export "$@"\nexec "{sys.executable}" -m export "$@"\n'
    )
    stub.chmod(0o755)
    (script,) = stack["export"]["command"]
    done = subprocess.run(
        ["sh", "-c", script.replace("$$", "$").replace("/models", str(tmp_path))],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.startswith(wanted)
    assert wanted != "export" or done.stdout.split()[-1] == "--force"
