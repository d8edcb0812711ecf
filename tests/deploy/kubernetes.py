"""Strict validation of Kubernetes objects, as an API server with fieldValidation=Strict does: an unknown key fails.

The schemas of Kubernetes' own kinds, one set for each minor version, come from PyPI's kubernetes-validate. Its command
only warns of a kind that it does not know, so custom resources would pass whatever is in them; ours are in schemas/,
where each file names its source. Its function reads two megabytes for each object, so only its files are used here.
"""

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

Object = dict[str, Any]  # Any: what YAML holds

VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
_CUSTOM = Path(__file__).with_name("schemas")
_SCHEMAS = Path(str(files("kubernetes_validate"))) / "kubernetes-json-schema"


def errors(found: Object, version: str) -> list[str]:
    """What is wrong with an object, by the rules of one version of Kubernetes. Raises `LookupError`: no such kind."""
    validator = _validator(found["apiVersion"], found["kind"], version)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    group, _, name = api_version.rpartition("/")
    own = f"{kind.lower()}-{group.partition('.')[0]}-{name}".replace("--", "-")
    candidates = (_directory(version) / f"{own}.json", _CUSTOM / f"{kind.lower()}-{group}-{name}.json")
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        raise LookupError(f"Kubernetes {version} has no {api_version} {kind}")
    registry: Registry[Any] = Registry().with_resource("https://kubernetes.io/api/_definitions.json", _shared(version))
    return Draft202012Validator(json.loads(path.read_text()), registry=registry)


@functools.cache
def _shared(version: str) -> "Resource[Any]":
    return Resource.from_contents(json.loads((_directory(version) / "_definitions.json").read_text()))


def _directory(version: str) -> Path:
    return _SCHEMAS / f"v{version}.0-local-strict"


def is_restricted(pod: Object) -> bool:
    """Whether a pod's spec fits the level `restricted` of the Pod Security Standards.

    Source: kubernetes.io/docs/concepts/security/pod-security-standards; image volumes since 1.33, kubernetes#130394.
    """
    volumes = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
    }
    whole = pod["securityContext"]
    return (
        not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        and whole["runAsNonRoot"] is True
        and whole.get("runAsUser") != 0
        and whole["seccompProfile"] == {"type": "RuntimeDefault"}
        and all(volume.keys() - {"name"} <= {*volumes, "secret"} for volume in pod.get("volumes", []))
        and all(_is_confined(container) for container in pod["containers"] + pod.get("initContainers", []))
    )


def _is_confined(container: Object) -> bool:
    own = container["securityContext"]
    return (
        own["allowPrivilegeEscalation"] is False
        and own["capabilities"] == {"drop": ["ALL"]}
        and own.keys() <= {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"}
        and not any("hostPort" in port for port in container.get("ports", []))
    )
