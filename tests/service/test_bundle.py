"""The bundle on disk: what is written is read again, and whatever is not whole is refused by name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.bundle import (
    GOLDEN,
    MANIFEST,
    Golden,
    graph_file,
    read_bundle,
    read_golden,
    write_golden,
    write_manifest,
)
from service.errors import BundleError
from service.request import TokenSequence
from tests.fakes import MANIFEST as MANIFEST_OF_FAKE

HIDDEN_SIZE = 4
GRAPH = graph_file("fp32")
WEIGHTS, VOCABULARY = "model.onnx.data", "tokenizer/vocab.txt"
FILES = (GRAPH, WEIGHTS, GOLDEN, "parity.json", VOCABULARY)
MANIFEST_VALUE = replace(
    MANIFEST_OF_FAKE,
    name="tiny",
    hidden_size=HIDDEN_SIZE,
    output_size=HIDDEN_SIZE,
    vocab_size=11,
    max_sequence_tokens=8,
)


def golden(*lengths: int) -> Golden:
    rng = np.random.default_rng(3)
    return Golden(
        tuple(TokenSequence(*(rng.integers(0, 11, length) for _ in range(3))) for length in lengths),
        rng.standard_normal((sum(lengths), HIDDEN_SIZE)).astype(np.float32),
        rng.standard_normal((len(lengths), HIDDEN_SIZE)).astype(np.float32),
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A whole bundle; the graph is no graph, which is not this module's business."""
    path = tmp_path / "tiny" / "1"
    (path / "tokenizer").mkdir(parents=True)
    (path / GRAPH).write_bytes(b"graph")
    (path / WEIGHTS).write_bytes(b"weights")
    (path / "parity.json").write_text("{}")
    (path / VOCABULARY).write_text("[PAD]\n")
    write_golden(path / GOLDEN, golden(2, 1, 3))
    write_manifest(path, MANIFEST_VALUE)
    return path


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((bundle / MANIFEST).read_text())
    edit(content)
    (bundle / MANIFEST).write_text(json.dumps(content))


def refusal(bundle: Path) -> str:
    """The one line with which a bundle is refused."""
    with pytest.raises(BundleError) as caught:
        read_bundle(bundle)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_manifest_is_read_as_it_was_written(bundle: Path) -> None:
    read = read_bundle(bundle).manifest
    assert read == replace(MANIFEST_VALUE, files=read.files)


def test_every_file_but_the_manifest_is_listed_with_its_sha256(bundle: Path) -> None:
    expected = {name: sha256((bundle / name).read_bytes()).hexdigest() for name in FILES}
    assert read_bundle(bundle).manifest.files == expected


def test_a_file_that_is_called_like_the_manifest_further_down_is_listed_too(bundle: Path) -> None:
    (bundle / "tokenizer" / MANIFEST).write_text("{}")
    write_manifest(bundle, MANIFEST_VALUE)
    assert f"tokenizer/{MANIFEST}" in read_bundle(bundle).manifest.files


def test_the_digest_is_the_sha256_of_the_manifest(bundle: Path) -> None:
    written = write_manifest(bundle, MANIFEST_VALUE)
    assert written == sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    assert read_bundle(bundle).digest == written


def test_the_same_files_give_the_same_digest(bundle: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(bundle, tmp_path / "copy"))
    assert write_manifest(copied, MANIFEST_VALUE) == write_manifest(bundle, MANIFEST_VALUE)


@pytest.mark.parametrize("name", FILES)
def test_the_digest_changes_with_every_file(bundle: Path, name: str) -> None:
    before = write_manifest(bundle, MANIFEST_VALUE)
    (bundle / name).write_bytes((bundle / name).read_bytes() + b"x")
    assert write_manifest(bundle, MANIFEST_VALUE) != before


@pytest.mark.parametrize("name", FILES)
def test_any_changed_byte_is_found_and_its_file_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        (bundle / name).write_bytes(changed)
        with pytest.raises(BundleError, match=f"{bundle / name}: sha256 is"):
            read_bundle(bundle)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    assert f"{bundle / name}: cannot be read" in refusal(bundle)


def test_a_file_that_became_a_directory_is_named(bundle: Path) -> None:
    (bundle / GRAPH).unlink()
    (bundle / GRAPH).mkdir()
    assert f"{bundle / GRAPH}: cannot be read" in refusal(bundle)


@pytest.mark.parametrize("name", ["other.data", ".hidden", "tokenizer/extra.txt"])
def test_a_file_that_is_not_listed_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).write_text("x")
    assert f"does not list {name}; delete it" in refusal(bundle)


@pytest.mark.parametrize("name", [GRAPH, GOLDEN])
def test_a_manifest_must_list_the_files_that_the_server_opens(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    write_manifest(bundle, MANIFEST_VALUE)
    assert f"lists no {name}" in refusal(bundle)


@pytest.mark.parametrize("name", ["../secret", "tokenizer/../../secret", "{root}/secret"])
def test_a_listed_file_outside_the_bundle_is_refused_unread(bundle: Path, name: str) -> None:
    secret = bundle.parent / "secret"
    secret.write_text("secret")
    name = name.format(root=bundle.parent)
    edit_manifest(bundle, lambda content: content["files"].update({name: sha256(b"secret").hexdigest()}))
    assert f"{name!r}, which is not inside the bundle" in refusal(bundle)


def test_a_bundle_without_a_manifest_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path}: no readable {MANIFEST}" in refusal(tmp_path)


def test_another_format_is_refused_with_both_names(bundle: Path) -> None:
    edit_manifest(bundle, lambda content: content.update(format="mhsa-bundle/3"))
    assert "format is 'mhsa-bundle/3', this server reads 'mhsa-bundle/2'; export it again" in refusal(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "12", '"text"', "\xff"])
def test_what_is_no_json_object_is_refused(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_bytes(text.encode("latin-1"))
    assert "model.json cannot be read" in refusal(bundle)


@pytest.mark.parametrize(
    ("edit", "seen"),
    [
        (lambda content: content.update(surprise=1), "surprise"),
        (lambda content: content["graphs"]["fp32"].update(surprise=1), "surprise"),
        (lambda content: content.pop("hidden_size"), "hidden_size"),
        (lambda content: content.pop("graphs"), "graphs"),
        (lambda content: content["graphs"]["fp32"].pop("opset"), "opset"),
        (lambda content: content["graphs"].update(fp32=None), "GraphFacts"),
        (lambda content: content.update(graphs={}), "graphs is empty"),
        (lambda content: content.update(graphs=[]), "items"),
        (lambda content: content["graphs"].update(fp8=content["graphs"]["fp32"]), "graphs is"),
        (lambda content: content.update(task="summary"), "task is 'summary'"),
        (lambda content: content.update(task="classification"), "0 labels for 4 outputs of classification"),
        (lambda content: content.update(labels=["a"]), "1 labels for 4 outputs of embedding"),
        (lambda content: content.update(labels=[1]), "labels is [1]"),
        (lambda content: content.update(prompts={"query": "\ud800"}), "prompts is {'query': '\\ud800'}"),
        (lambda content: content.update(default_prompt="query"), "default_prompt is 'query', which is none of prompts"),
        (lambda content: content.update(hidden_size="4"), "hidden_size is '4'"),
        (lambda content: content.update(hidden_size=4.0), "hidden_size is 4.0"),
        (lambda content: content.update(vocab_size=True), "vocab_size is True"),
        (lambda content: content.update(normalize=1), "normalize is 1"),
        (lambda content: content.update(pooling="median"), "pooling is 'median'"),
        (lambda content: content["graphs"]["fp32"].update(token_tolerance=None), "token_tolerance is None"),
        (lambda content: content["graphs"]["fp32"].update(pooled_tolerance=float("nan")), "NaN"),
        (lambda content: content["graphs"]["fp32"].update(pooled_tolerance=float("inf")), "Infinity"),
        (lambda content: content.update(files=[GRAPH]), "files is"),
        (lambda content: content.update(files={GRAPH: 1}), "files is"),
        (lambda content: content["graphs"]["fp32"].update(opset="20"), "opset is '20'"),
    ],
)
def test_a_manifest_with_other_keys_or_types_is_refused(
    bundle: Path, edit: Callable[[dict[str, Any]], object], seen: str
) -> None:
    edit_manifest(bundle, edit)
    message = refusal(bundle)
    assert "model.json cannot be read" in message
    assert seen in message


def test_a_whole_number_is_good_for_a_tolerance(bundle: Path) -> None:
    edit_manifest(bundle, lambda content: content["graphs"]["fp32"].update(token_tolerance=1))
    assert read_bundle(bundle).manifest.graphs["fp32"].token_tolerance == 1


@pytest.mark.parametrize("name", ["token_tolerance", "pooled_tolerance"])
@pytest.mark.parametrize("value", [0, -1.0, 4.0])
def test_a_tolerance_that_passes_nothing_or_everything_is_refused(bundle: Path, name: str, value: float) -> None:
    edit_manifest(bundle, lambda content: content["graphs"]["fp32"].update({name: value}))
    assert f"fp32 has a {name} of {value}; it takes more than 0 and less than the largest golden number" in refusal(
        bundle
    )


def test_each_precision_has_a_graph_of_its_own(bundle: Path) -> None:
    int8 = replace(MANIFEST_VALUE.graphs["fp32"], file=graph_file("int8"))
    (bundle / int8.file).write_bytes(b"another graph")
    write_manifest(bundle, replace(MANIFEST_VALUE, graphs=MANIFEST_VALUE.graphs | {"int8": int8}))
    read = read_bundle(bundle)
    assert read.graph_path("int8") == bundle / "model.int8.onnx"
    assert read.graph_path("fp32") == bundle / "model.fp32.onnx"


def test_a_graph_that_is_listed_and_not_there_is_named(bundle: Path) -> None:
    int8 = replace(MANIFEST_VALUE.graphs["fp32"], file=graph_file("int8"))
    write_manifest(bundle, replace(MANIFEST_VALUE, graphs=MANIFEST_VALUE.graphs | {"int8": int8}))
    assert f"{MANIFEST} lists no {graph_file('int8')}" in refusal(bundle)


def test_the_golden_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = golden(2, 1, 3)
    write_golden(tmp_path / GOLDEN, written)
    read = read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE)
    assert [s.token_ids.tolist() for s in read.sequences] == [s.token_ids.tolist() for s in written.sequences]
    assert [s.position_ids.tolist() for s in read.sequences] == [s.position_ids.tolist() for s in written.sequences]
    assert [s.token_type_ids.tolist() for s in read.sequences] == [s.token_type_ids.tolist() for s in written.sequences]
    np.testing.assert_array_equal(read.token_embeddings, written.token_embeddings)
    np.testing.assert_array_equal(read.sentence_embedding, written.sentence_embedding)


def of_vectors() -> Golden:
    """Two sequences of vectors of 5 components."""
    of_ids, rng = golden(2, 3), np.random.default_rng(4)
    sequences = [
        TokenSequence.of_vectors(rng.standard_normal((length, 5), np.float32), np.arange(length)) for length in (2, 3)
    ]
    return Golden(tuple(sequences), of_ids.token_embeddings, of_ids.sentence_embedding)


def test_golden_vectors_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_golden(tmp_path / GOLDEN, of_vectors())

    read = read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE, 5)

    for found, written in zip(read.sequences, of_vectors().sequences, strict=True):
        assert found.embeddings is not None
        assert found.embeddings.dtype == np.float32
        np.testing.assert_array_equal(found.embeddings, written.embeddings)
        np.testing.assert_array_equal(found.position_ids, written.position_ids)


def test_golden_vectors_of_another_width_are_refused(tmp_path: Path) -> None:
    write_golden(tmp_path / GOLDEN, of_vectors())

    with pytest.raises(BundleError, match=r"embeddings has shape \(5, 5\), expected \(5, 6\); export it again"):
        read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE, 6)


def test_a_golden_file_of_ids_is_none_for_a_model_of_vectors(tmp_path: Path) -> None:
    write_golden(tmp_path / GOLDEN, golden(2, 1, 3))

    with pytest.raises(BundleError, match="not a golden file"):
        read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE, 5)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 broken", b"\x93NUMPY"])
def test_a_golden_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / GOLDEN).write_bytes(content)
    with pytest.raises(BundleError, match="not a golden file"):
        read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE)


def test_a_pickle_in_the_golden_file_is_not_opened(tmp_path: Path) -> None:
    write_golden(tmp_path / GOLDEN, golden(2, 1, 3))
    arrays = dict(np.load(tmp_path / GOLDEN))
    np.savez(tmp_path / GOLDEN, **(arrays | {"lengths": arrays["lengths"].astype(object)}))
    with pytest.raises(BundleError, match="not a golden file"):
        read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lengths", np.array([], np.int64)),
        ("lengths", np.array([2, 0, 4])),
        ("lengths", np.array(6)),
        ("lengths", np.array([2, 1, 4])),
        ("token_ids", np.zeros(5, np.int64)),
        ("position_ids", np.zeros((6, 1), np.int64)),
        ("token_type_ids", np.zeros(0, np.int64)),
        # These two would be broadcast when they are compared.
        ("token_embeddings", np.zeros((1, HIDDEN_SIZE), np.float32)),
        ("sentence_embedding", np.zeros((3, 1), np.float32)),
        ("sentence_embedding", np.zeros((3, HIDDEN_SIZE + 1), np.float32)),
    ],
)
def test_a_golden_file_whose_shapes_do_not_fit_is_refused(
    tmp_path: Path, name: str, value: np.ndarray[Any, Any]
) -> None:
    write_golden(tmp_path / GOLDEN, golden(2, 1, 3))
    arrays = dict(np.load(tmp_path / GOLDEN))
    np.savez(tmp_path / GOLDEN, **(arrays | {name: value}))
    with pytest.raises(BundleError, match="export it again"):
        read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE)


def test_a_golden_file_without_sequences_is_refused(tmp_path: Path) -> None:
    """Its shapes fit, and replaying it would prove nothing."""
    ids, vectors = np.zeros(0, np.int64), np.zeros((0, HIDDEN_SIZE), np.float32)
    flat = dict.fromkeys(("lengths", "token_ids", "position_ids", "token_type_ids"), ids)
    np.savez(tmp_path / GOLDEN, **flat, token_embeddings=vectors, sentence_embedding=vectors)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match="nothing can be compared"):
        read_golden(tmp_path / GOLDEN, HIDDEN_SIZE, HIDDEN_SIZE)


def test_golden_outputs_of_another_width_than_the_model_are_refused(bundle: Path) -> None:
    write_manifest(bundle, replace(MANIFEST_VALUE, hidden_size=HIDDEN_SIZE + 1))
    assert "token_embeddings has shape (6, 4), expected (6, 5)" in refusal(bundle)


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 0), ("max_sequence_tokens", -1), ("pad_token_id", -1), ("output_size", 0)],
)
def test_a_manifest_with_a_number_that_no_model_has_is_refused(bundle: Path, name: str, value: float) -> None:
    edit_manifest(bundle, lambda content: content.update({name: value}))
    assert f"{MANIFEST} cannot be read" in refusal(bundle)
    assert name in refusal(bundle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_size": 4}, "input_size is 4 for a model of token_ids; it takes 0"),
        ({"input": "embeddings", "input_size": 0, "vocab_size": 0}, "input_size is 0; it takes 1 to 2147483647"),
        ({"input": "embeddings", "input_size": 4, "vocab_size": 9}, "vocab_size is 9 for a model of embeddings"),
    ],
)
def test_a_manifest_of_ids_and_vectors_at_once_is_refused(bundle: Path, changes: dict[str, Any], message: str) -> None:
    edit_manifest(bundle, lambda content: content.update(changes))

    assert message in refusal(bundle)


def test_a_manifest_nested_without_end_is_refused(bundle: Path) -> None:
    (bundle / MANIFEST).write_text("[" * 200_000)
    assert f"{MANIFEST} cannot be read" in refusal(bundle)
