"""A real model, prepared on the machine of the test: what must hold however busy that is."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service import preparing
from service.config import Settings
from service.cost_model import fit
from service.preparing import Prepared, prepare
from service.side_by_side import Timed


@pytest.fixture(scope="module")
def prepared(minilm_bundle: Path) -> Prepared:
    return prepare(minilm_bundle, Settings(models=minilm_bundle, device="cpu", threads=2))


def test_the_grid_reaches_from_one_short_sequence_to_several_times_the_plateau(prepared: Prepared) -> None:
    shapes = {(sample.num_sequences, sample.longest) for sample in prepared.calibration.samples}
    assert (1, 16) in shapes
    assert prepared.calibration.max_batch_tokens in {count * length for count, length in shapes if length == 16}


def test_the_model_in_force_is_the_fit_of_the_grid_and_its_error_is_there(prepared: Prepared) -> None:
    found = prepared.calibration
    assert found.cost == fit(found.samples)
    predicted = [found.cost.seconds(s.num_sequences, s.num_tokens, s.longest) / s.seconds for s in found.samples]
    assert found.worst_error == pytest.approx(max(abs(ratio - 1) for ratio in predicted))


def test_more_work_takes_longer(prepared: Prepared) -> None:
    cost = prepared.calibration.cost
    assert 0 < cost.seconds(1, 16, 16) <= cost.seconds(4, 64, 16) < cost.seconds(16, 256, 16)


def test_the_layouts_were_compared_and_both_ways_of_running_proved(prepared: Prepared) -> None:
    assert [str(one.layout) for one in prepared.layouts] == ["2 x 1", "1 x 2"]
    assert prepared.difference < 1e-5


@pytest.mark.parametrize(("runners", "clock"), [(2, time.thread_time), (1, time.perf_counter), (3, time.perf_counter)])
def test_a_run_of_one_thread_that_has_a_cpu_is_measured_in_its_cpu_time(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, runners: int, clock: Callable[[], float]
) -> None:
    """Of the threads of a pool there is no telling, and three runs on two CPUs wait for each other."""
    monkeypatch.setattr(preparing, "available_cpus", lambda: 2)
    seen: list[tuple[object, int]] = []

    def timed(run: object, shape: object, num_runners: int, *, clock: object, input_size: int) -> Timed:
        seen.append((clock, num_runners))
        return Timed(1.0, 1)

    monkeypatch.setattr(preparing, "time_shape", timed)
    prepare(tiny_bundle, Settings(models=tiny_bundle, device="cpu", threads=2, runners=runners))
    assert set(seen) == {(clock, runners)}
