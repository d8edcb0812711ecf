"""Whether the engine can still be trusted. Decides only: no clock, no threads.

A request that fails says nothing of the engine: it may be the culprit itself. So after `MAX_FAULTS` failed runs with no
success between, the engine is asked for something known to be right, the bundle's golden outputs. If it fails there
too, or if a run does not end, it is not healthy: nothing is accepted, health says NOT_SERVING, and it is asked again
every `TEST_SECONDS`. Whoever is not healthy for `DEATH_SECONDS` is dead, and the process should be started anew.
"""

MAX_FAULTS = 8
TEST_SECONDS = 1.0
DEATH_SECONDS = 30.0
# A run that takes so much longer than predicted, and so long at all, is taken to hang.
HANG_SECONDS = 10.0
HANG_RATIO = 20.0
# Callers with deadlines leave before a run is taken to hang; one that they leave after so long counts as a fault.
OVERDUE_SECONDS = 0.5


class Supervisor:
    """The state of one engine."""

    def __init__(self) -> None:
        self._num_faults = 0
        self._unhealthy_since: float | None = None

    @property
    def is_healthy(self) -> bool:
        return self._unhealthy_since is None

    @property
    def needs_test(self) -> bool:
        """Whether the engine must show that it can be trusted before it runs anything else."""
        return self._num_faults >= MAX_FAULTS or not self.is_healthy

    def note_success(self) -> None:
        """A run gave an answer."""
        self._num_faults = 0

    def note_fault(self) -> None:
        """A run failed."""
        self._num_faults += 1

    def forgive(self, seconds: float) -> None:
        """The whole process stood still for so long: frozen, or moved to another machine."""
        if self._unhealthy_since is not None:
            self._unhealthy_since += seconds

    def is_overdue(self, seconds: float, predicted_seconds: float) -> bool:
        """Whether a run that was stopped since its callers had left had taken suspiciously long by then."""
        return seconds > max(OVERDUE_SECONDS, HANG_RATIO * predicted_seconds)

    def note_hang(self, now: float) -> None:
        """A run does not end."""
        if self._unhealthy_since is None:
            self._unhealthy_since = now

    def note_test(self, *, is_passed: bool, now: float) -> None:
        """What came of asking for something known to be right."""
        if is_passed:
            self._num_faults = 0
            self._unhealthy_since = None
        elif self._unhealthy_since is None:
            self._unhealthy_since = now

    def is_hung(self, started: float, predicted_seconds: float, now: float) -> bool:
        """Whether a run that has not ended should have ended long ago."""
        return now - started > max(HANG_SECONDS, HANG_RATIO * predicted_seconds)

    def is_dead(self, now: float) -> bool:
        """Whether it has not been healthy for too long."""
        return self._unhealthy_since is not None and now - self._unhealthy_since >= DEATH_SECONDS
