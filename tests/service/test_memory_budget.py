"""The memory budget under a clock of numbers."""

from service.memory_budget import RECOVERY_SECONDS, MemoryBudget


def test_nothing_is_limited_before_anything_has_failed() -> None:
    assert MemoryBudget().allows(10**9, 10**6, 0.0)


def test_what_was_possible_is_allowed_and_no_more() -> None:
    budget = MemoryBudget()
    budget.limit(50, 30, 0.0)
    assert budget.allows(50, 30, 0.0)
    assert not budget.allows(51, 30, 0.0)


def test_lengths_within_a_power_of_two_share_it_and_others_have_their_own() -> None:
    budget = MemoryBudget()
    budget.limit(50, 16, 0.0)
    assert not budget.allows(51, 31, 0.0)
    assert budget.allows(51, 15, 0.0)
    assert budget.allows(51, 32, 0.0)


def test_it_doubles_with_time() -> None:
    budget = MemoryBudget()
    budget.limit(50, 16, 0.0)
    assert not budget.allows(51, 16, RECOVERY_SECONDS - 1)
    assert budget.allows(100, 16, RECOVERY_SECONDS)
    assert budget.allows(400, 16, 3 * RECOVERY_SECONDS)
    assert budget.allows(10**9, 16, 1e6 * RECOVERY_SECONDS)
