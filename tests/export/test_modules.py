"""A user's own module: exported when it keeps its promises, refused in one line for each way that it does not."""

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import save_file

from export.errors import ExportError
from export.modules import read_module
from export.steps import export_checkpoint
from service.bundle import read_bundle

# What a user writes. Tests change one line of it.
MODEL = dedent("""
    import torch
    from torch import nn

    from export.attention import attend
    from export.modules import ServedModule


    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
            self.norm = nn.LayerNorm(16)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x, mask, packing):
            y = attend(self.query(x), self.key(x), self.value(x), num_heads=2, mask=mask, packing=packing)
            return self.norm(x + self.dropout(self.out(y)))


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.into = nn.Linear(5, 16)
            self.position = nn.Embedding(24, 16)
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, inputs, position_ids=None, *, mask=None, packing=None):
            if position_ids is None:
                position_ids = torch.arange(inputs.shape[1])
            x = self.into(inputs) + self.position(position_ids)
            for layer in self.layers:
                x = layer(x, mask, packing)
            return x


    FACTS = dict(hidden_size=16, num_layers=2, num_heads=2, max_sequence_tokens=24, input_size=5)


    def build():
        return ServedModule(Model(), **FACTS)
""")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two files of one name and size in a second
    for name in ("mine", "mine.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def _write(path: Path, old: str = "", new: str = "") -> None:
    assert old in MODEL
    path.write_text(MODEL.replace(old, new, 1) if old else MODEL)


def _refusal(tmp_path: Path, old: str = "", new: str = "", target: str = "mine:build") -> str:
    _write(tmp_path / "mine.py", old, new)
    sys.modules.pop("mine", None)
    with pytest.raises(ExportError) as refusal:
        read_module(target, None)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_module_becomes_a_verified_bundle(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    _write(tmp_path / "mine" / "model.py")

    path, report = export_checkpoint(
        None, tmp_path / "models", name="mine", module="mine.model:build", pooling="max", normalize=True
    )

    manifest = read_bundle(path).manifest
    assert (manifest.family, manifest.input, manifest.input_size) == ("module", "embeddings", 5)
    assert report.fusion.optimized_attention_nodes == 2
    # Both forms were compared in columns of their own, too.
    assert {"left padded", "masks with holes"} <= {case.name for case in report.cases}


def test_a_module_of_token_ids_becomes_a_verified_bundle(tmp_path: Path) -> None:
    _write(tmp_path / "mine.py", "nn.Linear(5, 16)", "nn.Embedding(70, 16)")
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py").read_text().replace("input_size=5", "vocab_size=70, pad_token_id=3")
    )

    path, _ = export_checkpoint(
        None, tmp_path / "models", name="mine", module="mine:build", pooling="cls", normalize=False
    )

    manifest = read_bundle(path).manifest
    assert (manifest.input, manifest.vocab_size, manifest.pad_token_id) == ("token_ids", 70, 3)


def test_weights_are_loaded_into_it(tmp_path: Path) -> None:
    _write(tmp_path / "mine.py")
    weights = {key: tensor + 1 for key, tensor in read_module("mine:build", None).encoder.state_dict().items()}
    save_file(weights, tmp_path / "trained.safetensors")

    found = read_module("mine:build", tmp_path / "trained.safetensors").encoder.state_dict()

    assert all(torch.equal(found[key], tensor) for key, tensor in weights.items())


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "mine.py")
    save_file({"into.weight": torch.zeros(16, 5)}, tmp_path / "trained.safetensors")

    with pytest.raises(ExportError, match=r"problems with its weights: into\.bias is missing"):
        read_module("mine:build", tmp_path / "trained.safetensors")


def test_dropout_is_off(tmp_path: Path) -> None:
    _write(tmp_path / "mine.py")

    assert not any(module.training for module in read_module("mine:build", None).encoder.modules())


@pytest.mark.parametrize("target", ["mine", "mine:", ":build", ""])
def test_a_target_without_module_and_function_is_refused(tmp_path: Path, target: str) -> None:
    assert "it takes PACKAGE.MODULE:BUILD" in _refusal(tmp_path, target=target)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import torch\n", "import torhc\n", "importing mine failed: ModuleNotFoundError: No module named 'torhc'"),
        ("import torch\n", "import torch,\n", "importing mine failed: SyntaxError: "),
        ("import torch\n", "raise SystemExit('no arguments')\n", "importing mine failed: SystemExit: no arguments"),
        ("def build", "def built", "mine.py: it has no build"),
        ("def build", "build = 3\ndef built", "mine.py: build is 3"),
        ("return ServedModule", "raise KeyError('x')\n    return ServedModule", "build() failed: KeyError: 'x'"),
        ("ServedModule(Model(), **FACTS)", "Model()", "build() returned Model, not an export.modules.ServedModule"),
        ("ServedModule(Model()", "ServedModule(FACTS", "module is dict; it must be a torch.nn.Module"),
        ("hidden_size=16, ", "", "missing 1 required positional argument: 'hidden_size'"),
        ("num_layers=2", "num_layers=0", "num_layers is 0; it must be a whole number of at least 1"),
        ("num_heads=2, max", "num_heads='2', max", "num_heads is '2'; it must be a whole number"),
        (", input_size=5", "", "vocab_size is 0 and input_size 0; give the first for token ids"),
        ("input_size=5", "input_size=5, vocab_size=9", "vocab_size is 9 and input_size 5; give the first"),
        ("input_size=5", "vocab_size=9, pad_token_id=9", "pad_token_id is 9; token ids end before 9"),
        (
            "self.into = nn",
            "self.b = nn.Buffer(torch.tensor([torch.inf])); self.into = nn",
            "b has 1 values that are NaN",
        ),
        (", mask=None, packing=None):", ", packing=None):", "padded, forward(inputs, mask=mask) failed: TypeError"),
        (", mask=None, packing=None):", ", mask=None):", "failed: NameError: name 'packing' is not defined"),
        (
            "hidden_size=16",
            "hidden_size=17",
            "returned torch.float32 (2, 2, 16); by its facts it must be torch.float32",
        ),
        ("return x\n\n\nFACTS", "return x.double()\n\n\nFACTS", "returned torch.float64 (2, 2, 16)"),
        (
            "return x\n\n\nFACTS",
            "return x, x\n\n\nFACTS",
            "returned tuple; by its facts it must be torch.float32 (2, 2, 16)",
        ),
        (
            "input_size=5",
            "input_size=6",
            "padded, forward(inputs, mask=mask) failed: RuntimeError: mat1 and mat2 shapes",
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in _refusal(tmp_path, old, new)


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "importing yours failed: ModuleNotFoundError: No module named 'yours'" in _refusal(
        tmp_path, target="yours:build"
    )


def _refused_export(tmp_path: Path, old: str, new: str) -> str:
    _write(tmp_path / "mine.py", old, new)
    with pytest.raises(ExportError) as refusal:
        export_checkpoint(None, tmp_path / "models", name="mine", module="mine:build", pooling="mean", normalize=False)
    assert not (tmp_path / "models").exists()
    return str(refusal.value)


def test_attention_that_does_not_pass_the_seam_is_counted_and_refused(tmp_path: Path) -> None:
    own = dedent("""
        def attend(q, k, v, *, num_heads, mask, packing):
            if packing is not None:
                q, k, v = packing.pad(q), packing.pad(k), packing.pad(v)
            mask = packing.is_real() if packing is not None else mask
            scores = (q @ k.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
            attended = scores.softmax(-1) @ v
            return attended if packing is None else packing.unpad(attended)
    """)

    message = _refused_export(tmp_path, "from export.attention import attend\n", own)

    assert "0 fused attention nodes and 2 Softmax for 2 layers" in message
    assert "this model does not do its attention through the seam" in message


def test_a_wrong_number_of_layers_is_counted_and_refused(tmp_path: Path) -> None:
    assert "2 fused attention nodes and 0 Softmax for 3 layers" in _refused_export(
        tmp_path, "num_layers=2", "num_layers=3"
    )


def test_a_module_that_torch_cannot_export_is_refused(tmp_path: Path) -> None:
    branch = "return x if x.sum() > 0 else -x\n\n\nFACTS"

    message = _refused_export(tmp_path, "return x\n\n\nFACTS", branch)

    assert re.match(r"torch \S+ cannot export this model: \w+: ", message)
    assert "\n" not in message


def test_two_forms_that_differ_are_refused(tmp_path: Path) -> None:
    message = _refused_export(tmp_path, "torch.arange(inputs.shape[1])", "torch.arange(inputs.shape[1]) * 0")

    assert "the exported graph does not answer as PyTorch does" in message
