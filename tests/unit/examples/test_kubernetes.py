"""The manifest for KubeRay: its pods are valid for Kubernetes, its run is valid, its Ray is that of the images."""

import re
import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.conftest import ROOT
from tests.launched_scripts import LaunchedScripts
from verl.config import load_config

TEXT = (ROOT / "examples" / "kubernetes" / "rayjob.yaml").read_text(encoding="utf-8")
FIELDS = {  # of ray.io/v1, with the type of each; from KubeRay's API reference
    "RayJob": {
        "submissionMode": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "backoffLimit": int,
        "entrypoint": str,
        "runtimeEnvYAML": str,
        "rayClusterSpec": dict,
    },
    "RayCluster": {"rayVersion": str, "headGroupSpec": dict, "workerGroupSpecs": list},
    "head": {"rayStartParams": dict, "template": dict, "serviceType": str},
    "worker": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "rayStartParams": dict,
        "template": dict,
    },
}


def job() -> dict[str, Any]:
    return yaml.safe_load(TEXT)


def groups(found: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = found["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def problems(found: dict[str, Any]) -> list[str]:
    """What KubeRay or Kubernetes would refuse."""
    cluster = found["spec"]["rayClusterSpec"]
    head, *workers = groups(found)
    parts = [("RayJob", found["spec"]), ("RayCluster", cluster), ("head", head), *(("worker", w) for w in workers)]
    out = [
        f"{kind}.{name}"
        for kind, part in parts
        for name, value in part.items()
        if not isinstance(value, FIELDS[kind].get(name, ()))
    ]
    for group in groups(found):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": group["template"]}
        try:
            kubernetes_validate.validate(template, "1.33", strict=True)
        except kubernetes_validate.ValidationError as error:
            out.append(error.message)
    return out


def test_the_manifest_is_valid():
    assert (job()["apiVersion"], job()["kind"]) == ("ray.io/v1", "RayJob")
    assert problems(job()) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("mountPath: /shared", "mountpath: /shared", "mountPath"),
        ("entrypoint: >-", "entryPoint: >-", "RayJob.entryPoint"),
        ("replicas: 1", 'replicas: "1"', "worker.replicas"),
    ],
)
def test_a_mistake_is_found(old, new, problem):
    changed = yaml.safe_load(TEXT.replace(f" {old}", f" {new}", 1))
    assert any(problem in found for found in problems(changed))


def test_its_run_uses_all_devices_of_the_pods(tmp_path):
    environment = yaml.safe_load(job()["spec"]["runtimeEnvYAML"])["env_vars"]
    script, *overrides = shlex.split(job()["spec"]["entrypoint"])[1:]
    arguments, _ = LaunchedScripts(tmp_path)(script.removeprefix("/workspace/verl/"), *overrides, **environment)
    config = load_config(arguments)
    pods = [1, *(group["replicas"] for group in groups(job())[1:])]
    devices = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups(job())]
    assert config.trainer.nnodes == sum(pods)
    assert {int(found["nvidia.com/gpu"]) for found in devices} == {config.trainer.n_gpus_per_node}


def test_its_ray_is_the_one_that_images_install():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert job()["spec"]["rayClusterSpec"]["rayVersion"] == re.search(r"^ray==(.+)$", constraints, flags=re.M)[1]
