"""The image and the compose file agree with the code: commands, settings, volumes, who waits for whom.

There is no Docker engine where tests run, so what an engine would refuse is checked as far as the compose
specification can be read off the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher.settings import DispatcherSettings
from forebay.settings import FrontSettings
from monitor.settings import MonitorSettings
from tests.checkout import ROOT
from tests.commands import complaint, in_shell
from workers.settings import ServiceSettings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service.get("image") == "forebay"}
ENGINES = {name for name, service in OURS.items() if service["command"][0] == "simulate-engine"}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")

KNOWN_TOP = {"name", "services", "volumes", "networks", "configs", "secrets", "include"}
KNOWN_OF_A_SERVICE = {
    "build", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "env_file", "environment", "expose",
    "extra_hosts", "healthcheck", "image", "init", "ports", "profiles", "read_only", "restart",
    "security_opt", "stop_grace_period", "tmpfs", "volumes",
}  # fmt: skip
DURATION = re.compile(r"^(\d+(us|ms|s|m|h))+$")


def commands(service: dict[str, Any]) -> list[list[str]]:
    """What a service runs of ours: words after `forebay`."""
    if "entrypoint" not in service:
        return [service["command"]]
    assert service["entrypoint"] == ["/bin/sh", "-ec"]
    [script] = service["command"]
    return list(in_shell(script))


def settings_of(service: dict[str, Any]) -> type[ServiceSettings | MonitorSettings]:
    kinds: dict[str, type[ServiceSettings | MonitorSettings]] = {
        "monitor": MonitorSettings,
        "dispatcher": DispatcherSettings,
    }
    return kinds.get(commands(service)[0][0], FrontSettings)


def test_it_holds_nothing_that_the_compose_specification_does_not_know():
    assert {key for key in COMPOSE if not key.startswith("x-")} <= KNOWN_TOP
    unknown = {name: service.keys() - KNOWN_OF_A_SERVICE for name, service in SERVICES.items()}
    assert {name: keys for name, keys in unknown.items() if keys} == {}


def test_the_services_are_those_of_the_documents():
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        "valkey",
        "monitor",
        "dispatcher",
    }
    assert {name for name, service in SERVICES.items() if service.get("profiles") == ["demo"]} == {
        *ENGINES,
        "register",
    }
    watching = {name for name, service in SERVICES.items() if service.get("profiles") == ["watch"]}
    assert watching == {"prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_value_has_the_type_that_the_specification_asks_for(name: str):
    service = SERVICES[name]
    for key in (
        "cap_drop", "command", "entrypoint", "expose", "extra_hosts", "ports", "profiles", "security_opt",
        "tmpfs", "volumes",
    ):  # fmt: skip
        # A bare number or boolean would be refused, or read as something else, by Docker.
        assert all(isinstance(word, str) for word in service.get(key, [])), key
    assert all(isinstance(value, str) for value in service.get("environment", {}).values())
    assert isinstance(service.get("build", "."), str)
    assert service.get("restart", "no") in {"no", "always", "on-failure", "unless-stopped"}
    health = service.get("healthcheck", {})
    assert health.keys() <= {"test", "interval", "timeout", "retries", "start_period"}
    durations = [health.get(key) for key in ("interval", "timeout", "start_period")]
    durations.append(service.get("stop_grace_period"))
    assert all(DURATION.match(duration) for duration in durations if duration is not None)
    assert "test" not in health or health["test"][0] in {"CMD", "CMD-SHELL"}


@pytest.mark.parametrize("name", OURS)
def test_every_command_is_a_command_with_flags_that_it_has(name: str):
    found = commands(OURS[name])
    assert found
    assert [complaint(words) for words in found if complaint(words) is not None] == []


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting_and_its_value_a_good_one(name: str, monkeypatch: pytest.MonkeyPatch):
    environment = OURS[name].get("environment", {})
    known = {f"FOREBAY_{field.upper()}" for field in settings_of(OURS[name]).model_fields}
    assert environment.keys() <= known
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    made = settings_of(OURS[name])()
    said = {
        variable: str(getattr(made, variable.removeprefix("FOREBAY_").lower())) for variable in environment
    }
    assert {key: float(value) if key.endswith("_S") else value for key, value in said.items()} == {
        key: float(value) if key.endswith("_S") else value for key, value in environment.items()
    }


def test_every_redis_url_names_the_valkey_of_the_file():
    urls = {
        service["environment"]["FOREBAY_REDIS_URL"] for service in OURS.values() if "environment" in service
    }
    assert urls == {"redis://valkey:6379/0"}


@pytest.mark.parametrize("name", SERVICES)
def test_who_is_waited_for_exists_and_can_become_healthy(name: str):
    for other, how in SERVICES[name].get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[other]
        # A service without the profile must not wait for one that is not started with it.
        assert set(SERVICES[other].get("profiles", [])) <= set(SERVICES[name].get("profiles", []))


def test_every_volume_is_declared_and_every_declared_one_used():
    used = {source for source, _ in mounts() if not source.startswith(".")}
    assert used == set(COMPOSE["volumes"])


def mounts() -> list[tuple[str, str]]:
    """What is mounted, and where: volumes by name, files and folders of the checkout as ./PATH."""
    found = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", [])]
    return [(source, target) for source, target, *_ in found]


def test_every_file_that_is_mounted_is_there():
    files = [ROOT / source for source, _ in mounts() if source.startswith(".")]
    assert len(files) == 3
    assert [file for file in files if not file.exists()] == []


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in {*ENGINES, "register"}])
def test_what_runs_for_long_is_watched_restarted_and_has_its_bounds(name: str):
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert {"test", "interval", "timeout", "retries"} <= service["healthcheck"].keys()
    limits = service["deploy"]["resources"]["limits"]
    assert limits.keys() <= {"cpus", "memory"}
    assert re.fullmatch(r"\d+[MG]", limits["memory"])
    assert isinstance(limits.get("cpus", ""), str)


@pytest.mark.parametrize("name", ["monitor", "dispatcher"])
def test_our_services_can_write_only_where_they_have_to(name: str):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_valkey_keeps_its_data_and_drops_no_key():
    valkey = SERVICES["valkey"]
    flags = dict(zip(valkey["command"][1::2], valkey["command"][2::2], strict=True))
    assert flags == {
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--maxmemory": "768mb",
        "--maxmemory-policy": "noeviction",
    }
    assert valkey["volumes"] == ["valkey:/data"]
    # It must refuse before the kernel kills it, with room for a rewrite of its file.
    assert valkey["deploy"]["resources"]["limits"]["memory"] == f"{768 * 2}M"


def test_dispatchers_scale():
    dispatcher = SERVICES["dispatcher"]
    assert not dispatcher.keys() & {"container_name", "hostname", "ports"}
    # Several with one name would take each other for themselves.
    assert "FOREBAY_NAME" not in dispatcher["environment"]
    drain_s = float(dispatcher["environment"]["FOREBAY_DRAIN_TIMEOUT_S"])
    assert int(dispatcher["stop_grace_period"].removesuffix("s")) > drain_s


def test_the_fleet_of_the_demo_is_registered_whole_and_is_of_two_runtimes():
    added = {words[2] for words in commands(SERVICES["register"]) if words[:2] == ["workers", "add"]}
    assert added == {f"http://{name}:8000" for name in ENGINES}
    runtimes = [OURS[name]["command"][OURS[name]["command"].index("--runtime") + 1] for name in ENGINES]
    assert sorted(runtimes) == ["sglang", "sglang", "vllm", "vllm"]


@pytest.mark.parametrize("name", ["monitor", "dispatcher"])
def test_health_is_asked_on_the_port_that_is_served(name: str):
    port = SERVICES[name]["environment"]["FOREBAY_METRICS_PORT"]
    assert f"'http://127.0.0.1:{port}/readyz'" in SERVICES[name]["healthcheck"]["test"][-1]


# -- the profile watch -----------------------------------------------------------------------------------


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_prometheus_scrapes_every_replica_of_our_services_at_its_port_and_reads_the_alerts():
    said = read("deploy/prometheus/prometheus.yml")
    scraped = {
        name: str(where["port"])
        for job in said["scrape_configs"]
        for where in job["dns_sd_configs"]
        for name in where["names"]
    }
    assert scraped == {
        name: SERVICES[name]["environment"]["FOREBAY_METRICS_PORT"] for name in ("monitor", "dispatcher")
    }
    for file in said["rule_files"]:
        assert (ROOT / "deploy" / "prometheus" / file).is_file()
    assert ("./deploy/prometheus", "/etc/prometheus") in mounts()


def test_grafana_finds_its_data_source_and_the_dashboard():
    [source] = read("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    [provider] = read("deploy/grafana/provisioning/dashboards/forebay.yml")["providers"]
    folder = provider["options"]["path"]
    assert ("./deploy/grafana/forebay.json", f"{folder}/forebay.json") in mounts()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/forebay.json"


def test_what_is_published_listens_to_this_host_only():
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


# -- the image -----------------------------------------------------------------------------------------


def test_everything_installed_in_the_image_is_checked_by_hash_or_our_own():
    installs = re.findall(r"pip install ([^&\\\n]*)", DOCKERFILE)
    assert len(installs) == 3
    assert all(
        words.startswith(("--require-hashes -r requirements/", "--no-deps --no-index /wheels/"))
        for words in installs
    )


def test_everything_that_the_image_copies_is_there_and_not_ignored():
    copied = [
        source
        for sources in re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", DOCKERFILE)
        for source in sources.split()
    ]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {"workers", "monitor", "dispatcher", "forebay", "requirements/run.txt"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored or f"!{Path(source).parent}/*{Path(source).suffix}" in ignored


def test_the_image_runs_as_nobody_special_and_owns_its_storage():
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"(?m)^USER (\S+)$", last_stage) == ["forebay"]
    assert "install -d -o forebay" in last_stage
    assert "/data" in last_stage[last_stage.index("install -d") :]
    assert SERVICES["dispatcher"]["volumes"] == ["storage:/data"]
