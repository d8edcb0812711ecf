"""What is inside a bundle, for people and, as JSON, for programs. It needs numpy and onnx; neither torch nor a runtime.

`read_bundle` has compared every file with its sha256 before anything here is told.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from export.errors import ExportError
from service.bundle import MANIFEST, PARITY, Bundle, Precision, read_bundle

_FUSED = "com.microsoft"


@dataclass(frozen=True, slots=True)
class GraphContents:
    """One precision's graph: nodes by domain and type, weights by dtype.

    Shapes, axes and single numbers are no parameters. Equal tensors are one; what two graphs share counts in both.
    """

    operators: dict[str, int]
    parameters: int
    bytes_by_dtype: dict[str, int]

    @property
    def fused(self) -> dict[str, int]:
        """The operators that ONNX itself does not have."""
        return {name: count for name, count in self.operators.items() if name.startswith(_FUSED)}


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """A bundle with the contents of its graphs, its files' sizes in bytes and its parity report as it is."""

    bundle: Bundle
    graphs: dict[Precision, GraphContents]
    sizes: dict[str, int]
    parity: Any

    def as_json(self) -> str:
        """All of it."""
        manifest = asdict(self.bundle.manifest)
        content = {
            "path": str(self.bundle.path),
            "digest": self.bundle.digest,
            "size": sum(self.sizes.values()),
            "manifest": manifest,
            "graphs": {precision: asdict(graph) for precision, graph in self.graphs.items()},
            "files": {name: {"size": size, "sha256": self._sha256(name)} for name, size in self.sizes.items()},
            "parity": self.parity,
        }
        return json.dumps(content, indent=2)

    def as_text(self) -> str:
        """What most people want to know, a fact a line."""
        sections = [self._describe_model(), self._describe_graphs(), self._describe_parity(), self._describe_files()]
        return "\n\n".join("\n".join(lines) for lines in sections)

    def _sha256(self, name: str) -> str:
        return self.bundle.digest if name == MANIFEST else self.bundle.manifest.files[name]

    def _describe_model(self) -> list[str]:
        model = self.bundle.manifest
        takes = f"vectors of {model.input_size}" if model.input_size else f"token ids below {model.vocab_size}"
        types = f", {model.type_vocab_size} token types" if model.type_vocab_size else ""
        pad = "" if model.input_size else f", pad {model.pad_token_id}"
        normalized = "normalized" if model.normalize else "not normalized"
        facts = {
            "name": f"{model.name}, version {self.bundle.path.resolve().name}",
            "model": f"{model.family}, for {model.task}",
            "layers": f"{model.num_layers}, of {model.num_heads} heads and hidden size {model.hidden_size}",
            "input": f"{takes}{types}{pad}, at most {model.max_sequence_tokens} tokens",
            "output": f"{model.output_size} numbers, {model.pooling} pooling, {normalized}",
            "labels": ", ".join(model.labels),
            "prompts": "; ".join(f"{name}: {text!r}" for name, text in model.prompts.items()),
            "default": model.default_prompt,
            "made with": ", ".join(f"{package} {version}" for package, version in model.versions.items()),
            "format": model.format,
            "digest": self.bundle.digest,
        }
        return [f"{name:<10} {value}" for name, value in facts.items() if value]

    def _describe_graphs(self) -> list[str]:
        return [line for precision in self.graphs for line in self._describe_graph(precision)]

    def _describe_graph(self, precision: Precision) -> Iterator[str]:
        facts, graph = self.bundle.manifest.graphs[precision], self.graphs[precision]
        by_dtype = ", ".join(f"{dtype} {_readable(size)}" for dtype, size in graph.bytes_by_dtype.items())
        yield f"{precision:<10} {facts.file}, opset {facts.opset}, {graph.parameters:,} parameters ({by_dtype})"
        yield f"  fused    {_list_counts(graph.fused)}; {facts.optimized_attention_nodes} attention nodes when loaded"
        yield f"  all      {_list_counts(graph.operators)}"
        yield f"  golden   within {facts.token_tolerance:.2g} a token, {facts.pooled_tolerance:.2g} pooled"
        if facts.kept_in_fp32:
            yield f"  in fp32  {len(facts.kept_in_fp32)}: {', '.join(facts.kept_in_fp32)}"

    def _describe_parity(self) -> Iterator[str]:
        """Of fp32's batches the worst one, quantity by quantity; and what other precisions lose on text."""
        limits = {key: value for key, value in self.parity.items() if isinstance(value, float)}
        kept = "" if "fp32" in self.bundle.manifest.graphs else " (the fp32 graph, from which the others were made)"
        yield f"parity     against PyTorch{kept}, {_list_numbers(limits)}"
        for key in ("token_error", "pooled_error", "token_cosine", "pooled_cosine", "company_error"):
            is_cosine = key.endswith("_cosine")
            worst = (min if is_cosine else max)(self.parity["cases"], key=lambda case: case[key])
            value = f"1 - {1 - worst[key]:.2g}" if is_cosine else f"{worst[key]:.2g}"
            yield f"  {key.replace('_', ' '):<14} {value} at worst, in batch {worst['name']!r}"
        for report in self.parity["quality"]:
            numbers = {key: value for key, value in report.items() if isinstance(value, float)}
            yield f"  {report['precision']:<14} against fp32 on {report['num_texts']} texts, {_list_numbers(numbers)}"

    def _describe_files(self) -> list[str]:
        lines = [f"{self._sha256(name)} {_readable(size):>10}  {name}" for name, size in self.sizes.items()]
        return [*lines, f"{'in all, and every sha256 is as recorded':<64} {_readable(sum(self.sizes.values())):>10}"]


def inspect_bundle(path: Path) -> Inspection:
    """Read and check all of a bundle. Raises `BundleError` or `ExportError`."""
    bundle = read_bundle(path)
    graphs = {precision: _read_graph(bundle.graph_path(precision)) for precision in bundle.manifest.graphs}
    sizes = {name: (path / name).stat().st_size for name in (MANIFEST, *bundle.manifest.files)}
    try:
        inspection = Inspection(bundle, graphs, sizes, json.loads((path / PARITY).read_bytes()))
        inspection.as_text()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path / PARITY}: no report of parity ({error!r}); export the bundle again") from None
    return inspection


def _read_graph(path: Path) -> GraphContents:
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except DecodeError:
        raise ExportError(f"{path}: not an ONNX graph; export the bundle again") from None
    operators = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.node)
    tensors = [(onnx.helper.tensor_dtype_to_np_dtype(t.data_type), math.prod(t.dims)) for t in graph.initializer]
    weights = [(dtype, count) for dtype, count in tensors if dtype.name not in ("int64", "bool") and count > 1]
    sizes: Counter[str] = Counter()
    for dtype, count in weights:
        sizes[dtype.name] += count * dtype.itemsize
    return GraphContents(dict(operators.most_common()), sum(count for _, count in weights), dict(sizes.most_common()))


def _list_numbers(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {number:.6g}" for name, number in numbers.items())


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items()) or "none"


def _readable(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
