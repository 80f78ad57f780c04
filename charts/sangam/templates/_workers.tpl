{{/* What a role's values are: `workers.<role>` laid over `workers.defaults`. */}}

{{/* The roles that `.Values` has counts for, in the order in which they are rendered. */}}
{{- define "sangam.roles" -}}
prefill decode colocated
{{- end -}}

{{/* A role's values, as JSON: maps merged, lists and plain values replaced. (dict "root" $ "role" ROLE) */}}
{{- define "sangam.roleValues" -}}
{{- $workers := .root.Values.workers -}}
{{ mergeOverwrite (deepCopy $workers.defaults) (deepCopy (get $workers .role)) | toJson }}
{{- end -}}

{{/* The pod selector of this release's workers, as the fleet watcher wants it. */}}
{{- define "sangam.workerSelector" -}}
app.kubernetes.io/name=sangam,app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=worker
{{- end -}}

{{/* Something where a role's pods are on the host network, else nothing. */}}
{{- define "sangam.hasHostNetworkWorkers" -}}
{{- range $role := splitList " " (include "sangam.roles" .) }}
{{- if (include "sangam.roleValues" (dict "root" $ "role" $role) | fromJson).hostNetwork }}{{ $role }}{{ end }}
{{- end }}
{{- end -}}

{{/* The same for pods with an address of their own. */}}
{{- define "sangam.hasPodNetworkWorkers" -}}
{{- range $role := splitList " " (include "sangam.roles" .) }}
{{- if not (include "sangam.roleValues" (dict "root" $ "role" $role) | fromJson).hostNetwork }}{{ $role }}{{ end }}
{{- end }}
{{- end -}}

{{/* The grace period of a role's pods, seconds. */}}
{{- define "sangam.workerGraceSeconds" -}}
{{ .terminationGracePeriodSeconds | default (add (ceil .drainDeadlineSeconds) 30) | int }}
{{- end -}}

{{/* The longest lease of any role, seconds, or nothing where no role sets one: the routers must know it. */}}
{{- define "sangam.leaseSeconds" -}}
{{- $longest := 0.0 -}}
{{- range $role := splitList " " (include "sangam.roles" .) -}}
  {{- $settings := (include "sangam.roleValues" (dict "root" $ "role" $role) | fromJson).settings -}}
  {{- $longest = maxf $longest ($settings.leaseSeconds | default 0.0) -}}
{{- end -}}
{{- if $longest }}{{ include "sangam.scalar" $longest }}{{ end -}}
{{- end -}}

{{/* The image tag of a role without one: the variant follows the device. (dict "root" $ "worker" VALUES) */}}
{{- define "sangam.workerTag" -}}
{{ printf "%s-%s" .root.Chart.AppVersion (gt (int .worker.gpus) 0 | ternary "gpu" "cpu") }}
{{- end -}}

{{/* A role's resources with its GPU. Called with the role's values. */}}
{{- define "sangam.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
  {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (int .gpus)) ($resources.limits | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* The workers' writable cache. */}}
{{- define "sangam.workerCacheVolume" -}}
{{- with .Values.model.cache -}}
- name: cache
{{- if eq .type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .claimName }}
{{- else if eq .type "hostPath" }}
  hostPath:
    path: {{ .hostPath }}
    type: DirectoryOrCreate
{{- else }}
  emptyDir:
    sizeLimit: {{ .sizeLimit }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A worker's environment. (dict "root" $ "role" ROLE "worker" VALUES) */}}
{{- define "sangam.workerEnv" -}}
{{- $worker := .worker -}}
{{- $isGpu := gt (int $worker.gpus) 0 -}}
{{- $device := dict "device" ($isGpu | ternary "cuda:0" "cpu") "dtype" ($isGpu | ternary "bfloat16" "float32") -}}
- name: SANGAM_ROLE
  value: {{ .role }}
# The pod's UID: a recreated pod of the same name is another worker.
- name: SANGAM_WORKER_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.uid
- name: SANGAM_WORKER_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: SANGAM_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: SANGAM_ADVERTISE_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: SANGAM_HOST
  value: 0.0.0.0
- name: SANGAM_PORT_RANGE
  value: {{ $worker.portRange | quote }}
- name: SANGAM_PORT_FILE
  value: /run/sangam/port
- name: SANGAM_DRAIN_DEADLINE_SECONDS
  value: {{ include "sangam.scalar" $worker.drainDeadlineSeconds | quote }}
{{- range $role := list "prefill" "decode" "colocated" }}
- name: SANGAM_TAU_TOKENS_{{ upper $role }}
  value: {{ include "sangam.scalar" (get $.root.Values.tau $role) | quote }}
{{- end }}
{{ include "sangam.sharedEnv" .root }}
{{- include "sangam.settingsEnv" (merge (deepCopy $worker.settings) $device) }}
{{- range $name, $value := $worker.ncclEnv }}
- name: {{ $name }}
  value: {{ include "sangam.scalar" $value | quote }}
{{- end }}
{{- with $worker.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
