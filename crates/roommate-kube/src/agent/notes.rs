//! What the agent writes: annotations of pods and of its node, and events. Of one pod one write is
//! under way at a time, and the newest value of an annotation is the one that counts.

use crate::client::{Failure, send};
use crate::event::{About, Says, event};
use crate::objects::Pod;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use http::Method;
use kube::Client;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const MERGE: &str = "application/merge-patch+json";
/// Pause before a write that failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// The key of what is to be written of the node.
const NODE: &str = "";
/// Most events that wait; further ones are dropped.
const MOST_EVENTS: usize = 100;

/// What is to be written of an object.
struct Note {
    path: String,
    uid: Option<String>,
    annotations: BTreeMap<&'static str, String>,
    not_before: Option<Instant>,
    under_way: bool,
}

/// A write that was answered.
struct Written {
    key: String,
    annotations: BTreeMap<&'static str, String>,
    failed: Option<Failure>,
}

/// What is to be written.
pub(super) struct Notes {
    client: Client,
    node: String,
    /// By the unique id of a pod, or [`NODE`].
    all: BTreeMap<String, Note>,
    events: Vec<(String, Value)>,
    under_way: FuturesUnordered<BoxFuture<'static, Written>>,
}

impl Notes {
    pub(super) fn new(client: Client, node: String) -> Self {
        let (all, events) = (BTreeMap::new(), Vec::new());
        Self { client, node, all, events, under_way: FuturesUnordered::new() }
    }

    /// Has an annotation of a pod written.
    pub(super) fn annotate(&mut self, uid: &str, pod: &Pod, name: &'static str, value: String) {
        let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace(), pod.name());
        self.note(uid, path, Some(uid)).annotations.insert(name, value);
    }

    /// Has an annotation of the node written.
    pub(super) fn annotate_node(&mut self, name: &'static str, value: String) {
        let path = format!("/api/v1/nodes/{}", self.node);
        self.note(NODE, path, None).annotations.insert(name, value);
    }

    fn note(&mut self, key: &str, path: String, uid: Option<&str>) -> &mut Note {
        self.all.entry(key.into()).or_insert_with(|| Note {
            path,
            uid: uid.map(String::from),
            annotations: BTreeMap::new(),
            not_before: None,
            under_way: false,
        })
    }

    /// Has an event of a pod written.
    pub(super) fn event(&mut self, pod: &Pod, says: Says<'_>) {
        self.write_event(About::Pod(pod.namespace(), pod.name(), pod.uid()), says);
    }

    /// Has an event of the node written.
    pub(super) fn event_of_node(&mut self, says: Says<'_>) {
        let node = self.node.clone();
        self.write_event(About::Node(&node), says);
    }

    fn write_event(&mut self, about: About<'_>, says: Says<'_>) {
        if self.events.len() < MOST_EVENTS {
            self.events.push(event(about, says, ("roommate-agent", &self.node)));
        }
    }

    /// A pod is gone.
    pub(super) fn forget(&mut self, uid: &str) {
        self.all.remove(uid);
    }

    /// When something is to be sent again.
    pub(super) fn due(&self, now: Instant) -> Option<Duration> {
        let waiting = self.all.values().filter(|n| !n.under_way && !n.annotations.is_empty());
        waiting.filter_map(|n| Some(n.not_before?.saturating_duration_since(now))).min()
    }

    /// Sends what may be sent.
    pub(super) fn send(&mut self, now: Instant) {
        for (path, body) in self.events.drain(..) {
            let client = self.client.clone();
            self.under_way.push(Box::pin(async move {
                let kind = "application/json";
                let failed = send(&client, Method::POST, &path, kind, &body).await.err();
                Written { key: String::new(), annotations: BTreeMap::new(), failed }
            }));
        }
        for (key, note) in &mut self.all {
            let early = note.not_before.is_some_and(|at| now < at);
            if note.under_way || early || note.annotations.is_empty() {
                continue;
            }
            (note.under_way, note.not_before) = (true, None);
            let annotations = std::mem::take(&mut note.annotations);
            let (client, path, key) = (self.client.clone(), note.path.clone(), key.clone());
            let mut metadata = json!({"annotations": annotations});
            if let Some(uid) = &note.uid {
                // Another pod of the same name has another uid, and such a patch is refused.
                metadata["uid"] = json!(uid);
            }
            self.under_way.push(Box::pin(async move {
                let body = json!({"metadata": metadata});
                let failed = send(&client, Method::PATCH, &path, MERGE, &body).await.err();
                Written { key, annotations, failed }
            }));
        }
    }

    /// Waits for the answer of a write; returns what went wrong with it, unless its pod is gone.
    pub(super) async fn written(&mut self) -> Option<String> {
        let Some(written) = self.under_way.next().await else {
            return std::future::pending().await;
        };
        let Written { key, annotations, failed } = written;
        let note = self.all.get_mut(&key);
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
        Some(format!("write of an annotation or of an event: {failed}"))
    }
}
