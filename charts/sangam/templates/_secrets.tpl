{{/*
The two secrets, and what of them makes pods roll. A generated value is made once: a live Secret's
value is taken up again, and within one rendering it is remembered in .Values, so that the Secret and
the checksums agree on the first install too.
*/}}

{{- define "sangam.redisSecretName" -}}
{{ .Values.auth.redis.existingSecret | default (printf "%s-redis" (include "sangam.fullname" .)) }}
{{- end -}}

{{- define "sangam.tokenSecretName" -}}
{{ .Values.auth.internalToken.existingSecret | default (printf "%s-internal-token" (include "sangam.fullname" .)) }}
{{- end -}}

{{/* A value that is generated once, in base64. (dict "root" $ "name" SECRET "key" KEY) */}}
{{- define "sangam.generated" -}}
{{- $made := .root.Values.generated | default dict -}}
{{- $id := printf "%s/%s" .name .key -}}
{{- if not (hasKey $made $id) -}}
  {{- $live := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
  {{- $value := dig "data" .key "" $live -}}
  {{- $_ := set $made $id ($value | default (randAlphaNum 40 | b64enc)) -}}
  {{- $_ := set .root.Values "generated" $made -}}
{{- end -}}
{{ get $made $id }}
{{- end -}}

{{/*
A checksum of a secret's value, for a pod annotation: a new password rolls the pods. A Secret that
the chart does not make counts as it is in the cluster at the moment.
(dict "root" $ "existing" NAME "name" OWN-NAME "key" KEY)
*/}}
{{- define "sangam.secretChecksum" -}}
{{- if .existing -}}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .existing | default dict -}}
{{ dig "data" .key "" $live | sha256sum | trunc 16 }}
{{- else -}}
{{ include "sangam.generated" . | sha256sum | trunc 16 }}
{{- end -}}
{{- end -}}

{{- define "sangam.redisChecksum" -}}
{{- $external := .Values.redis.external -}}
{{- if and $external.url $external.existingSecret -}}
{{ include "sangam.secretChecksum" (dict "root" . "existing" $external.existingSecret "key" $external.key) }}
{{- else if not $external.url -}}
{{ include "sangam.secretChecksum" (dict "root" . "existing" .Values.auth.redis.existingSecret
     "name" (include "sangam.redisSecretName" .) "key" .Values.auth.redis.key) }}
{{- end -}}
{{- end -}}

{{- define "sangam.tokenChecksum" -}}
{{ include "sangam.secretChecksum" (dict "root" . "existing" .Values.auth.internalToken.existingSecret
     "name" (include "sangam.tokenSecretName" .) "key" .Values.auth.internalToken.key) }}
{{- end -}}
