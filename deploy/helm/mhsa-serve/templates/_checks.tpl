{{/* What the schema cannot check: values that are valid alone but not together. Each message says what to change. */}}
{{- define "mhsa.checks" -}}
{{- include "mhsa.checks.model" . -}}
{{- include "mhsa.checks.threads" . -}}
{{- include "mhsa.checks.shutdown" . -}}
{{- include "mhsa.checks.scaling" . -}}
{{- include "mhsa.checks.names" . -}}
{{- include "mhsa.checks.host" . -}}
{{- include "mhsa.checks.arguments" . -}}
{{- if eq (int64 .Values.ports.grpc) (int64 .Values.ports.metrics) -}}
{{- fail "ports.grpc and ports.metrics are the same port" -}}
{{- end -}}
{{- end -}}

{{- define "mhsa.checks.model" -}}
{{- with .Values.model -}}
{{- if and (eq .source "pvc") (not .pvc.claimName) -}}
{{- fail "model.source is pvc: set model.pvc.claimName to the claim that holds <name>/<version>/ bundles" -}}
{{- else if and (eq .source "init") (not .init.image) -}}
{{- fail "model.source is init: set model.init.image to the image that writes <name>/<version>/ bundles to /models" -}}
{{- else if and (eq .source "image") (not .image.reference) -}}
{{- fail "model.source is image: set model.image.reference to the OCI image that holds <name>/<version>/ bundles" -}}
{{- end -}}
{{- if and (eq .source "image") (semverCompare "<1.33.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source is image: Kubernetes %s is too old: restricted Pod Security takes image volumes from 1.33 on" $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The server takes its number of threads from the CPU quota; a second number would one day contradict it. */}}
{{- define "mhsa.checks.threads" -}}
{{- $limit := include "mhsa.cpuLimit" . -}}
{{- if and $limit .Values.settings.threads -}}
{{- fail "settings.threads and resources.limits.cpu are both set: the server takes its threads from the limit; remove settings.threads" -}}
{{- else if not (or $limit .Values.settings.threads) -}}
{{- fail "resources.limits.cpu is not set: the server would take every CPU of the node; set it, or settings.threads" -}}
{{- end -}}
{{- end -}}

{{- define "mhsa.cpuLimit" -}}
{{- with .Values.resources -}}{{- with .limits -}}{{- with .cpu -}}{{ . }}{{- end -}}{{- end -}}{{- end -}}
{{- end -}}

{{- define "mhsa.checks.shutdown" -}}
{{- $needed := include "mhsa.shutdownSeconds" . | int64 -}}
{{- $given := include "mhsa.terminationGracePeriodSeconds" . | int64 -}}
{{- if le $given $needed -}}
{{- fail (printf "shutdown.terminationGracePeriodSeconds is %d: the server would be killed before it has answered what it accepted; it must be more than preStopSeconds + drainSeconds + graceSeconds = %d" $given $needed) -}}
{{- end -}}
{{- end -}}

{{- define "mhsa.checks.scaling" -}}
{{- with .Values.autoscaling -}}
{{- if and .hpa.enabled .keda.enabled -}}
{{- fail "autoscaling.hpa and autoscaling.keda are both enabled: KEDA makes a HorizontalPodAutoscaler of its own, and two would fight" -}}
{{- end -}}
{{- if gt (int64 .minReplicas) (int64 .maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas %d is more than maxReplicas %d" (int64 .minReplicas) (int64 .maxReplicas)) -}}
{{- end -}}
{{- if and (or .hpa.enabled .keda.enabled) .cpuPercent (not $.Values.gpu.enabled) -}}
{{- if not (or (include "mhsa.cpuLimit" $) (dig "requests" "cpu" "" (default dict $.Values.resources))) -}}
{{- fail "autoscaling.cpuPercent is a part of the CPU request, and there is none: set resources.requests.cpu, or autoscaling.cpuPercent to null" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Service's name is a label of DNS that begins with a letter; dots of the release's name have become dashes. */}}
{{- define "mhsa.checks.names" -}}
{{- $name := include "mhsa.fullname" . -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $name) -}}
{{- fail (printf "%s cannot be the name of a Service, which begins with a letter: set fullnameOverride" $name) -}}
{{- end -}}
{{- end -}}

{{/* The kubelet asks at the pod's address. */}}
{{- define "mhsa.checks.host" -}}
{{- with .Values.settings.host -}}
{{- if regexMatch "^(localhost|127[.].*|::1)$" . -}}
{{- fail (printf "settings.host is %s: neither callers nor the kubelet's probes would reach the server; leave it out, or set it to :: for IPv6" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of a flag given twice the second counts, and a flag overrides its variable, both silently. Probes and mounts would not match. */}}
{{- define "mhsa.checks.arguments" -}}
{{- range $flag, $value := include "mhsa.owned" . | fromYaml -}}
{{- range $.Values.extraArgs -}}
{{- if or (eq . $flag) (hasPrefix (print $flag "=") .) -}}
{{- fail (printf "extraArgs has %s: set %s" . $value) -}}
{{- end -}}
{{- end -}}
{{- range $.Values.extraEnv -}}
{{- if eq .name (printf "MHSA_%s" (trimPrefix "--" $flag | replace "-" "_" | upper)) -}}
{{- fail (printf "extraEnv has %s: set %s" .name $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Flags that the chart sets, each with the value that sets it. */}}
{{- define "mhsa.owned" -}}
--models: model
--grpc-port: ports.grpc
--metrics-port: ports.metrics
--device: gpu.enabled
--drain-seconds: shutdown.drainSeconds
--grace-seconds: shutdown.graceSeconds
--tls-cert: tls.secretName
--tls-key: tls.secretName
--auth-token-file: auth.secretName
{{- range $name, $_ := .Values.settings }}
--{{ kebabcase $name }}: settings.{{ $name }}
{{- end }}
{{- if and (include "mhsa.cpuLimit" .) (not (hasKey .Values.settings "threads")) }}
--threads: resources.limits.cpu
{{- end }}
{{- end -}}
