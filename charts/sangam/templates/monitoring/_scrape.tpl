{{/*
Labels of all that is scraped: alerts and dashboards tell releases apart by `namespace` and
`release`, whoever scrapes. (dict "root" $ "component" "router")
*/}}
{{- define "sangam.scrapeLabels" -}}
- targetLabel: release
  replacement: {{ .root.Release.Name | quote }}
- targetLabel: namespace
  replacement: {{ .root.Release.Namespace | quote }}
- targetLabel: job
  replacement: {{ include "sangam.fullname" .root }}-{{ .component }}
{{- end -}}
