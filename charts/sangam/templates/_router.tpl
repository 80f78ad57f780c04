{{/* The routers' environment and deadlines. */}}

{{- define "sangam.routerEnv" -}}
{{- $router := .Values.router -}}
- name: SANGAM_SERVED_MODEL_NAME
  value: {{ .Values.model.servedName | quote }}
{{- if not (kindIs "invalid" .Values.theta) }}
- name: SANGAM_THETA_TOKENS
  value: {{ include "sangam.scalar" .Values.theta | quote }}
{{- end }}
- name: SANGAM_OVERFLOW
  value: {{ .Values.overflow | quote }}
- name: SANGAM_SHUTDOWN_SECONDS
  value: {{ include "sangam.scalar" $router.shutdownSeconds | quote }}
{{- with include "sangam.leaseSeconds" . }}
- name: SANGAM_WORKER_LEASE_SECONDS
  value: {{ . | quote }}
{{- end }}
{{- if $router.fleetWatcher.enabled }}
- name: SANGAM_KUBERNETES_NAMESPACE
  value: {{ .Release.Namespace }}
- name: SANGAM_KUBERNETES_POD_SELECTOR
  value: {{ include "sangam.workerSelector" . }}
{{- end }}
{{- with $router.apiKeys }}
{{- if .existingSecret }}
- name: SANGAM_API_KEYS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{ include "sangam.sharedEnv" . }}
{{- include "sangam.settingsEnv" $router.settings }}
{{- with $router.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Seconds from a router pod's deletion to its kill. Called with the routers' values. */}}
{{- define "sangam.routerGraceSeconds" -}}
{{ .terminationGracePeriodSeconds | default (add .preStopSleepSeconds (ceil .shutdownSeconds) 20) | int }}
{{- end -}}

{{/* Deadline of a request, seconds: the setting, or the service's default. */}}
{{- define "sangam.requestSeconds" -}}
{{ .Values.router.settings.requestSeconds | default 600 | ceil | int }}
{{- end -}}
