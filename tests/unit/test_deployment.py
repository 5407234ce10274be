"""What is shipped to deploy with holds to its schemas and to the project's own rules. Nothing is started."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

from support.deployment import DEPLOY, DOCKER, ROOT, alerts, compose, dashboard, queries
from tokenflow_gateway.config import load_settings

COMPOSE_FILES = ["compose.yaml", "compose.gpu.yaml"]
KUBERNETES = "1.34"
"""Of this version the schemas are."""
HADOLINT = Path(sys.executable).parent / "hadolint"
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_]+)(?P<rest>[^}]*)\}")


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    text = (ROOT / "tests/data/schemas/compose-spec.json").read_text()
    return jsonschema.Draft7Validator(json.loads(text))


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose(name)["services"]
    return found


def each_service() -> list[Any]:
    return [
        pytest.param(name, service, id=f"{file}-{name}")
        for file in COMPOSE_FILES
        for name, service in services(file).items()
    ]


# ---- compose ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_files_hold_to_the_specification(schema: jsonschema.Draft7Validator, name: str) -> None:
    assert not [error.message for error in schema.iter_errors(compose(name))]


@pytest.mark.parametrize("file", ["open-webui/compose.yaml", "librechat/docker-compose.override.yml"])
def test_so_do_the_examples(schema: jsonschema.Draft7Validator, file: str) -> None:
    loaded = yaml.safe_load((ROOT / "examples" / file).read_text())
    assert not [error.message for error in schema.iter_errors(loaded)]


def test_control_the_schema_finds_faults(schema: jsonschema.Draft7Validator) -> None:
    loaded = compose("compose.yaml")
    for service, fault in (("gateway", {"ports": "8080"}), ("engine", {"healtcheck": {}})):
        broken = copy.deepcopy(loaded)
        broken["services"][service] |= fault
        assert list(schema.iter_errors(broken))


@pytest.mark.parametrize(("name", "service"), each_service())
def test_each_service_is_pinned_bounded_and_without_privileges(name: str, service: dict[str, Any]) -> None:
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+(\.\d+)+[a-z0-9.-]*(@sha256:[0-9a-f]{64})?", service["image"])
    limits = service["deploy"]["resources"]["limits"]
    assert {"cpus", "memory"} <= set(limits)
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert "healthcheck" in service or "build" in service, "its image has one: see the Dockerfile"
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_what_compose_files_name_exists(name: str) -> None:
    loaded = compose(name)
    for service in loaded["services"].values():
        for other in service.get("depends_on", {}):
            assert other in loaded["services"]
        assert set(service.get("networks", [])) <= set(loaded.get("networks", {}))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).exists(), source
            elif not source.startswith("$"):
                assert source in loaded["volumes"]
        if "build" in service:
            assert f"AS {service['build']['target']}\n" in (DOCKER / "Dockerfile").read_text()


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_only_the_proxy_is_open_to_the_network(name: str) -> None:
    for service, fields in services(name).items():
        for port in fields.get("ports", []):
            assert service == "proxy" or port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_secrets_have_no_default_and_every_variable_is_in_the_example(name: str) -> None:
    example = (DOCKER / "env.example").read_text()
    text = "\n".join(line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#"))
    for match in _VARIABLE.finditer(text):
        variable, rest = match["name"], match["rest"]
        if re.search(r"SECRET|PASSWORD|ADMIN_TOKEN", variable):
            assert rest.startswith(":?"), variable
        assert f"{variable}=" in example, variable


@pytest.mark.parametrize("file", [DOCKER / "gateway.laptop.yaml", DOCKER / "gateway.gpu.yaml"])
def test_gateways_can_be_started_with_their_files(file: Path) -> None:
    settings = load_settings(file)
    assert settings.host == "0.0.0.0"


def test_a_gateway_has_time_for_its_grace() -> None:
    for name, file in (("compose.yaml", "gateway.laptop.yaml"), ("compose.gpu.yaml", "gateway.gpu.yaml")):
        grace_s = load_settings(DOCKER / file).shutdown_grace_s
        for service, fields in services(name).items():
            if service.startswith("gateway"):
                assert int(fields["stop_grace_period"].removesuffix("s")) > grace_s + 5


def test_the_proxy_has_connections_for_all_clients_that_the_gateways_take() -> None:
    main = (DOCKER / "nginx/nginx.conf").read_text()
    workers, files, connections = (
        int(re.findall(rf"^ *{name} (\d+);", main, re.MULTILINE)[0])
        for name in ("worker_processes", "worker_rlimit_nofile", "worker_connections")
    )
    there = services("compose.gpu.yaml")
    clients = 2 * load_settings(DOCKER / "gateway.gpu.yaml").max_connections
    assert workers * connections >= 2 * clients, "one to the client, one to the gateway"
    assert connections < files <= there["proxy"]["ulimits"]["nofile"]
    assert workers == int(there["proxy"]["deploy"]["resources"]["limits"]["cpus"])


def test_prometheus_asks_the_gateways_that_there_are() -> None:
    config = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    gateways = [name for name in services("compose.gpu.yaml") if name.startswith("gateway")]
    assert targets == [f"{name}:8080" for name in gateways]


# ---- images -----------------------------------------------------------------------------------------


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by its name."""
    text = (DOCKER / "Dockerfile").read_text()
    found = list(re.finditer(r"^FROM .+ AS (?P<name>\S+)$", text, re.MULTILINE))
    ends = [match.start() for match in found] + [len(text)]
    spans = pairwise(ends)
    return {match["name"]: text[begin:end] for match, (begin, end) in zip(found, spans, strict=True)}


@pytest.mark.parametrize("target", ["gateway", "engine-cpu", "engine-cuda"])
def test_images_run_as_nobody_in_particular_and_say_whether_they_are_well(target: str) -> None:
    stage = stages()[target]
    assert re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1] == "10001:10001"
    assert "\nHEALTHCHECK " in stage


def test_bases_are_exact_versions() -> None:
    for base in re.findall(
        r"^ARG (?:PYTHON|SGLANG)=(.+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE
    ):
        assert re.search(r":v?\d+\.\d+\.\d+", base)


def test_the_engine_image_has_the_version_that_the_plugin_is_for() -> None:
    from tokenflow_gateway.local.environment import SGLANG, TORCH_FOR_CPU

    text = (DOCKER / "Dockerfile").read_text()
    assert f":v{SGLANG.partition('==')[2]}\n" in text
    assert TORCH_FOR_CPU in text


def lint(dockerfile: str) -> str:
    command = [HADOLINT, "--no-color", "--config", DOCKER / "hadolint.yaml", "-"]
    ran = subprocess.run(command, input=dockerfile, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def test_hadolint_finds_nothing() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert lint(text) == ""
    control = text.replace("USER 10001:10001", "USER root").replace("--no-cache-dir ", "")
    assert "DL3002" in lint(control)
    assert "DL3042" in lint(control)


def test_the_build_gets_what_the_package_is_made_of() -> None:
    """An image of a clone must not take environments, models or secrets with it."""
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = re.findall(r"^COPY ([^-].+?) \S+$", stages()["source"], re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {f"!{name}" for name in names} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


# ---- Kubernetes and systemd -------------------------------------------------------------------------


def manifests() -> list[Any]:
    kinds = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    return [
        pytest.param(document, id=f"{document['kind']}-{document['metadata']['name']}")
        for name in kinds
        for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    ]


@pytest.mark.parametrize("document", manifests())
def test_manifests_hold_to_the_schemas_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_control_the_schemas_find_faults() -> None:
    document = next(param.values[0] for param in manifests() if param.id == "StatefulSet-gateway")
    broken = copy.deepcopy(document)
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "document", [param for param in manifests() if str(param.id).startswith(("Deployment", "StatefulSet"))]
)
def test_pods_are_bounded_watched_and_without_privileges(document: dict[str, Any]) -> None:
    pod = document["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"livenessProbe", "readinessProbe"} <= set(container)
        assert {"limits", "requests"} <= set(container["resources"])
        assert re.search(r":v?\d+\.\d+\.\d+", container["image"])


def test_gateways_of_kubernetes_can_be_started() -> None:
    settings = load_settings(DEPLOY / "kubernetes/settings.yaml")
    gateway = next(param.values[0] for param in manifests() if param.id == "StatefulSet-gateway")
    pod = gateway["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.shutdown_grace_s + 5


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("name", ["tokenflow-gateway.service", "tokenflow-engine@.service"])
def test_units_are_understood(tmp_path: Path, name: str) -> None:
    """With programs that exist here in place of those of an installation."""
    text = (DEPLOY / "systemd" / name).read_text()
    assert _verified(tmp_path / name, re.sub(r"^(Exec\w+)=/opt\S+", r"\1=/bin/true", text, flags=re.M)) == ""
    assert "Unknown key 'ProtectHom'" in _verified(tmp_path / name, text.replace("ProtectHome", "ProtectHom"))


def _verified(unit: Path, text: str) -> str:
    unit.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--generators=no", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return "".join(line for line in ran.stderr.splitlines(keepends=True) if "tokenflow-" in line)


# ---- dashboard and alerts ---------------------------------------------------------------------------


@pytest.mark.parametrize("query", [pytest.param(expr, id=where) for where, expr in queries()])
def test_queries_are_promql(query: str) -> None:
    promql_parser.parse(query)


def test_control_the_parser_finds_faults() -> None:
    with pytest.raises(ValueError, match="rate"):
        promql_parser.parse("rate(tokenflow_responses_total)")


def test_panels_lie_side_by_side_and_say_what_they_show() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert all(target["legendFormat"] for target in panel["targets"])


def test_alerts_say_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert {"summary", "description"} <= set(rule["annotations"])


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
def test_promtool_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    """With a key in a file that is there: promtool looks for it."""
    (tmp_path / "monitor").touch()
    shutil.copytree(DOCKER / "prometheus", tmp_path / "prometheus")
    config = tmp_path / "prometheus/prometheus.yml"
    config.write_text(config.read_text().replace("/etc/tokenflow/keys", str(tmp_path)))
    for check in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        command = ["promtool", "check", check[0], str(tmp_path / "prometheus" / check[1])]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
