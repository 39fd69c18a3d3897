//! `Queue`: what a team may use.

use crate::crd::condition;
use crate::world::{Grant, QueueReport};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a team may use. Pods name their queue by the label roommate.dev/queue; those that name none
/// are in the queue "default". A queue without such an object has no limit.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "roommate.dev",
    version = "v1alpha1",
    kind = "Queue",
    plural = "queues",
    shortname = "gpuq",
    category = "roommate",
    status = "QueueStatus",
    derive = "PartialEq",
    doc = "A team's part of the GPUs. Pods name their queue by the label roommate.dev/queue.",
    printcolumn(name = "Quota", type_ = "number", json_path = ".spec.quota"),
    printcolumn(name = "Used", type_ = "number", json_path = ".status.used"),
    printcolumn(name = "Waiting", type_ = "integer", json_path = ".status.waiting"),
    printcolumn(name = "Borrows", type_ = "boolean", json_path = ".spec.mayBorrow"),
    printcolumn(name = "Weight", type_ = "number", json_path = ".spec.weight", priority = 1),
    printcolumn(
        name = "Admits",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Admits\")].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("!self.mayBorrow || has(self.quota)")
    .message("mayBorrow needs a quota: a queue without one has no limit already"))]
#[serde(rename_all = "camelCase")]
pub struct QueueSpec {
    /// GPUs that the pods of the queue may use together. A pod that is promised a share of a GPU
    /// counts as that share (0.5 for roommate.dev/gpu-share: "50"), any other as whole GPUs. What
    /// is beyond the quota waits, in the order in which it came. Without a quota there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub quota: Option<f64>,
    /// Whether the queue may use more than its quota while GPUs are idle and no other queue within
    /// its quota waits for some. What it borrowed is evicted when another queue within its quota
    /// has waited for five seconds; the newest goes first.
    #[serde(default)]
    pub may_borrow: bool,
    /// Its weight relative to other queues, for policies that are fair to teams: `roommate` with
    /// its parameter `fairness`, and `gavel`.
    #[serde(default = "usual_weight")]
    #[schemars(range(max = 1000.0))]
    #[x_kube(validation = Rule::new("self > 0.0").message("expected a weight above 0"))]
    pub weight: f64,
}

fn usual_weight() -> f64 {
    1.0
}

/// What the queue uses.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueueStatus {
    /// GPUs that its pods use; a promised share counts as that share.
    pub used: f64,
    /// Pods and gangs that have their GPUs.
    #[schemars(with = "i32")]
    pub running: u32,
    /// Pods and gangs that wait, for the quota or for GPUs.
    #[schemars(with = "i32")]
    pub waiting: u32,
    /// Those of them that wait for the quota.
    #[schemars(with = "i32")]
    pub held_back: u32,
    /// The generation of the spec that the scheduler knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Admits`: whether its next pod may have GPUs. Its reasons are `NoQuota`, `WithinQuota`,
    /// `Borrows` and `QuotaUsed`.
    #[schemars(schema_with = "crate::crd::conditions")]
    pub conditions: Vec<Condition>,
}

impl QueueSpec {
    /// What it grants.
    pub fn grant(&self) -> Grant {
        let quota = self.quota.filter(|q| q.is_finite() && *q >= 0.0);
        Grant {
            weight: self.weight,
            quota: quota.map(|gpus| (gpus * 1000.0).round() as u64),
            borrows: self.may_borrow,
        }
    }
}

impl QueueStatus {
    /// The status of a queue.
    pub fn of(report: &QueueReport, before: Option<&Self>, generation: Option<i64>) -> Self {
        let gpus = |permille: u64| permille as f64 / 1000.0;
        let used = gpus(report.used);
        let (is, reason, message) = match report.quota {
            None => (true, "NoQuota", format!("uses {used} GPUs; it has no quota")),
            Some(quota) => {
                let uses = format!("uses {used} of its {} GPUs", gpus(quota));
                match (report.held_back, report.used > quota) {
                    (0, false) => (true, "WithinQuota", uses),
                    (0, true) => (true, "Borrows", uses),
                    (n, _) => (false, "QuotaUsed", format!("{uses}; {n} wait for its quota")),
                }
            }
        };
        let known = before.map_or(&[][..], |status| &status.conditions);
        Self {
            used,
            running: report.running,
            waiting: report.waiting,
            held_back: report.held_back,
            observed_generation: generation,
            conditions: vec![condition(known, "Admits", is, (reason, message), generation)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_queue_without_words_has_no_limit() {
        let spec: QueueSpec = serde_json::from_value(json!({})).unwrap();
        assert_eq!(spec.grant(), Grant::default());
        let spec: QueueSpec =
            serde_json::from_value(json!({"quota": 7.5, "mayBorrow": true, "weight": 2})).unwrap();
        assert_eq!(spec.grant(), Grant { weight: 2.0, quota: Some(7500), borrows: true });
    }

    #[test]
    fn its_status_says_whether_it_admits() {
        let report = |used, quota, held_back| QueueReport {
            name: "a".into(),
            used,
            quota,
            running: 1,
            waiting: held_back,
            held_back,
        };
        for (report, reason, message) in [
            (report(500, None, 0), "NoQuota", "uses 0.5 GPUs; it has no quota"),
            (report(500, Some(8000), 0), "WithinQuota", "uses 0.5 of its 8 GPUs"),
            (report(9000, Some(8000), 0), "Borrows", "uses 9 of its 8 GPUs"),
            (
                report(8000, Some(8000), 2),
                "QuotaUsed",
                "uses 8 of its 8 GPUs; 2 wait for its quota",
            ),
        ] {
            let status = QueueStatus::of(&report, None, Some(3));
            let told = &status.conditions[0];
            assert_eq!((told.reason.as_str(), told.message.as_str()), (reason, message));
            assert_eq!(told.observed_generation, Some(3));
        }
    }
}
