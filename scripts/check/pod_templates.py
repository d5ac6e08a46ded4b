"""Write a manifest for validators that have no schema of its custom resources: their pod templates become Pods.

`pod_templates.py MANIFEST` prints the documents of Kubernetes' own kinds as they are. Of every other one it prints each
pod template; exit status 1 if there is none in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import yaml


def is_built_in(document: dict[str, Any]) -> bool:
    """Say whether a document is of one of Kubernetes' own kinds, whose API groups are words or end in .k8s.io."""
    group, _, version = document["apiVersion"].rpartition("/")
    return bool(version) and ("." not in group or group.endswith(".k8s.io"))


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all pod templates within a value: they have a spec with containers."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from templates(each)


def looked_at(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a validator can look at of a document. Raises SystemExit if there is nothing."""
    if is_built_in(document):
        return [document]
    name = document["metadata"]["name"]
    pods = []
    for template in templates(document):
        metadata = {"name": name, **template.get("metadata", {})}  # validators ask for one
        pods.append({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})
    if not pods:
        raise SystemExit(f"{document['kind']}: there is no pod template in it")
    return pods


def main() -> None:
    """Print what can be looked at of the manifest that the command line names."""
    [path] = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        documents = [each for document in yaml.safe_load_all(file) for each in looked_at(document)]
    yaml.safe_dump_all(documents, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
