"""docs/deploy agrees with the program: flags, ports, paths, users, times. scripts/check/deploy.sh lints each format."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.cli.main import make_parser
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.server.app import OPEN_PATHS
from jaxllm.version import __version__
from tests.architecture.sources import ROOT

DEPLOY = ROOT / "docs/deploy"
VARIANTS = ("base", "cuda", "tpu")
SECONDS_TO_END = 10
"""A server that has drained ends within this time."""


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, in order, each with what follows its name."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, value) for name, value in lines]


def values(name: str) -> list[str]:
    return [value for each, value in instructions() if each == name]


def parsed(words: list[str]) -> Any:
    """Return what `jaxllm serve` makes of its arguments; unknown ones end the test."""
    args = make_parser()[0].parse_args(["serve", *words])
    ServerArgs.from_cli_args(args)
    return args


def test_an_image_for_each_platform_on_a_base_of_one_version():
    stages = [value.split(" AS ") for value in values("FROM")]
    names = [name for _, name in stages]
    assert {"cpu", "cuda", "tpu"} <= set(names)
    assert {base for base, _ in stages} <= {"${PYTHON}", *names}
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-\w+", values("ARG")[0])


def test_the_server_gets_signals_and_is_not_root():
    assert values("ENTRYPOINT") == ['["jaxllm", "serve"]']
    assert values("CMD") == ['["--help"]']
    [user] = values("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "USER" not in names[names.index("ENTRYPOINT") :]


def test_the_check_asks_the_port_without_a_key():
    [port] = values("EXPOSE")
    assert int(port) == ServerArgs().port
    [check] = values("HEALTHCHECK")
    [path] = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", check)
    assert path in OPEN_PATHS
    assert 'CMD ["' in check


def test_what_is_installed_is_locked_and_there():
    installs = [value for value in values("RUN") if "pip install" in value]
    assert len(installs) == 4
    assert all("-c requirements.lock" in each for each in installs)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [default] = [value.removeprefix("EXTRAS=") for value in values("ARG") if value.startswith("EXTRAS=")]
    wanted = [each.replace("$EXTRAS", default) for each in re.findall(r'"\.\[([$\w,]+)\]"', " ".join(installs))]
    extras = [each.split(",") for each in wanted]
    assert {each[-1] for each in extras} == {"otel", "cuda13", "tpu"}
    assert {extra for each in extras for extra in each} <= known.keys()
    copied = [word for value in values("COPY") if "--from" not in value for word in value.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    assert not any(fnmatch(name, pattern) for name in copied for pattern in ignored if pattern not in ("*", f"!{name}"))


def test_caches_are_in_the_volume():
    [volume] = values("VOLUME")
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(values("ENV"))))
    assert all(variables[name].startswith(f"{volume}/") for name in ("HF_HOME", "JAXLLM_CACHE"))


def manifests(variant: str) -> dict[str, Any]:
    """Return the base's objects by kind, or a variant's patches of them."""
    if variant == "base":
        documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/base/jaxllm.yaml").read_text(encoding="utf-8")))
    else:
        text = (DEPLOY / f"kubernetes/{variant}/kustomization.yaml").read_text(encoding="utf-8")
        documents = [yaml.safe_load(each["patch"]) for each in yaml.safe_load(text)["patches"]]
    return {document["kind"]: document for document in documents}


def pod(variant: str = "base") -> dict[str, Any]:
    return manifests(variant)["Deployment"]["spec"]["template"]["spec"]


def test_pods_are_asked_where_no_key_is_needed():
    [container] = pod()["containers"]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/livez",
    }
    assert all(probe["path"] in OPEN_PATHS and probe["port"] == "http" for probe in probes.values())
    assert container["ports"] == [{"name": "http", "containerPort": ServerArgs().port}]
    service = manifests("base")["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == "http"
    assert service["selector"] == manifests("base")["Deployment"]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_the_time_to_drain(variant: str):
    [container] = pod(variant)["containers"]
    args = parsed(container["args"])
    sleeps = pod()["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert args.shutdown_timeout > 0
    assert pod()["terminationGracePeriodSeconds"] >= sleeps + args.shutdown_timeout + SECONDS_TO_END


def test_pods_may_do_little():
    [container] = pod()["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    whole = pod()["securityContext"]
    assert whole["runAsNonRoot"] is True
    assert f"{whole['runAsUser']}:{whole['runAsGroup']}" == values("USER")[0]
    assert whole["fsGroupChangePolicy"] == "OnRootMismatch"  # files that the group may write to are not loaded
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {values("VOLUME")[0], "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod()["volumes"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_images_have_versions(variant: str):
    text = (DEPLOY / f"kubernetes/{variant}/kustomization.yaml").read_text(encoding="utf-8")
    [image] = yaml.safe_load(text)["images"]
    assert image["newTag"] == f"{__version__}-{'cpu' if variant == 'base' else variant}"


def example(name: str) -> list[dict[str, Any]]:
    """Return the documents of an example that has a custom resource."""
    return list(yaml.safe_load_all((DEPLOY / f"kubernetes/{name}/jaxllm.yaml").read_text(encoding="utf-8")))


def test_hosts_of_a_model_find_each_other():
    """A LeaderWorkerSet's own variables are the hosts' ranks, and the first host's address."""
    service, leaders = example("hosts")
    template = leaders["spec"]["leaderWorkerTemplate"]
    spec = template["workerTemplate"]["spec"]
    [container] = spec["containers"]
    words = " ".join(container["args"])
    known = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "leader"}
    for name, value in known.items():
        words = words.replace(f"$({name})", value)
    args = parsed(words.split())
    assert (args.nnodes, args.node_rank, args.master_addr) == (4, 3, "leader")
    assert args.tensor_parallel_size == args.nnodes * int(container["resources"]["limits"]["google.com/tpu"])
    ports = [ServerArgs().port, args.master_port, args.master_port + 1]
    assert [port["containerPort"] for port in container["ports"]] == ports
    assert service["spec"]["ports"][0]["targetPort"] == ports[0]
    labels = template["workerTemplate"]["metadata"]["labels"]
    assert labels.items() <= service["metadata"]["labels"].items()
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    check_pod(spec)


def check_pod(spec: dict[str, Any]) -> None:
    """Check that a pod of an example may do as little as the base's."""
    [container] = spec["containers"]
    assert container["securityContext"] == pod()["containers"][0]["securityContext"]
    assert spec["securityContext"].items() <= pod()["securityContext"].items()
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {values("VOLUME")[0], "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert container["image"].startswith(f"registry.example.com/jaxllm:{__version__}-")


def ray_cluster() -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the head's pod of the example for Ray, its group of workers, and what the head runs after waiting."""
    [cluster] = [each for each in example("ray") if each["kind"] == "RayCluster"]
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    [group] = cluster["spec"]["workerGroupSpecs"]
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    [command] = head["containers"][0]["args"]
    start, wait, serve = command.split(" && ")
    assert start.startswith("ray start --head ")
    assert f"/{group['replicas']}.0 GPU" in wait
    return head, group, shlex.split(serve)


def test_replicas_of_ray_have_a_gpu_each():
    head, group, (_, program, command, *words) = ray_cluster()
    args = parsed(words)
    assert (program, command, args.data_parallel_backend) == ("jaxllm", "serve", "ray")
    assert args.data_parallel_size == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    worker = group["template"]["spec"]
    [container] = worker["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(args.tensor_parallel_size)
    assert container["image"] == head["containers"][0]["image"]
    assert container["args"] == ["exec $KUBERAY_GEN_RAY_START_CMD"]
    drained = head["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] + args.shutdown_timeout
    assert head["terminationGracePeriodSeconds"] >= drained + SECONDS_TO_END
    slept = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert worker["terminationGracePeriodSeconds"] > slept >= drained, "workers outlive what drains"
    for node in (head, worker):
        check_pod(node)


def test_the_head_of_a_ray_cluster_is_found_and_probed():
    service, policy, cluster = example("ray")
    head, group, _ = ray_cluster()
    name = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert service["spec"]["selector"] == {**name, "ray.io/node-type": "head"}
    assert policy["spec"]["podSelector"]["matchLabels"] == name
    [container] = head["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == ServerArgs().port == policy["spec"]["ingress"][1]["ports"][0]["port"]
    assert f"--port={ports['gcs-server']} " in container["args"][0]
    base = pod()["containers"][0]
    assert all(container[probe] == base[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe"))
    [worker] = group["template"]["spec"]["containers"]
    [port] = worker["ports"]
    assert group["rayStartParams"]["node-manager-port"] == str(port["containerPort"])
    assert all(worker[probe]["tcpSocket"]["port"] == port["name"] for probe in ("readinessProbe", "livenessProbe"))


def test_pods_of_custom_resources_are_linted():
    """scripts/check/deploy.sh has no schema of these resources, so their pods have to be found."""
    for name, count in (("hosts", 1), ("ray", 2)):
        path = DEPLOY / f"kubernetes/{name}/jaxllm.yaml"
        command = [sys.executable, ROOT / "scripts/check/pod_templates.py", path]
        documents = list(yaml.safe_load_all(subprocess.run(command, capture_output=True, check=True).stdout))
        assert sum(each["kind"] == "Pod" for each in documents) == count
        assert [each for each in documents if each["kind"] != "Pod"] == [
            each for each in example(name) if each["kind"] in ("Service", "NetworkPolicy")
        ]


def unit() -> dict[str, list[str]]:
    """Return the unit's settings; one that is given several times has several values."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "jaxllm.service").read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_starts_a_server_that_may_drain(tmp_path: Path):
    text = (DEPLOY / "jaxllm.service").read_text(encoding="utf-8")
    [example] = re.findall(r"printf '(.*)' >/etc/jaxllm/serve.yaml", text)
    config = yaml.safe_load(example.replace("\\n", "\n"))
    program, command, *words = shlex.split(unit()["ExecStart"][0])
    assert (Path(program).name, command) == ("jaxllm", "serve")
    assert parsed(words).config == "/etc/jaxllm/serve.yaml"
    args = parsed([f"--{name}={value}" for name, value in config.items()])
    assert int(unit()["TimeoutStopSec"][0]) >= args.shutdown_timeout + SECONDS_TO_END
    assert args.shutdown_timeout > 0
    assert unit()["KillMode"] == ["mixed"]  # a SIGTERM to the engine's process would cut off what drains
    assert unit()["RestartPreventExitStatus"] == ["2"]


def test_the_unit_writes_to_its_cache_alone():
    assert unit()["ProtectSystem"] == ["strict"]
    assert unit()["DynamicUser"] == ["yes"]
    [folder] = unit()["CacheDirectory"]
    paths = re.findall(r"=(/\S+)", unit()["Environment"][0])
    assert len(paths) == 3
    assert all(path.startswith(f"/var/cache/{folder}") for path in paths)
    assert "MemoryDenyWriteExecute" not in unit()  # the engine compiles programs
