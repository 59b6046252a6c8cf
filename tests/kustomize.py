"""What a folder of Kustomize renders to, as far as ours use it: anything else is an error, not a guess.

There is no kustomize where tests run. Belongs here: resources, components, JSON patches, images, labels,
namespace and generated ConfigMaps. What the objects have to say is their test's subject.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

KNOWN = {
    "apiVersion", "kind", "namespace", "labels", "resources", "components", "patches", "images",
    "configMapGenerator",
}  # fmt: skip
_CLUSTER_WIDE = {"Namespace"}


def render(folder: Path) -> list[Object]:
    """All objects. Raises AssertionError for a file that is not there, and for what is not known here."""
    said = _read_one(folder / "kustomization.yaml")
    assert said.keys() <= KNOWN, f"{folder}: {said.keys() - KNOWN}"
    objects = [made for name in said.get("resources", []) for made in _resource(folder / name)]
    objects += [_config_map(folder, how) for how in said.get("configMapGenerator", [])]
    for component in said.get("components", []):
        objects = _with_component(folder / component, objects)
    return [_finished(made, said) for made in _patched(objects, said)]


def documents(path: Path) -> list[Object]:
    """The YAML documents of a file."""
    assert path.is_file(), f"{path} is not there"
    return [found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found]


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of a kind, and of a name when one is given."""
    [found] = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def _read_one(path: Path) -> Object:
    [found] = documents(path)
    return found


def _resource(path: Path) -> list[Object]:
    return render(path) if path.is_dir() else copy.deepcopy(documents(path))


def _config_map(folder: Path, how: Object) -> Object:
    assert how.keys() == {"name", "files", "options"}
    assert how["options"] == {"disableNameSuffixHash": True}
    data = {name: (folder / name).read_text(encoding="utf-8") for name in how["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": how["name"]}, "data": data}


def _with_component(folder: Path, objects: list[Object]) -> list[Object]:
    said = _read_one(folder / "kustomization.yaml")
    assert said["kind"] == "Component"
    assert said.keys() <= {"apiVersion", "kind", "resources", "patches"}
    added = [made for name in said.get("resources", []) for made in _resource(folder / name)]
    return _patched([*objects, *added], said)


def _patched(objects: list[Object], said: Object) -> list[Object]:
    for patch in said.get("patches", []):
        target = only(objects, patch["target"]["kind"], patch["target"]["name"])
        for step in yaml.safe_load(patch["patch"]):
            _apply(target, step)
    return objects


def _apply(target: Any, step: Object) -> None:
    *way, last = step["path"].strip("/").split("/")
    for key in way:
        target = target[int(key)] if isinstance(target, list) else target[key]
    match step["op"], target:
        case "add", list() if last == "-":
            target.append(step["value"])
        case "add", dict():
            target[last] = step["value"]
        case "remove", dict():
            del target[last]
        case _:
            raise AssertionError(f"a patch that is not known here: {step}")


def _finished(made: Object, said: Object) -> Object:
    meta = made["metadata"]
    if "namespace" in said and made["kind"] not in _CLUSTER_WIDE:
        meta["namespace"] = said["namespace"]
    for group in said.get("labels", []):
        meta.setdefault("labels", {}).update(group["pairs"])
    for container in containers(made):
        for image in said.get("images", []):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return made


def containers(made: Object) -> Iterator[Object]:
    """The containers of what runs pods; none of anything else."""
    if "template" in made.get("spec", {}):
        yield from made["spec"]["template"]["spec"]["containers"]
