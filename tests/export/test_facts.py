"""Facts that weights cannot tell: all asked for, and every problem in one line."""

from pathlib import Path

import pytest

from export.errors import ExportError
from export.facts import Fact, check_facts, parse_settings

FACTS = (
    Fact("num_heads", most=64),
    Fact("activation", choices=("relu", "gelu")),
    Fact("norm_first", choices=(True, False)),
    Fact("layer_norm_eps", kind=float, least=1e-12, most=1),
)
RIGHT = {"num_heads": 8, "activation": "gelu", "norm_first": False, "layer_norm_eps": 1e-5}


def _refusal(**changes: object) -> str:
    content = {"model_type": "x"} | {name: v for name, v in (RIGHT | changes).items() if v is not None}
    with pytest.raises(ExportError) as refusal:
        check_facts(Path("model"), content, FACTS)
    return str(refusal.value)


def test_what_is_whole_and_right_is_returned() -> None:
    assert check_facts(Path("model"), {"model_type": "x"} | RIGHT, FACTS) == RIGHT


def test_everything_missing_is_listed_with_what_it_takes() -> None:
    message = _refusal(num_heads=None, activation=None, norm_first=None)

    assert (
        "missing: num_heads (a whole number from 1 to 64), activation (relu or gelu), norm_first (true or false). "
        in message
    )
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("num_heads", 0, "0"),
        ("num_heads", 65, "65"),
        ("num_heads", True, "true"),
        ("num_heads", "8", "8"),
        ("num_heads", 8.0, "8.0"),
        ("activation", "swish", "swish"),
        ("norm_first", 1, "1"),
        ("norm_first", "false", "false"),
        ("layer_norm_eps", 0, "0"),
        ("layer_norm_eps", float("nan"), "NaN"),
    ],
)
def test_a_wrong_value_is_shown(name: str, value: object, written: str) -> None:
    message = _refusal(**{name: value})

    assert f"wrong: {name} (" in message
    assert f") is {written}. Correct" in message


def test_an_unknown_name_is_refused() -> None:
    assert "unknown: dropout. Correct" in _refusal(dropout=0.1)


def test_a_whole_number_is_a_number() -> None:
    assert check_facts(Path("model"), {"model_type": "x"} | RIGHT | {"layer_norm_eps": 1}, FACTS)["layer_norm_eps"] == 1


def test_settings_are_json_and_else_text() -> None:
    settings = ["num_heads=8", "norm_first=true", "layer_norm_eps=1e-5", "activation=relu", "model_type=a=b"]

    assert parse_settings(settings) == {
        "num_heads": 8,
        "norm_first": True,
        "layer_norm_eps": 1e-5,
        "activation": "relu",
        "model_type": "a=b",
    }


@pytest.mark.parametrize("setting", ["num_heads", "=8", ""])
def test_a_setting_without_name_and_value_is_refused(setting: str) -> None:
    with pytest.raises(ExportError, match="is not NAME=VALUE"):
        parse_settings([setting])


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ExportError, match="--set num_heads is given twice, as 8 and 4"):
        parse_settings(["num_heads=8", "num_heads=4"])
