//! Pods that a manifest would make.

use crate::client::Failure;
use crate::client::send;
use crate::names;
use crate::objects::{Node, Pod};
use crate::request::Request;
use crate::what_if::Question;
use crate::world::gang_of;
use http::Method;
use kube::Client;
use serde::Deserialize as _;
use serde_json::{Value, json};

/// Pods that are alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Pods {
    /// The name of what makes them.
    pub name: String,
    /// How many.
    pub count: u16,
    /// One of them.
    pub pod: Value,
}

/// Most pods of a manifest.
const MOST_PODS: u64 = 1000;

/// The pods that a manifest would make at once; none if it makes no pods.
pub fn pods(manifest: &Value) -> Option<Pods> {
    let name = manifest.pointer("/metadata/name").or(manifest.pointer("/metadata/generateName"));
    let name = name.and_then(Value::as_str).unwrap_or("unnamed").trim_end_matches('-');
    if manifest["kind"] == "Pod" {
        return Some(Pods { name: name.into(), count: 1, pod: manifest.clone() });
    }
    let spec = manifest.pointer("/spec/jobTemplate/spec").or(manifest.get("spec"))?;
    let template = spec.get("template").filter(|t| t.pointer("/spec/containers").is_some())?;
    let number = |field: &str| spec.get(field).and_then(Value::as_u64);
    let parallel = number("parallelism").or(number("replicas")).unwrap_or(1);
    let count = parallel.min(number("completions").unwrap_or(u64::MAX)).min(MOST_PODS);
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": template.get("metadata").cloned().unwrap_or_else(|| json!({})),
        "spec": template["spec"],
    });
    let namespace = manifest.pointer("/metadata/namespace");
    if let (Some(namespace), Some(of)) = (namespace, pod["metadata"].as_object_mut()) {
        of.insert("namespace".into(), namespace.clone());
    }
    Some(Pods { name: name.into(), count: count as u16, pod })
}

/// The pods of a text with manifests; a text whose objects make none, or of which several do, is
/// refused, with what to do.
pub fn read(text: &str) -> Result<Pods, (String, &'static str)> {
    let mut found = Vec::new();
    for document in yaml_serde::Deserializer::from_str(text) {
        let value = Value::deserialize(document);
        let value = value.map_err(|e| (e.to_string(), "expected YAML or JSON, as for kubectl"))?;
        found.extend(pods(&value));
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err((
            "it makes no pods".into(),
            "expected a Pod, a Job, a Deployment or another object with a template of pods",
        )),
        n => Err((format!("{n} of its objects make pods"), "ask about one at a time")),
    }
}

impl Pods {
    /// The same pods as the API server would admit them: with its defaults, and with what webhooks
    /// make of them. Nothing is created.
    pub async fn admitted(self, client: &Client, namespace: &str) -> Result<Self, Failure> {
        let mut pod = self.pod.clone();
        // A pod of this name may exist.
        pod["metadata"]["name"] = Value::Null;
        pod["metadata"]["generateName"] = json!(format!("{}-", self.name));
        pod["metadata"]["namespace"] = json!(namespace);
        let path = format!("/api/v1/namespaces/{namespace}/pods?dryRun=All");
        let answer = send(client, Method::POST, &path, "application/json", &pod).await?;
        let pod = serde_json::from_str(&answer)
            .map_err(|e| Failure { code: 0, what: format!("the admitted pod: {e}") })?;
        Ok(Self { pod, ..self })
    }

    /// The scheduler that they name.
    pub fn scheduler(&self) -> Option<&str> {
        self.pod.pointer("/spec/schedulerName").and_then(Value::as_str)
    }

    /// What one of them asks for, or why it cannot be placed.
    pub fn request(&self, namespace: &str) -> Result<(Pod, Request), String> {
        let mut pod: Pod = serde_json::from_value(self.pod.clone()).map_err(|e| e.to_string())?;
        // What was made up for a pod that is only tried would be taken for another kind of work.
        pod.metadata.name = Some(self.name.clone());
        pod.metadata.namespace = Some(namespace.into());
        let request = Request::of(&pod, names::RESOURCE)?;
        Ok((pod, request))
    }

    /// What is asked of them, on nodes that are allowed: each by itself, or all as a gang.
    pub fn question<'a>(
        &self,
        pod: &Pod,
        request: &'a Request,
        allows: &'a dyn Fn(&str) -> bool,
    ) -> Question<'a> {
        let namespace = pod.namespace();
        let jobs = match gang_of(pod) {
            Some((namespace, gang)) => {
                let size = pod.annotation(names::GROUP_SIZE).and_then(|n| n.parse().ok());
                vec![(format!("{namespace}/{gang}"), size.unwrap_or(self.count).max(1))]
            }
            None if self.count == 1 => vec![(format!("{namespace}/{}", self.name), 1)],
            None => {
                (0..self.count).map(|n| (format!("{namespace}/{}-{n}", self.name), 1)).collect()
            }
        };
        Question { request, jobs, allows }
    }
}

/// Whether a pod that asks for this may run on a node.
pub fn allows<'a>(request: &'a Request, nodes: &'a [Value]) -> impl Fn(&str) -> bool + 'a {
    let nodes: Vec<Node> =
        nodes.iter().filter_map(|n| serde_json::from_value(n.clone()).ok()).collect();
    let allowed = nodes.iter().filter(|n| request.constraint.allows(n));
    let allowed: std::collections::BTreeSet<String> = allowed.map(|n| n.name().into()).collect();
    move |name| allowed.contains(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_say_how_many_pods_they_make() {
        let template = json!({"metadata": {"labels": {"a": "b"}},
                              "spec": {"containers": [{"name": "x"}]}});
        let of = |kind: &str, more: Value| {
            let mut manifest = json!({"kind": kind, "metadata": {"name": "t-7"},
                                      "spec": {"template": template}});
            for (key, value) in more.as_object().unwrap() {
                manifest["spec"][key] = value.clone();
            }
            pods(&manifest).map(|p| (p.name, p.count))
        };
        let found = |n| Some(("t-7".to_string(), n));
        assert_eq!(of("Job", json!({})), found(1));
        assert_eq!(of("Job", json!({"parallelism": 4, "completions": 3})), found(3));
        assert_eq!(of("Deployment", json!({"replicas": 2})), found(2));
        let cron = json!({"kind": "CronJob", "metadata": {"name": "c"},
                          "spec": {"jobTemplate": {"spec": {"template": template}}}});
        let made = pods(&cron).unwrap();
        assert_eq!((made.count, &made.pod["metadata"]["labels"]["a"]), (1, &json!("b")));
        let there = pods(&json!({"kind": "Job", "metadata": {"name": "t", "namespace": "ml"},
                                 "spec": {"template": template}}));
        assert_eq!(there.unwrap().pod["metadata"]["namespace"], "ml");
        assert_eq!(pods(&json!({"kind": "Service", "spec": {"ports": []}})), None);
    }

    #[test]
    fn pods_of_a_job_are_asked_about_one_by_one_or_as_a_gang() {
        let limits = json!({"limits": {"roommate.dev/gpu": "2"}});
        let pod = json!({"kind": "Pod", "metadata": {"name": "t-7"},
                         "spec": {"containers": [{"name": "x", "resources": limits}]}});
        let mut made = Pods { count: 3, ..pods(&pod).unwrap() };
        let (one, request) = made.request("ml").unwrap();
        assert_eq!(request.profile, "ml/t");
        let asked = made.question(&one, &request, &|_| true);
        assert_eq!(asked.jobs.len(), 3);
        assert_eq!(asked.jobs[1], ("ml/t-7-1".to_string(), 1));
        made.pod["metadata"]["labels"] = json!({"scheduling.x-k8s.io/pod-group": "g"});
        let (one, request) = made.request("ml").unwrap();
        let asked = made.question(&one, &request, &|_| true);
        assert_eq!(asked.jobs, [("ml/g".to_string(), 3)]);
    }
}
