"""The simulator told of a server, and asked about a schedule: in numbers that are easy to add."""

import pytest

from benchmarks import foretold
from benchmarks.devices import CPU, Device
from benchmarks.foretold import fitted, foretell, read_device
from benchmarks.load import Address
from benchmarks.open_loop import Message, Schedule
from benchmarks.outcomes import Window
from service.cost_model import CostModel
from tests.benchmarks.test_simulator import DEVICE

WINDOW = Window(2.0, 50.0)


def test_a_device_is_what_a_server_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "mhsa_cost_run_seconds": 0.002,
        "mhsa_cost_token_seconds": 0.0001,
        "mhsa_cost_pair_seconds": 3e-8,
        "mhsa_runners": 4.0,
        "mhsa_batch_budget_tokens": 128.0,
    }
    samples = [type("Sample", (), {"name": name, "value": value}) for name, value in values.items()]
    monkeypatch.setattr(foretold, "scrape_samples", lambda address, prefix: samples)
    device = read_device(Address(0, 0, 0))
    assert (device.cost, device.num_runners, device.max_batch_tokens) == (CostModel(0.002, 0.0001, 3e-8), 4, 128)
    assert device.alone.per_token == pytest.approx(0.0001 * CPU.alone.per_token / CPU.cost.per_token)


def test_runs_are_scaled_until_callers_who_wait_get_what_was_measured() -> None:
    """A token a second was simulated; two were measured."""
    device = fitted(DEVICE, [Message(b"", (4,))], 3, WINDOW, capacity=2.0)
    assert device.cost == CostModel(0.0, 0.5, 0.0)


@pytest.mark.parametrize(("bound", "is_ok"), [(None, [False, True]), (100, [True, False]), (4, [True, False])])
def test_a_schedule_is_foretold_for_our_queue_and_for_plain_ones(bound: int | None, is_ok: list[bool]) -> None:
    """The second cannot be in time: ours refuses it at once, a plain queue when its deadline has passed."""
    device: Device = DEVICE
    schedule = Schedule((Message(b"", (4,)), Message(b"", (2,), "b")), (0.0, 1.0), 4.5, WINDOW)
    found = foretell(schedule, device, bound)
    assert [outcome.is_ok for outcome in found.outcomes] == is_ok
    assert {outcome.group for outcome in found.outcomes} == {"", "b"}
