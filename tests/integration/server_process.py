"""The real server as a process of its own: started with real flags, watched through its log, ended with a signal."""

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from prometheus_client.parser import text_string_to_metric_families

_LISTENING = re.compile(r"listening: gRPC on port (\d+), metrics on port (\d+)")


class ServerProcess:
    """`mhsa-serve` on free ports of 127.0.0.1; leaving the block kills it if it still runs."""

    def __init__(self, models: Path, *flags: str) -> None:
        defaults = ["--host", "127.0.0.1", "--grpc-port", "0", "--metrics-port", "0", "--drain-seconds", "0"]
        command = [sys.executable, "-m", "service", "--models", str(models), *defaults, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def wait_for_log(self, pattern: "str | re.Pattern[str]", seconds: float = 60.0) -> re.Match[str]:
        """The first log line that matches, past or future."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            for line in list(self.log):
                if match := re.search(pattern, line):
                    return match
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no log line matches {pattern!r}:\n{''.join(self.log)}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.wait_for_log(_LISTENING)[1]}"

    def wait_until_serving(self) -> str:
        """Wait for health SERVING; the address."""
        address = self.address
        with grpc.insecure_channel(address) as channel:
            for response in HealthStub(channel).Watch(HealthCheckRequest(), timeout=60, wait_for_ready=True):
                if response.status == HealthCheckResponse.SERVING:
                    return address
        raise AssertionError(f"the server left before it served:\n{''.join(self.log)}")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a sample over every series that has these labels."""
        samples = [s for s in self.samples() if s[0] == name and labels.items() <= s[1].items()]
        assert samples, f"no series {name} with {labels}"
        return sum(value for _, _, value in samples)

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Every sample that a scrape of /metrics gives."""
        port = self.wait_for_log(_LISTENING)[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self, seconds: float = 30.0) -> int:
        """Wait for the end."""
        return self.process.wait(seconds)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.log.append(line)
