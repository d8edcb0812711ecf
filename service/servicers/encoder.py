"""mhsa.encoder.v1.EncoderService, the typed API: ragged batches in, vectors out."""

import asyncio
import time
from collections.abc import AsyncIterator

from grpc.aio import ServicerContext

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceServicer
from service.codec.encoder import decode_request, encode_response, foreseen_bytes
from service.errors import RequestError
from service.logs import caller, name_model
from service.repository import Repository
from service.request import Limits
from service.servicers.call import Call, arrival_and_deadline, trace
from service.servicers.encode_stream import EncodeStreamCall, StreamBounds, StreamContext
from service.servicers.meter import Instruments, Meter


class EncoderServicer(EncoderServiceServicer):
    """Answers from the repository's models. `draining` ends the streams, which would outlast any drain."""

    def __init__(
        self, repository: Repository, instruments: Instruments, bounds: StreamBounds, draining: asyncio.Event
    ) -> None:
        self._repository = repository
        self._stream_bounds = bounds
        self._draining = draining
        self._stream_meter = Meter(instruments, "EncodeStream")

    async def Encode(
        self, request: pb.EncodeRequest, context: ServicerContext[pb.EncodeRequest, pb.EncodeResponse]
    ) -> pb.EncodeResponse:
        """Encode one ragged batch."""
        return await self._encode(request, context)

    async def EncodeStream(  # type: ignore[override]
        self, _request_iterator: AsyncIterator[pb.EncodeStreamRequest], context: StreamContext
    ) -> None:
        """Encode a pipeline of ragged batches."""
        call = EncodeStreamCall(
            context,
            lambda message: self._encode(message, context),
            self._foreseen_bytes,
            self._stream_meter,
            self._stream_bounds,
        )
        await call.serve(self._draining)

    async def GetModel(
        self, request: pb.GetModelRequest, _context: ServicerContext[pb.GetModelRequest, pb.GetModelResponse]
    ) -> pb.GetModelResponse:
        """Describe a model."""
        model = self._repository.get(request.model, request.version)
        return pb.GetModelResponse(
            model=model.name,
            version=model.version,
            hidden_size=model.limits.hidden_size,
            vocab_size=model.limits.vocab_size,
            type_vocab_size=model.limits.type_vocab_size,
            pad_token_id=model.manifest.pad_token_id,
            pooling=model.manifest.pooling,
            normalized=model.manifest.normalize,
            limits=_limits(model.limits),
            precision=model.precision,
            execution_provider=model.provider,
            bundle_digest=model.digest,
            input=model.manifest.input,
            input_size=model.limits.input_size,
            task=model.manifest.task,
            output_size=model.limits.output_size,
            labels=model.manifest.labels,
            prompts=model.manifest.prompts,
            default_prompt=model.manifest.default_prompt,
        )

    async def _encode(self, message: pb.EncodeRequest, call: Call) -> pb.EncodeResponse:
        arrival, deadline = arrival_and_deadline(call)
        model = self._repository.get(message.model, message.version)
        name_model(model.name, model.version)
        request = decode_request(message, model.limits, arrival=arrival, deadline=deadline, caller=caller.get())
        trace(request)
        await model.batcher.submit(request)
        return encode_response(message, request, model.limits, version=model.version, now=time.monotonic())

    def _foreseen_bytes(self, message: pb.EncodeRequest) -> int:
        try:
            limits = self._repository.get(message.model, message.version).limits
        except RequestError:  # is its answer, in a moment
            return message.ByteSize()
        return foreseen_bytes(message, limits)


def _limits(limits: Limits) -> pb.Limits:
    return pb.Limits(
        max_sequence_tokens=limits.max_sequence_tokens,
        max_request_sequences=limits.max_request_sequences,
        max_request_tokens=limits.max_request_tokens,
        max_request_bytes=limits.max_request_bytes,
        max_message_bytes=limits.max_message_bytes,
    )
