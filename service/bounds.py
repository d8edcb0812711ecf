"""The four amounts by which a model's queue is bounded."""

from typing import NamedTuple


class Bounds(NamedTuple):
    """Tokens and sequences that wait, requests and bytes in flight: the most of each, or how much there is."""

    tokens: int
    sequences: int
    requests: int
    bytes: int
