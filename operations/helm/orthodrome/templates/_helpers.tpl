{{/* Names of a region's objects. Kubernetes wants lower-case letters. */}}
{{- define "orthodrome.region" -}}
{{ .release }}-{{ .region | lower }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "orthodrome.labels" -}}
app.kubernetes.io/name: orthodrome
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
