"""docker-compose.yml and its overlay, as the real Compose reads them. test_compose_stack.py runs them."""

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config import read_setting
from tests.deploy.compose import GPU, MAIN, services
from tests.deploy.paths import GRAFANA, GUIDE, PROMETHEUS, ROOT

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
    published = {port["target"]: port["host_ip"] for service in stack.values() for port in service.get("ports", [])}
    assert published == dict.fromkeys((8001, 8002, 9090, 9093, 3000), "127.0.0.1")


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


def test_the_readme_s_own_override_is_what_compose_takes(tmp_path: Path) -> None:
    text = GUIDE.read_text().partition("\n## Compose\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```yaml\n(.+?) *```", text, re.DOTALL)
    override = tmp_path / "override.yml"
    override.write_text(textwrap.dedent(block))
    encoder = services(MAIN, str(override))["encoder"]
    assert [volume["target"] for volume in encoder["volumes"]] == ["/models", "/tls"]
    assert "depends_on" not in encoder
