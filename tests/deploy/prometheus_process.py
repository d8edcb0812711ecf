"""A real Prometheus as a process of its own, which scrapes every few seconds and keeps our rules."""

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from deploy.grafana.prometheus import Prometheus
from deploy.process import free_ports
from tests.deploy.paths import ALERTS, RECORDING
from tests.deploy.programs import need
from tests.waiting import wait_for


class PrometheusProcess:
    """Debian's prometheus on a free port of 127.0.0.1; `targets` are metrics ports and the labels of each."""

    def __init__(
        self,
        directory: Path,
        targets: Mapping[int, Mapping[str, str]],
        *,
        job: str = "mhsa-serve",
        interval_seconds: int = 1,
    ) -> None:
        self._directory = directory
        self._program = need("prometheus")
        (self._port,) = free_ports(1)
        self._config = {
            "global": {"scrape_interval": f"{interval_seconds}s", "evaluation_interval": f"{interval_seconds}s"},
            "rule_files": [str(RECORDING), str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [
                        {"targets": [f"127.0.0.1:{port}"], "labels": dict(labels)} for port, labels in targets.items()
                    ],
                }
            ],
        }
        self.api = Prometheus(f"http://127.0.0.1:{self._port}")

    def __enter__(self) -> Self:
        config = self._directory / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config))
        self._log = (self._directory / "prometheus.log").open("w+")
        self._process = subprocess.Popen(
            [
                self._program,
                f"--config.file={config}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._directory / "data", ignore_errors=True)

    def _wait_until_ready(self) -> None:
        wait_for(self._is_ready, lambda: f"Prometheus does not start:\n{self._read_log()}")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._read_log()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _read_log(self) -> str:
        return (self._directory / "prometheus.log").read_text()
