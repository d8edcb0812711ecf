"""A certificate's last moment, against certificates of another library."""

from datetime import UTC, datetime

import pytest
import trustme

from service.certificate import first_expiry

SOON = datetime(2031, 4, 5, 6, 7, 8, tzinfo=UTC)
LATER = datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC)
PAST_2050 = datetime(2062, 1, 2, 3, 4, 5, tzinfo=UTC)  # written as another type, with a century


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def pem(authority: trustme.CA, moment: datetime) -> bytes:
    return authority.issue_cert("localhost", not_after=moment).cert_chain_pems[0].bytes()


@pytest.mark.parametrize("moment", [datetime(1999, 1, 1, tzinfo=UTC), SOON, LATER, PAST_2050])
def test_the_last_moment_of_a_certificate_is_read(authority: trustme.CA, moment: datetime) -> None:
    leaf = authority.issue_cert("localhost", not_before=datetime(1998, 1, 1, tzinfo=UTC), not_after=moment)
    assert first_expiry(leaf.cert_chain_pems[0].bytes()) == moment.timestamp()


def test_a_chain_ends_with_the_first_of_its_certificates(authority: trustme.CA) -> None:
    early, late = pem(authority, SOON), pem(authority, LATER)
    assert first_expiry(early + late) == first_expiry(late + b"a comment\n" + early) == SOON.timestamp()


def test_what_else_is_in_the_file_does_not_matter(authority: trustme.CA) -> None:
    key = authority.issue_cert("localhost").private_key_pem.bytes()
    assert first_expiry(key + pem(authority, SOON)) == SOON.timestamp()
