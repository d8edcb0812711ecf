"""The real server as a process of its own, with what a test wants to see of it: its log and its metrics."""

import re
import signal
import urllib.request
from datetime import datetime
from pathlib import Path

import trustme
from prometheus_client.parser import text_string_to_metric_families

from deploy.process import ServerProcess, free_ports
from tests.waiting import wait_for


class TestedServer(ServerProcess):
    """`mhsa-serve` on `host`, its gRPC on `grpc_port` or a free one."""

    __test__ = False  # to pytest, a class called Test... is tests

    def __init__(self, models: Path, *flags: str, host: str = "127.0.0.1", grpc_port: int = 0) -> None:
        free, metrics_port = free_ports(2)
        arguments = ["--models", str(models), "--host", host, "--drain-seconds", "0", *flags]
        super().__init__("service", arguments, grpc_port=grpc_port or free, metrics_port=metrics_port, host=host)

    def wait_for_log(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """The first part of the log that matches, past or future."""
        return wait_for(
            lambda: re.search(pattern, self.log()),
            lambda: f"the log has no {pattern!r}:\n{self.log()}",
            seconds=seconds,
        )

    def wait_until_listening(self) -> str:
        """Wait until calls are answered, if only with UNAVAILABLE; the address."""
        self.wait_for_log("listening: gRPC")
        return self.target

    def refusal(self) -> str:
        """The one line that a server leaves which cannot start."""
        assert self.wait(60) == 2
        assert "Traceback" not in self.log()
        return self.last_line()

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self.send(signal.SIGTERM)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a sample over every series that has these labels."""
        samples = [s for s in self._samples() if s[0] == name and labels.items() <= s[1].items()]
        assert samples, f"no series {name} with {labels}"
        return sum(value for _, _, value in samples)

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        with urllib.request.urlopen(f"http://{self.host}:{self.metrics_port}/metrics", timeout=10) as response:
            text = response.read().decode()
        return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


def write_certificate(
    authority: trustme.CA, stem: Path, *, name: str = "127.0.0.1", not_after: datetime | None = None
) -> tuple[Path, Path]:
    """A new certificate and its key, in `stem` with the endings .crt and .key."""
    issued = authority.issue_cert(name, not_after=not_after)
    certificate, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
    issued.private_key_pem.write_to_path(key)
    for pem in issued.cert_chain_pems:
        pem.write_to_path(certificate, append=True)
    return certificate, key
