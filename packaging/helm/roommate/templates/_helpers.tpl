{{- define "roommate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a part: (list . "scheduler"). */}}
{{- define "roommate.selector" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: {{ default $top.Chart.Name $top.Values.nameOverride }}
app.kubernetes.io/instance: {{ $top.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "roommate.labels" -}}
{{- $top := index . 0 -}}
{{ include "roommate.selector" . }}
app.kubernetes.io/version: {{ $top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $top.Chart.Name $top.Chart.Version }}
{{- end -}}

{{- define "roommate.image" -}}
{{- with .Values.image -}}
{{- if .registry }}{{ .registry }}/{{ end }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The service account of a part: (list . "scheduler"). */}}
{{- define "roommate.account" -}}
{{- $top := index . 0 -}}
{{- $part := index . 1 -}}
{{- $account := (index $top.Values $part).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "roommate.fullname" $top) $part -}}
{{- else -}}
{{- fail (printf "%s.serviceAccount.name is needed where create is false" $part) -}}
{{- end -}}
{{- end -}}

{{- define "roommate.serviceAccount" -}}
{{- $top := index . 0 -}}
{{- $account := (index $top.Values (index . 1)).serviceAccount -}}
{{- if $account.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "roommate.account" . }}
  namespace: {{ $top.Release.Namespace }}
  labels: {{- include "roommate.labels" . | nindent 4 }}
  {{- with $account.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
# Its pods ask for the token themselves.
automountServiceAccountToken: false
{{- end -}}
{{- end -}}

{{/* A subject for role bindings. */}}
{{- define "roommate.subject" -}}
{{- $top := index . 0 -}}
kind: ServiceAccount
name: {{ include "roommate.account" . }}
namespace: {{ $top.Release.Namespace }}
{{- end -}}

{{/* The security context of containers that need nothing of their node. */}}
{{- define "roommate.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* What all parts have in their pod: (list . "scheduler"). */}}
{{- define "roommate.pod" -}}
{{- $top := index . 0 -}}
{{- $part := index $top.Values (index . 1) -}}
serviceAccountName: {{ include "roommate.account" . }}
automountServiceAccountToken: true
{{- with $top.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Other replicas of the same part are on other nodes, if possible. */}}
{{- define "roommate.affinity" -}}
{{- $top := index . 0 -}}
{{- with (index $top.Values (index . 1)).affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- else }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "roommate.selector" . | nindent 14 }}
{{- end }}
{{- end -}}

{{- define "roommate.scrape" -}}
{{- if .top.Values.metrics.annotations }}
annotations:
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ .port | quote }}
  prometheus.io/path: /metrics
{{- end }}
{{- end -}}

{{/* A ServiceMonitor of a part: (list . "scheduler"). */}}
{{- define "roommate.serviceMonitor" -}}
{{- $top := index . 0 -}}
{{- $name := index . 1 -}}
{{- with $top.Values.metrics.serviceMonitor }}
{{- if .enabled }}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ include "roommate.fullname" $top }}-{{ $name }}
  namespace: {{ $top.Release.Namespace }}
  labels:
    {{- include "roommate.labels" (list $top $name) | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels: {{- include "roommate.selector" (list $top $name) | nindent 6 }}
  endpoints:
    - port: metrics
      interval: {{ .interval }}
      # Labels of the pods that metrics are about, not of the pod that tells them.
      honorLabels: true
{{- end }}
{{- end }}
{{- end -}}
