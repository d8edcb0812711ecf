"""The parameters of the Open Inference Protocol: which are honoured, which would change the answer and are refused.

Every other is ignored, as the protocol asks.
"""

import math
from collections.abc import Mapping

from protos.open_inference_pb2 import InferParameter
from service.errors import InvalidRequestError
from service.request import Priority

REFUSED_PARAMETERS = ("sequence_", "shared_memory_", "classification")

# Of a request or a tensor; clients of the protocol send a handful.
MAX_PARAMETERS = 64
# What whole numbers come as: KServe's clients send one kind, Triton's either.
_WHOLE = ("int64_param", "uint64_param")


def refuse_parameters(owner: str, parameters: Mapping[str, InferParameter]) -> None:
    """Raise `InvalidRequestError` for parameters that would change the answer, or for too many."""
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequestError(f"{owner} has {len(parameters)} parameters; the limit is {MAX_PARAMETERS}")
    for name in parameters:
        if name.startswith(REFUSED_PARAMETERS):
            raise InvalidRequestError(f"{owner} has the parameter {name[:64]!r}, which this server does not support")


def read_deadline(parameters: Mapping[str, InferParameter], arrival: float, deadline: float | None) -> float | None:
    """The call's deadline, or that of `timeout` where it is sooner. Raises `InvalidRequestError`."""
    microseconds = _whole_number(parameters, "timeout", "microseconds")
    if microseconds < 0:
        raise InvalidRequestError(f"timeout is {microseconds} microseconds; the least is 0, which means none")
    if microseconds == 0:
        return deadline
    return min(arrival + microseconds / 1e6, math.inf if deadline is None else deadline)


def read_priority(parameters: Mapping[str, InferParameter]) -> Priority:
    """`priority` as Triton has it, 1 the most urgent; 0 or none is normal. Raises `InvalidRequestError`."""
    number = _whole_number(parameters, "priority", "1 (high) to 3 (low), or 0 for normal")
    if not 0 <= number <= max(Priority):
        raise InvalidRequestError(f"priority is {number}; it takes 1 (high) to 3 (low), or 0 for normal")
    return Priority(number) if number else Priority.NORMAL


def _whole_number(parameters: Mapping[str, InferParameter], name: str, wanted: str) -> int:
    """0 where the parameter is not there."""
    if name not in parameters:  # looking it up would add it
        return 0
    parameter = parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in _WHOLE:
        raise InvalidRequestError(
            f"{name} is a {kind or 'parameter without a value'}; it takes {' or '.join(_WHOLE)}, {wanted}"
        )
    return parameter.int64_param if kind == "int64_param" else parameter.uint64_param
