{{- define "sangam.validate" -}}
{{- end -}}
