{{/* To Helm numbers are floats: 16777216 would be written as 1.6777216e+07. */}}
{{- define "mhsa.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* How long a pod takes to end: until other nodes stop sending to it, until it has answered what it accepted. */}}
{{- define "mhsa.shutdownSeconds" -}}
{{- with .Values.shutdown -}}
{{- addf .preStopSeconds .drainSeconds .graceSeconds | ceil | int64 -}}
{{- end -}}
{{- end -}}

{{/* 5 s more, for gRPC to flush and for Python to exit. */}}
{{- define "mhsa.terminationGracePeriodSeconds" -}}
{{- .Values.shutdown.terminationGracePeriodSeconds | default (add (include "mhsa.shutdownSeconds" .) 5) | int64 -}}
{{- end -}}

{{- define "mhsa.args" -}}
- --models=/models
- --grpc-port={{ .Values.ports.grpc }}
- --metrics-port={{ .Values.ports.metrics }}
- --device={{ .Values.gpu.enabled | ternary "cuda" "cpu" }}
- --drain-seconds={{ include "mhsa.text" .Values.shutdown.drainSeconds }}
- --grace-seconds={{ include "mhsa.text" .Values.shutdown.graceSeconds }}
{{- if .Values.tls.secretName }}
- --tls-cert=/etc/mhsa/tls/tls.crt
- --tls-key=/etc/mhsa/tls/tls.key
{{- end }}
{{- if .Values.auth.secretName }}
- --auth-token-file=/etc/mhsa/auth/{{ .Values.auth.key }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {{ printf "--%s=%s" (kebabcase $name) (include "mhsa.text" $value) | quote }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* A probe of a health service, called with (list $ SERVICE). The kubelet's gRPC probe has no TLS; our command has. */}}
{{- define "mhsa.probe" -}}
{{- $ := first . -}}
{{- $service := last . -}}
{{- if $.Values.tls.secretName -}}
exec:
  command:
    - mhsa-serve
    - healthcheck
    - --tls
    - --target=127.0.0.1:{{ $.Values.ports.grpc }}
    - --service={{ $service }}
{{- else -}}
grpc:
  port: {{ $.Values.ports.grpc }}
  service: {{ $service | quote }}
{{- end -}}
{{- end -}}

{{/* Less often with TLS: each probe is then a process that takes 0.2 s of the pod's own CPU. */}}
{{- define "mhsa.probePeriod" -}}
{{- empty .Values.tls.secretName | ternary 5 10 -}}
{{- end -}}
