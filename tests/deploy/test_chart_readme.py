"""The chart's README: its table is what values and schema say, its examples render."""

import json
import re

import yaml

from tests.deploy.chart import defaults, leaves, objects
from tests.deploy.kubernetes import errors
from tests.deploy.paths import CHART

README = CHART / "README.md"


def described(path: str) -> str:
    node = json.loads((CHART / "values.schema.json").read_text())
    for key in path.split("."):
        node = node["properties"][key]
    text: str = node["description"]
    return text


def test_the_readmes_table_is_what_values_and_schema_say() -> None:
    rows = ["| value | default | what |", "|---|---|---|"]
    for path, value in leaves(defaults()):
        rows.append(f"| `{path}` | `{json.dumps(value)}` | {described(path)} |")
    found = README.read_text().partition("<!-- values -->\n")[2].partition("<!-- /values -->")[0].strip()
    table = "\n".join(rows)
    assert found == table, f"between <!-- values --> and <!-- /values --> README.md of the chart needs\n\n{table}\n"


def test_the_readmes_examples_render() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) >= 4
    for example in examples:
        values = yaml.safe_load(example)
        assert "model" in values, "as it stands nothing could be installed with it"
        for found in objects(values):
            assert errors(found, "1.37") == []
