//! Objects of the API server, reduced to what is used: everything else is dropped when they are
//! read, so that a cache of many pods stays small.

use k8s_openapi::api::core::v1::{Node as NodeObject, Pod as PodObject};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Resource;
use kube::core::ObjectMeta;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Texts by name.
pub type Texts = BTreeMap<String, String>;
/// Amounts of resources by name.
pub type Amounts = BTreeMap<String, Quantity>;

/// A pod.
#[derive(Resource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[resource(inherit = PodObject)]
#[serde(default, rename_all = "camelCase")]
pub struct Pod {
    /// Its name, labels, annotations, owners.
    pub metadata: ObjectMeta,
    /// What is asked for.
    pub spec: PodSpec,
    /// What is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<PodStatus>,
}

/// What a pod asks for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// Its node, once it is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Who binds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
    /// Its containers.
    pub containers: Vec<Container>,
    /// Containers that run before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<Container>,
    /// What it needs besides its containers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Amounts>,
    /// Labels that its node has to have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<Texts>,
    /// Further conditions on nodes and other pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Taints that it tolerates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerations: Option<Vec<Toleration>>,
    /// How its group is spread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology_spread_constraints: Option<Vec<Spread>>,
    /// While there is one, the pod may not be bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduling_gates: Option<Vec<serde_json::Value>>,
    /// Its volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Volume>>,
    /// Devices that another driver allocates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claims: Option<Vec<serde_json::Value>>,
    /// Its native pod group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduling_group: Option<SchedulingGroup>,
}

/// A container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    /// Its name.
    pub name: String,
    /// What it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Its ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<Port>>,
    /// `Always` in an init container: it runs beside the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
}

/// What a container needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// At least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<Amounts>,
    /// At most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<Amounts>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Port {
    /// The port of the node that it takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_port: Option<i32>,
}

/// A volume; only those are told apart that bind a pod to nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Volume {
    /// A claim, whose volume may be on some nodes only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<serde_json::Value>,
    /// The same, made for the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<serde_json::Value>,
}

/// The native pod group of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SchedulingGroup {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_group_name: Option<String>,
}

/// Conditions on nodes and other pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Affinity {
    /// Conditions on nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_affinity: Option<NodeAffinity>,
    /// Pods that have to be near.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_affinity: Option<PodTerms>,
    /// Pods that may not be near.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_anti_affinity: Option<PodTerms>,
}

/// Conditions on nodes; what is only preferred is not read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeAffinity {
    /// One of its terms has to hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
}

/// Terms of which one has to hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeSelector {
    /// The terms.
    pub node_selector_terms: Vec<NodeTerm>,
}

/// A term: all its conditions have to hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeTerm {
    /// Conditions on labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_expressions: Option<Vec<Condition>>,
    /// Conditions on fields; only the name of a node is a field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_fields: Option<Vec<Condition>>,
}

/// A condition on a label.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// The label.
    pub key: String,
    /// `In`, `NotIn`, `Exists`, `DoesNotExist`, `Gt` or `Lt`.
    pub operator: String,
    /// With what it is compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<Vec<String>>,
}

/// Terms on other pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodTerms {
    /// Those that have to hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required_during_scheduling_ignored_during_execution: Option<Vec<PodTerm>>,
}

/// A term on other pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodTerm {
    /// Labels of the other pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
    /// Namespaces of the other pods, if not the pod's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<Vec<String>>,
    /// The same by labels of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<serde_json::Value>,
}

/// Labels of pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with their values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<Texts>,
    /// Conditions on labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_expressions: Option<Vec<Condition>>,
}

/// A taint that a pod tolerates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// The taint; none = all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// `Equal` (the default) or `Exists`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// The value of the taint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The effect; none = all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
}

/// How the pods of a group are spread over nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spread {
    /// `DoNotSchedule` (the default) or `ScheduleAnyway`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub when_unsatisfiable: Option<String>,
}

/// What a pod is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What its containers are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub container_statuses: Vec<ContainerStatus>,
}

/// What a container is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// Its name.
    pub name: String,
    /// What its runtime calls it, `containerd://ID`.
    #[serde(rename = "containerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// Whether it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<ContainerState>,
}

/// Whether a container runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// Since when, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<serde_json::Value>,
}

/// A node.
#[derive(Resource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[resource(inherit = NodeObject)]
#[serde(default, rename_all = "camelCase")]
pub struct Node {
    /// Its name, labels, annotations.
    pub metadata: ObjectMeta,
    /// What is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<NodeSpec>,
    /// What is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<NodeStatus>,
}

/// What is set of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeSpec {
    /// Its taints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taints: Option<Vec<Taint>>,
    /// Whether no pod may be bound to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unschedulable: Option<bool>,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Taint {
    /// Its name.
    pub key: String,
    /// Its value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// What a node is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// What pods may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocatable: Option<Amounts>,
    /// Whether it is ready, among others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<NodeCondition>>,
}

/// A condition of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeCondition {
    /// Its name.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

impl Pod {
    /// Its unique id; it never changes, while a pod of the same name may be another one.
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its namespace.
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// An annotation of it.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(name).map(String::as_str)
    }

    /// A label of it.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(name).map(String::as_str)
    }

    /// Its phase.
    pub fn phase(&self) -> &str {
        self.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("Pending")
    }

    /// Whether all its containers have ended for good.
    pub fn has_ended(&self) -> bool {
        matches!(self.phase(), "Succeeded" | "Failed")
    }

    /// What it needs of a resource: the sum over its containers, or what the largest container
    /// needs that runs before them.
    pub fn needs(&self, resource: &str, unit: f64) -> u64 {
        let of = |c: &Container| {
            let resources = c.resources.as_ref()?;
            let asked = |a: &Option<Amounts>| a.as_ref()?.get(resource).and_then(amount);
            asked(&resources.requests).or_else(|| asked(&resources.limits))
        };
        let each = |c: &Container| of(c).unwrap_or(0.0);
        let beside = |c: &&Container| c.restart_policy.as_deref() == Some("Always");
        let together: f64 = self.spec.containers.iter().map(each).sum::<f64>()
            + self.spec.init_containers.iter().filter(beside).map(each).sum::<f64>();
        let before = self.spec.init_containers.iter().map(each).fold(0.0, f64::max);
        let overhead = self.spec.overhead.as_ref().and_then(|o| amount(o.get(resource)?));
        ((together.max(before) + overhead.unwrap_or(0.0)) / unit).ceil() as u64
    }

    /// What it needs of its node: CPU in thousandths of a core, and memory in MiB.
    pub fn room(&self) -> (u64, u64) {
        (self.needs("cpu", 1e-3), self.needs("memory", 1024.0 * 1024.0))
    }
}

impl Node {
    /// Its name.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// A label of it.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(name).map(String::as_str)
    }

    /// Whether its kubelet says that pods can run on it.
    pub fn is_ready(&self) -> bool {
        let conditions = self.status.as_ref().and_then(|s| s.conditions.as_ref());
        conditions.is_some_and(|all| all.iter().any(|c| c.kind == "Ready" && c.status == "True"))
    }

    /// How much of a resource pods may use.
    pub fn has(&self, resource: &str, unit: f64) -> u64 {
        let all = self.status.as_ref().and_then(|s| s.allocatable.as_ref());
        all.and_then(|a| amount(a.get(resource)?)).map_or(0, |v| (v / unit).floor() as u64)
    }

    /// Its taints, that of a cordoned node included.
    pub fn taints(&self) -> Vec<Taint> {
        let Some(spec) = &self.spec else { return Vec::new() };
        let mut taints = spec.taints.clone().unwrap_or_default();
        let cordon = "node.kubernetes.io/unschedulable";
        if spec.unschedulable == Some(true) && !taints.iter().any(|t| t.key == cordon) {
            taints.push(Taint { key: cordon.into(), value: None, effect: "NoSchedule".into() });
        }
        taints
    }
}

/// A quantity as a number: `500m` is 0.5, `2Gi` is 2147483648.
pub fn amount(quantity: &Quantity) -> Option<f64> {
    let text = quantity.0.trim();
    // `1e3` is a number, `2E` and `1Ei` have units.
    let unit = |c: char| c.is_ascii_alphabetic();
    let is_exponent =
        |at: usize| text[at + 1..].starts_with(|c: char| c.is_ascii_digit() || c == '-');
    let mut ends = text.match_indices(unit).map(|(at, _)| at).filter(|at| !is_exponent(*at));
    let end = ends.next().unwrap_or(text.len());
    let factor = match &text[end..] {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        _ => return None,
    };
    let value = text[..end].parse::<f64>().ok()? * factor;
    (value.is_finite() && value >= 0.0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_means_them() {
        let read = |text: &str| amount(&Quantity(text.into()));
        for (text, value) in [
            ("1", 1.0),
            ("500m", 0.5),
            ("2Gi", 2_147_483_648.0),
            ("1.5k", 1500.0),
            ("1e3", 1000.0),
            ("2E", 2e18),
            ("1Ei", 1024f64.powi(6)),
        ] {
            assert_eq!(read(text), Some(value), "{text}");
        }
        for text in ["", "x", "-1", "1Q", "Gi"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn a_pod_needs_the_sum_of_its_containers_or_the_largest() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "a"},
            "spec": {
                "initContainers": [
                    {"name": "large", "resources": {"requests": {"cpu": "5"}}},
                    {"name": "side", "restartPolicy": "Always",
                     "resources": {"requests": {"cpu": "500m"}}},
                ],
                "containers": [
                    {"name": "x", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
                    {"name": "y", "resources": {"limits": {"cpu": "250m"}}},
                ],
            },
        }))
        .unwrap();
        assert_eq!(pod.room(), (5000, 1024));
    }
}
