//! Watches of the API server: what changes, and complete lists whenever a watch begins anew.

use futures::StreamExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Debug;
use tokio::sync::mpsc::Sender;

/// Objects of a page of a list.
const PAGE: u32 = 1000;

/// As what objects of a kind are told.
pub(crate) struct To<K, N> {
    /// One is new or has changed.
    pub(crate) one: fn(K) -> N,
    /// One is gone.
    pub(crate) gone: fn(String) -> N,
    /// All there are.
    pub(crate) all: fn(BTreeSet<String>) -> N,
    /// The watch failed and is tried again.
    pub(crate) trouble: fn(String) -> N,
}

/// Watches the objects of a kind that a configuration selects; each list is told as complete once
/// it is.
pub(crate) async fn watch<K, N>(
    api: Api<K>,
    (what, config): (&str, Config),
    key: fn(&K) -> String,
    to: To<K, N>,
    news: Sender<N>,
) where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut stream = std::pin::pin!(watcher(api, config.page_size(PAGE)).default_backoff());
    let mut listed = BTreeSet::new();
    while let Some(event) = stream.next().await {
        let told = match event {
            Ok(Event::Apply(object)) => (to.one)(object),
            Ok(Event::Delete(object)) => (to.gone)(key(&object)),
            Ok(Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(Event::InitApply(object)) => {
                listed.insert(key(&object));
                (to.one)(object)
            }
            Ok(Event::InitDone) => (to.all)(std::mem::take(&mut listed)),
            Err(error) => (to.trouble)(format!("watch of {what}: {error}")),
        };
        if news.send(told).await.is_err() {
            return;
        }
    }
}
