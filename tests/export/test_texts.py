from export.texts import calibration_probes, held_out_probes


def tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_no_held_out_text_is_a_calibration_text() -> None:
    calibration = {probe.text for probe in calibration_probes(tokenize, 32)}
    held_out = {probe.text for probe in held_out_probes(tokenize, 32)}

    assert (len(calibration), len(held_out)) == (64, 200)  # and each of them once
    assert not calibration & held_out


def test_a_probe_has_its_text_s_tokens_up_to_the_limit() -> None:
    probe = held_out_probes(tokenize, 7)[3]

    assert probe.sequence.token_ids.tolist() == tokenize(probe.text)[:7]
    assert probe.sequence.position_ids.tolist() == list(range(7))
