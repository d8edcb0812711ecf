"""Real text for what random ids cannot show: Python's own language reference, which every Python has.

Its paragraphs are cut in two halves that have none in common. int8 is calibrated on one and judged on the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np

from service.request import TokenSequence

Tokenize = Callable[[str], list[int]]

_SHORTEST_PARAGRAPH = 60
_NUM_CALIBRATION, _NUM_HELD_OUT = 64, 200
# Enough for every length that text usually has, and a bound on the time of both.
_MOST_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A text and its tokens."""

    text: str
    sequence: TokenSequence


def calibration_probes(tokenize: Tokenize, max_tokens: int) -> list[Probe]:
    """What int8's decisions are made on."""
    return _probes(tokenize, max_tokens, _paragraphs()[0::2], _NUM_CALIBRATION)


def held_out_probes(tokenize: Tokenize, max_tokens: int) -> list[Probe]:
    """What int8 is judged on; none of it is among the calibration probes."""
    return _probes(tokenize, max_tokens, _paragraphs()[1::2], _NUM_HELD_OUT)


def _paragraphs() -> list[str]:
    """Each once: topics quote one another."""
    parts = (part for text in topics.values() for part in text.split("\n\n") if len(part) > _SHORTEST_PARAGRAPH)
    return list(dict.fromkeys(parts))


def _probes(tokenize: Tokenize, max_tokens: int, paragraphs: Sequence[str], count: int) -> list[Probe]:
    chosen = paragraphs[:: len(paragraphs) // count][:count]
    rows = [np.array(tokenize(text)[: min(max_tokens, _MOST_TOKENS)], np.int64) for text in chosen]
    return [
        Probe(text, TokenSequence(row, np.arange(len(row)), np.zeros(len(row), np.int64)))
        for text, row in zip(chosen, rows, strict=True)
    ]
