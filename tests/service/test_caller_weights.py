"""How weights are written, and which are refused."""

import pytest

from service.caller_weights import parse_weights
from service.errors import StartupError


def test_each_name_has_its_weight() -> None:
    assert parse_weights("acme=2,team/search=0.5,a.b@c:d+e_f-1=1000") == {
        "acme": 2.0,
        "team/search": 0.5,
        "a.b@c:d+e_f-1": 1000.0,
    }


@pytest.mark.parametrize(
    ("text", "entry", "reason"),
    [
        ("acme", "acme", "it takes NAME=WEIGHT, the name 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"),
        ("a=1,", "", "it takes NAME=WEIGHT, the name 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"),
        ("=1", "=1", "it takes NAME=WEIGHT, the name 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"),
        ("two words=1", "two words=1", "it takes NAME=WEIGHT, the name 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"),
        ("a=1,b=2,a=3", "a=3", "a has a weight already"),
        ("a=much", "a=much", "'much' is no number"),
        ("a=", "a=", "'' is no number"),
        ("a=1=2", "a=1=2", "'1=2' is no number"),
        ("a=0", "a=0", "a weight is 0.001 to 1000"),
        ("a=-1", "a=-1", "a weight is 0.001 to 1000"),
        ("a=1000.1", "a=1000.1", "a weight is 0.001 to 1000"),
        ("a=inf", "a=inf", "a weight is 0.001 to 1000"),
        ("a=nan", "a=nan", "a weight is 0.001 to 1000"),
    ],
)
def test_what_is_no_weight_is_refused_by_its_entry(text: str, entry: str, reason: str) -> None:
    with pytest.raises(StartupError) as refusal:
        parse_weights(text)
    assert str(refusal.value) == f"--tenant-weights (MHSA_TENANT_WEIGHTS) has {entry!r}: {reason}"


def test_a_name_has_at_most_64_characters() -> None:
    assert parse_weights("x" * 64 + "=1") == {"x" * 64: 1.0}
    with pytest.raises(StartupError):
        parse_weights("x" * 65 + "=1")
