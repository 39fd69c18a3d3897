//! The pods of this node, as the API server tells of them.

use super::Heard;
use crate::objects::Pod;
use crate::watch::{To, watch};
use kube::runtime::watcher::Config;
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
    let here = Config::default().fields(&format!("spec.nodeName={node}"));
    let key = |pod: &Pod| pod.uid().to_string();
    let told = To {
        one: |pod| Heard::Watched(News::Pod(Box::new(pod))),
        gone: |uid| Heard::Watched(News::PodGone(uid)),
        all: |uids| Heard::Watched(News::Pods(uids)),
        trouble: |what| Heard::Watched(News::Trouble(what)),
    };
    watch(Api::<Pod>::all(client), ("pods", here), key, told, to).await;
}
