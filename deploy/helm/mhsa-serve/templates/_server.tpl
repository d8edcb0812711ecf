{{/* Numbers from values are floats to Helm, and would be written as 1.6777216e+07. */}}
{{- define "mhsa.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Seconds that the kubelet must wait for: until other machines have noticed, until what was accepted is answered. */}}
{{- define "mhsa.shutdownSeconds" -}}
{{- with .Values.shutdown -}}
{{- addf .preStopSeconds .drainSeconds .graceSeconds | ceil | int64 -}}
{{- end -}}
{{- end -}}

{{/* 5 more: for Python to start its end and for gRPC to flush. */}}
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

{{/* What to ask, called with (list $ SERVICE). The kubelet's own gRPC probe speaks no TLS: there our command asks. */}}
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

{{/* A command is a process of 0.2 s, out of the pod's own CPU. */}}
{{- define "mhsa.probePeriod" -}}
{{- empty .Values.tls.secretName | ternary 5 10 -}}
{{- end -}}
