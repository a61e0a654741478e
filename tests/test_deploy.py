"""Checks the files in `deploy/` without building or running them: commands parse, names agree, and paths exist."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest

import fastpipe
from fastpipe import cli

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
IMAGE = (ROOT / "deploy/Dockerfile").read_text("utf-8")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """Returns the manifest's objects by kind. There is one object of each kind."""
    found = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text("utf-8")))
    kinds = {one["kind"]: one for one in found}
    assert sorted(kinds) == sorted(one["kind"] for one in found)
    assert kinds.keys() == {"ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget"}
    return kinds


@pytest.fixture(scope="module")
def pod(manifest: dict[str, Any]) -> Any:
    return manifest["StatefulSet"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (found,) = pod["containers"]
    return found


def instructions(name: str) -> list[str]:
    """Returns the arguments of every use of an instruction in the Dockerfile."""
    whole = IMAGE.replace("\\\n", "")
    return re.findall(rf"^{name} (.+)$", whole, re.MULTILINE)


def test_copied_files_exist() -> None:
    copied = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert set(copied) >= {"Cargo.toml", "Cargo.lock", "pyproject.toml", "rust", "python"}
    assert all((ROOT / source).exists() for source in copied)
    # Everything that is copied isn't ignored, and everything else is.
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)


def test_the_image_matches_its_description() -> None:
    build, run = instructions("FROM")
    assert build.startswith("rust:")
    assert run.startswith("python:3.12-slim")
    assert re.search(r"-slim-\w+", build.split()[0]).group() == re.search(r"-slim-\w+", run).group()  # type: ignore[union-attr]
    assert "[metrics]" in IMAGE
    (user,) = instructions("USER")
    assert int(user) > 0, "Kubernetes recognizes only numeric users as non-root"
    version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    assert f"image: fastpipe:{version[1]}" in (ROOT / "deploy/kubernetes.yaml").read_text("utf-8")


def test_commands_are_valid(container: Any) -> None:
    (entry,), (default,) = (json.loads(line) for line in instructions("ENTRYPOINT")), instructions("CMD")
    assert entry[0] == "fastpipe"
    parser = cli._parser()
    assert parser.parse_args([*entry[1:], *json.loads(default)]).host == "0.0.0.0"
    serve = parser.parse_args([*entry[1:], *container["args"]])
    assert (serve.host, serve.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    for probe in ("startupProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[0] == "fastpipe"
        health = parser.parse_args(command[1:])
        assert health.run.__name__ == "_health"
        assert health.url == f"grpc+tls://localhost:{serve.port}"
        assert health.token_file == serve.token_file
        assert health.timeout < container[probe]["timeoutSeconds"]
        assert health.ca.parent == serve.tls[0].parent
    assert list(map(int, instructions("EXPOSE")[0].split())) == [serve.port, serve.metrics_port]


def test_the_metrics_port_is_exposed(manifest: dict[str, Any], container: Any) -> None:
    port = cli._parser().parse_args(["serve", *container["args"]]).metrics_port
    assert {"name": "metrics", "containerPort": port} in container["ports"]
    about = manifest["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert about == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    pytest.importorskip("pyarrow.flight")
    with fastpipe.from_arrays({"id": np.arange(2)}, batch_size=1).serve(metrics_port=0) as server:
        assert server.metrics_url is not None
        for path in (about["prometheus.io/path"], container["readinessProbe"]["httpGet"]["path"]):
            with urllib.request.urlopen(urljoin(server.metrics_url, path), timeout=100) as answer:
                assert answer.status == 200


def test_commands_in_comments_are_valid() -> None:
    text = (ROOT / "deploy/kubernetes.yaml").read_text("utf-8") + IMAGE
    commands = [shlex.split(line) for line in re.findall(r"^#     (.+)$", text, re.MULTILINE)]
    assert {words[0] for words in commands} == {"docker", "kubectl"}
    secrets = {words[4] for words in commands if words[:4] == ["kubectl", "create", "secret", "generic"]}
    assert secrets == {"fastpipe-token", "fastpipe-tls"}
    (built,) = [words for words in commands if words[:2] == ["docker", "build"]]
    assert (ROOT / built[built.index("-f") + 1]).exists()


def test_paths_are_on_mounted_volumes(manifest: dict[str, Any], pod: Any, container: Any) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    serve = cli._parser().parse_args(["serve", *container["args"]])
    assert str(serve.token_file.parent) == mounts["token"]
    assert {str(file.parent) for file in serve.tls} == {mounts["tls"]}
    config = manifest["ConfigMap"]
    assert volumes["readers"]["configMap"]["name"] == config["metadata"]["name"]
    assert serve.config == Path(mounts["readers"], *config["data"])
    assert f'"{mounts["data"]}/' in config["data"]["readers.py"]


def test_readers_are_valid(manifest: dict[str, Any]) -> None:
    tree = ast.parse(manifest["ConfigMap"]["data"]["readers.py"])
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert ast.unparse(call.func) == "fastpipe.read_avro"
    signature = inspect.signature(fastpipe.read_avro)
    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
    known = set(signature.parameters) | set(fastpipe.typing.Options.__annotations__)
    assert options.keys() <= known


def test_names_and_labels_agree(manifest: dict[str, Any]) -> None:
    servers, service = manifest["StatefulSet"]["spec"], manifest["Service"]["spec"]
    labels = servers["template"]["metadata"]["labels"]
    assert service["clusterIP"] == "None"
    assert servers["serviceName"] == manifest["Service"]["metadata"]["name"]
    assert service["selector"] == labels
    assert servers["selector"]["matchLabels"] == labels
    assert manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def test_memory_is_enough(manifest: dict[str, Any], container: Any) -> None:
    from fastpipe._arguments import memory_size
    from fastpipe.service._served import Shares

    serve = cli._parser().parse_args(["serve", *container["args"]])
    found = re.search(r'memory_limit="(.+?)"', manifest["ConfigMap"]["data"]["readers.py"])
    assert found is not None
    limit, keep, own = (memory_size("size", size) for size in (serve.memory_limit, serve.cache_bytes, found[1]))
    # Readers get the memory that they request.
    assert Shares.of(limit, keep, serve.max_passes).limit(own) == own
    most = memory_size("memory", container["resources"]["limits"]["memory"] + "B")
    assert limit + (1 << 30) <= most


def test_the_dashboard_shows_metrics_that_exist() -> None:
    pytest.importorskip("pyarrow.flight")
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    reader = fastpipe.from_arrays({"id": np.arange(2)}, batch_size=1)
    fastpipe.metrics.prometheus(reader, registry=registry)
    text = prometheus_client.generate_latest(registry).decode()
    with (
        reader.serve(metrics_port=0) as server,
        urllib.request.urlopen(server.metrics_url or "", timeout=100) as answer,
    ):
        text += answer.read().decode()
    exported = set(re.findall(r"^(fastpipe_\w+)", text, re.MULTILINE))
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [one["query"] for one in dashboard["templating"]["list"]]
    shown = set(re.findall(r"\bfastpipe_\w+", " ".join(queries)))
    assert shown <= exported
    assert len(shown) > 20
    # Queries use only variables that the dashboard defines.
    assert set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(dashboard))) == {
        one["name"] for one in dashboard["templating"]["list"]
    }
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)
