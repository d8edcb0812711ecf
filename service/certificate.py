"""When a certificate expires, read out of its bytes.

The standard library can load a certificate that it would serve, and not look into it; a library that can would be one
more in the image, for one date. X.509 puts that date at a fixed place, so the walk to it is short.

Source: RFC 5280, section 4.1, in the encoding of X.690.
"""

import base64
import re
from datetime import UTC, datetime

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17


def first_expiry(chain: bytes) -> float:
    """The Unix time from which a PEM chain is not valid any more: that of the certificate that expires first."""
    return min(_not_after(base64.b64decode(block)) for block in _BLOCK.findall(chain))


def _not_after(der: bytes) -> float:
    """{ { [version], serial, algorithm, issuer, { notBefore, notAfter }, ... }, ... }"""
    (certificate,) = _parts(der)
    fields = _parts(_parts(certificate[1])[0][1])
    if fields[0][0] == _EXPLICIT_VERSION:
        del fields[0]
    _, (tag, text) = _parts(fields[3][1])
    written = text.decode("ascii")
    if tag == _UTC_TIME:
        written = ("20" if written < "50" else "19") + written
    return datetime.strptime(written, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each value in a row of them."""
    parts, at = [], 0
    while at < len(der):
        tag, length, start = der[at], der[at + 1], at + 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[at + 2 : start])
        at = start + length
        parts.append((tag, der[start:at]))
    return parts
