//! What the API server says of one pod: what it asks for, where it is, and what happened to it.

use crate::client::{Failure, get};
use crate::names;
use crate::objects::Pod;
use crate::request::Request;
use crate::view::{Tenant, View, Waiting};
use crate::world::gang_of;
use kube::Client;
use serde::Serialize;
use serde_json::Value;

/// What is known of a pod.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Story {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its phase.
    pub phase: String,
    /// The scheduler that it names.
    pub scheduler: String,
    /// The GPUs that it has, each with its roommates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub on: Vec<Tenant>,
    /// Why it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waiting>,
    /// What is wrong with what it asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrong: Option<String>,
    /// What the webhook translated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub translated_from: Option<String>,
    /// What was done to it, the oldest first.
    pub events: Vec<Happened>,
}

/// Something that happened to a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Happened {
    /// When it happened last.
    pub at: String,
    /// Its name.
    pub reason: String,
    /// In words.
    pub what: String,
    /// Who says it.
    pub by: String,
}

impl Story {
    /// Reads what is known of a pod.
    pub async fn read(client: &Client, namespace: &str, pod: &str) -> Result<Self, Failure> {
        let of = format!("/api/v1/namespaces/{namespace}");
        let found = get(client, &format!("{of}/pods/{pod}")).await?;
        // Roommates may be of any namespace; whoever may not read them sees his own.
        let all = match get(client, "/api/v1/pods").await {
            Ok(all) => all,
            Err(_) => get(client, &format!("{of}/pods")).await?,
        };
        let uid = found.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
        let events = format!("{of}/events?fieldSelector=involvedObject.uid%3D{uid}");
        let events = get(client, &events).await.unwrap_or_default();
        Ok(Self::of(&found, items(&all), items(&events)))
    }

    /// The story of a pod among these.
    pub fn of(found: &Value, pods: &[Value], events: &[Value]) -> Self {
        let pod: Pod = serde_json::from_value(found.clone()).unwrap_or_default();
        let scheduler = pod.spec.scheduler_name.clone().unwrap_or_default();
        let own = |namespace: &str, name: &str| (namespace, name) == (pod.namespace(), pod.name());
        let view = View::of(pods);
        let request = Request::of(&pod, names::RESOURCE);
        let text = |value: &Value, field: &str| {
            value.pointer(field).and_then(Value::as_str).map(String::from)
        };
        let mut happened: Vec<Happened> = events
            .iter()
            .map(|e| Happened {
                at: ["/series/lastObservedTime", "/lastTimestamp", "/eventTime"]
                    .iter()
                    .find_map(|field| text(e, field))
                    .or_else(|| text(e, "/metadata/creationTimestamp"))
                    .unwrap_or_default(),
                reason: text(e, "/reason").unwrap_or_default(),
                what: text(e, "/message").unwrap_or_default(),
                by: text(e, "/reportingComponent")
                    .filter(|by| !by.is_empty())
                    .or_else(|| text(e, "/source/component"))
                    .unwrap_or_default(),
            })
            .collect();
        happened.sort_by(|a, b| a.at.cmp(&b.at));
        Self {
            namespace: pod.namespace().into(),
            pod: pod.name().into(),
            phase: pod.phase().into(),
            wrong: request.err().filter(|_| scheduler == names::SCHEDULER),
            scheduler,
            on: view.tenants.into_iter().filter(|t| own(&t.namespace, &t.pod)).collect(),
            waits: view.waiting.into_iter().find(|w| own(&w.namespace, &w.pod)),
            translated_from: pod.annotation(names::TRANSLATED).map(String::from),
            events: happened,
        }
    }
}

/// The name by which the scheduler's journal knows a pod: that of its gang, if it is in one.
pub async fn name_in_journal(client: &Client, namespace: &str, pod: &str) -> String {
    let found = get(client, &format!("/api/v1/namespaces/{namespace}/pods/{pod}")).await;
    let found = found.ok().and_then(|found| serde_json::from_value::<Pod>(found).ok());
    let gang = found.and_then(|pod| gang_of(&pod));
    gang.map_or_else(|| format!("{namespace}/{pod}"), |(space, gang)| format!("{space}/{gang}"))
}

fn items(list: &Value) -> &[Value] {
    list.get("items").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_story_has_the_events_in_order_and_the_roommates() {
        let assigned = json!({"gpus": [1], "term": 1, "decision": 2}).to_string();
        let pod = |name: &str| {
            json!({
                "metadata": {"name": name, "namespace": "ml", "uid": name,
                             "annotations": {names::ASSIGNMENT: assigned}},
                "spec": {"nodeName": "n", "schedulerName": "roommate", "containers": [
                    {"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}]},
                "status": {"phase": "Running"},
            })
        };
        let event = |at: &str, reason: &str| {
            json!({"eventTime": at, "reason": reason, "message": "m",
                   "reportingComponent": "roommate"})
        };
        let events = [event("2026-01-01T00:00:02Z", "b"), event("2026-01-01T00:00:01Z", "a")];
        let story = Story::of(&pod("a"), &[pod("a"), pod("b")], &events);
        assert_eq!(story.on[0].roommates, ["ml/b"]);
        assert_eq!((story.on.len(), story.on[0].gpu, story.waits), (1, 1, None));
        let reasons: Vec<_> = story.events.iter().map(|e| e.reason.as_str()).collect();
        assert_eq!(reasons, ["a", "b"]);
    }
}
