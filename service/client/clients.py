"""The two clients, blocking and asyncio, line for line alike.

Channels balance over every address behind a name (round_robin). gRPC itself tries two statuses again, on the next
address, five times in all, which is the most it allows:

- UNAVAILABLE: the server is loading or stopping, or cannot be reached. A server that stops fails requests of which a
  part has run, and a connection may break after the work was done; to encode a sequence twice changes nothing.
- RESOURCE_EXHAUSTED: the queue was full for a moment. A refusal costs the server the decoding and no run, and gRPC
  comes back when there is room by the server's own reckoning, for it obeys `grpc-retry-pushback-ms`. Nor do retries
  pile up: a part that waits keeps its place in flight, and all places of a call hold what one request may.

Without that header RESOURCE_EXHAUSTED is a device out of memory, which other work may give back: gRPC waits 0.1 s, then
twice as long each time. It is a message above the server's limit, too; parts are cut to fit it, and one sequence
that does not is sent once if it is above the 4 MiB that gRPC keeps. A call of which a part fails five times fails:
retries carry a call over a moment of overload, not over callers who together want more than the server has.

Errors are gRPC's own, `grpc.RpcError`; bad arguments are `ValueError`, answers that don't fit together `RuntimeError`.
A model's description is kept until a call fails or another version answers: then it may be out of date.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Self, Unpack

import grpc

from protos.encoder_pb2 import (
    OUTPUT_POOLED,
    OUTPUT_TOKENS,
    EncodeResponse,
    GetModelRequest,
    GetModelResponse,
    Output,
)
from protos.encoder_pb2_grpc import EncoderServiceStub
from service.client.plan import CallOptions, Float32Array, Plan, Sequences, Task

_SERVICE_CONFIG: dict[str, object] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": "mhsa.encoder.v1.EncoderService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
}
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC keeps this much of a call to send again, and tries a larger one once. Its default, 256 KiB, is too little for
    # a part of a server whose limit is a million tokens.
    ("grpc.per_rpc_retry_buffer_size", 4 * 1024 * 1024),
    # A name is looked up when a connection ends, but by default once in 30 s at most: a rollout is faster, and would
    # leave a client with the addresses of pods that are gone.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
]
_HEALTH = {"healthCheckConfig": {"serviceName": "mhsa.encoder.v1.EncoderService"}}


_LONGEST_SECONDS = 1e8


class EncoderClient:
    """A blocking client; threads may share it.

    `credentials` turn TLS on; `token` is sent as a bearer token; `tenant` is whom a gateway calls for. With
    `watch_health` no call goes to a server that loads or drains. It is for servers that nothing stands before: of a
    proxy one such server would speak for all.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        tenant: str | None = None,
        watch_health: bool = False,
    ) -> None:
        options = _options(watch_health)
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)
        self._metadata = _metadata(token, tenant)
        self._models: dict[tuple[str, str], GetModelResponse] = {}

    def model(self, model: str = "", version: str = "", *, timeout: float | None = None) -> GetModelResponse:
        """The server's description of a model; asked for once, and again where it may be out of date."""
        key = (model, version)
        if (described := self._models.get(key)) is None:
            request = GetModelRequest(model=model, version=version)
            described = self._stub.GetModel(request, timeout=timeout, metadata=self._metadata)
            self._models[key] = described
        return described

    def encode(self, sequences: Sequences, *, dimensions: int = 0, **options: Unpack[CallOptions]) -> Float32Array:
        """One vector for each sequence, token ids (L,) or vectors (L, input_size): (n, dimensions or output_size)."""
        plan, responses = self._run(sequences, OUTPUT_POOLED, dimensions, options, "embedding")
        return plan.pooled(responses)

    def classify(self, sequences: Sequences, **options: Unpack[CallOptions]) -> Float32Array:
        """A classifier's logits, as the model gives them: (n, labels), in the order of `model().labels`."""
        plan, responses = self._run(sequences, OUTPUT_POOLED, 0, options, "classification")
        return plan.pooled(responses)

    def encode_tokens(self, sequences: Sequences, **options: Unpack[CallOptions]) -> list[Float32Array]:
        """One vector for each token: (L, hidden_size) for each sequence."""
        plan, responses = self._run(sequences, OUTPUT_TOKENS, 0, options)
        return plan.tokens(responses)

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        sequences: Sequences,
        output: Output.ValueType,
        dimensions: int,
        options: CallOptions,
        task: Task | None = None,
    ) -> tuple[Plan, list[EncodeResponse]]:
        remaining = _countdown(options.get("timeout"))
        key = (options.get("model", ""), options.get("version", ""))
        described = self.model(*key, timeout=remaining())
        is_current = False
        try:
            plan = Plan(described, sequences, output, dimensions, options, task)
            responses = self._send(plan, remaining)
            is_current = plan.is_described(responses)
            return plan, responses
        finally:
            if not is_current:
                self._models.pop(key, None)

    def _send(self, plan: Plan, remaining: Callable[[], float | None]) -> list[EncodeResponse]:
        if len(plan.parts) == 1:  # gRPC's blocking call takes half the time of its future
            return [self._stub.Encode(plan.request(plan.parts[0]), timeout=remaining(), metadata=self._metadata)]
        pending: deque[grpc.Future[EncodeResponse]] = deque()
        responses: list[EncodeResponse] = []
        try:
            for part in plan.parts:
                if len(pending) == plan.max_in_flight:
                    responses.append(pending.popleft().result())
                request = plan.request(part)
                pending.append(self._stub.Encode.future(request, timeout=remaining(), metadata=self._metadata))
            responses.extend(call.result() for call in pending)
        finally:
            for call in pending:
                call.cancel()
        return responses


class AsyncEncoderClient:
    """The same for asyncio; make it in the event loop that uses it."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        tenant: str | None = None,
        watch_health: bool = False,
    ) -> None:
        options = _options(watch_health)
        self._channel = (
            grpc.aio.insecure_channel(target, options)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)
        self._metadata = _metadata(token, tenant)
        self._models: dict[tuple[str, str], GetModelResponse] = {}

    async def model(self, model: str = "", version: str = "", *, timeout: float | None = None) -> GetModelResponse:
        """The server's description of a model; asked for once, and again where it may be out of date."""
        key = (model, version)
        if (described := self._models.get(key)) is None:
            request = GetModelRequest(model=model, version=version)
            described = await self._stub.GetModel(request, timeout=timeout, metadata=self._metadata)
            self._models[key] = described
        return described

    async def encode(
        self, sequences: Sequences, *, dimensions: int = 0, **options: Unpack[CallOptions]
    ) -> Float32Array:
        """One vector for each sequence, token ids (L,) or vectors (L, input_size): (n, dimensions or output_size)."""
        plan, responses = await self._run(sequences, OUTPUT_POOLED, dimensions, options, "embedding")
        return plan.pooled(responses)

    async def classify(self, sequences: Sequences, **options: Unpack[CallOptions]) -> Float32Array:
        """A classifier's logits, as the model gives them: (n, labels), in the order of `model().labels`."""
        plan, responses = await self._run(sequences, OUTPUT_POOLED, 0, options, "classification")
        return plan.pooled(responses)

    async def encode_tokens(self, sequences: Sequences, **options: Unpack[CallOptions]) -> list[Float32Array]:
        """One vector for each token: (L, hidden_size) for each sequence."""
        plan, responses = await self._run(sequences, OUTPUT_TOKENS, 0, options)
        return plan.tokens(responses)

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(
        self,
        sequences: Sequences,
        output: Output.ValueType,
        dimensions: int,
        options: CallOptions,
        task: Task | None = None,
    ) -> tuple[Plan, list[EncodeResponse]]:
        remaining = _countdown(options.get("timeout"))
        key = (options.get("model", ""), options.get("version", ""))
        described = await self.model(*key, timeout=remaining())
        is_current = False
        try:
            plan = Plan(described, sequences, output, dimensions, options, task)
            responses = await self._send(plan, remaining)
            is_current = plan.is_described(responses)
            return plan, responses
        finally:
            if not is_current:
                self._models.pop(key, None)

    async def _send(self, plan: Plan, remaining: Callable[[], float | None]) -> list[EncodeResponse]:
        permits = asyncio.Semaphore(plan.max_in_flight)

        async def send(part: slice) -> EncodeResponse:
            async with permits:
                return await self._stub.Encode(plan.request(part), timeout=remaining(), metadata=self._metadata)

        tasks = [asyncio.create_task(send(part)) for part in plan.parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def _options(watch_health: bool) -> list[tuple[str, int | str]]:
    config = _SERVICE_CONFIG | (_HEALTH if watch_health else {})
    return [*_OPTIONS, ("grpc.service_config", json.dumps(config))]


def _metadata(token: str | None, tenant: str | None) -> tuple[tuple[str, str], ...]:
    for name, value in (("token", token), ("tenant", tenant)):
        if value is not None and not (value and value.isascii() and value.isprintable()):
            raise ValueError(f"the {name} is empty or has characters other than printable ASCII")
    authorization = () if token is None else (("authorization", f"Bearer {token}"),)
    return authorization if tenant is None else (*authorization, ("mhsa-tenant", tenant))


def _seconds(timeout: float | None) -> float | None:
    """A timeout as gRPC can have it. What is beyond years is none to gRPC, which would take it for one that is over."""
    if timeout is None or timeout > _LONGEST_SECONDS:
        return None
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it takes seconds above 0, or None for no limit")
    return timeout


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left of a timeout each time it is asked."""
    seconds = _seconds(timeout)
    end = None if seconds is None else time.monotonic() + seconds
    return lambda: None if end is None else max(0.0, end - time.monotonic())
