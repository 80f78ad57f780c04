"""Values that are wrong, or do not fit together, fail before anything is created, in words."""

from typing import Any

import pytest
from tests.chart.helm import Helm

NO_DECODER = "No worker can decode"


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("colocatedd=3", "'colocatedd' not allowed"),
        ("workers.defaults.hostNetworkk=true", "'hostNetworkk' not allowed"),
        ("workers.prefill.startupProbe.failureThresold=3", "'failureThresold' not allowed"),
        ("router.settings.requestsSeconds=3", "'requestsSeconds' not allowed"),
        ("workers.decode.settings.role=prefill", "'role' not allowed"),
        ("redis.external.tls.casecret=x", "'casecret' not allowed"),
        ("prefill=-1", "/prefill"),
        ("prefill=two", "/prefill"),
        ("colocated=1.5", "/colocated"),
        ("theta=0", "/theta"),
        ('overflow="no"', "/overflow"),
        ("workers.defaults.gpus=2", "/workers/defaults/gpus"),
        ("workers.defaults.portRange=20000", "/workers/defaults/portRange"),
        ("router.settings.requestSeconds=0", "/router/settings/requestSeconds"),
        ("router.settings.logLevel=loud", "/router/settings/logLevel"),
        ("model.cache.type=nfs", "/model/cache/type"),
        ("redis.external.url=http://redis", "/redis/external/url"),
        ("router.image.pullPolicy=Sometimes", "/router/image/pullPolicy"),
        ("ingress.maxAnswerSeconds=10m", "/ingress/maxAnswerSeconds"),
        ('workers.defaults.tolerations=[{"keyy": "x"}]', "'keyy' not allowed"),
    ],
)
def test_the_schema_refuses_and_names_the_place(helm: Helm, pair: str, words: str) -> None:
    said = helm.refusal(pair)
    assert words.replace("'", "") in said.replace("'", ""), said


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["colocated=0"], NO_DECODER),
        (["colocated=0", "prefill=0"], NO_DECODER),
        (["prefill=0", "colocated=0", "decode=1"], "No worker can prefill"),
        (["prefill=0", "theta=512"], "theta=512 has no meaning without prefill workers"),
        (["theta=512", "overflow=false"], "theta=512 has no meaning with overflow=false"),
        (["router.settings.fixedMaskBufferTokens=100"], "no multiple of model.blockLength=32"),
        (
            ["workers.prefill.terminationGracePeriodSeconds=30"],
            "workers.prefill: terminationGracePeriodSeconds=30 would kill a worker",
        ),
        (["workers.defaults.hostNetwork=false"], "hostNetwork=false with a GPU"),
        (["workers.defaults.portRange=29000-31000"], "overlaps the NodePorts"),
        (["workers.defaults.portRange=29000-28000"], "must be LOW-HIGH"),
        (
            ["workers.decode.settings.totalPages=9", "workers.decode.settings.poolBytes=9999999"],
            "exclude each other",
        ),
        (
            ["workers.prefill.gpus=0", "workers.prefill.settings.attention=flashinfer-fa3"],
            "workers.prefill: settings.attention=flashinfer-fa3 needs a GPU",
        ),
        (
            ["workers.defaults.gpus=0", "workers.defaults.settings.kvTransport=nccl"],
            "settings.kvTransport=nccl needs a GPU",
        ),
        (["workers.defaults.settings.dtype=float32"], "dtype=float32 has no FlashInfer kernels"),
        (["workers.defaults.settings.leaseSeconds=1"], "at least two settings.heartbeatSeconds"),
        (["router.shutdownSeconds=60"], "would cut answers at every roll"),
        (["router.terminationGracePeriodSeconds=300"], "would kill a router before"),
        (
            ["router.autoscaling.enabled=true", "router.autoscaling.maxReplicas=1"],
            "minReplicas=2 is above maxReplicas=1",
        ),
        (['router.extraEnv=[{"name": "SANGAM_MODEL", "value": "x"}]'], "router.extraEnv"),
        (['workers.decode.extraEnv=[{"name": "HF_TOKEN"}]'], "HF_TOKEN is set by the chart"),
        (["model.cache.type=pvc"], "model.cache.type=pvc needs model.cache.claimName"),
        (["model.weights.hostPath=/x"], "is for type=hostPath, but the type is none"),
        (["model.name=/models/llada"], "is a folder, but no volume holds it"),
        (
            ["model.name=/other/x", "model.weights.type=hostPath", "model.weights.hostPath=/x"],
            "does not lie under model.weights.mountPath",
        ),
        (["redis.external.existingSecret=x"], "set redis.external.url"),
        (["redis.external.url=redis://u:secret@r:6379"], "holds a password"),
        (
            ["redis.external.url=redis://r:6379", "redis.external.tls.caSecret=x"],
            "does not begin with rediss://",
        ),
        (["ingress.enabled=true", "ingress.maxAnswerSeconds=60"], "would cut answers"),
        (["httpRoute.enabled=true"], "httpRoute.parentRefs is empty"),
        (['networkPolicy.nodeCIDRs=["10.0.0.0"]'], "is no address range"),
        (['networkPolicy.internalFrom=[{"podSelector": {}}]'], "policies are off"),
    ],
)
def test_what_does_not_fit_together_is_told_in_words(
    helm: Helm, sets: list[str], words: str
) -> None:
    said = helm.refusal(*sets)
    assert "These values do not fit together" in said
    assert words in said, said


def test_all_problems_are_told_at_once(helm: Helm) -> None:
    said = helm.refusal("colocated=0", "overflow=false", "theta=9", "httpRoute.enabled=true")
    for words in (NO_DECODER, "theta=9 has no meaning", "httpRoute.parentRefs is empty"):
        assert words in said


def test_a_password_in_the_values_is_not_shown_again(helm: Helm) -> None:
    said = helm.refusal("redis.external.url=redis://u:verysecret@r:6379")
    assert "verysecret" not in said


def test_a_typo_within_a_list_is_refused_too(helm: Helm) -> None:
    values: dict[str, Any] = {"router": {"extraEnv": [{"name": "A", "valu": "x"}]}}
    assert "valu" in helm.refusal(values=values)
