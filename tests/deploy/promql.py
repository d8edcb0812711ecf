"""PromQL taken apart: which series an expression reads, and what it is put together from."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser
from promql_parser import BinaryExpr, Expr, ParenExpr, VectorSelector

_CONDITIONS = {"==", "!=", ">", "<", ">=", "<=", "and", "or", "unless"}


@dataclass(frozen=True, slots=True)
class Selector:
    """What is read: a metric's name, and the matchers as they are written."""

    name: str
    matchers: frozenset[str]


def selectors(expression: str) -> list[Selector]:
    """Every selector of an expression. Raises `ValueError` where it is no PromQL."""
    found: list[Expr] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return [
        Selector(node.name or "", frozenset(str(matcher) for matcher in node.matchers.matchers))
        for node in found
        if isinstance(node, VectorSelector)
    ]


def operands(expression: str) -> list[str]:
    """What its conditions join or compare: each has data also while the whole says that nothing is wrong."""
    return list(_operands(promql_parser.parse(expression)))


def _operands(node: Expr) -> Iterator[str]:
    while isinstance(node, ParenExpr):
        node = node.expr
    if isinstance(node, BinaryExpr) and str(node.op) in _CONDITIONS:
        yield from _operands(node.lhs)
        yield from _operands(node.rhs)
    else:
        yield node.prettify()
