"""Replace the custom resources of a manifest by Pods of their pod templates, for validators without their schemas.

`pod_templates.py MANIFEST` prints documents of Kubernetes' own kinds unchanged, and the pod templates of every other
document; the exit status is 1 if one has no pod template.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def is_built_in(document: dict[str, Any]) -> bool:
    """Return whether a document is of one of Kubernetes' own kinds: their API groups are words or end in .k8s.io."""
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
        for item in value:
            yield from templates(item)


def looked_at(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a document that a validator can check. Raises SystemExit if there are none."""
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
    """Print the parts that can be checked of the manifest that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    with parser.parse_args().manifest.open(encoding="utf-8") as file:
        documents = [each for document in yaml.safe_load_all(file) for each in looked_at(document)]
    yaml.safe_dump_all(documents, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
