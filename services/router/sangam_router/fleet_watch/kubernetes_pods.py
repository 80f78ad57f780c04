"""Pods from a real API server, through the official client (``kubernetes.aio``).

Decides time-outs and which failures mean what; nothing about wishes. Imported only where a
namespace is set: the client takes half a second to import.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from sangam_core.errors import ConfigurationError
from sangam_router.fleet_watch.pods import HistoryGone, PodEvent, PodList, PodsUnavailable

_LIST_SECONDS = 15.0
_WATCH_SECONDS = 30
"""How long the server lets one watch run. Short, so that a connection that died without a word is
known within ``_SILENCE_SECONDS``; asking again from the last version costs next to nothing."""

_SILENCE_SECONDS = 40.0
_GONE = 410


class KubernetesPods:
    """The pods of a namespace with given labels.

    Args:
        namespace: where they are. selector: a label selector.
    """

    def __init__(
        self, configuration: client.Configuration, *, namespace: str, selector: str
    ) -> None:
        self._client = client.ApiClient(configuration)
        self._api = client.CoreV1Api(self._client)
        self._query: dict[str, Any] = {"namespace": namespace, "label_selector": selector}

    async def aclose(self) -> None:
        """End the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def list(self) -> PodList:
        """All pods. Raises ``PodsUnavailable``."""
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                response = await self._get()
                async with response:
                    body = json.loads(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise PodsUnavailable(_text(error)) from None
        _check(response.status, body)
        metadata = _metadata(body)
        pods = body.get("items") or []
        for pod in pods:
            _metadata(pod, "uid")
        return PodList(pods, metadata["resourceVersion"])

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[PodEvent]]:
        """What happens after ``version`` (``PodSource.watch``)."""
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                response = await self._get(
                    watch=True,
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=_WATCH_SECONDS,
                )
                if response.status != 200:
                    async with response:
                        _check(response.status, json.loads(await response.read()))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise PodsUnavailable(_text(error)) from None
        try:
            yield _events(response)
        finally:
            response.close()

    async def _get(self, **query: Any) -> aiohttp.ClientResponse:
        return await self._api.list_namespaced_pod_without_preload_content(
            **self._query, **query, _request_timeout=float(_WATCH_SECONDS + _SILENCE_SECONDS)
        )


async def cluster_configuration() -> client.Configuration:
    """In a pod, its service account; elsewhere what KUBECONFIG names.

    Raises:
        ConfigurationError: there is neither.
    """
    configuration = client.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            load = config.load_kube_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
            await load
    except (config.ConfigException, OSError) as error:
        raise ConfigurationError(
            f"SANGAM_KUBERNETES_NAMESPACE is set, but there is no way to the API server: {error}"
        ) from None
    return configuration


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[PodEvent]:
    while True:
        try:
            async with asyncio.timeout(_SILENCE_SECONDS):
                line = await response.content.readline()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise PodsUnavailable(f"the watch broke off: {_text(error)}") from None
        if not line:
            return
        try:
            event = json.loads(line)
            kind, pod = event["type"], event["object"]
        except (ValueError, KeyError, TypeError):
            raise PodsUnavailable("the watch broke off in the middle of an event") from None
        if kind == "ERROR":
            code = pod.get("code") if isinstance(pod, dict) else None
            _check(code if isinstance(code, int) and code != 200 else 500, pod)
        _metadata(pod, *(() if kind == "BOOKMARK" else ("uid",)))
        yield PodEvent(kind, pod)


def _check(status: int, body: Any) -> None:
    if status == 200:
        return
    message = body.get("message", "") if isinstance(body, dict) else ""
    if status == _GONE:
        raise HistoryGone(message)
    raise PodsUnavailable(f"the API server answers {status}: {message}")


def _metadata(thing: Any, *needed: str) -> dict[str, Any]:
    """The metadata of a list or a pod; whatever answers otherwise is no API server."""
    metadata = thing.get("metadata") if isinstance(thing, dict) else None
    if not isinstance(metadata, dict) or not {"resourceVersion", *needed} <= metadata.keys():
        raise PodsUnavailable("the API server's answer is no pod or list of pods")
    return metadata


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
