"""Prometheus' HTTP API, as far as dashboards need it: a query now, and a query over time."""

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_TIMEOUT_SECONDS = 30.0


class QueryError(Exception):
    """Prometheus refused a query; the text is its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One answer: its labels, and its values at their Unix times."""

    labels: dict[str, str]
    times: Values
    values: Values


class Prometheus:
    """A server that answers queries, at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def query(self, expression: str) -> list[Series]:
        """What an expression gives now; a number is a series without labels. Raises `QueryError`."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [_series({}, [data["result"]])]
        return [_series(one["metric"], [one["value"]]) for one in data["result"]]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """What an expression gave at each step. Raises `QueryError`."""
        data = self.get("query_range", query=expression, start=str(start), end=str(end), step=str(step))
        return [_series(one["metric"], one["values"]) for one in data["result"]]

    def get(self, endpoint: str, **parameters: str) -> Any:  # Any: JSON
        """The `data` of an answer of /api/v1/<endpoint>. Raises `QueryError`."""
        address = f"{self._url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(json.load(error).get("error", error.reason)) from None


def _series(labels: dict[str, str], points: list[list[Any]]) -> Series:
    times, values = zip(*points, strict=True)
    return Series(labels, np.array(times, np.float64), np.array(values, np.float64))
