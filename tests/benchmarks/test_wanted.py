from benchmarks.contenders import OFFLINE, ONE, SIXTEEN, UNDER_HALF, ours, packed, padded, unbatched
from benchmarks.measurement import Batches, Slice
from benchmarks.wanted import Verdict, judge


def make_slice(*, rate: float = 100.0, cpu: float = 10.0, latencies: tuple[float, ...] = (0.01,)) -> Slice:
    return Slice(
        num_sequences=100,
        num_tokens=6000,
        seconds=100 / rate,
        cpu_seconds=cpu / 10,
        load_cpu_seconds=0.0,
        batches=Batches(1.0, 1.0, 60.0),
        latencies=latencies,
    )


def find(verdicts: list[Verdict], quantity: str, row: str, reference: str) -> Verdict:
    (verdict,) = (
        verdict
        for verdict in verdicts
        if (verdict.wanted.quantity_name, verdict.wanted.row, verdict.wanted.reference) == (quantity, row, reference)
    )
    return verdict


def test_a_rate_at_its_limit_is_held_and_below_it_is_missed() -> None:
    slices = {ours(SIXTEEN): [make_slice(rate=90)], OFFLINE: [make_slice(rate=100)]}
    assert not find(judge("mixed", slices), "sequences/s", ours(SIXTEEN), OFFLINE).is_missed
    slices[ours(SIXTEEN)] = [make_slice(rate=89)]
    assert find(judge("mixed", slices), "sequences/s", ours(SIXTEEN), OFFLINE).is_missed


def test_a_cost_above_its_limit_is_missed() -> None:
    slices = {ours(SIXTEEN): [make_slice(cpu=11.6)], OFFLINE: [make_slice(cpu=10)]}
    assert find(judge("mixed", slices), "CPU per sequence", ours(SIXTEEN), OFFLINE).is_missed


def test_a_single_caller_must_not_wait_longer() -> None:
    slices = {ours(ONE): [make_slice(latencies=(0.02,))], unbatched(ONE): [make_slice(latencies=(0.01,))]}
    assert find(judge("mixed", slices), "p50", ours(ONE), unbatched(ONE)).is_missed


def test_the_short_trace_wants_more_of_batching() -> None:
    slices = {ours(SIXTEEN): [make_slice(rate=110)], unbatched(SIXTEEN): [make_slice(rate=100)]}
    assert not find(judge("mixed", slices), "sequences/s", ours(SIXTEEN), unbatched(SIXTEEN)).is_missed
    assert find(judge("short", slices), "sequences/s", ours(SIXTEEN), unbatched(SIXTEEN)).is_missed


def test_padding_is_judged_where_batches_are_under_half_full() -> None:
    slices = {packed(UNDER_HALF): [make_slice(rate=190)], padded(UNDER_HALF): [make_slice(rate=100)]}
    assert find(judge("mixed", slices), "sequences/s", packed(UNDER_HALF), padded(UNDER_HALF)).is_missed


def test_a_figure_without_its_rows_is_not_measured_and_not_missed() -> None:
    verdicts = judge("mixed", {})
    assert verdicts
    assert all(verdict.found is None and not verdict.is_missed for verdict in verdicts)
