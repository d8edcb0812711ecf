"""Prints what pyproject.toml requires for some extras, a line each: `python requirements.py cpu otel`.

Images install the requirements first and the project's own code last. pip cannot install a project's requirements
without the project, and a copied list would go stale. It runs in an image that has nothing but Python.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, *extras: str) -> list[str]:
    """The project's dependencies and those of the extras."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml").read_text(), *sys.argv[1:])))
