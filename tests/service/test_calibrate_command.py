"""What `mhsa-serve calibrate` prints of a real bundle."""

import json
import re
from pathlib import Path

import pytest

from service.calibrate_command import main
from service.errors import StartupError

TWO = ["--device", "cpu", "--threads", "2"]


def test_the_json_has_layouts_grid_fit_budget_and_rate(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny_bundle), "--json", *TWO], {})
    found = json.loads(capsys.readouterr().out)
    assert (found["provider"], found["precision"]) == ("CPUExecutionProvider", "fp32")
    assert [(one["runners"], one["threads"]) for one in found["layouts"]] == [(2, 1), (1, 2)]
    assert {"runners": found["runners"], "threads": found["threads"]} in [
        {"runners": one["runners"], "threads": one["threads"]} for one in found["layouts"]
    ]
    run, cost = found["grid"][-1], found["cost"]
    tokens, pairs = run["sequences"] * run["length"], run["sequences"] * run["length"] ** 2
    predicted = cost["run_seconds"] + tokens * cost["token_seconds"] + pairs * cost["pair_seconds"]
    assert run["predicted_seconds"] == pytest.approx(predicted)
    assert found["worst_error"] >= abs(run["predicted_seconds"] / run["seconds"] - 1) - 1e-9
    assert found["budget_tokens"] == found["measured_budget_tokens"] >= 16
    assert found["tokens_per_second"] > 0


def test_the_text_has_a_line_for_each_layout_and_each_run_of_the_grid(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tiny_bundle), *TWO], {})
    text = capsys.readouterr().out
    for layout in ("2 x 1", "1 x 2"):
        assert re.search(rf"^ +{layout} +\d+ +[\d.]+ ms$", text, re.MULTILINE)
    runs = re.findall(r"^ +(\d+ x \d+) +[\d.]+ ms +[\d.]+ ms +[+-]\d+% +\d+$", text, re.MULTILINE)
    assert runs[0] == "1 x 16"
    assert len(set(runs)) == len(runs)
    for line in (r"taken: \d x \d, and \d threads", r"a run takes .* ms a pair, within \d+%", r"budget: \d+ tokens"):
        assert re.search(rf"^{line}", text, re.MULTILINE)


def test_what_the_operator_says_is_taken(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny_bundle), "--json", "--runners", "2", "--max-batch-tokens", "77", *TWO], {})
    found = json.loads(capsys.readouterr().out)
    assert (found["runners"], found["threads"], found["budget_tokens"]) == (2, 1, 77)


def test_the_servers_environment_counts_here_too(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"MHSA_MODELS": "/elsewhere", "MHSA_GRPC_PORT": "1234", "MHSA_THREADS": "1", "MHSA_DEVICE": "cpu"}
    main([str(tiny_bundle), "--json"], environment)
    found = json.loads(capsys.readouterr().out)
    assert (found["runners"], found["threads"], found["layouts"]) == (1, 1, [])


def test_a_setting_that_is_wrong_is_refused_as_the_server_does(tiny_bundle: Path) -> None:
    with pytest.raises(StartupError, match=r"--threads \(MHSA_THREADS\) is -1"):
        main([str(tiny_bundle), "--threads", "-1"], {})


def test_what_changes_no_calibration_is_no_flag_of_it(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tiny_bundle), "--grpc-port", "1"], {})
    assert caught.value.code == 2
    assert "--grpc-port" in capsys.readouterr().err
