//! The pods of this node, as the API server tells of them.

use super::Heard;
use crate::objects::Pod;
use futures::StreamExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use std::collections::BTreeSet;
use tokio::sync::mpsc::Sender;

/// What the API server told.
pub(super) enum News {
    Pod(Box<Pod>),
    PodGone(String),
    /// All pods there are.
    Pods(BTreeSet<String>),
    /// The watch failed and is tried again.
    Trouble(String),
}

/// Watches the pods of a node.
pub(super) async fn pods(client: Client, node: String, to: Sender<Heard>) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let pods = watcher(Api::<Pod>::all(client), config).default_backoff();
    let mut pods = std::pin::pin!(pods);
    let mut listed = BTreeSet::new();
    while let Some(event) = pods.next().await {
        let news = match event {
            Ok(Event::Apply(pod)) => News::Pod(Box::new(pod)),
            Ok(Event::Delete(pod)) => News::PodGone(pod.uid().into()),
            Ok(Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(Event::InitApply(pod)) => {
                listed.insert(pod.uid().to_string());
                News::Pod(Box::new(pod))
            }
            Ok(Event::InitDone) => News::Pods(std::mem::take(&mut listed)),
            Err(error) => News::Trouble(format!("watch of pods: {error}")),
        };
        if to.send(Heard::Watched(news)).await.is_err() {
            return;
        }
    }
}
