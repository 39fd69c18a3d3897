//! `GpuService`: a service with a latency to keep, in a few lines. It becomes a `Deployment` and a
//! `Service`.

use crate::crd::condition;
use crate::crd::template::{Marks, Pods, one};
use crate::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A service that answers requests within a latency, beside training on the same GPUs.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "roommate.dev",
    version = "v1alpha1",
    kind = "GpuService",
    plural = "gpuservices",
    shortname = "gpusvc",
    category = "roommate",
    namespaced,
    status = "GpuServiceStatus",
    derive = "PartialEq",
    doc = "A service that answers requests within a latency, beside training on the same GPUs.",
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$')")
        .message("the name becomes that of a Service: at most 50 of a-z, 0-9 and -, a letter first"),
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Objective", type_ = "string", json_path = ".spec.objective"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.model"),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.address"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Available\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("has(self.image) != has(self.template)")
        .message("give either image (with command) or template"),
    validation = Rule::new("has(self.image) || !(has(self.command) || has(self.args) || has(self.env))")
        .message("command, args and env belong to image; a template has its own")
)]
#[serde(rename_all = "camelCase")]
pub struct GpuServiceSpec {
    /// The latency to keep: p99=25ms for 99 of 100 requests within 25 ms; also us and s.
    #[schemars(length(max = 32))]
    #[x_kube(validation = Rule::new("self.matches('^p99=[0-9]+([.][0-9]+)?(us|ms|s)$')")
        .message("expected an objective such as p99=25ms"))]
    pub objective: String,
    /// The name of its model. Unless profile is given, what is learned of services with the same
    /// model holds for all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub model: Option<String>,
    /// Most requests in a batch; its container finds it in `ROOMMATE_MAX_BATCH`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 1, max = 65_536))]
    pub max_batch: Option<u32>,
    /// Requests per second that are expected of each replica at busy times.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 10_000_000.0))]
    pub expected_rate: Option<f64>,
    /// The port at which it takes requests.
    #[serde(default = "usual_port")]
    #[schemars(with = "i32", range(min = 1, max = 65_535))]
    pub port: u16,
    /// Pods that answer requests.
    #[serde(default = "one")]
    #[schemars(with = "i32", range(min = 0, max = 4096))]
    pub replicas: u16,
    /// What its pods are.
    #[serde(flatten)]
    pub each: Pods,
}

/// Whether it answers.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuServiceStatus {
    /// Pods that exist.
    #[schemars(with = "i32")]
    pub replicas: u32,
    /// Pods that answer.
    #[schemars(with = "i32")]
    pub ready_replicas: u32,
    /// Where it answers within the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The labels of its pods, for autoscalers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// The generation of the spec that was carried out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Accepted`: whether its Deployment and Service could be made. `Available`: whether all its
    /// replicas answer, and what they wait for.
    #[schemars(schema_with = "crate::crd::conditions")]
    pub conditions: Vec<Condition>,
}

fn usual_port() -> u16 {
    8000
}

impl GpuService {
    /// The objects of which it consists.
    pub fn children(&self, scheduler: &str) -> Result<Vec<Value>, String> {
        let (spec, name) = (&self.spec, self.name_any());
        let text = |value: &dyn ToString| value.to_string();
        let told = [
            ("ROOMMATE_OBJECTIVE", Some(spec.objective.clone())),
            ("ROOMMATE_PORT", Some(text(&spec.port))),
            ("ROOMMATE_MODEL", spec.model.clone()),
            ("ROOMMATE_MAX_BATCH", spec.max_batch.map(|v| text(&v))),
        ];
        let marks = Marks {
            annotations: vec![
                (names::CLASS, Some("service".into())),
                (names::OBJECTIVE, Some(spec.objective.clone())),
                (names::MODEL, spec.model.clone()),
                (names::MAX_BATCH, spec.max_batch.map(|v| text(&v))),
                (names::EXPECTED_RATE, spec.expected_rate.map(|v| text(&v))),
                (names::PROFILE, spec.model.clone()),
            ],
            labels: vec![(names::SERVICE, Some(name.clone()))],
            env: told.into_iter().filter_map(|(name, value)| Some((name, value?))).collect(),
            port: Some(spec.port),
        };
        let template = spec.each.marked(&marks, scheduler)?;
        let ours = json!({names::SERVICE: name});
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
            "spec": {"replicas": spec.replicas, "selector": {"matchLabels": ours},
                     "template": template},
        });
        let front = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": ours,
                     "ports": [{"name": "http", "port": spec.port, "targetPort": spec.port}]},
        });
        Ok(vec![deployment, front])
    }

    /// Whether it answers: `made` says whether its objects could be made, `found` is its
    /// Deployment, and `waits` what the scheduler says of its pods.
    pub fn progress(
        &self,
        made: Result<(), (&str, String)>,
        found: Option<&Value>,
        waits: Option<String>,
    ) -> GpuServiceStatus {
        let generation = self.metadata.generation;
        let known = self.status.as_ref().map_or(&[][..], |status| &status.conditions);
        let count = |name: &str| found.and_then(|d| d["status"][name].as_u64()).unwrap_or(0) as u32;
        let (ready, wanted) = (count("readyReplicas"), u32::from(self.spec.replicas));
        let accepted = made.is_ok();
        let told = made.err();
        let told =
            told.unwrap_or_else(|| ("Made", "its Deployment and its Service are made".to_string()));
        let available = match (accepted, ready >= wanted) {
            (false, _) => (false, "NotMade", "its objects could not be made".to_string()),
            (true, true) => (true, "Answers", format!("{ready} of {wanted} replicas are ready")),
            (true, false) => {
                let why = waits.map_or(String::new(), |why| format!(": {why}"));
                (false, "Waits", format!("{ready} of {wanted} replicas are ready{why}"))
            }
        };
        let name = self.name_any();
        let space = self.namespace().unwrap_or_default();
        GpuServiceStatus {
            replicas: count("replicas"),
            ready_replicas: ready,
            address: accepted.then(|| format!("{name}.{space}.svc:{}", self.spec.port)),
            selector: Some(format!("{}={name}", names::SERVICE)),
            observed_generation: generation,
            conditions: vec![
                condition(known, "Accepted", accepted, told, generation),
                condition(known, "Available", available.0, (available.1, available.2), generation),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Pod;
    use crate::request::Request;

    fn service() -> GpuService {
        let spec = json!({"objective": "p99=25ms", "model": "bert", "maxBatch": 16,
                          "memoryMiB": 4000, "image": "x", "replicas": 2, "port": 9000});
        GpuService::new("front", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_service_becomes_a_deployment_and_a_service() {
        let children = service().children("roommate").unwrap();
        let [deployment, front] = &children[..] else { panic!("a Deployment and a Service") };
        assert_eq!(deployment["spec"]["replicas"], 2);
        let selector = &front["spec"]["selector"];
        assert_eq!(&deployment["spec"]["selector"]["matchLabels"], selector);
        let pod = &deployment["spec"]["template"];
        assert_eq!(&pod["metadata"]["labels"], selector);
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["ports"], json!([{"name": "http", "containerPort": 9000}]));
        let told = |name: &str, value: &str| {
            let variable = json!({"name": name, "value": value});
            container["env"].as_array().unwrap().contains(&variable)
        };
        assert!(told("ROOMMATE_MAX_BATCH", "16") && told("ROOMMATE_OBJECTIVE", "p99=25ms"));
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        let asked = Request::of(&pod, names::RESOURCE).unwrap();
        assert_eq!(asked.slo.map(|slo| slo.p99_us), Some(25_000));
        assert_eq!((asked.profile.as_str(), asked.knobs.mem_mib), ("bert", 4000));
    }

    #[test]
    fn its_status_follows_its_deployment() {
        let found = json!({"status": {"replicas": 2, "readyReplicas": 1}});
        let status = service().progress(Ok(()), Some(&found), Some("waits for 1 GPUs".into()));
        assert_eq!((status.replicas, status.ready_replicas), (2, 1));
        let available = &status.conditions[1];
        assert_eq!((available.type_.as_str(), available.status.as_str()), ("Available", "False"));
        assert_eq!(available.message, "1 of 2 replicas are ready: waits for 1 GPUs");
        let refused = service().progress(Err(("NameTaken", "x".into())), None, None);
        assert_eq!((refused.conditions[0].reason.as_str(), refused.address), ("NameTaken", None));
    }
}
