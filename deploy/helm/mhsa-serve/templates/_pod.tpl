{{/* Pod Security Standards, level restricted. */}}
{{- define "mhsa.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.user }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "mhsa.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{- define "mhsa.resources" -}}
{{- $resources := deepCopy (default dict .Values.resources) -}}
{{- if .Values.gpu.enabled -}}
{{- $limits := merge (dict .Values.gpu.resource 1) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* If no GPU is free, a surge pod would wait for ever for the GPU of the pod that it replaces. */}}
{{- define "mhsa.rollingUpdate" -}}
{{- if .Values.gpu.enabled -}}
maxSurge: 0
maxUnavailable: 1
{{- else -}}
maxSurge: 25%
maxUnavailable: 0
{{- end -}}
{{- end -}}

{{- define "mhsa.mounts" -}}
- name: models
  mountPath: /models
  readOnly: true
  {{- with .Values.model }}
  {{- with (dict "pvc" .pvc.subPath "image" .image.subPath "init" "" | dig .source "") }}
  subPath: {{ . | quote }}
  {{- end }}
  {{- end }}
- name: tmp
  mountPath: /tmp
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /etc/mhsa/tls
  readOnly: true
{{- end }}
{{- if .Values.auth.secretName }}
- name: auth
  mountPath: /etc/mhsa/auth
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mhsa.volumes" -}}
- name: models
{{- with .Values.model }}
{{- if eq .source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
{{- else if eq .source "image" }}
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .init.sizeLimit }}
{{- end }}
{{- end }}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.auth.secretName }}
- name: auth
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
