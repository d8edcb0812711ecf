"""What the simulator says of the very slices that `bench-overload` measures: how far it can be believed.

It is told what the server itself says of its model (the cost model in force, from its metrics) and one measured number,
the capacity of the round: all runs are scaled so that callers who wait get that much of the simulated server too. What
scaling makes up for is what was left out, wire, event loop and load generator, which want CPU as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from benchmarks.arrivals import Arrival
from benchmarks.cases import default_bounds
from benchmarks.devices import CPU, Device
from benchmarks.fifo import Fifo
from benchmarks.load import Address, scrape_samples
from benchmarks.open_loop import Message, Schedule
from benchmarks.outcomes import Tally, Window
from benchmarks.simulator import Replica, replay, saturate
from service.cost_model import CostModel
from service.scheduler import Scheduler


def read_device(address: Address) -> Device:
    """A server's device, by its own metrics; what it does not say is as on the CPU of `benchmarks.devices`."""
    found = {sample.name: sample.value for sample in scrape_samples(address, "mhsa_")}
    cost = CostModel(*(found[f"mhsa_cost_{part}_seconds"] for part in ("run", "token", "pair")))
    lone = CPU.alone.per_token / CPU.cost.per_token
    return replace(
        CPU,
        name="measured",
        cost=cost,
        alone=cost.scaled(lone),
        num_runners=int(found["mhsa_runners"]),
        max_batch_tokens=int(found["mhsa_batch_budget_tokens"]),
    )


def fitted(device: Device, messages: Sequence[Message], num_callers: int, window: Window, capacity: float) -> Device:
    """The device, slower or faster, so that it gives callers who wait so many tokens a second."""
    lengths = cycle([message.lengths for message in messages])
    found = saturate(lengths, Replica(device, Scheduler, default_bounds()), num_callers, window).goodput()
    return replace(device, cost=device.cost.scaled(found / capacity), alone=device.alone.scaled(found / capacity))


def foretell(schedule: Schedule, device: Device, max_queued_tokens: int | None) -> Tally:
    """What becomes of a schedule; with a bound, in a plain queue that holds so much."""
    arrivals = [
        Arrival(at, message.lengths, schedule.timeout_seconds, caller=message.group)
        for at, message in zip(schedule.times, schedule.messages, strict=True)
    ]
    if max_queued_tokens is None:
        replica = Replica(device, Scheduler, default_bounds())
    else:
        replica = Replica(device, Fifo, default_bounds()._replace(tokens=max_queued_tokens))
    return replay(arrivals, [replica], lambda replicas: replicas[0], schedule.window)
