//! The objects of Kubernetes that tell of pods, reduced to what a trace needs.

use crate::trace::error::Problem;
use crate::trace::{Remark, Status, field};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Resources that are whole GPUs.
const GPUS: [&str; 4] = ["roommate.dev/gpu", "nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe"];
/// Beginnings of resources and annotations that are parts of a GPU: MIG slices, time slices,
/// `HAMi`, KAI.
const PARTS: [&str; 6] = [
    "nvidia.com/mig-",
    "nvidia.com/gpu.shared",
    "nvidia.com/gpumem",
    "nvidia.com/gpucores",
    "gpu-fraction",
    "gpu-memory",
];
/// Labels and annotations that name the gang of a pod.
const GANGS: [&str; 8] = [
    "scheduling.x-k8s.io/pod-group",
    "scheduling.k8s.io/group-name",
    "pod-group-name",
    "jobset.sigs.k8s.io/jobset-name",
    "training.kubeflow.org/job-name",
    "volcano.sh/job-name",
    "leaderworkerset.sigs.k8s.io/group-key",
    "ray.io/cluster",
];
/// Labels that name the queue of a pod.
const QUEUES: [&str; 4] = [
    "roommate.dev/queue",
    "kueue.x-k8s.io/queue-name",
    "kai.scheduler/queue",
    "volcano.sh/queue-name",
];
/// Labels of nodes that say their GPU model, as pods select them.
const MODELS: [&str; 3] =
    ["nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "roommate.dev/gpu-model"];
/// The index of a pod in an indexed Job.
const INDEX: &str = "batch.kubernetes.io/job-completion-index";
/// Owners whose pods serve until they are deleted.
const SERVERS: [&str; 4] = ["ReplicaSet", "StatefulSet", "DaemonSet", "ReplicationController"];

/// What an object is to a trace.
pub(super) enum Object {
    Pod(Box<PodState>),
    Times(Times),
    Other,
}

/// Times of a pod that an event or an audit log tells, in seconds since 1970.
pub(super) struct Times {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: Option<String>,
    pub(super) start_s: Option<u64>,
    pub(super) end_s: Option<u64>,
}

impl Times {
    pub(super) fn latest_s(&self) -> u64 {
        self.start_s.max(self.end_s).unwrap_or(0)
    }
}

/// The last known state of a pod. Times are seconds since 1970.
pub(super) struct PodState {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// The job that it belongs to.
    pub(super) job: String,
    /// The kind of work.
    pub(super) kind: Option<String>,
    pub(super) team: String,
    pub(super) submit_s: Option<u64>,
    pub(super) start_s: Option<u64>,
    pub(super) end_s: Option<u64>,
    pub(super) status: Option<Status>,
    pub(super) gpus: u32,
    pub(super) gpu_model: Option<String>,
    pub(super) cpu_milli: u32,
    pub(super) mem_mib: u32,
    pub(super) best_effort: bool,
    parts: bool,
    server: bool,
}

impl PodState {
    pub(super) fn latest_s(&self) -> u64 {
        self.submit_s.max(self.start_s).max(self.end_s).unwrap_or(0)
    }

    /// Why it is no part of a job of the trace.
    pub(super) fn left_out(&self) -> Option<Remark> {
        Some(match self {
            Self { parts: true, .. } => Remark::PartOfGpu,
            Self { gpus: 0, .. } => Remark::NoGpu,
            Self { server: true, .. } => Remark::Server,
            Self { start_s: None, .. } => Remark::NeverStarted,
            _ => return None,
        })
    }
}

impl Object {
    /// What a JSON object is; an error names the object.
    pub(super) fn of(value: Value) -> Result<Self, Problem> {
        let has = |key: &str| value.get(key).is_some();
        let is_audit = text(&value, "/apiVersion").starts_with("audit.k8s.io/");
        if is_audit {
            Self::of_audit(value)
        } else if has("type") && has("object") {
            Self::of_watch(value)
        } else if has("involvedObject") || has("regarding") {
            Self::of_event(&value)
        } else if text(&value, "/kind") == "Pod" || value.pointer("/spec/containers").is_some() {
            pod(value).map(|pod| Self::Pod(Box::new(pod)))
        } else {
            Ok(Self::Other)
        }
    }

    /// `{"type": "DELETED", "object": {…}}`, a line of a watch.
    fn of_watch(mut value: Value) -> Result<Self, Problem> {
        if text(&value, "/type") == "BOOKMARK" {
            return Ok(Self::Other);
        }
        let deleted = text(&value, "/type") == "DELETED";
        let mut object = Self::of(value["object"].take())?;
        if let Object::Pod(pod) = &mut object
            && deleted
            && pod.start_s.is_some()
            && pod.status.is_none()
        {
            pod.status = Some(Status::Killed);
        }
        Ok(object)
    }

    /// An event of `v1` or `events.k8s.io/v1`.
    fn of_event(value: &Value) -> Result<Self, Problem> {
        let of =
            if value.get("involvedObject").is_some() { "/involvedObject" } else { "/regarding" };
        if text(value, &format!("{of}/kind")) != "Pod" {
            return Ok(Self::Other);
        }
        let times =
            ["/eventTime", "/firstTimestamp", "/deprecatedFirstTimestamp", "/lastTimestamp"];
        let at = times.into_iter().map(|key| text(value, key)).find(|t| !t.is_empty());
        let named = |problem| {
            told(&format!("event of pod {}", text(value, &format!("{of}/name"))), problem)
        };
        let at_s = at.map(field::timestamp).transpose().map_err(named)?;
        let (start_s, end_s) = match text(value, "/reason") {
            "Scheduled" | "Started" => (at_s, None),
            "Killing" | "Preempted" | "Evicted" => (None, at_s),
            _ => return Ok(Self::Other),
        };
        Ok(Self::Times(Times {
            namespace: text(value, &format!("{of}/namespace")).into(),
            name: text(value, &format!("{of}/name")).into(),
            uid: Some(text(value, &format!("{of}/uid")).into())
                .filter(|uid: &String| !uid.is_empty()),
            start_s,
            end_s,
        }))
    }

    /// A line of an audit log: the answer has the pod where the log's level is `RequestResponse`;
    /// otherwise only deletions tell something.
    fn of_audit(mut value: Value) -> Result<Self, Problem> {
        if text(&value, "/objectRef/resource") != "pods" {
            return Ok(Self::Other);
        }
        let deletes = text(&value, "/verb") == "delete";
        if text(&value, "/responseObject/kind") == "Pod" && !deletes {
            return Self::of(value["responseObject"].take());
        }
        if !deletes {
            return Ok(Self::Other);
        }
        let name = text(&value, "/objectRef/name");
        let at = field::timestamp(text(&value, "/requestReceivedTimestamp"));
        let at_s = at.map_err(|problem| told(&format!("audit of pod {name}"), problem))?;
        Ok(Self::Times(Times {
            namespace: text(&value, "/objectRef/namespace").into(),
            name: name.into(),
            uid: value
                .pointer("/responseObject/metadata/uid")
                .and_then(Value::as_str)
                .map(Into::into),
            start_s: None,
            end_s: Some(at_s),
        }))
    }
}

/// The text at a place of an object; empty if there is none.
fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// A problem with the name of the object, which has no line of its own.
fn told(what: &str, problem: impl std::fmt::Display) -> Problem {
    Problem::Json(format!("{what}: {problem}"))
}

type Texts = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Pod {
    metadata: Metadata,
    spec: Spec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    uid: String,
    creation_timestamp: Option<String>,
    deletion_timestamp: Option<String>,
    #[serde(default)]
    labels: Texts,
    #[serde(default)]
    annotations: Texts,
    #[serde(default)]
    owner_references: Vec<Owner>,
}

#[derive(Deserialize)]
struct Owner {
    kind: String,
    name: String,
    #[serde(default)]
    controller: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    containers: Vec<Container>,
    #[serde(default)]
    node_selector: Texts,
    scheduling_group: Option<SchedulingGroup>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SchedulingGroup {
    pod_group_name: Option<String>,
}

#[derive(Deserialize)]
struct Container {
    #[serde(default)]
    resources: Resources,
}

#[derive(Default, Deserialize)]
struct Resources {
    #[serde(default)]
    limits: BTreeMap<String, Value>,
    #[serde(default)]
    requests: BTreeMap<String, Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodStatus {
    phase: Option<String>,
    start_time: Option<String>,
    #[serde(default)]
    conditions: Vec<Condition>,
    #[serde(default)]
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Condition {
    r#type: String,
    status: String,
    last_transition_time: Option<String>,
}

#[derive(Deserialize)]
struct ContainerStatus {
    #[serde(default)]
    state: ContainerState,
}

#[derive(Default, Deserialize)]
struct ContainerState {
    terminated: Option<Terminated>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Terminated {
    finished_at: Option<String>,
}

/// Reads a pod; an error names it.
fn pod(value: Value) -> Result<PodState, Problem> {
    let metadata = |key: &str| text(&value, &format!("/metadata/{key}")).to_owned();
    let what = format!("pod {}/{}", metadata("namespace"), metadata("name"));
    let pod: Pod = serde_json::from_value(value).map_err(|e| told(&what, e))?;
    pod.state().map_err(|problem| told(&what, problem))
}

impl Pod {
    fn state(self) -> Result<PodState, Problem> {
        let Self { metadata, spec, status } = &self;
        let mark = |name: &str| metadata.labels.get(name).or(metadata.annotations.get(name));
        let gpus = spec.amount(|name| GPUS.contains(&name))?;
        let asked = spec.names().chain(metadata.annotations.keys());
        let parts = asked.into_iter().any(|name| PARTS.iter().any(|part| name.starts_with(part)));
        let owner = metadata.owner_references.iter().find(|owner| owner.controller);
        let named = owner.map(|owner| owner.name.as_str());
        let class = mark("roommate.dev/class").map(String::as_str);
        let annotated = |name: &str| mark(name).map(|t| field::parse(t)).transpose();
        let mem_mib =
            annotated("roommate.dev/gpu-mem")?.map_or(Ok(0), |v| field::whole(v, 1 << 30))?;
        Ok(PodState {
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            job: self.job(owner),
            kind: mark("roommate.dev/profile")
                .cloned()
                .or_else(|| kind(self.gang().or(named).unwrap_or(&metadata.name))),
            team: QUEUES.into_iter().find_map(mark).unwrap_or(&metadata.namespace).clone(),
            submit_s: metadata.creation_timestamp.as_deref().map(field::timestamp).transpose()?,
            start_s: status.start_s()?,
            end_s: status.end_s(metadata)?,
            status: status.outcome(metadata),
            gpus: field::whole(gpus, field::MAX_GPUS)?,
            gpu_model: MODELS.into_iter().find_map(|m| spec.node_selector.get(m)).map(|m| plain(m)),
            cpu_milli: (spec.amount(|name| name == "cpu")? * 1000.0) as u32,
            mem_mib,
            best_effort: class == Some("best-effort"),
            parts,
            server: class == Some("service")
                || owner.is_some_and(|o| SERVERS.contains(&o.kind.as_str()))
                    && self.gang().is_none(),
        })
    }

    /// The gang that the pod says it belongs to.
    fn gang(&self) -> Option<&str> {
        let Metadata { labels, annotations, .. } = &self.metadata;
        let group = self.spec.scheduling_group.as_ref().and_then(|g| g.pod_group_name.as_ref());
        let marked =
            || GANGS.into_iter().find_map(|name| labels.get(name).or(annotations.get(name)));
        group.or_else(marked).map(String::as_str)
    }

    /// The job that the pod is a part or an attempt of. Pods of a Job are tasks of their own, and
    /// those with the same index are attempts of one; other owners (`PyTorchJob`, `MPIJob`) have
    /// gangs.
    fn job(&self, owner: Option<&Owner>) -> String {
        let Metadata { namespace, name, labels, annotations, .. } = &self.metadata;
        if let Some(gang) = self.gang() {
            return format!("{namespace}/{gang}");
        }
        match (owner, labels.get(INDEX).or(annotations.get(INDEX))) {
            (Some(owner), Some(index)) => format!("{namespace}/{}/{index}", owner.name),
            (Some(owner), None)
                if owner.kind != "Job" && !SERVERS.contains(&owner.kind.as_str()) =>
            {
                format!("{namespace}/{}", owner.name)
            }
            _ => format!("{namespace}/{name}"),
        }
    }
}

/// The kind of work: a name without the part that is made up for each run.
fn kind(name: &str) -> Option<String> {
    let kind = name.trim_end_matches(|c: char| c == '-' || c.is_ascii_digit());
    (!kind.is_empty()).then(|| kind.to_owned())
}

/// A GPU model as a cluster is written: `NVIDIA-H100-80GB-HBM3` in lower case.
fn plain(model: &str) -> String {
    model.to_ascii_lowercase().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "-")
}

impl Spec {
    fn names(&self) -> impl Iterator<Item = &String> {
        self.containers
            .iter()
            .flat_map(|c| c.resources.limits.keys().chain(c.resources.requests.keys()))
    }

    /// The sum over containers of a resource: its limits, or its requests where there are none.
    fn amount(&self, is: impl Fn(&str) -> bool) -> Result<f64, Problem> {
        let mut sum = 0.0;
        for Container { resources } in &self.containers {
            let of = |amounts: &BTreeMap<String, Value>| {
                amounts.iter().find(|(name, _)| is(name)).map(|(_, value)| quantity(value))
            };
            // A CPU limit is often far above what is used; the request is what a node sets aside.
            let asked = if is("cpu") {
                of(&resources.requests).or_else(|| of(&resources.limits))
            } else {
                of(&resources.limits).or_else(|| of(&resources.requests))
            };
            sum += asked.transpose()?.unwrap_or(0.0);
        }
        Ok(sum)
    }
}

/// A quantity in the units that GPUs and CPUs come in: `2`, `"2"`, `"500m"`.
fn quantity(value: &Value) -> Result<f64, Problem> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let (digits, unit) = text.strip_suffix('m').map_or((text.as_str(), 1.0), |d| (d, 1e-3));
    field::number(field::parse(digits)? * unit)
}

impl PodStatus {
    /// When its GPUs were set aside for it: when it was bound to a node.
    fn start_s(&self) -> Result<Option<u64>, Problem> {
        let bound = |c: &&Condition| c.r#type == "PodScheduled" && c.status == "True";
        let bound =
            self.conditions.iter().find(bound).and_then(|c| c.last_transition_time.as_ref());
        bound.or(self.start_time.as_ref()).map(|text| field::timestamp(text)).transpose()
    }

    /// When the last of its containers ended, or when it was deleted.
    fn end_s(&self, metadata: &Metadata) -> Result<Option<u64>, Problem> {
        let ended = |s: &ContainerStatus| Some(s.state.terminated.as_ref()?.finished_at.clone());
        let ends: Option<Vec<Option<String>>> = self.container_statuses.iter().map(ended).collect();
        let ends = ends.unwrap_or_default().into_iter().flatten();
        let last = ends.map(|text| field::timestamp(&text)).collect::<Result<Vec<u64>, _>>()?;
        let deleted = metadata.deletion_timestamp.as_deref().map(field::timestamp).transpose()?;
        let finished = self.conditions.iter().find(|c| c.r#type == "Ready" && self.is_final());
        let finished = finished.and_then(|c| c.last_transition_time.as_deref());
        let finished = finished.map(field::timestamp).transpose()?;
        Ok(last.into_iter().max().or(finished).or(deleted))
    }

    fn is_final(&self) -> bool {
        matches!(self.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    fn outcome(&self, metadata: &Metadata) -> Option<Status> {
        match self.phase.as_deref() {
            Some("Succeeded") => Some(Status::Passed),
            Some("Failed") if metadata.deletion_timestamp.is_none() => Some(Status::Failed),
            _ => metadata.deletion_timestamp.as_ref().map(|_| Status::Killed),
        }
    }
}
