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

{{/* A table of a worker's configuration that names a service, with what the service's has there: a
list of the table's name, the service's configuration and its address. */}}
{{- define "maskserve.served" -}}
{{- $name := index . 0 -}}
[{{ $name }}]
service = "{{ index . 2 }}"
{{- $within := false }}
{{- range splitList "\n" (index . 1) }}
{{- if hasPrefix "[" (trim .) }}
{{- $within = hasPrefix (printf "[%s]" $name) (trim .) }}
{{- else if $within }}
{{ . }}
{{- end }}
{{- end }}
{{- end }}
