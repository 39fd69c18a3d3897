//! `GpuJob`: training in a few lines. It becomes a `Job`, and for a gang a headless `Service` by
//! which its pods find each other.

use crate::crd::condition;
use crate::crd::profile::Batch;
use crate::crd::template::{Marks, Pods, one};
use crate::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The port at which the first pod of a gang is found by the others.
const MASTER_PORT: u16 = 29_500;

/// A training job: one pod, or a gang of pods that start together.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "roommate.dev",
    version = "v1alpha1",
    kind = "GpuJob",
    plural = "gpujobs",
    shortname = "gpuj",
    category = "roommate",
    namespaced,
    status = "GpuJobStatus",
    derive = "PartialEq",
    doc = "A training job on GPUs or parts of them: one pod, or a gang that starts together.",
    validation = Rule::new("size(self.metadata.name) <= 50 && !self.metadata.name.contains('.')")
        .message("the name becomes a part of the names of pods: at most 50 letters, no dots"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "GPUs", type_ = "integer", json_path = ".spec.gpus"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".spec.pods"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.ready"),
    printcolumn(name = "Queue", type_ = "string", json_path = ".spec.queue"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Running\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("has(self.image) != has(self.template)")
        .message("give either image (with command) or template"),
    validation = Rule::new("has(self.image) || !(has(self.command) || has(self.args) || has(self.env))")
        .message("command, args and env belong to image; a template has its own"),
    validation = Rule::new("!has(self.maxSlowdown) || self.class == 'guaranteed'")
        .message("maxSlowdown is a promise: only for class guaranteed"),
    validation = Rule::new("self == oldSelf")
        .message("a GpuJob cannot be changed: delete it and make another")
)]
#[serde(rename_all = "camelCase")]
pub struct GpuJobSpec {
    /// Pods. Several are a gang: they start together or not at all.
    #[serde(default = "one")]
    #[schemars(with = "i32", range(min = 1, max = 4096))]
    pub pods: u16,
    /// `guaranteed` keeps its speed within maxSlowdown; `best-effort` uses what others leave.
    #[serde(default)]
    pub class: JobClass,
    /// How much longer roommates may make its steps: 1.5 for half as long again.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1.0, max = 1000.0))]
    pub max_slowdown: Option<f64>,
    /// Batch sizes per GPU that its user allows: policies that tune batch sizes stay within them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// Seconds that it takes alone, for policies that use declared lengths.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 10_000_000_000.0))]
    pub expected_seconds: Option<f64>,
    /// How often pods may fail before the job does. Pods that Roommate moved do not count.
    #[serde(default)]
    #[schemars(with = "i32", range(min = 0, max = 1000))]
    pub retries: u16,
    /// What its pods are.
    #[serde(flatten)]
    pub each: Pods,
}

/// What a job is guaranteed.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobClass {
    /// Keeps its speed.
    #[default]
    Guaranteed,
    /// Uses what others leave.
    BestEffort,
}

/// How far it is.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuJobStatus {
    /// `Pending`, `Running`, `Succeeded` or `Failed`.
    pub phase: String,
    /// Pods that exist and have not ended.
    #[schemars(with = "i32")]
    pub active: u32,
    /// Pods that are ready.
    #[schemars(with = "i32")]
    pub ready: u32,
    /// Pods that ended well.
    #[schemars(with = "i32")]
    pub succeeded: u32,
    /// Pods that failed.
    #[schemars(with = "i32")]
    pub failed: u32,
    /// The generation of the spec that was carried out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Accepted`: whether its Job could be made. `Running`: whether all its pods run, and what
    /// they wait for. `Complete` and `Failed`: whether it has ended.
    #[schemars(schema_with = "crate::crd::conditions")]
    pub conditions: Vec<Condition>,
}

impl GpuJob {
    /// The objects of which it consists.
    pub fn children(&self, scheduler: &str) -> Result<Vec<Value>, String> {
        let (spec, name) = (&self.spec, self.name_any());
        let gang = spec.pods > 1;
        let class = match spec.class {
            JobClass::Guaranteed => "guaranteed",
            JobClass::BestEffort => "best-effort",
        };
        let text = |value: &dyn ToString| value.to_string();
        let pods = spec.pods.to_string();
        let marks = Marks {
            annotations: vec![
                (names::CLASS, Some(class.into())),
                (names::MAX_SLOWDOWN, spec.max_slowdown.map(|v| text(&v))),
                (names::BATCH, spec.batch.map(|v| text(&v))),
                (names::SECONDS, spec.expected_seconds.map(|v| text(&v))),
                (names::GROUP_SIZE, gang.then(|| pods.clone())),
            ],
            labels: vec![(names::GROUP_LABELS[0], gang.then(|| name.clone()))],
            env: if gang {
                vec![
                    ("MASTER_ADDR", format!("{name}-0.{name}")),
                    ("MASTER_PORT", MASTER_PORT.to_string()),
                    ("WORLD_SIZE", pods),
                ]
            } else {
                Vec::new()
            },
            port: None,
        };
        let mut template = spec.each.marked(&marks, scheduler)?;
        // A pod that fails is made again by its Job, which then counts it.
        template["spec"]["restartPolicy"] = json!("Never");
        if gang {
            template["spec"]["subdomain"] = json!(name);
        }
        let job = json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
            "spec": {
                "parallelism": spec.pods, "completions": spec.pods,
                "completionMode": if gang { "Indexed" } else { "NonIndexed" },
                "backoffLimit": spec.retries,
                "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [
                    {"type": "DisruptionTarget", "status": "True"}]}]},
                "template": template,
            },
        });
        let found_by = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": true,
                     "selector": {"batch.kubernetes.io/job-name": name},
                     "ports": [{"name": "master", "port": MASTER_PORT}]},
        });
        Ok(if gang { vec![job, found_by] } else { vec![job] })
    }

    /// How far it is: `made` says whether its objects could be made, `found` is its Job, and
    /// `waits` what the scheduler says of its pods.
    pub fn progress(
        &self,
        made: Result<(), (&str, String)>,
        found: Option<&Value>,
        waits: Option<String>,
    ) -> GpuJobStatus {
        let generation = self.metadata.generation;
        let known = self.status.as_ref().map_or(&[][..], |status| &status.conditions);
        let count =
            |name: &str| found.and_then(|job| job["status"][name].as_u64()).unwrap_or(0) as u32;
        let ended = |kind: &str| {
            let all = found.and_then(|job| job["status"]["conditions"].as_array());
            let is = |c: &&Value| c["type"] == kind && c["status"] == "True";
            let text = |c: &Value| c["message"].as_str().unwrap_or_default().to_string();
            all.and_then(|all| all.iter().find(is).map(text))
        };
        let (complete, failed) = (ended("Complete"), ended("Failed"));
        let runs = count("ready") + count("succeeded") >= u32::from(self.spec.pods);
        let phase = match (&complete, &failed) {
            (Some(_), _) => "Succeeded",
            (_, Some(_)) => "Failed",
            _ if runs => "Running",
            _ => "Pending",
        };
        let accepted = made.is_ok();
        let told = made.err().unwrap_or_else(|| ("Made", "its Job is made".to_string()));
        let running = match phase {
            "Running" => (true, "Runs", "all its pods run".to_string()),
            "Pending" if accepted => {
                (false, "Waits", waits.unwrap_or_else(|| "its pods are being made".into()))
            }
            "Pending" => (false, "NotMade", "its Job could not be made".to_string()),
            _ => (false, "Ended", "it has ended".to_string()),
        };
        let mut conditions = vec![
            condition(known, "Accepted", accepted, told, generation),
            condition(known, "Running", running.0, (running.1, running.2), generation),
        ];
        let ends = [("Complete", "Succeeded", complete), ("Failed", "PodsFailed", failed)];
        for (kind, reason, message) in ends {
            if let Some(message) = message {
                conditions.push(condition(known, kind, true, (reason, message), generation));
            }
        }
        GpuJobStatus {
            phase: phase.into(),
            active: count("active"),
            ready: count("ready"),
            succeeded: count("succeeded"),
            failed: count("failed"),
            observed_generation: generation,
            conditions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(spec: Value) -> GpuJob {
        GpuJob::new("train", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_job_becomes_a_job_with_what_roommate_reads() {
        let one = job(json!({"image": "x", "command": ["run"], "sharePercent": 50, "queue": "a",
                             "class": "best-effort", "env": [{"name": "LR", "value": "0.1"}]}));
        let children = one.children("roommate").unwrap();
        assert_eq!(children.len(), 1);
        let spec = &children[0]["spec"];
        assert_eq!(
            (&spec["parallelism"], &spec["completionMode"]),
            (&json!(1), &json!("NonIndexed"))
        );
        let pod = &spec["template"];
        let annotations =
            json!({"roommate.dev/class": "best-effort", "roommate.dev/gpu-share": "50"});
        assert_eq!(pod["metadata"]["annotations"], annotations);
        assert_eq!(pod["metadata"]["labels"], json!({"roommate.dev/queue": "a"}));
        let container = json!({"name": "main", "image": "x", "command": ["run"],
                               "env": [{"name": "LR", "value": "0.1"}],
                               "resources": {"limits": {"roommate.dev/gpu": "1"}}});
        assert_eq!(pod["spec"]["containers"], json!([container]));
    }

    #[test]
    fn pods_of_a_gang_know_each_other() {
        let children = job(json!({"image": "x", "pods": 3, "gpus": 2})).children("r").unwrap();
        let [made, found_by] = &children[..] else { panic!("a Job and a Service") };
        assert_eq!(found_by["spec"]["clusterIP"], "None");
        let pod = &made["spec"]["template"];
        assert_eq!(pod["metadata"]["annotations"]["roommate.dev/pod-group-size"], "3");
        assert_eq!(pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"], "train");
        assert_eq!(pod["spec"]["subdomain"], found_by["metadata"]["name"]);
        let env = &pod["spec"]["containers"][0]["env"];
        assert_eq!(env[0], json!({"name": "MASTER_ADDR", "value": "train-0.train"}));
        let text = serde_json::to_value(pod).unwrap();
        let pod: crate::objects::Pod = serde_json::from_value(text).unwrap();
        let asked = crate::request::Request::of(&pod, names::RESOURCE).unwrap();
        assert_eq!(asked.gpus, 2);
    }

    #[test]
    fn its_status_follows_its_job() {
        let one = job(json!({"image": "x"}));
        let told = |status: &GpuJobStatus, kind: &str| {
            let found = status.conditions.iter().find(|c| c.type_ == kind).cloned();
            found.map(|c| (c.status, c.reason, c.message))
        };
        let is = |a: &str, b: &str, c: &str| Some((a.to_string(), b.to_string(), c.to_string()));
        let refused = one.progress(Err(("JobRefused", "no".into())), None, None);
        assert_eq!(told(&refused, "Accepted"), is("False", "JobRefused", "no"));
        let found = json!({"status": {"active": 1}});
        let waits = one.progress(Ok(()), Some(&found), Some("queue a uses 8 of its 8 GPUs".into()));
        assert_eq!(waits.phase, "Pending");
        assert_eq!(told(&waits, "Running"), is("False", "Waits", "queue a uses 8 of its 8 GPUs"));
        let runs = one.progress(Ok(()), Some(&json!({"status": {"active": 1, "ready": 1}})), None);
        assert_eq!((runs.phase.as_str(), runs.ready), ("Running", 1));
        let found = json!({"status": {"failed": 1, "conditions": [
            {"type": "Failed", "status": "True", "message": "backoff"}]}});
        let failed = one.progress(Ok(()), Some(&found), None);
        assert_eq!(failed.phase, "Failed");
        assert_eq!(told(&failed, "Failed"), is("True", "PodsFailed", "backoff"));
        assert_eq!(told(&failed, "Complete"), None);
    }
}
