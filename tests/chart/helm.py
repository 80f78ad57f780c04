"""Where helm is, and what the chart renders to: each set of values once for all tests.

helm is taken from PATH, else from $SANGAM_CLUSTER_HOME/bin (default ~/.cache/sangam-cluster/bin),
else unpacked there from $SANGAM_SHARED/cluster (default ../shared beside the repository), whose
`cluster install` would put it at the same place.
"""

import functools
import lzma
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "sangam"
SCENARIOS = sorted((CHART / "ci").glob("*-values.yaml"))
MONITORING = (
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "monitoring.coreos.com/v1alpha1/ScrapeConfig",
)
EVERYTHING: dict[str, Any] = {
    "decode": 1,
    "theta": 4096,
    "imagePullSecrets": [{"name": "registry"}],
    "model": {
        "name": "/models/llada",
        "weights": {"type": "pvc", "claimName": "weights"},
        "cache": {"type": "pvc", "claimName": "cache"},
        "hfToken": {"existingSecret": "hugging-face"},
    },
    "workers": {
        "defaults": {
            "nodeSelector": {"pool": "gpu"},
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "podAnnotations": {"example.com/a": "1"},
            "podLabels": {"example.com/b": "2"},
            "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "settings": {"leaseSeconds": 8},
            "topologySpreadConstraints": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "maxSkew": 1,
                    "whenUnsatisfiable": "ScheduleAnyway",
                }
            ],
        },
        "decode": {"settings": {"poolBytes": 40000000000}},
    },
    "router": {
        "autoscaling": {"enabled": True},
        "apiKeys": {"existingSecret": "keys"},
        "podAnnotations": {"example.com/a": "1"},
        "podLabels": {"example.com/b": "2"},
        "settings": {"requestSeconds": 600, "maxBodyBytes": 4194304},
        "service": {"annotations": {"example.com/c": "3"}},
    },
    "ingress": {
        "enabled": True,
        "host": "sangam.test",
        "annotations": {"example.com/d": "4"},
        "tls": [{"secretName": "tls", "hosts": ["sangam.test"]}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    "networkPolicy": {
        "nodeCIDRs": ["10.0.0.0/16", "fd00::/64"],
        "internalFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"prometheus": "main"}},
        "scrapeConfig": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True, "annotations": {"folder": "LLM"}},
    },
}
"""Values that switch on all that is off by default."""


class _NoDuplicates(yaml.CSafeLoader):
    """YAML in which a key that stands twice is an error, as it is for the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice in {keys}"
        return super().construct_mapping(node, deep)


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text, _NoDuplicates) if document]


@dataclass(frozen=True)
class Rendered:
    """The objects of one rendering."""

    objects: list[dict[str, Any]]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] in kinds]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        return found

    @property
    def workers(self) -> list[dict[str, Any]]:
        return [s for s in self.of("StatefulSet") if component(s) == "worker"]

    def pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Every pod, templates and the test hook's: its owner's name, metadata and spec."""
        for each in self.of("StatefulSet", "Deployment"):
            template = each["spec"]["template"]
            yield each["metadata"]["name"], template["metadata"], template["spec"]
        for each in self.of("Pod"):
            yield each["metadata"]["name"], each["metadata"], each["spec"]


def component(each: Mapping[str, Any]) -> str:
    return str(each["metadata"]["labels"]["app.kubernetes.io/component"])


def container(each: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = each["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(each: Mapping[str, Any]) -> dict[str, Any]:
    """A set's variables; those from elsewhere as their `valueFrom`."""
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in container(each)["env"]
    }


@dataclass
class Helm:
    """Runs helm on the chart, without any cluster."""

    program: Path
    folder: Path
    _rendered: dict[tuple[object, ...], Rendered] = field(default_factory=dict)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # An empty KUBECONFIG: no test may meet a cluster that happens to be there.
        environment = {**os.environ, "KUBECONFIG": os.devnull, "HELM_CACHE_HOME": str(self.folder)}
        return subprocess.run(
            [str(self.program), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment,
        )

    def template(
        self,
        values: Mapping[str, Any] | Path | None = None,
        *sets: str,
        release: str = "sangam",
        kinds: tuple[str, ...] = MONITORING,
        chart: Path = CHART,
    ) -> subprocess.CompletedProcess[str]:
        arguments = ["template", release, str(chart), "--namespace", "serving"]
        for kind in kinds:
            arguments += ["--api-versions", kind]
        if isinstance(values, Path):
            arguments += ["-f", str(values)]
        elif values:
            path = self.folder / "values.yaml"
            path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
            arguments += ["-f", str(path)]
        for pair in sets:
            is_json = pair.partition("=")[2].startswith(("[", "{", '"'))
            arguments += ["--set-json" if is_json else "--set", pair]
        return self.run(*arguments)

    def render(
        self,
        values: Mapping[str, Any] | Path | None = None,
        *sets: str,
        release: str = "sangam",
        kinds: tuple[str, ...] = MONITORING,
        chart: Path = CHART,
    ) -> Rendered:
        """What the values render to; the same values once."""
        key = (repr(values), sets, release, kinds, chart)
        if key not in self._rendered:
            done = self.template(values, *sets, release=release, kinds=kinds, chart=chart)
            assert done.returncode == 0, done.stderr
            self._rendered[key] = Rendered(documents(done.stdout))
        return self._rendered[key]

    def refusal(self, *sets: str, values: Mapping[str, Any] | None = None) -> str:
        """What helm says of values that it must refuse; nothing may be rendered."""
        done = self.template(values, *sets)
        assert done.returncode != 0, f"{sets} {values}: accepted"
        assert done.stdout == ""
        return done.stderr


@functools.cache
def find_helm() -> Path | str:
    """helm, or why there is none."""
    on_path = shutil.which("helm")
    if on_path:
        return Path(on_path)
    home = Path(os.environ.get("SANGAM_CLUSTER_HOME", Path.home() / ".cache/sangam-cluster"))
    program = home / "bin" / "helm"
    if program.exists():
        return program
    shared = Path(os.environ.get("SANGAM_SHARED", REPOSITORY.parent / "shared"))
    packed = shared / "cluster" / "controlplane.xz"
    if not packed.exists():
        return f"no helm on PATH, at {program} or packed in {packed}"
    try:
        _unpack(packed, home / "bin")
    except OSError as error:
        return f"no helm on PATH, and {packed} could not be unpacked: {error}"
    return program


def _unpack(packed: Path, folder: Path) -> None:
    """As `cluster install` does it: helm is one name of one executable."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, part = folder / "controlplane", folder / f".controlplane.{os.getpid()}.part"
    if not whole.exists():
        with lzma.open(packed) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part.chmod(0o755)
        part.rename(whole)
    link = folder / "helm"
    if not link.is_symlink():
        link.symlink_to("controlplane")
