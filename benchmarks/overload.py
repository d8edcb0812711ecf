"""`python -m benchmarks.overload`: more is asked than can be answered; exit code 1 when a wanted figure is missed.

Capacity is what our server answers with enough callers who wait. Then the same requests come on a schedule, at half of
that and at up to four times, with a deadline of a second, to our server and to a plain queue with the same engine. All
rows of a round see the same requests at the same moments; capacity is measured before and after the rows that are
compared with it, since the machine drifts. A plain queue is bounded in tokens, and all depends on that bound: so it
comes with two, chosen with a knowledge of capacity that nobody has when it is deployed. Ours has its defaults.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import load, machine, open_loop
from benchmarks.arrivals import poisson_times
from benchmarks.comparison import Stopwatch, comparison_parser, is_chosen, parse_comparison, run_comparison
from benchmarks.contenders import rotated
from benchmarks.field import models_directory, one_process, start_server
from benchmarks.foretold import fitted, foretell, read_device
from benchmarks.load import Address, LoadError, encode
from benchmarks.open_loop import Message, Offered, Schedule
from benchmarks.outcomes import Tally, Window
from benchmarks.overload_report import (
    FORETOLD_NOTE,
    LOADS,
    LOADS_NOTE,
    MAX_LAG_SECONDS,
    OVERLOADS,
    REFUSALS_NOTE,
    SCENARIOS,
    Round,
    Row,
    Stream,
    foretold_table,
    groups_table,
    judge,
    loads_table,
    refusals_table,
    wanted_table,
)
from benchmarks.terms import FILL_SECONDS, OURS, RIVALS, TIMEOUT_SECONDS
from benchmarks.traces import Batch, by_count, mixed_trace
from service.bundle import Bundle, read_bundle

# Few enough tokens to be answered in a tenth of the deadline, so many that the generator, which wants CPU too, gets by
# with a fiftieth of what the server has.
REQUEST_SEQUENCES = 16
_PART_REQUESTS = 80
# As many sequences in the server as an overloaded queue of one second holds, so that batches find the same company.
_CALLERS = 6
# Of a request at its longest: less, and the rival would refuse it for good.
_LEAST_BOUND_TOKENS = REQUEST_SEQUENCES * 256
EVERYBODY_ALIKE = Stream(1.0)
# A round in which the generator was held up is run again, this often in all.
_TRIES_A_ROUND = 3


@dataclass(frozen=True, slots=True)
class Field:
    """The load generator's process and the servers, by name; the tokens that the rivals' queues may hold."""

    generator: Executor
    servers: Mapping[str, Address]
    bounds: Mapping[str, int]
    trace: Sequence[Batch]
    window: Window

    def saturate(self, server: str, number: int) -> Offered:
        """A server's capacity, on the requests of a round."""
        return self.generator.submit(
            open_loop.saturate, self.servers[server], self._messages(number), _CALLERS, self.window
        ).result()

    def offer(self, row: Row, number: int, rate: float) -> Offered:
        """Offer a round's requests in a scenario, where `rate` requests a second are capacity."""
        schedule = self._plan(row, number, rate)
        return self.generator.submit(open_loop.offer, self.servers[row.server], schedule).result()

    def foretell(self, rows: Iterable[Row], number: int, rate: float, capacity: float) -> dict[Row, Tally]:
        """What the simulator says of rows, given what our server says of itself and the capacity of the round."""
        device = read_device(self.servers[OURS])
        device = fitted(device, self._messages(number), _CALLERS, self.window, capacity)
        return {row: foretell(self._plan(row, number, rate), device, self.bounds.get(row.server)) for row in rows}

    def request_tokens(self, number: int) -> float:
        """Tokens in a request of a round, in the mean."""
        return fmean(message.num_tokens for message in self._messages(number))

    def _plan(self, row: Row, number: int, rate: float) -> Schedule:
        streams = SCENARIOS[row.scenario]
        return plan(streams, [self._messages(number, stream) for stream in streams], number, rate, self.window)

    def _messages(self, number: int, stream: Stream = EVERYBODY_ALIKE) -> list[Message]:
        return messages(by_count(self.trace[number], REQUEST_SEQUENCES), stream)


def messages(requests: Iterable[Batch], stream: Stream) -> list[Message]:
    """Requests as callers of a kind send them."""
    metadata = (("mhsa-tenant", stream.group),) if stream.group else ()
    return [
        Message(encode(batch, stream.priority), tuple(one.num_tokens for one in batch), stream.group, metadata)
        for batch in requests
    ]


def plan(
    streams: Sequence[Stream], requests: Sequence[Sequence[Message]], seed: int, rate: float, window: Window
) -> Schedule:
    """Each stream's messages at its own times, again from the first after the last; all in order of time."""
    sent = [
        (float(at), message)
        for place, (stream, messages) in enumerate(zip(streams, requests, strict=True))
        for at, message in zip(
            poisson_times(np.random.default_rng((seed, place)), stream.load * rate, window.end),
            cycle(messages),
            strict=False,
        )
    ]
    sent.sort(key=lambda pair: pair[0])
    times, ordered = zip(*sent, strict=True) if sent else ((), ())
    return Schedule(ordered, times, TIMEOUT_SECONDS, window)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    console = Console(width=160, highlight=False)
    return run_comparison("benchmarks.overload", lambda work: _run(options, work, console))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison_parser(
        "benchmarks.overload",
        "Offer up to four times what the server can do, and see what it does.",
        rounds=5,
        seconds=4.0,
        slice_="of a slice that count",
        only="rows with TEXT in their name",
    )
    return parse_comparison(parser, arguments)


def _run(options: argparse.Namespace, work: Path, console: Console) -> int:
    stopwatch = Stopwatch()
    console.print(machine.describe())
    bundle = read_bundle(options.bundle)
    console.print(f"{bundle.manifest.name}, bundle {bundle.digest[:16]}\nstarting ...")
    rows = [row for row in _rows() if is_chosen(str(row), options.only)]
    with ExitStack() as stack:
        field = _open_field(stack, bundle, work, options, {row.server for row in rows})
        with stopwatch.during_rounds():
            rounds = list(_run_rounds(field, rows, options.rounds, console))
    if not rounds:
        raise LoadError("the load generator never kept its schedule; leave it more of the machine")
    for part in (loads_table(rounds), LOADS_NOTE, refusals_table(rounds), REFUSALS_NOTE):
        console.print(part)
    for part in (groups_table(rounds), foretold_table(rounds), FORETOLD_NOTE):
        if not isinstance(part, Table) or part.row_count:
            console.print(part)
    verdicts = judge(rounds)
    console.print(wanted_table(verdicts))
    console.print(stopwatch.summary(len(rounds)))
    return int(any(verdict.is_missed for verdict in verdicts))


def _rows() -> Iterator[Row]:
    yield from (Row(server, scenario) for server in (OURS, *RIVALS) for scenario in SCENARIOS)


def _open_field(stack: ExitStack, bundle: Bundle, work: Path, options: argparse.Namespace, names: set[str]) -> Field:
    """Start the generator, our server, and rivals whose bound is what our server does in so many seconds."""
    models = models_directory(bundle, work)
    window = Window(FILL_SECONDS, FILL_SECONDS + options.seconds)
    generator = stack.enter_context(one_process(load.prepare))
    trace = mixed_trace(_PART_REQUESTS * REQUEST_SEQUENCES, options.rounds)
    parts = [trace.part(number) for number in range(options.rounds + 1)]
    servers = {OURS: start_server(stack, "service", models, "--fairness", "tenant")}
    capacity = Field(generator, servers, {}, parts, window).saturate(OURS, 0).tally.goodput()
    bounds = {
        name: max(_LEAST_BOUND_TOKENS, round(seconds * capacity)) for name, seconds in RIVALS.items() if name in names
    }
    for name, bound in bounds.items():
        servers[name] = start_server(stack, "benchmarks.fifo", models, "--max-queued-tokens", str(bound))
    return Field(generator, servers, bounds, parts, window)


def _run_rounds(field: Field, rows: Sequence[Row], num_rounds: int, console: Console) -> Iterator[Round]:
    for number in range(1, num_rounds + 1):
        for _ in range(_TRIES_A_ROUND):
            started = time.monotonic()
            found = _run_round(field, rows, number)
            is_void = found.lag_seconds > MAX_LAG_SECONDS
            console.print(
                f"round {number} of {num_rounds}: {time.monotonic() - started:.0f} s, capacity {found.capacity:,.0f} "
                f"tokens/s, 99% were sent within {1000 * found.lag_seconds:.0f} ms" + (": void" if is_void else "")
            )
            if not is_void:
                yield found
                break


def _run_round(field: Field, rows: Sequence[Row], number: int) -> Round:
    """What is compared with capacity stands between two measurements of it; the rest follows."""
    judged = [row for row in rows if row.server == OURS and row.scenario in OVERLOADS]
    others = [row for row in rows if row not in judged]
    before = field.saturate(OURS, number)
    rate = before.tally.goodput() / field.request_tokens(number)
    slices = _offer_all(field, judged, number, rate)
    after = field.saturate(OURS, number)
    slices |= _offer_all(field, others, number, rate)
    plain = [row for row in rows if row.scenario in LOADS]
    found = Round((before, after), slices)
    return replace(found, foretold=field.foretell(plain, number, rate, found.capacity))


def _offer_all(field: Field, rows: Sequence[Row], number: int, rate: float) -> dict[Row, Offered]:
    return {row: field.offer(row, number, rate) for _, row in rotated({str(row): row for row in rows}, number)}


if __name__ == "__main__":
    sys.exit(main())
