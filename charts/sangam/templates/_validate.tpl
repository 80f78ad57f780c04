{{/*
What values.schema.json cannot say: values that are each well-formed but do not fit together. All
problems are told at once, before anything is created. The workers' StatefulSet calls it.
*/}}

{{- define "sangam.validate" -}}
{{- $problems := list -}}
{{- range $check := list "counts" "placing" "worker" "router" "environment" "volumes" "redis" "edge" -}}
  {{- range splitList "\n" (include (printf "sangam.problems.%s" $check) $) -}}
    {{- if trim . }}{{ $problems = append $problems (printf "  - %s" (trim .)) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- if $problems }}{{ fail (printf "\n\nThese values do not fit together:\n%s\n" (join "\n" $problems)) }}{{ end -}}
{{- end -}}

{{- define "sangam.problems.counts" -}}
{{- with .Values }}
{{- if not (or .colocated .decode) }}
No worker can decode (colocated=0, decode=0): answers would never be finished. Set colocated or decode to 1 or more.
{{- end }}
{{- if not (or .colocated .prefill) }}
No worker can prefill (colocated=0, prefill=0): no answer could begin. Set colocated or prefill to 1 or more.
{{- end }}
{{- end }}
{{- end -}}

{{- define "sangam.problems.placing" -}}
{{- with .Values }}
{{- if and (not (kindIs "invalid" .theta)) (not .prefill) }}
theta={{ include "sangam.scalar" .theta }} has no meaning without prefill workers: it says when prefills overflow from them. Set prefill, or leave theta null.
{{- end }}
{{- if and (not (kindIs "invalid" .theta)) (not .overflow) }}
theta={{ include "sangam.scalar" .theta }} has no meaning with overflow=false, which forbids what theta decides. Set one of the two.
{{- end }}
{{- $buffer := .router.settings.fixedMaskBufferTokens | default 0 | int }}
{{- if mod $buffer (int .model.blockLength) }}
router.settings.fixedMaskBufferTokens={{ $buffer }} is no multiple of model.blockLength={{ int .model.blockLength }}.
{{- end }}
{{- end }}
{{- end -}}

{{/* Every role, also one with count 0: it may be scaled. */}}
{{- define "sangam.problems.worker" -}}
{{- range $role := splitList " " (include "sangam.roles" .) }}
{{- $where := printf "workers.%s" $role }}
{{- with include "sangam.roleValues" (dict "root" $ "role" $role) | fromJson }}
{{- $least := add (ceil .drainDeadlineSeconds) 15 }}
{{- if lt (include "sangam.workerGraceSeconds" . | int64) $least }}
{{ $where }}: terminationGracePeriodSeconds={{ int .terminationGracePeriodSeconds }} would kill a worker before its drain has ended; with drainDeadlineSeconds={{ include "sangam.scalar" .drainDeadlineSeconds }} it must be at least {{ $least }}.
{{- end }}
{{- if and .gpus (not .hostNetwork) }}
{{ $where }}: hostNetwork=false with a GPU: NCCL moves KV between nodes over the host network. Set hostNetwork=true, or gpus=0.
{{- end }}
{{- $low := splitList "-" .portRange | first | int }}
{{- $high := splitList "-" .portRange | last | int }}
{{- if or (lt $low 1024) (gt $high 65535) (gt $low $high) }}
{{ $where }}: portRange={{ .portRange }} must be LOW-HIGH with 1024 <= LOW <= HIGH <= 65535.
{{- else if and .hostNetwork (le $low 32767) (ge $high 30000) }}
{{ $where }}: portRange={{ .portRange }} overlaps the NodePorts 30000-32767, which nodes redirect to Services. Stay below 30000.
{{- end }}
{{- if and .settings.totalPages .settings.poolBytes }}
{{ $where }}: settings.totalPages and settings.poolBytes exclude each other.
{{- end }}
{{- $device := .settings.device | default (.gpus | int | eq 0 | ternary "cpu" "cuda:0") }}
{{- $attention := .settings.attention | default "auto" }}
{{- if and (hasPrefix "flashinfer" $attention) (not (hasPrefix "cuda" $device)) }}
{{ $where }}: settings.attention={{ $attention }} needs a GPU, but the device is {{ $device }}. Leave attention out, or set gpus=1.
{{- end }}
{{- if and (eq (.settings.kvTransport | default "auto") "nccl") (not (hasPrefix "cuda" $device)) }}
{{ $where }}: settings.kvTransport=nccl needs a GPU, but the device is {{ $device }}. Leave kvTransport out, or set gpus=1.
{{- end }}
{{- $usesFlashInfer := and (hasPrefix "cuda" $device) (ne $attention "torch") }}
{{- if and $usesFlashInfer (eq (.settings.dtype | default "auto") "float32") }}
{{ $where }}: settings.dtype=float32 has no FlashInfer kernels. Leave dtype out, or set settings.attention=torch.
{{- end }}
{{- $lease := .settings.leaseSeconds | default 5.0 }}
{{- $heartbeat := .settings.heartbeatSeconds | default 1.0 }}
{{- if lt (float64 $lease) (mulf 2.0 $heartbeat) }}
{{ $where }}: settings.leaseSeconds={{ $lease }} must be at least two settings.heartbeatSeconds ({{ $heartbeat }}).
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "sangam.problems.router" -}}
{{- $request := include "sangam.requestSeconds" . | int64 }}
{{- with .Values.router }}
{{- if lt (ceil .shutdownSeconds | int64) $request }}
router.shutdownSeconds={{ include "sangam.scalar" .shutdownSeconds }} would cut answers at every roll: a request may take router.settings.requestSeconds={{ $request }}. Raise one or lower the other.
{{- end }}
{{- $least := add .preStopSleepSeconds (ceil .shutdownSeconds) 5 }}
{{- if lt (include "sangam.routerGraceSeconds" . | int64) $least }}
router.terminationGracePeriodSeconds={{ int .terminationGracePeriodSeconds }} would kill a router before its requests have finished; with preStopSleepSeconds={{ int .preStopSleepSeconds }} and shutdownSeconds={{ include "sangam.scalar" .shutdownSeconds }} it must be at least {{ $least }}.
{{- end }}
{{- if .autoscaling.enabled }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
router.autoscaling: minReplicas={{ int .autoscaling.minReplicas }} is above maxReplicas={{ int .autoscaling.maxReplicas }}.
{{- end }}
{{- if not (dig "requests" "cpu" "" .resources) }}
router.autoscaling needs router.resources.requests.cpu: utilisation is a percentage of it.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Names that the chart sets itself: the API server takes no name twice. */}}
{{- define "sangam.problems.environment" -}}
{{- $all := dict "router" .Values.router }}
{{- range $name, $values := omit .Values.workers "serviceAccount" }}{{ $_ := set $all (printf "workers.%s" $name) $values }}{{ end }}
{{- range $where, $values := $all }}
{{- range $values.extraEnv }}
{{- if hasPrefix "SANGAM_" .name }}
{{ $where }}.extraEnv: {{ .name }} belongs into {{ $where }}.settings, in camelCase, or has a value of its own.
{{- else if or (eq .name "HF_HOME" "HF_TOKEN") (hasKey ($values.ncclEnv | default dict) .name) }}
{{ $where }}.extraEnv: {{ .name }} is set by the chart already (model.cache, model.hfToken, ncclEnv).
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "sangam.problems.volumes" -}}
{{- range $name := list "weights" "cache" }}
{{- with get $.Values.model $name }}
{{- if and (eq .type "pvc") (not .claimName) }}
model.{{ $name }}.type=pvc needs model.{{ $name }}.claimName.
{{- end }}
{{- if and (ne .type "pvc") .claimName }}
model.{{ $name }}.claimName={{ .claimName }} is for type=pvc, but the type is {{ .type }}.
{{- end }}
{{- if and (eq .type "hostPath") (not .hostPath) }}
model.{{ $name }}.type=hostPath needs model.{{ $name }}.hostPath.
{{- end }}
{{- if and (ne .type "hostPath") .hostPath }}
model.{{ $name }}.hostPath={{ .hostPath }} is for type=hostPath, but the type is {{ .type }}.
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.model }}
{{- if and (hasPrefix "/" .name) (eq .weights.type "none") }}
model.name={{ .name }} is a folder, but no volume holds it: set model.weights.
{{- else if and (hasPrefix "/" .name) (not (hasPrefix (printf "%s/" .weights.mountPath) (printf "%s/" .name))) }}
model.name={{ .name }} does not lie under model.weights.mountPath={{ .weights.mountPath }}.
{{- end }}
{{- end }}
{{- end -}}

{{- define "sangam.problems.redis" -}}
{{- with .Values.redis.external }}
{{- if and (not .url) (or .cluster .existingSecret .tls.caSecret) }}
redis.external.cluster, existingSecret and tls.caSecret are for an external Redis: set redis.external.url. (The bundled one's password is auth.redis.existingSecret.)
{{- end }}
{{- if regexMatch "^[a-z]+://[^/@]*:[^/@]*@" .url }}
redis.external.url holds a password, which `helm get values` would show. Put it into a Secret and name that in redis.external.existingSecret.
{{- end }}
{{- if and .tls.caSecret (not (hasPrefix "rediss://" .url)) .url }}
redis.external.tls.caSecret is for TLS, but redis.external.url does not begin with rediss://.
{{- end }}
{{- if and .url $.Values.auth.redis.existingSecret }}
auth.redis.existingSecret is the bundled Redis' password; with redis.external.url set redis.external.existingSecret instead.
{{- end }}
{{- end }}
{{- end -}}

{{- define "sangam.problems.edge" -}}
{{- $request := include "sangam.requestSeconds" . | int64 }}
{{- range $name := list "ingress" "httpRoute" }}
{{- with get $.Values $name }}
{{- if and .enabled (lt (int64 .maxAnswerSeconds) $request) }}
{{ $name }}.maxAnswerSeconds={{ int .maxAnswerSeconds }} would cut answers, which may take router.settings.requestSeconds={{ $request }}.
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
httpRoute.parentRefs is empty: name the Gateway that the route belongs to, [{name: my-gateway}].
{{- end }}
{{- range .Values.networkPolicy.nodeCIDRs }}
{{- if not (include "sangam.isCidr" .) }}
networkPolicy.nodeCIDRs: {{ . | quote }} is no address range such as 10.0.0.0/16 or fd00::/64.
{{- end }}
{{- end }}
{{- if and .Values.networkPolicy.internalFrom (not .Values.networkPolicy.nodeCIDRs) }}
networkPolicy.internalFrom has no meaning while the policies are off: set networkPolicy.nodeCIDRs.
{{- end }}
{{- end -}}

{{/* Something where the text is an IPv4 or IPv6 range, else nothing. */}}
{{- define "sangam.isCidr" -}}
{{- $byte := "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])" -}}
{{- if regexMatch (printf "^%s(\\.%s){3}/(3[0-2]|[12]?[0-9])$" $byte $byte) . }}yes{{ end -}}
{{- if regexMatch "^[0-9a-fA-F:]*::?[0-9a-fA-F:]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9])$" . }}yes{{ end -}}
{{- end -}}
