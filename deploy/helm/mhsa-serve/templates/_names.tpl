{{- define "mhsa.name" -}}
{{- default .Chart.Name .Values.nameOverride -}}
{{- end -}}

{{/* At most 50 characters, so that it fits into the 63 of a name together with any suffix of ours. */}}
{{- define "mhsa.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $joined := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- regexReplaceAll "-+$" (default $joined .Values.fullnameOverride | replace "." "-" | trunc 50) "" -}}
{{- end -}}

{{- define "mhsa.selector" -}}
app.kubernetes.io/name: {{ include "mhsa.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of the pod of `helm test`, to which no Service is to lead. */}}
{{- define "mhsa.testSelector" -}}
app.kubernetes.io/name: {{ include "mhsa.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mhsa.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "mhsa.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "mhsa.metadata" -}}
name: {{ include "mhsa.fullname" . }}
namespace: {{ .Release.Namespace }}
labels: {{- include "mhsa.labels" . | nindent 2 }}
{{- end -}}

{{- define "mhsa.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "mhsa.fullname" .) "default") -}}
{{- end -}}

{{- define "mhsa.image" -}}
{{- $tag := printf "%s-%s" .Chart.AppVersion (.Values.gpu.enabled | ternary "gpu" "cpu") -}}
{{- with .Values.image -}}
{{- .repository -}}
{{- if .digest -}}@{{ .digest }}{{- else -}}:{{ default $tag .tag }}{{- end -}}
{{- end -}}
{{- end -}}
