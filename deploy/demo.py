"""`make run`: serves the exported model, encodes a few sentences through both APIs, and shows what came back.

Then it serves until Ctrl-C. With --oneshot it stops the server and exits with 0 if everything went well. The server is
a child process, and the clients are those that a user has: nothing here uses the server's internals.
"""

import argparse
import itertools
import signal
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import grpc
import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from deploy.process import ServerProcess, ServerProcessError
from service.bundle import TOKENIZER
from service.client import EncoderClient

NAME, VERSION = "all-MiniLM-L6-v2", "1"
GRPC_PORT, METRICS_PORT = 8001, 8002
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun by the window.",
    "Interest rates rose again this quarter.",
    "The central bank tightened monetary policy.",
    "How do I bake sourdough bread?",
    "A recipe for a crusty loaf made with wild yeast.",
)
# Both APIs carry float32, and the same model answers: only the make-up of batches can differ.
TOLERANCE = 1e-5
# How much came, in which batches, how full they were, and what the model runs on.
METRICS = ("mhsa_requests_total", "mhsa_sequences_total", "mhsa_tokens_total", "mhsa_batch_", "mhsa_model_info")

Vectors = NDArray[np.float32]


class DemoError(Exception):
    """The demo cannot go on; the text is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="deploy.demo", description="Serve the demo model and encode with two clients."
    )
    parser.add_argument(
        "--models", type=Path, default=Path("models"), help="directory of bundles (default: %(default)s)"
    )
    parser.add_argument("--oneshot", action="store_true", help="end the server after the printout")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs want it
            signal.signal(number, _interrupt)
    try:
        return run(options.models, is_oneshot=options.oneshot)
    except (DemoError, ServerProcessError, grpc.RpcError, InferenceServerException) as error:
        print(f"demo: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted before it was done", file=sys.stderr)
        return 130


def run(models: Path, *, is_oneshot: bool) -> int:
    """Serve, show, stop; returns the exit code. The server has ended also when this raises."""
    tokenizer = models / NAME / VERSION / TOKENIZER / "tokenizer.json"
    if not tokenizer.is_file():
        raise DemoError(f"{tokenizer} is missing; `make run` exports the model first")
    arguments = ["--models", str(models), "--device", "auto", "--drain-seconds", "0"]
    with ServerProcess("service", arguments, grpc_port=GRPC_PORT, metrics_port=METRICS_PORT) as server:
        print("starting the server: it loads the model, verifies it against its golden outputs, calibrates", flush=True)
        server.wait_until_serving()
        print(server.log())
        show(server, tokenizer)
        if not is_oneshot:
            serve_until_interrupted(server)
        code = server.stop()
    print(f"the server has drained and ended with exit code {code}")
    return int(code != 0)


def show(server: ServerProcess, tokenizer: Path) -> None:
    """Encode with two clients and print what came of it. Raises `DemoError` when they disagree."""
    with EncoderClient(server.target) as client:
        model = client.model(NAME, timeout=10)
        ids = tokenize(tokenizer, model.limits.max_sequence_tokens)
        ours = client.encode(ids, model=NAME, timeout=10)
    theirs = encode_with_triton(server.target, ids)
    difference = float(np.abs(ours - theirs).max())
    if not difference <= TOLERANCE:
        raise DemoError(f"the two APIs differ by {difference:.1e}; the limit is {TOLERANCE:.0e}")
    print("\n".join(similarity_lines(SENTENCES, ours)))
    print(f"\nlargest difference between EncoderClient and tritonclient: {difference:.1e} (limit {TOLERANCE:.0e})\n")
    print("\n".join(metric_lines(fetch_metrics())))
    print(f"\ngRPC     {server.target}  mhsa.encoder.v1.EncoderService and inference.GRPCInferenceService")
    print(f"metrics  http://127.0.0.1:{METRICS_PORT}/metrics", flush=True)


def serve_until_interrupted(server: ServerProcess) -> None:
    """Sleep until Ctrl-C or SIGTERM. Raises `ServerProcessError` when the server ends first."""
    print("\nserving; Ctrl-C ends it", flush=True)
    try:
        code = server.wait()
    except KeyboardInterrupt:
        print("\ndraining", flush=True)
    else:
        raise ServerProcessError(f"the server ended with exit code {code}: {server.last_line()}")


def tokenize(path: Path, max_tokens: int) -> list[list[int]]:
    """The sentences' token ids, special tokens included and no padding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(SENTENCES))]


def encode_with_triton(target: str, ids: Sequence[Sequence[int]]) -> Vectors:
    """Encode through the Open Inference Protocol, padded as its clients do."""
    rows = np.array(list(itertools.zip_longest(*ids, fillvalue=0)), np.int64).T.copy()  # (B, S)
    lengths = np.array([len(row) for row in ids])
    mask = (np.arange(rows.shape[1]) < lengths[:, None]).astype(np.int64)  # (B, S)
    inputs = []
    for name, array in (("input_ids", rows), ("attention_mask", mask)):
        inputs.append(triton.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    outputs = [triton.InferRequestedOutput("sentence_embedding")]
    with triton.InferenceServerClient(target) as client:
        result = client.infer(NAME, inputs, outputs=outputs, client_timeout=10)
    vectors: Vectors = result.as_numpy("sentence_embedding")
    return vectors


def similarity_lines(sentences: Sequence[str], vectors: Vectors) -> list[str]:
    """The cosine of every pair, each row with its sentence."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    width = max(map(len, sentences))
    numbers = "".join(f"{number:7d}" for number in range(1, len(sentences) + 1))
    cosines = (unit @ unit.T).round(2) + 0.0  # no -0.00
    rows = ("".join(f"{cosine:7.2f}" for cosine in row) for row in cosines)
    lines = (
        f"{number}  {text:<{width}}{row}" for number, (text, row) in enumerate(zip(sentences, rows, strict=True), 1)
    )
    return [f"{'cosine':<{width + 3}}{numbers}", *lines]


def fetch_metrics() -> str:
    """The metrics page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=10) as response:
        page: bytes = response.read()
    return page.decode()


def metric_lines(page: str) -> list[str]:
    """The lines that show what the demo did: those that are not zero, without buckets."""
    return [line for line in page.splitlines() if line.startswith(METRICS) and _tells(line)]


def _tells(line: str) -> bool:
    name, _, value = line.rpartition(" ")
    return "_bucket" not in name and "_created" not in name and float(value) != 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _one_line(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
