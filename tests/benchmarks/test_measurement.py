from benchmarks.measurement import (
    Batches,
    Ratio,
    Slice,
    cpu_per_thousand,
    load_cpu_per_thousand,
    mean_batches,
    over_rounds,
    p50,
    ratio,
    sequences_per_second,
    tokens_per_second,
)


def make_slice(*, seconds: float = 2.0, fill: float = 1.0, latencies: tuple[float, ...] = ()) -> Slice:
    return Slice(
        num_sequences=100,
        num_tokens=6000,
        seconds=seconds,
        cpu_seconds=3.0,
        load_cpu_seconds=0.5,
        batches=Batches(fill, 4.0, 240.0),
        latencies=latencies,
    )


def test_rates_and_costs_come_from_the_same_slice() -> None:
    part = make_slice()
    assert sequences_per_second(part) == 50.0
    assert tokens_per_second(part) == 3000.0
    assert cpu_per_thousand(part) == 30.0
    assert load_cpu_per_thousand(part) == 5.0


def test_a_ratio_is_taken_within_rounds_before_the_median() -> None:
    """A machine that slows down to a fifth in the third round changes nothing."""
    ours = [make_slice(seconds=1.0), make_slice(seconds=1.0), make_slice(seconds=5.0)]
    theirs = [make_slice(seconds=2.0), make_slice(seconds=3.0), make_slice(seconds=10.0)]
    assert ratio(ours, theirs, sequences_per_second) == Ratio(median=2.0, lowest=2.0, highest=3.0)


def test_the_median_over_rounds_ignores_one_bad_round() -> None:
    rounds = [make_slice(seconds=2.0), make_slice(seconds=20.0), make_slice(seconds=2.5)]
    assert over_rounds(rounds, sequences_per_second) == 40.0


def test_p50_is_the_median_latency() -> None:
    assert p50(make_slice(latencies=(0.1, 0.4, 0.2))) == 0.2


def test_batches_are_averaged_over_rounds() -> None:
    assert mean_batches([make_slice(fill=0.5), make_slice(fill=1.0)]) == Batches(0.75, 4.0, 240.0)
