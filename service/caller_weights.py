"""What a caller may be called, and `NAME=WEIGHT,...`: how much of the server each caller's share is worth.

A weight counts beside those of the others who have work waiting; who has none of his own has 1.
"""

import re
from collections.abc import Mapping

from service.errors import StartupError

# What may stand in a log line, in a setting and in metadata as it is; neither "=" nor ",", which part the weights.
CALLER_NAME = re.compile(r"[A-Za-z0-9._:/+@-]{1,64}")
NAME_RULE = "1 to 64 of A-Z a-z 0-9 . _ : / + @ -"
# Beyond a thousand to one a share is no share any more.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


def parse_weights(text: str) -> Mapping[str, float]:
    """`a=2,b=0.5`. Raises `StartupError` with the entry that is wrong."""
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, separator, number = entry.partition("=")
        if not separator or not CALLER_NAME.fullmatch(name):
            raise _refusal(entry, f"it takes NAME=WEIGHT, the name {NAME_RULE}")
        if name in weights:
            raise _refusal(entry, f"{name} has a weight already")
        weights[name] = _weight(entry, number)
    return weights


def _weight(entry: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        raise _refusal(entry, f"{number!r} is no number") from None
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise _refusal(entry, f"a weight is {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight


def _refusal(entry: str, reason: str) -> StartupError:
    return StartupError(f"--tenant-weights (MHSA_TENANT_WEIGHTS) has {entry[:200]!r}: {reason}")
