{{- define "maskserve.name" -}}
{{- if contains "maskserve" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-maskserve" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "maskserve.labels" -}}
app.kubernetes.io/name: maskserve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* What selects the pods of one part: a list of the chart's scope and the part. */}}
{{- define "maskserve.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: maskserve
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "maskserve.security" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "maskserve.rowsInUse" -}}
(sum(maskserve_running_rows{namespace="{{ .Release.Namespace }}"}) + sum(maskserve_waiting_rows{namespace="{{ .Release.Namespace }}"})) / sum(maskserve_row_capacity{namespace="{{ .Release.Namespace }}"}) * count(maskserve_row_capacity{namespace="{{ .Release.Namespace }}"})
{{- end }}
