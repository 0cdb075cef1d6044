"""Manifests and the image recipe: valid against Kubernetes' own schemas, and consistent with what the adapter needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kvdev.deploying import DeployTools, find_deploy_tools
from kvdev.paths import ROOT
from kvdev.staging import project_of
from vllm_adapter.config import Settings
from vllm_adapter.host.shutdown import LEASES_OF_A_DRAIN

pytestmark = pytest.mark.full  # manifests are judged by tools of their own

KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = ["base", *(f"overlays/{folder.name}" for folder in sorted((KUBERNETES / "overlays").iterdir()))]
OLDEST, NEWEST = "1.30", "1.37"
TEARDOWN_S = 10
"""Seconds that a pod needs after its drain: the transfer thread, NIXL and vLLM's processes end."""
KUBERNETES_GRACE_S = 30
"""terminationGracePeriodSeconds of a pod that has none."""
HOST_PATHS_BETWEEN_MACHINES = {"tcp", "rc", "rc_x", "dc_x", "ud", "ud_x"}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def tools() -> DeployTools:
    return find_deploy_tools()


@cache
def rendered(tools: DeployTools, folder: Path) -> str:
    ended = subprocess.run(
        [str(tools.kubectl), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "deprecated" not in ended.stderr
    return ended.stdout


def objects(text: str) -> list[Object]:
    return [each for each in YAML(typ="safe").load_all(text) if each]


def judge(tools: DeployTools, version: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [tools.validate, "--strict", "-k", version, *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def engines(tools: DeployTools, folder: str) -> dict[str, Object]:
    """Return the pod specifications of one rendered folder by the component that they are."""
    found = [each for each in objects(rendered(tools, KUBERNETES / folder)) if each["kind"] == "Deployment"]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found}


def engine_container(pod: Object) -> tuple[Object, Mapping[str, str], list[str]]:
    """Return the engine's container, its plain variables, and its arguments with these put in."""
    (container,) = (each for each in pod["containers"] if each["name"] == "vllm")
    values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    words = [re.sub(r"\$\((\w+)\)", lambda found: values[found.group(1)], word) for word in container["args"]]
    return container, values, words


def option(words: list[str], name: str) -> str:
    (value,) = (word.partition("=")[2] for word in words if word.startswith(f"--{name}="))
    return value


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_rendered_is_valid(tools: DeployTools, tmp_path: Path, folder: str, version: str) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(rendered(tools, KUBERNETES / folder))
    kinds = [each["kind"] for each in objects(file.read_text())]
    assert sorted(kinds) == ["Deployment", "Deployment", "NetworkPolicy", "Service", "Service"]
    ended = judge(tools, version, file)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@dataclass(frozen=True, slots=True)
class TimesToEnd:
    """Seconds that an engine's pod has, by its manifest or by a chart's values."""

    name: str
    pre_stop_s: int
    drain_s: int
    lease_s: float
    grace_s: int

    def broken(self) -> list[str]:
        """Return what does not hold of the rule in docs/operate/drain.md: grace >= hook + drain + teardown, drain >= 2 leases."""
        found = []
        if self.drain_s < LEASES_OF_A_DRAIN * self.lease_s:
            found.append(f"{self.name}: drain of {self.drain_s} s < {LEASES_OF_A_DRAIN} x {self.lease_s:g} s")
        if self.grace_s < (needed_s := self.pre_stop_s + self.drain_s + TEARDOWN_S):
            found.append(f"{self.name}: grace period of {self.grace_s} s < {needed_s} s")
        return found


def times_to_end(name: str, words: list[str], lifecycle: Object, grace_s: int) -> TimesToEnd:
    config = json.loads(option(words, "kv-transfer-config"))
    lease_s = config.get("kv_connector_extra_config", {}).get("kv_lease_duration", Settings().kv_lease_duration)
    pre_stop_s = lifecycle.get("preStop", {}).get("sleep", {}).get("seconds", 0)
    return TimesToEnd(name, pre_stop_s, int(option(words, "shutdown-timeout")), lease_s, grace_s)


def all_times_to_end(tools: DeployTools) -> list[TimesToEnd]:
    """Return the times of every engine that a file below deploy/kubernetes starts."""
    found = []
    for folder in FOLDERS:
        for name, pod in engines(tools, folder).items():
            container, _, words = engine_container(pod)
            grace_s = pod.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)
            found.append(times_to_end(f"{folder}/{name}", words, container.get("lifecycle", {}), grace_s))
    of_llm_d = YAML(typ="safe").load((KUBERNETES / "helm" / "llm-d-modelservice.values.yaml").read_text())
    for name in ("prefill", "decode"):
        (container,) = of_llm_d[name]["containers"]
        grace_s = of_llm_d[name].get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)
        lifecycle = container["extraConfig"].get("lifecycle", {})
        found.append(times_to_end(f"llm-d-modelservice/{name}", container["args"], lifecycle, grace_s))
    of_vllm = YAML(typ="safe").load((KUBERNETES / "helm" / "vllm-stack.values.yaml").read_text())
    for model in of_vllm["servingEngineSpec"]["modelSpec"]:
        # The chart's pods have neither a hook nor a grace period of their own.
        words = model["vllmConfig"]["extraArgs"]
        found.append(times_to_end(f"vllm-stack/{model['name']}", words, {}, KUBERNETES_GRACE_S))
    return found


def test_every_engine_has_time_for_two_leases_and_its_pod_for_hook_drain_and_teardown(tools: DeployTools) -> None:
    times = all_times_to_end(tools)
    assert len(times) == 2 * (len(FOLDERS) + len(list((KUBERNETES / "helm").glob("*.yaml"))))
    assert [broken for one in times for broken in one.broken()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_rank_has_a_side_channel_port_at_the_pods_address(tools: DeployTools, folder: str) -> None:
    for pod in engines(tools, folder).values():
        container, values, words = engine_container(pod)
        (host,) = (each["valueFrom"] for each in container["env"] if each["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST")
        assert host["fieldRef"]["fieldPath"] == "status.podIP"
        ranks = int(option(words, "data-parallel-size")) if any("data-parallel" in word for word in words) else 1
        base = int(values["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {base + rank for rank in range(ranks)} == {
            port for name, port in ports.items() if "side-channel" in name
        }
        probed = {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")}
        assert {ports[name] for name in probed} == {int(option(words, "port"))}
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert gpus in {0, ranks}


@pytest.mark.parametrize("folder", FOLDERS)
def test_transports_carry_host_memory_and_cuda_where_there_is_a_gpu(tools: DeployTools, folder: str) -> None:
    for pod in engines(tools, folder).values():
        container, values, _ = engine_container(pod)
        transports = set(values["UCX_TLS"].split(","))
        assert {"sm", "self"} < transports
        assert transports & HOST_PATHS_BETWEEN_MACHINES
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert {"cuda_copy", "cuda_ipc"} <= transports if has_gpu else not any("cuda" in one for one in transports)
        has_rdma = any(name.startswith("rdma/") for name in container["resources"]["limits"])
        assert has_rdma == bool(transports & (HOST_PATHS_BETWEEN_MACHINES - {"tcp"}))
        assert has_rdma == ("IPC_LOCK" in container["securityContext"].get("capabilities", {}).get("add", []))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_connectors_configuration_is_one_that_it_takes(tools: DeployTools, folder: str, tmp_path: Path) -> None:
    roles = {}
    for name, pod in engines(tools, folder).items():
        config = json.loads(option(engine_container(pod)[2], "kv-transfer-config"))
        assert (config["kv_connector"], config["kv_connector_module_path"]) == ("NixlConnector", "vllm_adapter")
        roles[name] = config["kv_role"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        checker = Path(sys.executable).parent / "vllm-adapter"
        ended = subprocess.run(
            [checker, "config", "--check", tmp_path / "config.json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}


def test_engines_accept_requests_from_routers_and_all_else_from_engines_alone(tools: DeployTools) -> None:
    (policy,) = (
        each["spec"] for each in objects(rendered(tools, KUBERNETES / "base")) if each["kind"] == "NetworkPolicy"
    )
    for pod in objects(rendered(tools, KUBERNETES / "base")):
        if pod["kind"] == "Deployment":
            assert policy["podSelector"]["matchLabels"].items() <= pod["spec"]["template"]["metadata"]["labels"].items()
    unlimited = [rule for rule in policy["ingress"] if "ports" not in rule]
    assert [rule["from"] for rule in unlimited] == [[{"podSelector": policy["podSelector"]}]]
    assert {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])} == {8000}


def test_behind_llm_d_the_sidecar_has_the_port_and_the_protocol_of_our_tickets(tools: DeployTools) -> None:
    (sidecar,) = engines(tools, "overlays/llm-d")["decode"]["initContainers"]
    _, _, words = engine_container(engines(tools, "overlays/llm-d")["decode"])
    assert (option(sidecar["args"], "port"), option(sidecar["args"], "vllm-port")) == ("8000", option(words, "port"))
    assert option(sidecar["args"], "kv-connector") == "nixlv2"
    assert sidecar["restartPolicy"] == "Always"


def test_values_for_charts_hold_what_the_manifests_hold(tools: DeployTools) -> None:
    of_llm_d = YAML(typ="safe").load((KUBERNETES / "helm" / "llm-d-modelservice.values.yaml").read_text())
    for role, name in (("kv_producer", "prefill"), ("kv_consumer", "decode")):
        (container,) = of_llm_d[name]["containers"]
        _, values, words = engine_container({"containers": [container]})
        own = engine_container(engines(tools, "overlays/rdma")[name])
        assert json.loads(option(words, "kv-transfer-config")) == json.loads(option(own[2], "kv-transfer-config"))
        assert json.loads(option(words, "kv-transfer-config"))["kv_role"] == role
        assert (values["UCX_TLS"], option(words, "shutdown-timeout")) == (
            own[1]["UCX_TLS"],
            option(own[2], "shutdown-timeout"),
        )
        assert of_llm_d[name]["terminationGracePeriodSeconds"] == 90
    of_vllm = YAML(typ="safe").load((KUBERNETES / "helm" / "vllm-stack.values.yaml").read_text())["servingEngineSpec"]
    for model in of_vllm["modelSpec"]:
        own = engine_container(engines(tools, "overlays/rdma")[model["name"]])
        words = model["vllmConfig"]["extraArgs"]
        config = json.loads(option(words, "kv-transfer-config"))
        assert config.pop("kv_connector_extra_config") == {"kv_lease_duration": 10}
        assert config == json.loads(option(own[2], "kv-transfer-config"))
    assert {one["name"] for one in of_vllm["env"]} == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "UCX_TLS",
    }


def test_commands_and_the_secret_of_the_page_are_good(tools: DeployTools, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    for folder in re.findall(r"^kubectl kustomize (\S+)$", page, re.MULTILINE):
        assert rendered(tools, ROOT / folder)
    (secret,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "secret.yaml").write_text(secret)
    assert judge(tools, NEWEST, tmp_path / "secret.yaml").returncode == 0
    named = re.findall(
        r"# +valueFrom: \{secretKeyRef: \{name: (\S+), key: (\w+)\}\}", (KUBERNETES / "base/decode.yaml").read_text()
    )
    (value,) = objects(secret)
    assert named == [(value["metadata"]["name"], *value["stringData"])]


def lint(tools: DeployTools, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tools.hadolint, file], capture_output=True, text=True, timeout=60, check=False)


def test_the_image_recipe_has_no_finding(tools: DeployTools, tmp_path: Path) -> None:
    recipe = ROOT / "deploy" / "Dockerfile"
    assert (lint(tools, recipe).returncode, lint(tools, recipe).stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text(recipe.read_text().replace("--no-cache-dir ", ""))
    assert "DL3042" in lint(tools, tmp_path / "Dockerfile").stdout


def test_the_image_recipe_copies_what_exists_and_installs_this_version() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "python3 tools/dev.py dist /wheels" in text
    version = project_of(ROOT / "packages" / "vllm-adapter")["version"]
    assert (
        "--no-index --no-deps --find-links /opt/kv-transfer/wheels --require-hashes -r /opt/kv-transfer/wheels/requirements.txt"
        in text
    )
    tags = re.findall(
        r'newTag: "?([\d.]+)', "".join(file.read_text() for file in KUBERNETES.rglob("kustomization.yaml"))
    )
    assert {tag.rstrip(".") for tag in tags} == {version}
