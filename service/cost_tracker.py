"""Keeps the cost model true while the machine changes under it: a noisy neighbour, a lower clock, a moved pod.

Runs are gathered in windows. If the middle run of a full window took over 20% more or less than predicted, the model
is fitted again to the window's runs and to itself, scaled by that much. Of itself, because a window may hold one shape
only, which tells nothing of the others; scaled, because what slows one shape slows all. The middle one, because a
neighbour's burst or a page fault is not the machine's speed: up to half of the runs may be disturbed.

It must be told of runs of one kind alone. A model measured with all runners busy says nothing of a run that has the
machine to itself but that a busy one is at best so much slower; the scheduler tells of such a run only where that
contradicts the model.

Synchronous, without a clock or threads; the caller's lock guards `observe`, and the figures may be read without it.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median, quantiles

from service.cost_model import LEAST_SECONDS, CostModel, Sample, fit

WINDOW_RUNS = 64
# Where a wrong model keeps others from running: one lets through one run in many seconds.
FEW_RUNS = 3
MAX_DRIFT = 0.2
# Runs further than that from the middle one were disturbed and are not fitted.
_OUTLIER = 3.0
# Far enough apart for the three numbers of the model to be found again from its own predictions.
_ANCHORS = ((1, 16), (16, 16), (1, 128), (4, 128), (1, 512))
# The length that a full batch is made of until one has been seen.
_SHORT_TOKENS = 16
# So many runs of at least half the budget make a window one of a loaded machine.
_LOADED_RUNS = WINDOW_RUNS // 4


class CostTracker:
    """The cost model in force.

    `token_seconds` are what a token really takes one runner under load, `drift` is observed over predicted seconds of
    the last window's middle run, and `worst_error` the largest relative error in it, its worst tenth left out; until a
    window is full, what the calibration says. `on_refit` is called under the caller's lock.
    """

    def __init__(
        self,
        cost: CostModel,
        max_batch_tokens: int,
        num_runners: int,
        worst_error: float = 0.0,
        on_refit: Callable[["CostTracker"], None] = lambda _tracker: None,
    ) -> None:
        self.cost = cost
        self.token_seconds = _full_batch_seconds(cost, max_batch_tokens) / max_batch_tokens
        self.drift = 1.0
        self.worst_error = worst_error
        self.num_refits = 0
        self.max_batch_tokens = max_batch_tokens
        self.num_runners = num_runners
        self._on_refit = on_refit
        self._window: list[Sample] = []

    @property
    def machine_token_seconds(self) -> float:
        """What a token takes the whole machine under load, with every runner busy."""
        return self.token_seconds / self.num_runners

    def observe(self, run: Sample, *, is_urgent: bool = False) -> None:
        """One run of the kind that the model is of. Where it is `is_urgent`, a few are judged like a window."""
        self._window.append(replace(run, seconds=max(run.seconds, LEAST_SECONDS)))
        if len(self._window) >= (FEW_RUNS if is_urgent else WINDOW_RUNS):
            self._judge(self._window)
            self._window = []

    def _judge(self, window: list[Sample]) -> None:
        drifts = [self.cost.drift(run) for run in window]
        self.drift = median(drifts)
        self.worst_error = quantiles((abs(1 / drift - 1) for drift in drifts), n=10)[-1]
        is_off = abs(self.drift - 1) > MAX_DRIFT
        if is_off:
            self.cost = self._refitted(window)
            self.token_seconds *= self.drift
            self.num_refits += 1
        # Small runs cost more a token, and there are none but small ones while little is asked for.
        loaded = [run for run in window if 2 * run.num_tokens >= self.max_batch_tokens]
        if len(loaded) >= _LOADED_RUNS:
            self.token_seconds = sum(run.seconds for run in loaded) / sum(run.num_tokens for run in loaded)
        if is_off:
            self._on_refit(self)

    def _refitted(self, runs: list[Sample]) -> CostModel:
        scaled = self.cost.scaled(self.drift)
        usable = [run for run in runs if 1 / _OUTLIER < scaled.drift(run) < _OUTLIER]
        fitted = fit([*_predictions(scaled), *usable])
        # The fit is drawn to the fast runs of a noisy window: relative to itself, a slow one is never far off.
        return fitted.scaled(median(fitted.drift(run) for run in runs))


def _full_batch_seconds(cost: CostModel, max_batch_tokens: int) -> float:
    length = min(_SHORT_TOKENS, max_batch_tokens)
    return cost.seconds(max_batch_tokens // length, max_batch_tokens, length)


def _predictions(cost: CostModel) -> list[Sample]:
    return [Sample(b, b * s, s, max(cost.seconds(b, b * s, s), LEAST_SECONDS)) for b, s in _ANCHORS]
