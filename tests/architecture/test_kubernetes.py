"""The Kubernetes manifests agree with the code, with each other and with the image; nothing is applied."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher.settings import DispatcherSettings
from monitor.configured import read_workers
from monitor.settings import MonitorSettings
from tests.checkout import ROOT
from tests.commands import complaint
from tests.kustomize import Object, containers, documents, only, render
from workers.settings import ServiceSettings

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted((KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted((KUBERNETES / "components").iterdir())
SERVICES: dict[str, type[ServiceSettings]] = {"monitor": MonitorSettings, "dispatcher": DispatcherSettings}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.fixture(params=OVERLAYS, ids=lambda folder: folder.name)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(request.param)


def running(objects: list[Object]) -> list[Object]:
    return [each for each in objects if list(containers(each))]


def deployed(objects: list[Object], name: str) -> tuple[Object, Object, dict[str, Any]]:
    """A service's Deployment, its container, and the values of its variables (None: from a Secret)."""
    deployment = only(objects, "Deployment", name)
    [container] = containers(deployment)
    return deployment, container, {each["name"]: each.get("value") for each in container["env"]}


def pod(deployment: Object) -> Object:
    return deployment["spec"]["template"]["spec"]


# -- that it hangs together ----------------------------------------------------------------------------------


def test_every_component_is_used_and_every_file_is_part_of_an_installation():
    used = {(overlay / name).resolve() for overlay in OVERLAYS for name in _said(overlay)["components"]}
    assert used == {folder.resolve() for folder in COMPONENTS}
    for folder in [KUBERNETES / "base", *COMPONENTS, *OVERLAYS]:
        generated = [name for how in _said(folder).get("configMapGenerator", []) for name in how["files"]]
        listed = {*_said(folder).get("resources", []), *generated, "kustomization.yaml"}
        assert {path.name for path in folder.iterdir()} <= listed


def _said(folder: Path) -> Object:
    [said] = documents(folder / "kustomization.yaml")
    return said


def test_every_object_is_whole_in_the_namespace_and_there_once(objects: list[Object]):
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    namespace = only(objects, "Namespace")["metadata"]["name"]
    for each in objects:
        assert each["apiVersion"]
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == namespace
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "forebay"


def test_selectors_find_pods(objects: list[Object]):
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in running(objects)]
    selectors = [
        *(each["spec"]["selector"]["matchLabels"] for each in running(objects)),
        *(
            each["spec"]["selector"]["matchLabels"]
            for each in objects
            if each["kind"] == "PodDisruptionBudget"
        ),
        *(each["spec"]["selector"] for each in objects if each["kind"] == "Service"),
        *(
            spread["labelSelector"]["matchLabels"]
            for each in running(objects)
            for spread in pod(each).get("topologySpreadConstraints", [])
        ),
    ]
    assert len(selectors) >= 6
    for selector in selectors:
        assert [found for found in labels if selector.items() <= found.items()], selector


def test_ports_that_are_named_are_there(objects: list[Object]):
    for each in running(objects):
        [container] = containers(each)
        ports = {port["name"] for port in container["ports"]}
        probes = [container["livenessProbe"], container["readinessProbe"]]
        asked = {probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe}
        assert asked <= ports
    all_ports = {
        port["name"] for each in running(objects) for found in containers(each) for port in found["ports"]
    }
    named = {
        *(
            port["targetPort"]
            for each in objects
            if each["kind"] == "Service"
            for port in each["spec"]["ports"]
        ),
        *(
            port["port"]
            for each in objects
            if each["kind"] == "NetworkPolicy"
            for rule in each["spec"]["ingress"]
            for port in rule["ports"]
        ),
        *(
            each["port"]
            for monitor in objects
            if monitor["kind"] == "PodMonitor"
            for each in monitor["spec"]["podMetricsEndpoints"]
        ),
    }
    assert named <= all_ports


def test_every_volume_that_is_mounted_is_there_and_filled(objects: list[Object]):
    maps = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    claims = {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"}
    for each in running(objects):
        volumes = {volume["name"]: volume for volume in pod(each).get("volumes", [])}
        templates = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        for container in containers(each):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == volumes.keys() | templates
        for volume in volumes.values():
            assert "configMap" not in volume or volume["configMap"]["name"] in maps
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or claim in claims


# -- that it is safe -----------------------------------------------------------------------------------------


def test_nothing_runs_as_root_writes_where_it_need_not_or_talks_to_the_cluster(objects: list[Object]):
    for each in running(objects):
        assert pod(each)["automountServiceAccountToken"] is False
        assert pod(each)["securityContext"]["runAsNonRoot"] is True
        assert pod(each)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(each):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()
            assert "memory" in container["resources"]["limits"]


def test_our_pods_run_as_the_user_of_the_image(objects: list[Object]):
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name in SERVICES:
        user = pod(only(objects, "Deployment", name))["securityContext"]["runAsUser"]
        assert f"--uid {user} " in dockerfile


def test_no_secret_stands_in_a_manifest():
    for path in KUBERNETES.rglob("*.yaml"):
        assert [each for each in documents(path) if each["kind"] == "Secret"] == [], path
        assert "secretGenerator" not in path.read_text(encoding="utf-8")


def test_every_secret_is_one_that_the_documents_tell_to_make(objects: list[Object]):
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for each in running(objects):
        for container in containers(each):
            keys = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one]
            whole = [one["secretRef"] for one in container.get("envFrom", [])]
            for secret in [*keys, *whole]:
                assert f"create secret generic {secret['name']} " in page
            assert all(f"--from-literal={key['key']}=" in page for key in keys)


# -- that it agrees with the code ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_commands_and_variables_are_those_of_the_code(
    objects: list[Object], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    _, container, variables = deployed(objects, name)
    assert container["args"][0] == name
    assert complaint(container["args"]) is None
    file = tmp_path / "forebay.toml"
    file.write_text(only(objects, "ConfigMap")["data"]["forebay.toml"], encoding="utf-8")
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    known = {f"FOREBAY_{field.upper()}": field for field in SERVICES[name].model_fields}
    given = variables.keys() - {"FOREBAY_CONFIG"}
    assert given <= known.keys()
    for variable in given:
        if variables[variable] is not None:
            monkeypatch.setenv(variable, variables[variable])
    made = SERVICES[name]()
    for variable in given:
        if variables[variable] is not None:
            assert str(getattr(made, known[variable])) == variables[variable]
    [port] = [port["containerPort"] for port in container["ports"]]
    assert getattr(made, "metrics_port", None) == port


@pytest.mark.parametrize("name", SERVICES)
def test_the_configuration_is_where_the_service_looks_for_it(objects: list[Object], name: str):
    deployment, container, variables = deployed(objects, name)
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "config"]
    [volume] = [each for each in pod(deployment)["volumes"] if each["name"] == "config"]
    content = only(objects, "ConfigMap", volume["configMap"]["name"])["data"]
    # A file mounted alone (subPath) would never change in a running pod.
    assert "subPath" not in mount
    assert variables["FOREBAY_CONFIG"] == f"{mount['mountPath']}/{next(iter(content))}"


def test_the_workers_that_the_configuration_shows_are_ones_that_monitors_read(tmp_path: Path):
    shown = (KUBERNETES / "base" / "forebay.toml").read_text(encoding="utf-8")
    lines = [
        line.removeprefix("# ") for line in shown.splitlines() if line.startswith(("# [[", "# url", "# api"))
    ]
    file = tmp_path / "forebay.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    [worker] = read_workers(file).values()
    assert worker.api_key_env == "VLLM_KEY"


def test_a_dispatcher_has_the_time_to_drain_and_one_at_a_time_ends(objects: list[Object]):
    deployment, _, _ = deployed(objects, "dispatcher")
    content = tomllib.loads(only(objects, "ConfigMap")["data"]["forebay.toml"])
    drain_s = content["dispatcher"]["drain_timeout_s"]
    assert pod(deployment)["terminationGracePeriodSeconds"] >= drain_s + 15
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert only(objects, "PodDisruptionBudget", "dispatcher")["spec"]["maxUnavailable"] == 1


def test_no_two_pods_have_the_same_name(objects: list[Object]):
    for name in SERVICES:
        _, _, variables = deployed(objects, name)
        assert "FOREBAY_NAME" not in variables


def test_probes_ask_for_life_and_for_readiness(objects: list[Object]):
    for name in SERVICES:
        _, container, _ = deployed(objects, name)
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_dispatchers_have_one_storage_that_all_of_them_see(objects: list[Object]):
    deployment, container, variables = deployed(objects, "dispatcher")
    storage = variables["FOREBAY_STORAGE"]
    if storage.startswith("s3://"):
        return
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == storage]
    [volume] = [each for each in pod(deployment)["volumes"] if each["name"] == mount["name"]]
    claim = only(objects, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_images_are_ours_at_this_version_or_pinned(objects: list[Object]):
    for each in running(objects):
        for container in containers(each):
            name, _, tag = container["image"].rpartition(":")
            ours = each["metadata"]["name"] in SERVICES
            assert name.rpartition("/")[2] == ("forebay" if ours else "valkey")
            assert not ours or tag == VERSION
            assert tag not in {"", "latest"}


def test_valkey_keeps_its_data_drops_no_key_and_is_the_one_of_the_compose_file():
    objects = render(KUBERNETES / "overlays" / "in-cluster")
    [container] = containers(only(objects, "StatefulSet", "valkey"))
    flags = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert (flags["--appendonly"], flags["--maxmemory-policy"]) == ("yes", "noeviction")
    assert flags["--dir"] in {mount["mountPath"] for mount in container["volumeMounts"]}
    # Valkey must refuse before the kernel kills it, with room for a rewrite of its file.
    assert _mib(flags["--maxmemory"]) * 1.5 <= _mib(container["resources"]["limits"]["memory"])
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert container["image"] == compose["services"]["valkey"]["image"]


def _mib(text: str) -> float:
    units = {"mb": 1.0, "gb": 1024.0, "Mi": 1.0, "Gi": 1024.0}
    return float(text[:-2]) * units[text[-2:]]


def test_the_autoscaler_owns_the_number_of_dispatchers():
    objects = render(KUBERNETES / "overlays" / "managed")
    scaled = only(objects, "ScaledObject")["spec"]
    deployment = only(objects, "Deployment", scaled["scaleTargetRef"]["name"])
    assert "replicas" not in deployment["spec"]
    assert scaled["minReplicaCount"] >= 2
    assert "replicas" in only(objects, "Deployment", "monitor")["spec"]
