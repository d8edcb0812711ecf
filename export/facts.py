"""What weights alone cannot tell of a model, and its owner must: heads, activation, the order of norms, limits.

A wrong guess would give vectors that look right. Every fact is asked for, in config.json or on the command line, none
has a default, and all that is missing, wrong or unknown is listed at once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.errors import ExportError

MODEL_TYPE = "model_type"


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and what it takes: one of `choices`, or a number of `kind` from `least` to `most`."""

    name: str
    choices: tuple[str | bool, ...] = ()
    kind: type[int] | type[float] = int
    least: float = 1
    most: float = 2**27

    def takes(self, value: object) -> bool:
        """Whether it is one of those. True and 1 are not the same."""
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        is_number = type(value) is int or (self.kind is float and type(value) is float)
        return is_number and self.least <= value <= self.most  # type: ignore[operator]  # it is a number

    def __str__(self) -> str:
        if self.choices:
            return f"{self.name} ({' or '.join(map(_written, self.choices))})"
        noun = "whole number" if self.kind is int else "number"
        return f"{self.name} (a {noun} from {self.least:g} to {self.most:.10g})"


def check_facts(where: Path, content: Mapping[str, Any], facts: Sequence[Fact]) -> dict[str, Any]:
    """The values of all facts. Raises `ExportError` for what is missing, unknown or of another kind."""
    given = {name: value for name, value in content.items() if name != MODEL_TYPE}
    missing = [str(fact) for fact in facts if fact.name not in given]
    wrong = [
        f"{fact} is {_written(given[fact.name])}"
        for fact in facts
        if fact.name in given and not fact.takes(given[fact.name])
    ]
    unknown = sorted(given.keys() - {fact.name for fact in facts})
    listed = (("missing", missing), ("wrong", wrong), ("unknown", unknown))
    if problems := "; ".join(f"{kind}: {', '.join(names)}" for kind, names in listed if names):
        raise ExportError(
            f"{where}: weights do not tell everything of a {content[MODEL_TYPE]}, and nothing is guessed; {problems}. "
            "Correct config.json, or for a bare file give --set NAME=VALUE"
        )
    return given


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE`, as JSON has it: numbers, true, false; anything else is text. Raises `ExportError`."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise ExportError(f"--set {setting!r} is not NAME=VALUE")
        if name in found:
            raise ExportError(f"--set {name} is given twice, as {_written(found[name])} and {value}")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def _written(value: object) -> str:
    """As in config.json; a long one is cut."""
    return value[:64] if isinstance(value, str) else json.dumps(value)[:64]
