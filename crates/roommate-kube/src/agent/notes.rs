//! What the agent writes: annotations of pods and of its node, and events. Of one pod one write is
//! under way at a time, and the newest value of an annotation is the one that counts.

use crate::client::{Failure, send};
use crate::objects::Pod;
use crate::world::PodRef;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use http::Method;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const MERGE: &str = "application/merge-patch+json";
/// Pause before a write that failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Most events that wait; further ones are dropped.
const MOST_EVENTS: usize = 100;

/// What is to be written of a pod.
struct Note {
    pod: PodRef,
    annotations: BTreeMap<&'static str, String>,
    not_before: Option<Instant>,
    under_way: bool,
}

/// A write that was answered.
struct Written {
    uid: String,
    annotations: BTreeMap<&'static str, String>,
    failed: Option<Failure>,
}

/// What is to be written.
pub(super) struct Notes {
    client: Client,
    pods: BTreeMap<String, Note>,
    events: Vec<(String, Value)>,
    under_way: FuturesUnordered<BoxFuture<'static, Written>>,
}

impl Notes {
    pub(super) fn new(client: Client) -> Self {
        let (pods, events) = (BTreeMap::new(), Vec::new());
        Self { client, pods, events, under_way: FuturesUnordered::new() }
    }

    /// Has an annotation of a pod written.
    pub(super) fn annotate(&mut self, uid: &str, pod: &Pod, name: &'static str, value: String) {
        let note = self.pods.entry(uid.into()).or_insert_with(|| Note {
            pod: PodRef {
                namespace: pod.namespace().into(),
                name: pod.name().into(),
                uid: uid.into(),
            },
            annotations: BTreeMap::new(),
            not_before: None,
            under_way: false,
        });
        note.annotations.insert(name, value);
    }

    /// Has an event of a pod written.
    pub(super) fn event(&mut self, pod: &Pod, kind: &str, reason: &str, action: &str, note: &str) {
        if self.events.len() >= MOST_EVENTS {
            return;
        }
        let now = Timestamp::now();
        let body = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": format!("{}.{:x}", pod.name(), now.as_nanosecond()),
                         "namespace": pod.namespace()},
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string(),
            "type": kind, "reason": reason, "action": action, "note": note,
            "reportingController": "roommate-agent", "reportingInstance": "roommate-agent",
            "regarding": {"apiVersion": "v1", "kind": "Pod", "name": pod.name(),
                          "namespace": pod.namespace(), "uid": pod.uid()},
        });
        let path = format!("/apis/events.k8s.io/v1/namespaces/{}/events", pod.namespace());
        self.events.push((path, body));
    }

    /// A pod is gone.
    pub(super) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// When something is to be sent again.
    pub(super) fn due(&self, now: Instant) -> Option<Duration> {
        let waiting = self.pods.values().filter(|n| !n.under_way && !n.annotations.is_empty());
        waiting.filter_map(|n| Some(n.not_before?.saturating_duration_since(now))).min()
    }

    /// Sends what may be sent.
    pub(super) fn send(&mut self, now: Instant) {
        for (path, body) in self.events.drain(..) {
            let client = self.client.clone();
            self.under_way.push(Box::pin(async move {
                let kind = "application/json";
                let failed = send(&client, Method::POST, &path, kind, &body).await.err();
                Written { uid: String::new(), annotations: BTreeMap::new(), failed }
            }));
        }
        for (uid, note) in &mut self.pods {
            let early = note.not_before.is_some_and(|at| now < at);
            if note.under_way || early || note.annotations.is_empty() {
                continue;
            }
            (note.under_way, note.not_before) = (true, None);
            let annotations = std::mem::take(&mut note.annotations);
            let (client, pod, uid) = (self.client.clone(), note.pod.clone(), uid.clone());
            self.under_way.push(Box::pin(async move {
                let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
                // Another pod of the same name has another uid, and such a patch is refused.
                let body = json!({"metadata": {"uid": pod.uid, "annotations": annotations}});
                let failed = send(&client, Method::PATCH, &path, MERGE, &body).await.err();
                Written { uid, annotations, failed }
            }));
        }
    }

    /// Waits for the answer of a write; returns what went wrong with it, unless its pod is gone.
    pub(super) async fn written(&mut self) -> Option<String> {
        let Some(written) = self.under_way.next().await else {
            return std::future::pending().await;
        };
        let Written { uid, annotations, failed } = written;
        let note = self.pods.get_mut(&uid);
        let failed = match (failed, note) {
            (None, Some(note)) => {
                note.under_way = false;
                return None;
            }
            (None, None) => return None,
            (Some(failed), Some(note)) => {
                note.under_way = false;
                if matches!(failed.code, 404 | 409 | 422) {
                    note.annotations.clear();
                    return None;
                }
                note.not_before = Some(Instant::now() + AGAIN);
                // What was to be written meanwhile is newer.
                for (name, value) in annotations {
                    note.annotations.entry(name).or_insert(value);
                }
                failed
            }
            (Some(failed), None) => failed,
        };
        Some(format!("write of a pod's annotations or of an event: {failed}"))
    }
}

/// Writes an annotation of a node.
pub(super) async fn annotate_node(
    client: &Client,
    node: &str,
    name: &str,
    value: &str,
) -> Result<(), Failure> {
    let body = json!({"metadata": {"annotations": {name: value}}});
    let path = format!("/api/v1/nodes/{node}");
    send(client, Method::PATCH, &path, MERGE, &body).await.map(drop)
}
