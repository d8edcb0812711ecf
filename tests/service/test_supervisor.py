"""The supervisor under a clock of numbers."""

from service.supervisor import DEATH_SECONDS, HANG_RATIO, HANG_SECONDS, MAX_FAULTS, Supervisor


def faulty() -> Supervisor:
    supervisor = Supervisor()
    for _ in range(MAX_FAULTS):
        supervisor.note_fault()
    return supervisor


def test_faults_with_successes_between_are_the_requests_own() -> None:
    supervisor = Supervisor()
    for _ in range(10 * MAX_FAULTS):
        supervisor.note_fault()
        supervisor.note_success()
    assert not supervisor.needs_test


def test_so_many_faults_in_a_row_call_for_a_test() -> None:
    supervisor = Supervisor()
    for _ in range(MAX_FAULTS - 1):
        supervisor.note_fault()
    assert not supervisor.needs_test
    supervisor.note_fault()
    assert supervisor.needs_test
    assert supervisor.is_healthy


def test_an_engine_that_passes_was_not_at_fault() -> None:
    supervisor = faulty()
    supervisor.note_test(is_passed=True, now=0.0)
    assert supervisor.is_healthy
    assert not supervisor.needs_test


def test_an_engine_that_fails_is_not_healthy_until_it_passes() -> None:
    supervisor = faulty()
    supervisor.note_test(is_passed=False, now=0.0)
    assert not supervisor.is_healthy
    assert supervisor.needs_test
    supervisor.note_test(is_passed=True, now=1.0)
    assert supervisor.is_healthy
    assert not supervisor.needs_test


def test_an_engine_that_is_not_healthy_for_too_long_is_dead() -> None:
    supervisor = faulty()
    for now in (5.0, 6.0, 7.0):
        supervisor.note_test(is_passed=False, now=now)
    assert not supervisor.is_dead(5.0 + DEATH_SECONDS - 0.1)
    assert supervisor.is_dead(5.0 + DEATH_SECONDS)


def test_a_run_hangs_when_it_takes_long_and_much_longer_than_predicted() -> None:
    supervisor = Supervisor()
    assert not supervisor.is_hung(0.0, 0.01, HANG_SECONDS)
    assert supervisor.is_hung(0.0, 0.01, HANG_SECONDS + 0.1)
    assert not supervisor.is_hung(0.0, 3.0, 3.0 * HANG_RATIO)
    assert supervisor.is_hung(0.0, 3.0, 3.0 * HANG_RATIO + 0.1)


def test_a_run_that_hangs_makes_the_engine_unhealthy_until_it_passes_a_test() -> None:
    supervisor = Supervisor()
    supervisor.note_hang(0.0)
    supervisor.note_hang(9.0)
    assert not supervisor.is_healthy
    assert supervisor.is_dead(DEATH_SECONDS)
    supervisor.note_test(is_passed=True, now=10.0)
    assert supervisor.is_healthy
