{{/*
Names, labels, images and small pieces that several templates share. No decisions: what is refused
stands in _validate.tpl, what a role's values are in _workers.tpl, the containers' environment in
_env.tpl.
*/}}

{{/*
What objects' names begin with: the release's name if it contains "sangam", else RELEASE-sangam.
40 characters, so that FULLNAME-colocated with the suffixes that controllers add stays a label.
*/}}
{{- define "sangam.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "sangam" $name) }}{{ $name = printf "%s-sangam" $name }}{{ end -}}
{{- default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels that select one component's pods; frozen. (dict "root" $ "component" "router") */}}
{{- define "sangam.selectorLabels" -}}
app.kubernetes.io/name: sangam
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* All labels of an object. (dict "root" $ "component" "router") */}}
{{- define "sangam.labels" -}}
{{ include "sangam.selectorLabels" . }}
{{ include "sangam.versionLabels" .root }}
{{- end -}}

{{/* What no selector may use, since it changes with the chart. */}}
{{- define "sangam.versionLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: sangam
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* A pod's labels: never the chart's version, or every chart release would restart every worker. */}}
{{- define "sangam.podLabels" -}}
{{ include "sangam.selectorLabels" . }}
app.kubernetes.io/part-of: sangam
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image reference. (dict "image" IMAGE "tag" DEFAULT-TAG) */}}
{{- define "sangam.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}
{{- end -}}

{{/* A component's service account. (dict "root" $ "component" "worker" "account" VALUES) */}}
{{- define "sangam.serviceAccountName" -}}
{{- if .account.create -}}
{{ .account.name | default (printf "%s-%s" (include "sangam.fullname" .root) .component) }}
{{- else -}}
{{ .account.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* A value as a variable's text: Helm reads YAML numbers as floats, which would print 2e+06. */}}
{{- define "sangam.scalar" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/*
The replicas of a set: the live count as long as the value is the one that the set was last rendered
from (an annotation keeps it), else the value. So an upgrade keeps what `kubectl scale` made, and
applies a number that it cannot conflict over. `helm template` knows no live set: the value.
(dict "root" $ "kind" "StatefulSet" "name" NAME "count" VALUE)
*/}}
{{- define "sangam.replicas" -}}
{{- if eq (include "sangam.renderedReplicas" .) (include "sangam.scalar" .count) -}}
{{ (lookup "apps/v1" .kind .root.Release.Namespace .name).spec.replicas | int }}
{{- else -}}
{{ .count | int }}
{{- end -}}
{{- end -}}

{{/* The value that a set in the cluster was last rendered from, or nothing. Called like the above. */}}
{{- define "sangam.renderedReplicas" -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace .name | default dict -}}
{{ dig "metadata" "annotations" "sangam.io/rendered-replicas" "" $live }}
{{- end -}}

{{/* What every pod has. */}}
{{- define "sangam.podBasics" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
# A Service called sangam would otherwise put SANGAM_PORT and others into the environment.
enableServiceLinks: false
{{- end -}}

{{/* Where pods may run and how important they are. Called with the component's values. */}}
{{- define "sangam.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}
