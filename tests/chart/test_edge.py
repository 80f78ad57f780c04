"""Routers, Redis, permissions, policies, and what leads in from outside, as rendered."""

import json
from typing import Any

from tests.chart.helm import CHART, Helm, Rendered, component, container, environment

RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]


def router(rendered: Rendered) -> dict[str, Any]:
    return rendered.one("Deployment", "sangam-router")


def test_there_are_two_routers_spread_over_nodes(default: Rendered) -> None:
    spec = router(default)["spec"]
    assert spec["replicas"] == 2
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert default.one("PodDisruptionBudget", "sangam-router")["spec"]["maxUnavailable"] == 1


def test_an_autoscaler_owns_the_routers_count(default: Rendered, everything: Rendered) -> None:
    assert default.of("HorizontalPodAutoscaler") == []
    assert "replicas" not in router(everything)["spec"]
    (scaler,) = everything.of("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "sangam-router",
    }


def test_a_leaving_router_may_finish_its_answers(default: Rendered) -> None:
    pod = router(default)["spec"]["template"]["spec"]
    shutdown = float(environment(router(default))["SANGAM_SHUTDOWN_SECONDS"])
    pause = container(router(default))["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert shutdown >= 600
    assert pod["terminationGracePeriodSeconds"] >= pause + shutdown + 5
    assert router(default)["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_routers_may_read_pods_and_nothing_else(default: Rendered) -> None:
    assert default.of("ClusterRole", "ClusterRoleBinding") == []
    (role,) = default.of("Role")
    assert role["rules"] == RULES
    (binding,) = default.of("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "sangam-router", "namespace": "serving"}
    ]


def test_only_routers_get_a_token_of_the_cluster(helm: Helm, everything: Rendered) -> None:
    for name, _, spec in everything.pods():
        assert spec["automountServiceAccountToken"] is (name == "sangam-router")
    for account in everything.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    without = helm.render(None, "router.fleetWatcher.enabled=false")
    assert without.of("Role", "RoleBinding") == []
    assert router(without)["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert "SANGAM_KUBERNETES_NAMESPACE" not in environment(router(without))


def test_the_watcher_follows_this_releases_workers(helm: Helm) -> None:
    rendered = helm.render(release="other")
    variables = environment(rendered.one("Deployment", "other-sangam-router"))
    assert variables["SANGAM_KUBERNETES_NAMESPACE"] == "serving"
    wanted = dict(p.split("=") for p in variables["SANGAM_KUBERNETES_POD_SELECTOR"].split(","))
    for each in rendered.of("StatefulSet", "Deployment"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert (wanted.items() <= labels.items()) is (component(each) == "worker")


def test_no_service_variables_reach_a_pod(everything: Rendered) -> None:
    assert [name for name, _, spec in everything.pods() if spec["enableServiceLinks"]] == []


def test_pods_are_restricted(everything: Rendered) -> None:
    for name, _, spec in everything.pods():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for each in spec["containers"]:
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_ingress_lets_an_answer_take_ten_minutes_and_stream(helm: Helm) -> None:
    for name in ("colocated", "cpu", "hybrid"):
        (ingress,) = helm.render(CHART / "ci" / f"{name}-values.yaml").of("Ingress")
        annotations = ingress["metadata"]["annotations"]
        prefix = "nginx.ingress.kubernetes.io/proxy-"
        assert int(annotations[prefix + "read-timeout"]) >= 600
        assert int(annotations[prefix + "send-timeout"]) >= 600
        assert annotations[prefix + "buffering"] == "off"
        assert annotations[prefix + "body-size"] == "0"


def test_an_annotation_of_the_operators_own_wins(helm: Helm) -> None:
    key = "nginx.ingress.kubernetes.io/proxy-body-size"
    (ingress,) = helm.render({"ingress": {"enabled": True, "annotations": {key: "8m"}}}).of(
        "Ingress"
    )
    assert ingress["metadata"]["annotations"][key] == "8m"


def test_the_route_lets_an_answer_take_ten_minutes(everything: Rendered) -> None:
    (route,) = everything.of("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}
    assert rule["backendRefs"] == [{"name": "sangam-router", "port": 80}]
    assert route["spec"]["parentRefs"] == [{"name": "gateway"}]


def test_nothing_outside_leads_to_the_internal_port(everything: Rendered) -> None:
    public = everything.one("Service", "sangam-router")["spec"]["ports"]
    assert [port["targetPort"] for port in public] == ["http"]
    for way_in in everything.of("Ingress", "HTTPRoute"):
        assert "internal" not in json.dumps(way_in["spec"])


def test_services_and_budgets_select_the_pods_that_they_mean(everything: Rendered) -> None:
    def selected(labels: dict[str, str]) -> list[str]:
        return [
            name
            for name, metadata, _ in everything.pods()
            if labels.items() <= metadata["labels"].items()
        ]

    sets = {"sangam-prefill", "sangam-decode", "sangam-colocated"}
    for name, names in {
        "sangam-router": {"sangam-router"},
        "sangam-router-internal": {"sangam-router"},
        "sangam-redis": {"sangam-redis"},
        "sangam-worker": sets,
    }.items():
        assert set(selected(everything.one("Service", name)["spec"]["selector"])) == names
    for budget in everything.of("PodDisruptionBudget"):
        name = budget["metadata"]["name"]
        assert selected(budget["spec"]["selector"]["matchLabels"]) == [name]


def test_policies_admit_routers_and_nodes_only(helm: Helm) -> None:
    rendered = helm.render(None, 'networkPolicy.nodeCIDRs=["10.0.0.0/16"]')
    redis = rendered.one("NetworkPolicy", "sangam-redis")["spec"]["ingress"]
    (rule,) = redis
    assert rule["ports"] == [{"port": "redis"}]
    components = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in rule["from"]
        if "podSelector" in peer
    ]
    assert components == ["router"]
    assert {"ipBlock": {"cidr": "10.0.0.0/16"}} in rule["from"]
    public, internal = rendered.one("NetworkPolicy", "sangam-router")["spec"]["ingress"]
    assert public == {"ports": [{"port": "http"}]}
    assert internal["ports"] == [{"port": "internal"}]
    assert len(internal["from"]) == 2


def test_policies_admit_who_is_named_beside(everything: Rendered) -> None:
    _, internal = everything.one("NetworkPolicy", "sangam-router")["spec"]["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}} in internal["from"]


def test_there_are_no_policies_without_the_nodes_ranges(default: Rendered) -> None:
    assert default.of("NetworkPolicy") == []


def test_workers_with_addresses_of_their_own_may_reach_redis(helm: Helm) -> None:
    rendered = helm.render(
        None,
        'networkPolicy.nodeCIDRs=["10.0.0.0/16"]',
        "workers.defaults.gpus=0",
        "workers.defaults.hostNetwork=false",
    )
    (rule,) = rendered.one("NetworkPolicy", "sangam-redis")["spec"]["ingress"]
    assert "worker" in json.dumps(rule["from"])


def test_redis_always_has_a_password(default: Rendered) -> None:
    reference = {"secretKeyRef": {"name": "sangam-redis", "key": "redis-password"}}
    for each in default.of("StatefulSet", "Deployment"):
        name = "REDISCLI_AUTH" if component(each) == "redis" else "SANGAM_REDIS_PASSWORD"
        assert environment(each)[name] == reference
    start = default.one("ConfigMap", "sangam-redis")["data"]["start.sh"]
    assert "requirepass" in start
    assert default.one("Secret", "sangam-redis")["data"]["redis-password"]


def test_two_installations_get_two_passwords(helm: Helm, default: Rendered) -> None:
    other = helm.render(release="sangam-two")
    one = default.one("Secret", "sangam-redis")["data"]["redis-password"]
    assert other.one("Secret", "sangam-two-redis")["data"]["redis-password"] != one


def test_an_external_redis_replaces_the_bundled_one(helm: Helm) -> None:
    rendered = helm.render(CHART / "ci/disaggregated-values.yaml")
    assert [
        each["metadata"]["name"] for each in rendered.objects if "redis" in each["metadata"]["name"]
    ] == []
    for each in (router(rendered), *rendered.workers):
        variables = environment(each)
        assert variables["SANGAM_REDIS_URL"].startswith("rediss://sangam@redis.example.com:6380/0?")
        assert variables["SANGAM_REDIS_PASSWORD"]["secretKeyRef"]["name"] == "sangam-redis-password"
        path = variables["SANGAM_REDIS_URL"].split("ssl_ca_certs=")[1]
        mounts = [m["mountPath"] for m in container(each)["volumeMounts"]]
        assert path.rsplit("/", 1)[0] in mounts


def test_secrets_that_exist_are_named_not_made(helm: Helm) -> None:
    rendered = helm.render(
        {"auth": {"redis": {"existingSecret": "a"}, "internalToken": {"existingSecret": "b"}}}
    )
    assert rendered.of("Secret") == []
    for each in (router(rendered), *rendered.workers):
        assert environment(each)["SANGAM_REDIS_PASSWORD"]["secretKeyRef"]["name"] == "a"
        assert environment(each)["SANGAM_INTERNAL_TOKEN"]["secretKeyRef"]["name"] == "b"


def test_every_object_is_named_labelled_and_placed(everything: Rendered) -> None:
    seen = set()
    for each in everything.objects:
        metadata = each["metadata"]
        key = (each["kind"], metadata["name"])
        assert key not in seen
        seen.add(key)
        assert metadata["namespace"] == "serving", key
        assert metadata["labels"]["app.kubernetes.io/name"] == "sangam", key
        assert metadata["labels"]["app.kubernetes.io/instance"] == "sangam", key


def test_no_variable_stands_twice(everything: Rendered) -> None:
    for name, _, spec in everything.pods():
        for each in spec["containers"]:
            names = [entry["name"] for entry in each["env"]]
            assert len(names) == len(set(names)), name


def test_names_stay_short_enough_for_labels(helm: Helm) -> None:
    rendered = helm.render(release="r" * 53)
    for each in rendered.of("StatefulSet", "Deployment"):
        # Controllers make a label of the name and a hash.
        assert len(each["metadata"]["name"]) <= 63 - len("-0123456789")
