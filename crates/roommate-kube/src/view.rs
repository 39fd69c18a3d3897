//! What people see of a cluster: who shares which GPU with whom, who waits, and why. Read from the
//! API server alone, so that it can be seen while no scheduler runs.

use crate::assignment::{Applied, Assignment};
use crate::client::{Error, Failure, get, send};
use crate::names;
use crate::objects::{Node, Pod};
use crate::world::Shape;
use http::Method;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use roommate_core::event::Sample;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A pod on one of its GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tenant {
    /// Its node.
    pub node: String,
    /// The number of the GPU there.
    pub gpu: u16,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its class, as its user said.
    pub class: String,
    /// Promised part of the GPU, percent; none if nothing is promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<f64>,
    /// The most of the GPU that it may use, percent.
    pub limit_percent: f64,
    /// Promised memory, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_mib: Option<u32>,
    /// `running`, `changing` (its node has not yet done what was decided), `starting`, `suspended`
    /// or `ending`.
    pub state: &'static str,
    /// Whether the agent of the node has put the assignment into force.
    pub in_force: bool,
    /// Measured seconds of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
    /// The other pods on this GPU.
    pub roommates: Vec<String>,
}

/// A pod that waits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Waiting {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// The team to which it counts.
    pub queue: String,
    /// GPUs that it asks for.
    pub gpus: u64,
    /// Since when, as the API server says.
    pub since: String,
    /// Why, as the scheduler said last.
    pub why: String,
}

/// A node as people see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeGpus {
    /// Its name.
    pub node: String,
    /// Its GPUs.
    pub gpus: u16,
    /// Name of their model.
    pub model: String,
    /// Memory of each, MiB; 0 = not known.
    pub mem_mib: u32,
    /// Whether pods can run there.
    pub up: bool,
}

/// A cluster as people see it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct View {
    /// Nodes with GPUs; empty where they were not read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeGpus>,
    /// Pods on GPUs, by node and GPU.
    pub tenants: Vec<Tenant>,
    /// Pods that wait, the oldest first.
    pub waiting: Vec<Waiting>,
}

impl View {
    /// Reads the pods of a namespace, or of all.
    pub async fn read(client: &Client, namespace: Option<&str>) -> Result<Self, Error> {
        let path = match namespace {
            Some(namespace) => format!("/api/v1/namespaces/{namespace}/pods"),
            None => "/api/v1/pods".into(),
        };
        let list = get(client, &path).await;
        let list = list.map_err(|e| Error::Other(format!("list of pods: {e}")))?;
        let items = list.get("items").and_then(Value::as_array);
        Ok(Self::of(items.map_or(&[], Vec::as_slice)))
    }

    /// Adds the nodes with their GPUs.
    pub async fn with_nodes(self, client: &Client) -> Result<Self, Error> {
        let list = get(client, "/api/v1/nodes").await;
        let list = list.map_err(|e| Error::Other(format!("list of nodes: {e}")))?;
        let items = list.get("items").and_then(Value::as_array);
        Ok(self.with(items.map_or(&[], Vec::as_slice)))
    }

    /// The same of these nodes.
    pub fn with(mut self, nodes: &[Value]) -> Self {
        let node = |value: &Value| {
            let node: Node = serde_json::from_value(value.clone()).ok()?;
            let shape = Shape::of(&node, names::RESOURCE)?;
            Some(NodeGpus {
                node: node.name().into(),
                gpus: shape.gpus,
                model: shape.model,
                mem_mib: shape.mem_mib,
                up: node.is_ready(),
            })
        };
        self.nodes = nodes.iter().filter_map(node).collect();
        self.nodes.sort_by(|a, b| a.node.cmp(&b.node));
        self
    }

    /// The view of these pods.
    pub fn of(pods: &[Value]) -> Self {
        let mut view = Self::default();
        let mut together: BTreeMap<(String, u16), Vec<String>> = BTreeMap::new();
        for value in pods {
            let Ok(pod) = serde_json::from_value::<Pod>(value.clone()) else { continue };
            if pod.has_ended() {
                continue;
            }
            match (pod.spec.node_name.clone(), Assignment::of(&pod)) {
                (Some(node), Some(assignment)) => {
                    for gpu in &assignment.gpus {
                        let on = together.entry((node.clone(), *gpu)).or_default();
                        on.push(format!("{}/{}", pod.namespace(), pod.name()));
                        view.tenants.push(tenant(&pod, &node, *gpu, &assignment));
                    }
                }
                (None, _) if pod.needs(names::RESOURCE, 1.0) > 0 => {
                    view.waiting.push(waiting(&pod, value));
                }
                _ => {}
            }
        }
        for tenant in &mut view.tenants {
            let own = format!("{}/{}", tenant.namespace, tenant.pod);
            let all = together.get(&(tenant.node.clone(), tenant.gpu));
            tenant.roommates = all.into_iter().flatten().filter(|n| **n != own).cloned().collect();
        }
        let key = |t: &Tenant| (t.node.clone(), t.gpu, t.namespace.clone(), t.pod.clone());
        view.tenants.sort_by_key(key);
        view.waiting.sort_by(|a, b| (&a.since, &a.pod).cmp(&(&b.since, &b.pod)));
        view
    }
}

fn tenant(pod: &Pod, node: &str, gpu: u16, assignment: &Assignment) -> Tenant {
    let knobs = &assignment.knobs;
    let sample = pod.annotation(names::MEASURED);
    let sample = sample.and_then(|text| serde_json::from_str::<Sample>(text).ok());
    let applied = Applied::of(pod);
    Tenant {
        node: node.into(),
        gpu,
        namespace: pod.namespace().into(),
        pod: pod.name().into(),
        class: pod.annotation(names::CLASS).unwrap_or("guaranteed").into(),
        share_percent: (knobs.sm_permille > 0).then(|| f64::from(knobs.sm_permille) / 10.0),
        limit_percent: f64::from(knobs.sm_most_permille) / 10.0,
        mem_mib: (knobs.mem_mib > 0).then_some(knobs.mem_mib),
        state: match (pod.metadata.deletion_timestamp.is_some(), assignment.suspended) {
            (true, _) => "ending",
            (_, true) => "suspended",
            // Nodes without an agent say nothing.
            _ if applied.is_some_and(|a| a < assignment.applied()) => "changing",
            _ if pod.phase() == "Running" => "running",
            _ => "starting",
        },
        in_force: applied >= Some(assignment.applied()),
        step_s: sample.map(|s| s.step_s.get()).filter(|s| *s > 0.0),
        roommates: Vec::new(),
    }
}

fn waiting(pod: &Pod, value: &Value) -> Waiting {
    let conditions = value.pointer("/status/conditions").and_then(Value::as_array);
    let scheduled = |c: &&Value| c["type"] == "PodScheduled" && c["status"] == "False";
    let told = conditions.and_then(|all| all.iter().find(scheduled));
    let gated = pod.spec.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty());
    let why = match told.and_then(|c| c["message"].as_str()) {
        _ if gated => "its scheduling gates are not removed",
        Some(why) if !why.is_empty() => why,
        _ if pod.spec.scheduler_name.as_deref() != Some(names::SCHEDULER) => {
            "waits for another scheduler"
        }
        _ => "no scheduler has looked at it yet",
    };
    let since = value.pointer("/metadata/creationTimestamp").and_then(Value::as_str);
    Waiting {
        namespace: pod.namespace().into(),
        pod: pod.name().into(),
        queue: pod.label(names::QUEUE).unwrap_or("default").into(),
        gpus: pod.needs(names::RESOURCE, 1.0),
        since: since.unwrap_or_default().into(),
        why: why.into(),
    }
}

/// Seconds since a time that the API server wrote.
pub fn seconds_since(at: &str) -> Option<f64> {
    let at: Timestamp = at.parse().ok()?;
    Some(Timestamp::now().duration_since(at).as_secs_f64().max(0.0))
}

/// Sets the most of each GPU that a pod may use, in percent.
pub async fn resize(
    client: &Client,
    namespace: &str,
    pod: &str,
    percent: f64,
) -> Result<(), Failure> {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}");
    let body = json!({"metadata": {"annotations": {names::LIMIT: percent.to_string()}}});
    send(client, Method::PATCH, &path, "application/merge-patch+json", &body).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, node: Option<&str>, annotations: &Value) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "ml", "uid": name, "annotations": annotations,
                         "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"nodeName": node, "schedulerName": "roommate", "containers": [
                {"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}]},
            "status": {"phase": if node.is_some() { "Running" } else { "Pending" }, "conditions": [
                {"type": "PodScheduled", "status": if node.is_some() { "True" } else { "False" },
                 "message": if node.is_some() { "" } else { "waits for 1 GPU" }}]},
        })
    }

    #[test]
    fn pods_are_seen_with_their_roommates_and_reasons() {
        let at = |gpu: u16| {
            json!({
                "roommate.dev/assignment": json!({"gpus": [gpu], "knobs": {"sm_permille": 300},
                    "term": 1, "decision": 4}).to_string(),
                "roommate.dev/applied": json!({"term": 1, "decision": 4}).to_string(),
                "roommate.dev/measured": json!({"step_s": 0.25}).to_string(),
            })
        };
        let view = View::of(&[
            pod("b", Some("n"), &at(0)),
            pod("a", Some("n"), &at(0)),
            pod("c", Some("n"), &at(1)),
            pod("d", None, &json!({})),
        ]);
        let seen: Vec<_> =
            view.tenants.iter().map(|t| (t.gpu, t.pod.as_str(), t.roommates.clone())).collect();
        let mate = |name: &str| vec![format!("ml/{name}")];
        assert_eq!(seen, [(0, "a", mate("b")), (0, "b", mate("a")), (1, "c", vec![])]);
        let one = &view.tenants[0];
        assert_eq!((one.share_percent, one.in_force, one.state), (Some(30.0), true, "running"));
        assert_eq!(one.step_s, Some(0.25));
        assert_eq!(view.waiting.len(), 1);
        assert_eq!((view.waiting[0].why.as_str(), view.waiting[0].gpus), ("waits for 1 GPU", 1));
    }
}
