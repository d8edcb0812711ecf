"""How pip reaches its packages on this machine, as a pip.conf that a build gets as a secret and no layer keeps."""

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# What says where packages are; `find-links` is apart, since its directories are this machine's.
_PASSED_ON = ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout")


@contextmanager
def pip_conf(path: Path) -> Iterator[tuple[Path, bool]]:
    """The file at `path`, and whether a directory of this machine has torch for CPUs.

    Directories of wheels are served to the build on 127.0.0.1, which it shares with this machine.
    """
    settings = _settings()
    directories = [Path(link) for link in settings.get("find-links", "").split() if Path(link).is_dir()]
    lines = [f"{key.removeprefix('default-')} = {settings[key]}" for key in _PASSED_ON if _is_remote(settings.get(key))]
    with ExitStack() as stack:
        if directories:
            links = [stack.enter_context(_served(directory)) for directory in directories]
            lines += [f"find-links = {' '.join(links)}", "trusted-host = 127.0.0.1"]
        path.write_text("\n".join(("[global]", *lines, "")))
        yield path, any(list(directory.glob("torch-*+cpu-*.whl")) for directory in directories)


def _settings() -> dict[str, str]:
    """What `pip config list` prints as section.key='value', by key."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name.rpartition(".")[2]: value.strip("'") for name, _, value in pairs}


def _is_remote(value: str | None) -> bool:
    return value is not None and "file:" not in value


@contextmanager
def _served(directory: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Builds that fail say so themselves."""
