"""Clients of the typed API: `EncoderClient("host:port").encode([[ids], ...])`, and the same on asyncio.

A model of vectors takes arrays (L, input_size) of floats where others take ids.

A call of any size works: it is split by the limits that the server publishes, sequences, tokens and bytes. Its parts
are on the wire together and hold no more than one request may, so no call fills a queue by itself; where others have
filled it, gRPC waits and tries again. What neither blocks nor awaits is in `plan.py`, one for both clients. Nothing
of the server is imported.
"""

from service.client.clients import AsyncEncoderClient, EncoderClient
from service.client.plan import CallOptions

__all__ = ["AsyncEncoderClient", "CallOptions", "EncoderClient"]
