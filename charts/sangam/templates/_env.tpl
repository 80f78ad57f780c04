{{/*
Environment of routers and workers. Values of `settings` are named by rule: leaseSeconds is
SANGAM_LEASE_SECONDS; a test holds the names against the services' settings classes.
*/}}

{{/* `settings`, sorted by name. */}}
{{- define "sangam.settingsEnv" -}}
{{- range $name, $value := . }}
- name: SANGAM_{{ $name | snakecase | upper }}
  value: {{ include "sangam.scalar" $value | quote }}
{{- end }}
{{- end -}}

{{/* What routers and workers share: the model, the token, Redis. */}}
{{- define "sangam.sharedEnv" -}}
{{- $external := .Values.redis.external -}}
- name: SANGAM_MODEL
  value: {{ .Values.model.name | quote }}
- name: SANGAM_BLOCK_LENGTH
  value: {{ include "sangam.scalar" .Values.model.blockLength | quote }}
- name: SANGAM_INTERNAL_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "sangam.tokenSecretName" . }}
      key: {{ .Values.auth.internalToken.key }}
- name: SANGAM_REDIS_URL
  value: {{ include "sangam.redisUrl" . | quote }}
- name: SANGAM_REDIS_NAMESPACE
  value: {{ include "sangam.redisNamespace" . | quote }}
{{- if $external.cluster }}
- name: SANGAM_REDIS_CLUSTER
  value: "true"
{{- end }}
{{- if not $external.url }}
- name: SANGAM_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "sangam.redisSecretName" . }}
      key: {{ .Values.auth.redis.key }}
{{- else if $external.existingSecret }}
- name: SANGAM_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $external.existingSecret }}
      key: {{ $external.key }}
{{- end }}
- name: HF_HOME
  value: /cache/huggingface
{{- with .Values.model.hfToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Redis' URL, without the password. */}}
{{- define "sangam.redisUrl" -}}
{{- with .Values.redis.external -}}
{{- if not .url -}}
redis://{{ include "sangam.fullname" $ }}-redis.{{ $.Release.Namespace }}.svc:6379/0
{{- else if .tls.caSecret -}}
{{ .url }}{{ contains "?" .url | ternary "&" "?" }}ssl_ca_certs=/etc/sangam/redis-ca/{{ .tls.caKey }}
{{- else -}}
{{ .url }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The prefix of all keys in Redis. */}}
{{- define "sangam.redisNamespace" -}}
{{- $shared := printf "%s.%s" .Release.Namespace (include "sangam.fullname" .) -}}
{{ .Values.redis.namespace | default (.Values.redis.external.url | empty | ternary "sangam" $shared) }}
{{- end -}}

{{/* Volumes that routers and workers share: scratch space, read-only weights, Redis' authority. */}}
{{- define "sangam.sharedVolumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.model.weights }}
{{- if eq .type "pvc" }}
- name: weights
  persistentVolumeClaim:
    claimName: {{ .claimName }}
    readOnly: true
{{- else if eq .type "hostPath" }}
- name: weights
  hostPath:
    path: {{ .hostPath }}
    type: Directory
{{- end }}
{{- end }}
{{- with .Values.redis.external.tls.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ . }}
{{- end }}
{{- end -}}

{{/* Their mounts. */}}
{{- define "sangam.sharedMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if ne .Values.model.weights.type "none" }}
- name: weights
  mountPath: {{ .Values.model.weights.mountPath }}
  readOnly: true
{{- end }}
{{- if .Values.redis.external.tls.caSecret }}
- name: redis-ca
  mountPath: /etc/sangam/redis-ca
  readOnly: true
{{- end }}
{{- end -}}
