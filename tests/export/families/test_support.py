"""The README's table of families: what the tests export, in which precisions, with which heads, and what is refused."""

from pathlib import Path

from export.families.table import FAMILIES, REFUSED
from tests import checkpoints
from tests.own_models import OWN_MODELS

README = Path(__file__).parents[3] / "README.md"
START, END = "<!-- families -->\n", "<!-- /families -->"


def support_table() -> str:
    """A row for each family that tests/checkpoints.py and tests/own_models.py make and the tests export."""
    rows = ["| `model_type` | read as | embeddings | classification | int8, fp16 |", "|---|---|---|---|---|"]
    for name in sorted(checkpoints.FAMILIES):
        family = FAMILIES[name]
        classifier = f"`{family.classifier.model_class.__name__}`" if family.classifier else "no"
        rows.append(f"| `{name}` | `{family.model_class.__name__}` | yes | {classifier} | yes |")
    for name in OWN_MODELS:
        shown = "`--module PACKAGE.MODULE:BUILD`" if name == "module" else f"`{name}`"
        precisions = "with a tokenizer" if name == "mhsa_encoder" else "no: judged on texts"
        inputs = {"mhsa_encoder": "token ids", "module": "vectors or token ids"}.get(name, "vectors")
        rows.append(f"| {shown} | {inputs} | yes | no | {precisions} |")
    rows += [f"| `{name}` | refused: {reason} | | | |" for name, reason in sorted(REFUSED.items())]
    return "\n".join(rows)


def test_every_family_that_is_supported_is_made_by_the_tests() -> None:
    assert checkpoints.FAMILIES.keys() == FAMILIES.keys()


def test_the_readme_has_the_table() -> None:
    found = README.read_text().partition(START)[2].partition(END)[0].strip()
    assert found == support_table(), f"between {START.strip()} and {END} README.md needs\n\n{support_table()}\n"
