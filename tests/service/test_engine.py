"""The engine on real ONNX Runtime sessions over graphs whose right answers can be read off."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from service import engine as engine_module
from service.cancellation import Cancellation
from service.engine import Engine, differences, first_line
from service.errors import EngineError, OutOfMemoryError, StartupError, StoppedError
from service.packing import pack
from service.request import Float32Array
from tests import reference
from tests.graphs import NUM_HEADS, TABLE, attention_graph, lookup_graph, sequence

IDS = [[3, 1, 4], [1], [5, 9, 2, 6]]
BATCH = pack([sequence(*ids) for ids in IDS])
FLAT = [token for ids in IDS for token in ids]
FIRST = [ids[0] for ids in IDS]

HAS_CUDA = "CUDAExecutionProvider" in ort.get_available_providers()
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this onnxruntime has CUDA in it")


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lookup_graph(tmp_path_factory.mktemp("lookup") / "model.onnx")


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attention_graph(tmp_path_factory.mktemp("attention") / "model.onnx")


def attended(ids: list[int]) -> Float32Array:
    """(L, E): what a fused self-attention over the table's rows must give."""
    rows = TABLE[ids]
    return reference.attention(rows, rows, rows, NUM_HEADS).astype(np.float32)


class FailingSession:
    """A session whose run raises what it was given."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, names: list[str], feeds: object, _options: object) -> list[Float32Array]:
        raise self._error


def narrow_and_wide(graph: Path) -> Engine:
    """Two runners of one thread, and two threads for a run that has the machine to itself."""
    engine = Engine(graph, num_runners=2)
    engine.run_alone_on(Engine(graph, num_threads=2))
    return engine


def make_cuda_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where libraries are missing: the wheel lists CUDA, and the session takes the CPU without an error."""
    real = ort.InferenceSession

    def fall_back(*arguments: Any, providers: list[Any], **options: Any) -> ort.InferenceSession:
        return real(*arguments, providers=providers[-1:], **options)

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(ort, "InferenceSession", fall_back)


def test_a_run_gives_one_vector_for_each_sequence(lookup: Path) -> None:
    outputs = Engine(lookup).run(BATCH)
    np.testing.assert_array_equal(outputs.sentence_embedding, TABLE[FIRST])
    assert outputs.token_embeddings is None


def test_a_run_that_wants_tokens_gives_one_vector_for_each_token_too(lookup: Path) -> None:
    outputs = Engine(lookup).run(BATCH, wants_tokens=True)
    np.testing.assert_array_equal(outputs.sentence_embedding, TABLE[FIRST])
    np.testing.assert_array_equal(outputs.token_embeddings, TABLE[FLAT])


@pytest.mark.parametrize("alone", [False, True])
def test_the_fused_operator_sees_each_sequence_and_nothing_else(attention: Path, *, alone: bool) -> None:
    outputs = narrow_and_wide(attention).run(BATCH, wants_tokens=True, alone=alone)
    assert outputs.token_embeddings is not None
    # float32 against float64 on numbers up to 2: a few roundings.
    np.testing.assert_allclose(outputs.token_embeddings, np.concatenate([attended(ids) for ids in IDS]), atol=1e-6)
    np.testing.assert_allclose(outputs.sentence_embedding, [attended(ids)[0] for ids in IDS], atol=1e-6)


def test_the_wide_session_gives_the_same_numbers(attention: Path) -> None:
    engine = narrow_and_wide(attention)
    narrow, wide = engine.run(BATCH), engine.run(BATCH, alone=True)
    # The same kernels; only the blocking may differ with the number of threads.
    np.testing.assert_allclose(wide.sentence_embedding, narrow.sentence_embedding, atol=1e-6)


def test_a_run_alone_takes_the_wide_session_and_others_the_narrow_one(
    lookup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = narrow_and_wide(lookup)
    monkeypatch.setattr(engine, "_wide_session", FailingSession(RuntimeError("wide")))
    engine.run(BATCH)
    with pytest.raises(EngineError):
        engine.run(BATCH, alone=True)


def test_runners_and_a_run_alone_have_the_threads_that_they_were_given(lookup: Path) -> None:
    engine = narrow_and_wide(lookup)
    narrow, wide = engine._session.get_session_options(), engine._wide_session.get_session_options()
    assert (narrow.intra_op_num_threads, wide.intra_op_num_threads) == (1, 2)
    assert (engine.num_runners, engine.num_threads, engine.num_threads_alone) == (2, 1, 2)


@pytest.mark.parametrize(("num_threads", "is_on_caller"), [(1, True), (2, False)])
def test_a_run_of_one_thread_is_the_callers(lookup: Path, num_threads: int, *, is_on_caller: bool) -> None:
    """What makes a thread's CPU time the time of its run."""
    assert Engine(lookup, num_threads=num_threads).is_on_caller is is_on_caller


def test_idle_threads_do_not_spin(lookup: Path) -> None:
    engine = narrow_and_wide(lookup)
    for session in (engine._session, engine._wide_session):
        assert session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_there_is_one_session_until_another_is_taken_for_runs_alone(lookup: Path) -> None:
    engine = Engine(lookup, num_runners=3)
    assert engine._wide_session is engine._session


def test_a_model_without_token_types_is_not_fed_any(tmp_path: Path) -> None:
    graph = lookup_graph(tmp_path / "model.onnx", has_token_types=False)
    outputs = Engine(graph, has_token_types=False).run(BATCH)
    np.testing.assert_array_equal(outputs.sentence_embedding, TABLE[FIRST])


def test_a_model_with_token_types_is_fed_them(lookup: Path) -> None:
    with pytest.raises(EngineError):
        Engine(lookup, has_token_types=False).run(BATCH)


def test_the_cpu_is_named_as_the_provider(lookup: Path) -> None:
    assert Engine(lookup, device="cpu").provider == "CPUExecutionProvider"


@without_cuda
def test_cuda_that_is_not_there_stops_the_start_and_says_what_to_do(lookup: Path) -> None:
    with pytest.raises(StartupError, match=r"^device cuda: .*install mhsa-serve\[gpu\].*or give --device cpu$"):
        Engine(lookup, device="cuda")


def test_a_silent_fall_back_to_the_cpu_stops_the_start(lookup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cuda_fall_back(monkeypatch)
    with pytest.raises(StartupError, match="fell back to the CPU"):
        Engine(lookup, device="cuda")


def test_an_id_past_the_table_is_an_engine_error_with_its_cause(lookup: Path) -> None:
    with pytest.raises(EngineError) as caught:
        Engine(lookup).run(pack([sequence(len(TABLE))]))
    assert not isinstance(caught.value, OutOfMemoryError)
    assert "Gather" in str(caught.value.__cause__)


def test_the_engines_own_words_stay_out_of_the_error(lookup: Path) -> None:
    with pytest.raises(EngineError, match=r"^the engine failed on this request$"):
        Engine(lookup).run(pack([sequence(len(TABLE))]))


def test_an_engine_error_leaves_the_engine_usable(lookup: Path) -> None:
    engine = Engine(lookup)
    with pytest.raises(EngineError):
        engine.run(pack([sequence(len(TABLE))]))
    np.testing.assert_array_equal(engine.run(BATCH).sentence_embedding, TABLE[FIRST])


@pytest.mark.parametrize(
    "text",
    [
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 17179",
        "CUDA failure 2: out of memory ; GPU=0",
        "bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool)",
        "std::bad_alloc",
    ],
)
def test_what_allocators_say_is_out_of_memory(lookup: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    engine = Engine(lookup)
    monkeypatch.setattr(engine, "_session", FailingSession(RuntimeError(text)))
    with pytest.raises(OutOfMemoryError):
        engine.run(BATCH)


def test_a_graph_that_is_no_graph_is_one_line_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(StartupError) as caught:
        Engine(tmp_path / "model.onnx")
    assert str(caught.value).startswith(f"{tmp_path / 'model.onnx'}: ONNX Runtime {ort.__version__} cannot load it: ")
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_missing_is_one_line_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^.*none\.onnx: ONNX Runtime .* cannot load it: [^\n]*$"):
        Engine(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("one\ntwo"), "one"), (ValueError(" \n one "), "one"), (ValueError(), "ValueError"), (None, "None")],
)
def test_an_error_is_put_in_one_line(error: Exception | None, line: str) -> None:
    assert first_line(error) == line


def test_no_difference_from_the_right_answers(lookup: Path) -> None:
    assert differences(Engine(lookup), BATCH, TABLE[FIRST], TABLE[FLAT]) == (0.0, 0.0)


@pytest.mark.parametrize("which", [0, 1], ids=["pooled", "tokens"])
def test_one_number_that_is_off_is_the_difference(lookup: Path, which: int) -> None:
    expected = [TABLE[FIRST], TABLE[FLAT]]
    expected[which][-1, -1] += 0.25
    assert differences(Engine(lookup), BATCH, *expected)[which] == 0.25
    assert differences(Engine(lookup), BATCH, *expected)[1 - which] == 0.0


@pytest.mark.parametrize("which", [0, 1], ids=["pooled", "tokens"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_infinitely_off(lookup: Path, which: int, value: float) -> None:
    expected = [TABLE[FIRST], TABLE[FLAT]]
    expected[which][0, 0] = value
    assert differences(Engine(lookup), BATCH, *expected)[which] == np.inf


def test_another_shape_is_infinitely_off_and_not_broadcast(lookup: Path) -> None:
    same = pack([sequence(3, 3), sequence(3)])
    assert differences(Engine(lookup), same, TABLE[[3, 3]], TABLE[[3, 3, 3]]) == (0.0, 0.0)
    assert differences(Engine(lookup), same, TABLE[[3]], TABLE[[3, 3, 3]]) == (np.inf, 0.0)
    assert differences(Engine(lookup), same, TABLE[[3, 3]], TABLE[[3]]) == (0.0, np.inf)


def test_the_difference_is_taken_of_the_session_that_is_asked_for(
    lookup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = narrow_and_wide(lookup)
    monkeypatch.setattr(engine, "_wide_session", FailingSession(RuntimeError("wide")))
    with pytest.raises(EngineError):
        differences(engine, BATCH, TABLE[FIRST], TABLE[FLAT], alone=True)


def test_a_run_that_is_cancelled_stops_between_two_operators(attention: Path) -> None:
    engine = Engine(attention)
    cancellation = Cancellation()
    cancellation.set()
    with pytest.raises(StoppedError):
        engine.run(BATCH, cancellation=cancellation)
    engine.run(BATCH, cancellation=Cancellation())


def test_tokens_are_computed_only_where_they_are_wanted(lookup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    engine = Engine(lookup)

    class Recording:
        def run(self, names: list[str], feeds: object, _options: object) -> list[Float32Array]:
            asked.append(names)
            return [TABLE, TABLE]

    monkeypatch.setattr(engine, "_session", Recording())
    engine.run(BATCH)
    engine.run(BATCH, wants_tokens=True)
    assert asked == [[engine_module.POOLED], [engine_module.POOLED, engine_module.TOKENS]]


def test_the_fusions_that_slow_a_cpu_or_end_it_are_off_there(lookup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    real = ort.InferenceSession

    def recorded(*arguments: object, disabled_optimizers: list[str], **others: object) -> object:
        given.append(disabled_optimizers)
        return real(*arguments, disabled_optimizers=disabled_optimizers, **others)

    monkeypatch.setattr(ort, "InferenceSession", recorded)
    Engine(lookup, device="cpu")
    assert given == [["SkipLayerNormFusion", "MatmulTransposeFusion"]]
