"""The API server: kubeconfig, the release's pods and StatefulSets, annotations and counts.

Decides which failures pass (``ClusterUnavailable``: worth asking again) and which do not
(``ClusterRefused``). Objects come and go as JSON; what they mean is ``pods``'.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client, config

from sangam_core.errors import ConfigurationError, SangamError
from sangam_router.kubectl.persist_plan import Debt, WorkerSet
from sangam_router.kubectl.pods import OWES_ANNOTATION, PodInfo, pod_info, set_info

_CALL_SECONDS = (5.0, 15.0)
"""Longest wait for a connection, and for an answer."""

_FIELD_MANAGER = "kubectl-sangam"
_MERGE = "application/merge-patch+json"
_NAME, _INSTANCE, _COMPONENT = (
    f"app.kubernetes.io/{label}" for label in ("name", "instance", "component")
)


class ClusterUnavailable(SangamError):
    """The API server does not answer now."""


class ClusterRefused(SangamError):
    """The API server answers no: not found, forbidden, a conflict."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the fleet is, as the command line says; None: what the kubeconfig says, or is found."""

    namespace: str | None = None
    release: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


class Cluster:
    """One release in one namespace."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        configuration.retries = 0
        self.configuration = configuration
        self.namespace = namespace
        self.release = ""
        self._api = client.ApiClient(configuration)
        self._core, self._apps = client.CoreV1Api(self._api), client.AppsV1Api(self._api)

    def close(self) -> None:
        """End the connections."""
        self._api.close()  # type: ignore[no-untyped-call]

    def find_release(self, wanted: str | None) -> None:
        """Settle which release is meant.

        Raises:
            ConfigurationError: there is none, or several and none is named.
        """
        found = self._releases()
        if wanted is not None and wanted not in found:
            others = f"; there is {', '.join(found)}" if found else ""
            raise ConfigurationError(
                f"no release {wanted!r} of sangam in the namespace {self.namespace!r}{others}"
            )
        if wanted is None and not found:
            raise ConfigurationError(
                f"no sangam in the namespace {self.namespace!r} (-n names another)"
            )
        if wanted is None and len(found) > 1:
            raise ConfigurationError(
                f"several releases of sangam in the namespace {self.namespace!r}: "
                f"{', '.join(found)}; name one with --release"
            )
        self.release = wanted or found[0]

    def pods(self, component: str) -> list[PodInfo]:
        """The release's pods: ``worker`` or ``router``; by name, ordinals as numbers."""
        items = self._list("pods", self._labels(component))
        pods = [pod_info(item) for item in items]
        return sorted(pods, key=lambda pod: (pod.name.rpartition("-")[0], pod.ordinal, pod.name))

    def sets(self) -> list[WorkerSet]:
        """The workers' StatefulSets."""
        items = self._list("statefulsets", self._labels("worker"))
        found = [set_info(item) for item in items]
        return [each for each in found if each is not None]

    def annotate(self, pod: PodInfo, key: str, value: str | None) -> None:
        """Set or remove a pod's annotation; only of this very pod, not of a successor."""
        metadata = {"uid": pod.uid, "annotations": {key: value}}
        self._patch("pod", pod.name, {"metadata": metadata})

    def scale(self, set_name: str, replicas: int, debt: Debt | None) -> None:
        """Change a set's count, and in the same request what it owes (None: leave that)."""
        owing = _owing(debt) if debt is not None else {}
        self._patch("stateful_set", set_name, owing | {"spec": {"replicas": replicas}})

    def settle(self, set_name: str) -> None:
        """Forget what a set owed."""
        self._patch("stateful_set", set_name, _owing(None))

    def _labels(self, component: str) -> str:
        return f"{_NAME}=sangam,{_INSTANCE}={self.release},{_COMPONENT}={component}"

    def _releases(self) -> list[str]:
        found = set()
        # Sets as well: a release whose workers are all scaled away has no pods.
        for kind in ("pods", "statefulsets"):
            for item in self._list(kind, f"{_NAME}=sangam"):
                found.add((item["metadata"].get("labels") or {}).get(_INSTANCE, ""))
            if found:
                break
        return sorted(found - {""})

    def _list(self, kind: str, labels: str) -> list[dict[str, Any]]:
        call = (
            self._core.list_namespaced_pod
            if kind == "pods"
            else self._apps.list_namespaced_stateful_set
        )
        body = self._call(f"list {kind}", call, self.namespace, label_selector=labels)
        return list(body["items"])

    def _patch(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        api = self._core if kind == "pod" else self._apps
        call = getattr(api, f"patch_namespaced_{kind}")
        self._call(
            f"patch {name}",
            call,
            name,
            self.namespace,
            body,
            field_manager=_FIELD_MANAGER,
            _content_type=_MERGE,
        )

    def _call(self, what: str, call: Any, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            response = call(
                *args, _preload_content=False, _request_timeout=_CALL_SECONDS, **options
            )
            return dict(json.loads(response.data))
        except client.ApiException as error:
            text = f"cannot {what} in the namespace {self.namespace!r}: {_reason(error)}"
            if error.status in (0, None, 429) or error.status >= 500:
                raise ClusterUnavailable(text) from None
            raise ClusterRefused(text) from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ClusterUnavailable(
                f"the API server {self.configuration.host} does not answer: {_root(error)}"
            ) from None


def connect(target: Target) -> Cluster:
    """The cluster that the options and the kubeconfig name, with its release found.

    Raises:
        ConfigurationError: no kubeconfig, an unknown context, no or several releases.
        ClusterUnavailable, ClusterRefused: the API server.
    """
    configuration = client.Configuration()
    try:
        contexts, current = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            config_file=target.kubeconfig
        )
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=target.kubeconfig,
            context=target.context,
            client_configuration=configuration,
        )
    except (config.ConfigException, OSError) as error:
        raise ConfigurationError(
            f"no way to a cluster: {error} (--kubeconfig, --context or KUBECONFIG name one)"
        ) from None
    if target.context is not None:
        current = next(each for each in contexts if each["name"] == target.context)
    namespace = target.namespace or current["context"].get("namespace") or "default"
    cluster = Cluster(configuration, namespace)
    cluster.find_release(target.release)
    return cluster


def _owing(debt: Debt | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {OWES_ANNOTATION: str(debt) if debt else None}}}


def _reason(error: client.ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _root(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error)
