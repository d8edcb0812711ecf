"""Where the pooling, the dense layers and the prompts come from: modules.json, each module's config.json, --pooling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from export.checkpoint import Checkpoint, read_checkpoint
from export.errors import ExportError
from export.heads import EmbeddingHead
from export.sentence_transformers import choose_embedding, read_prompts
from export.steps import export_checkpoint
from service.bundle import Pooling, read_bundle

_KIND = "sentence_transformers.models."


def _chosen(head: EmbeddingHead) -> tuple[Pooling, bool]:
    return head.pooling, head.normalize


def _read(path: Path, *kinds: str, **config: Any) -> Checkpoint:
    if kinds:
        modules = [{"path": "" if kind == "Transformer" else f"1_{kind}", "type": _KIND + kind} for kind in kinds]
        (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | config))
    return read_checkpoint(path)


def _refusal(checkpoint: Checkpoint, mode: Pooling | None = None, normalize: bool | None = None) -> str:
    with pytest.raises(ExportError) as refusal:
        choose_embedding(checkpoint, mode, normalize)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("mean_tokens", "mean"),
        ("cls_token", "cls"),
        ("lasttoken", "last"),
        ("max_tokens", "max"),
        ("mean_sqrt_len_tokens", "mean_sqrt_len"),
    ],
)
def test_the_flags_are_read(checkpoint: Path, key: str, mode: Pooling) -> None:
    names = ("mean_tokens", "cls_token", "lasttoken", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
    flags = {f"pooling_mode_{name}": name == key for name in names}
    found = _read(checkpoint, "Transformer", "Pooling", **flags)

    assert _chosen(choose_embedding(found)) == (mode, False)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("mean", "mean"), ("lasttoken", "last"), ("mean_sqrt_len_tokens", "mean_sqrt_len"), (["cls"], "cls")],
)
def test_the_newer_name_is_read(checkpoint: Path, name: object, mode: Pooling) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", pooling_mode=name)

    assert choose_embedding(found).pooling == mode


def test_a_normalize_module_normalizes(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", "Normalize", pooling_mode_cls_token=True)

    assert _chosen(choose_embedding(found)) == ("cls", True)


def test_the_real_checkpoint_has_mean_and_normalization(minilm_checkpoint: Path) -> None:
    assert _chosen(choose_embedding(read_checkpoint(minilm_checkpoint))) == ("mean", True)


def test_asking_for_what_is_declared_is_fine(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", pooling_mode_cls_token=True)

    assert _chosen(choose_embedding(found, "cls", False)) == ("cls", False)


def test_asking_for_something_else_is_refused(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", pooling_mode_cls_token=True)

    assert "--pooling mean contradicts the checkpoint, which pools by cls" in _refusal(found, "mean")


def test_asking_for_another_normalization_is_refused(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", pooling_mode_cls_token=True)

    assert "--normalize contradicts the checkpoint, which does not normalize" in _refusal(found, None, True)


def test_asking_not_to_normalize_what_is_normalized_is_refused(minilm_checkpoint: Path) -> None:
    found = read_checkpoint(minilm_checkpoint)

    assert "--no-normalize contradicts the checkpoint, which normalizes" in _refusal(found, "mean", False)


@pytest.mark.parametrize(("mode", "normalize"), [(None, None), ("mean", None), (None, True)])
def test_silence_is_refused_not_guessed(tiny_checkpoint: Path, mode: Pooling | None, normalize: bool | None) -> None:
    refusal = _refusal(read_checkpoint(tiny_checkpoint), mode, normalize)

    assert refusal.endswith("give --pooling mean|cls|last|max|mean_sqrt_len and --normalize or --no-normalize")


@pytest.mark.parametrize("normalize", [False, True])
def test_where_the_checkpoint_is_silent_the_user_decides(tiny_checkpoint: Path, normalize: bool) -> None:
    found = read_checkpoint(tiny_checkpoint)

    assert _chosen(choose_embedding(found, "last", normalize)) == ("last", normalize)


def test_modules_without_pooling_say_only_whether_to_normalize(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Normalize")

    assert _chosen(choose_embedding(found, "mean")) == ("mean", True)
    assert "--no-normalize contradicts" in _refusal(found, "mean", False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls_token + pooling_mode_max_tokens"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens"),
        ({"pooling_mode": ["mean", "max"]}, "mean + max"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({}, "none"),
    ],
)
def test_combined_unknown_and_no_poolings_are_refused(checkpoint: Path, flags: dict[str, Any], named: str) -> None:
    refusal = _refusal(_read(checkpoint, "Transformer", "Pooling", **flags))

    assert f"{named}; supported: one of mean, cls, last, max, mean_sqrt_len" in refusal


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Pooling", "LayerNorm"),
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "Dense", "Pooling"),
        ("Pooling", "Transformer"),
    ],
)
def test_other_modules_and_other_orders_are_refused_by_name(checkpoint: Path, kinds: tuple[str, ...]) -> None:
    refusal = _refusal(_read(checkpoint, *kinds, pooling_mode="mean"))

    assert f"its modules are {' > '.join(kinds)}; supported: Transformer > Pooling [> Dense ...]" in refusal


def test_a_width_that_is_not_the_models_is_refused(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", pooling_mode="mean", word_embedding_dimension=48)

    assert "it pools 48 components, the model has 32" in _refusal(found)


def test_pooling_without_the_prompt_is_refused(checkpoint: Path) -> None:
    found = _read(checkpoint, "Transformer", "Pooling", pooling_mode="mean", include_prompt=False)

    assert "include_prompt is false" in _refusal(found)


def _add_dense(checkpoint: Path, **config: Any) -> Checkpoint:
    """Transformer > Pooling > Dense, the last from 32 to 8 components with Tanh unless `config` says otherwise."""
    directory = checkpoint / "1_Dense"
    directory.mkdir()
    content = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (directory / "config.json").write_text(json.dumps(content | config))
    weights = {"linear.weight": torch.full((8, 32), 0.125), "linear.bias": torch.full((8,), 0.25)}
    save_file(weights, directory / "model.safetensors")
    return _read(checkpoint, "Transformer", "Pooling", "Dense", pooling_mode="mean")


def test_a_dense_layer_is_read_with_its_weights(checkpoint: Path) -> None:
    head = choose_embedding(_add_dense(checkpoint))

    assert head.output_size(32) == 8
    # Rows of ones: 32 x 0.125 + 0.25, through Tanh.
    found = head.reference(torch.ones(3, 32), torch.zeros(3, dtype=torch.int64))
    assert torch.allclose(found, torch.tensor(4.25).tanh().expand(8))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn.modules.linear.Identity", 4.25),
        ("torch.nn.modules.activation.ReLU", 4.25),
        ("torch.nn.Sigmoid", 0.985936),
    ],
)
def test_a_dense_layers_activation_is_the_one_that_it_names(checkpoint: Path, name: str, expected: float) -> None:
    head = choose_embedding(_add_dense(checkpoint, activation_function=name))

    found = head.reference(torch.ones(3, 32), torch.zeros(3, dtype=torch.int64))
    assert torch.allclose(found, torch.tensor(expected).expand(8))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"activation_function": "mine.Tanh"}, "activation_function is 'mine.Tanh'; supported: torch's Identity, Tanh"),
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "activation.Softmax'; supported: torch's"),
        ({"activation_function": "torch.nn.Linear"}, "activation_function is 'torch.nn.Linear'"),
        ({"in_features": 31}, "in_features is 31, but 32 come in"),
        ({"out_features": "8"}, "out_features is '8'"),
        ({"out_features": 0}, "out_features is 0"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        ({"module_output_name": "scores"}, "module_output_name is 'scores'; supported: sentence_embedding"),
        ({"use_residual": True}, "use_residual is true"),
        ({"out_features": 9}, "linear.weight has shape (8, 32), expected (9, 32)"),
        ({"bias": False}, "linear.bias is unknown"),
    ],
)
def test_what_a_dense_layer_cannot_be_is_refused(checkpoint: Path, config: dict[str, Any], reason: str) -> None:
    assert reason in _refusal(_add_dense(checkpoint, **config))


def test_a_dense_layer_in_a_pickle_is_refused(checkpoint: Path) -> None:
    found = _add_dense(checkpoint)
    (checkpoint / "1_Dense" / "model.safetensors").rename(checkpoint / "1_Dense" / "pytorch_model.bin")

    assert "pytorch_model.bin is a pickle" in _refusal(found)


def test_normalizing_token_vectors_is_refused(checkpoint: Path) -> None:
    (checkpoint / "1_Normalize").mkdir()
    (checkpoint / "1_Normalize" / "config.json").write_text('{"module_input_name": "token_embeddings"}')
    found = _read(checkpoint, "Transformer", "Pooling", "Normalize", pooling_mode="mean")

    assert "module_input_name is 'token_embeddings'; supported: sentence_embedding" in _refusal(found)


def _prompts(checkpoint: Path, **content: Any) -> tuple[dict[str, str], str]:
    (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(content))
    return read_prompts(read_checkpoint(checkpoint))


def test_prompts_are_read_with_the_default_ones_name(checkpoint: Path) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}

    assert _prompts(checkpoint, prompts=prompts, default_prompt_name="query") == (prompts, "query")


@pytest.mark.parametrize("content", [{}, {"prompts": {}, "default_prompt_name": None}])
def test_a_model_may_have_no_prompts(checkpoint: Path, content: dict[str, Any]) -> None:
    assert _prompts(checkpoint, **content) == ({}, "")


def test_a_checkpoint_without_sentence_transformers_files_has_no_prompts(tiny_checkpoint: Path) -> None:
    assert read_prompts(read_checkpoint(tiny_checkpoint)) == ({}, "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"prompts": ["query: "]}, "prompts is ['query: ']; it must map names to texts"),
        ({"prompts": {"query": None}}, "it must map names to texts"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "query"}, "default_prompt_name is 'query', the prompts are a"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(checkpoint: Path, content: dict[str, Any], reason: str) -> None:
    with pytest.raises(ExportError) as refusal:
        _prompts(checkpoint, **content)
    assert reason in str(refusal.value)


def test_dense_layers_and_prompts_reach_the_bundle(checkpoint: Path, tmp_path: Path) -> None:
    _add_dense(checkpoint)
    prompts = {"query": "query: "}
    content = {"prompts": prompts, "default_prompt_name": "query"}
    (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(content))

    path, _ = export_checkpoint(checkpoint, tmp_path / "models")

    bundle = read_bundle(path)
    assert (bundle.manifest.task, bundle.manifest.output_size, bundle.manifest.hidden_size) == ("embedding", 8, 32)
    assert (bundle.manifest.prompts, bundle.manifest.default_prompt) == (prompts, "query")
    assert bundle.golden.sentence_embedding.shape == (8, 8)
