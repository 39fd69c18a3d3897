//! What the API server tells of pods, nodes and pod groups, in order.

use crate::crd::profile::GpuProfile;
use crate::crd::queue::Queue;
use crate::objects::{Node, Pod};
use crate::watch::{To, watch};
use futures::StreamExt as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// Something that the API server told.
pub(crate) enum News {
    Pod(Box<Pod>),
    PodGone(String),
    /// All pods there are: a list is complete.
    Pods(BTreeSet<String>),
    Node(Box<Node>),
    NodeGone(String),
    /// All nodes there are.
    Nodes(BTreeSet<String>),
    /// How many pods a gang needs.
    Group {
        namespace: String,
        name: String,
        size: u16,
    },
    Queue(Box<Queue>),
    QueueGone(String),
    /// All queues there are.
    Queues(BTreeSet<String>),
    Profile(Box<GpuProfile>),
    ProfileGone(String),
    /// All profiles there are.
    Profiles(BTreeSet<String>),
    /// The custom resources are not installed.
    NoResources,
    /// Something failed and is tried again.
    Trouble(String),
}

/// Kinds of pod groups: where they are, and what says how many pods they need.
const GROUPS: [(&str, &str, &str); 5] = [
    ("scheduling.k8s.io", "v1beta1", "/spec/schedulingPolicy/gang/minCount"),
    ("scheduling.k8s.io", "v1alpha2", "/spec/schedulingPolicy/gang/minCount"),
    ("scheduling.k8s.io", "v1alpha1", "/spec/schedulingPolicy/gang/minCount"),
    ("scheduling.x-k8s.io", "v1alpha1", "/spec/minMember"),
    ("scheduling.volcano.sh", "v1beta1", "/spec/minMember"),
];
/// How often it is looked whether a kind of pod groups was installed.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Watches pods.
pub(super) async fn pods(client: Client, news: Sender<News>) {
    let key = |pod: &Pod| pod.uid().to_string();
    let one = |pod| News::Pod(Box::new(pod));
    let to = To { one, gone: News::PodGone, all: News::Pods, trouble: News::Trouble };
    watch(Api::<Pod>::all(client), ("pods", Config::default()), key, to, news).await;
}

/// Watches nodes.
pub(super) async fn nodes(client: Client, news: Sender<News>) {
    let key = |node: &Node| node.name().to_string();
    let one = |node| News::Node(Box::new(node));
    let to = To { one, gone: News::NodeGone, all: News::Nodes, trouble: News::Trouble };
    watch(Api::<Node>::all(client), ("nodes", Config::default()), key, to, news).await;
}

/// Watches a kind of pod groups, once it is there.
async fn groups_of(
    client: Client,
    news: Sender<News>,
    (group, version, size): (&'static str, &'static str, &'static str),
) {
    let kind = GroupVersionKind::gvk(group, version, "PodGroup");
    let resource = ApiResource::from_gvk_with_plural(&kind, "podgroups");
    while !is_served(&client, &resource).await {
        if news.is_closed() {
            return;
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    let api = Api::<DynamicObject>::all_with(client, &resource);
    let mut stream = std::pin::pin!(watcher(api, Config::default()).default_backoff());
    while let Some(event) = stream.next().await {
        let told = match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                let least = object.data.pointer(size).and_then(serde_json::Value::as_u64);
                let Some(size) = least.and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0)
                else {
                    continue;
                };
                let named = object.metadata.namespace.zip(object.metadata.name);
                let Some((namespace, name)) = named else { continue };
                News::Group { namespace, name, size }
            }
            Ok(_) => continue,
            Err(error) => News::Trouble(format!("watch of podgroups.{group}: {error}")),
        };
        if news.send(told).await.is_err() {
            return;
        }
    }
}

/// Watches all kinds of pod groups.
pub(super) async fn groups(client: Client, news: Sender<News>) {
    let all = GROUPS.map(|kind| groups_of(client.clone(), news.clone(), kind));
    futures::future::join_all(all).await;
}

async fn is_served(client: &Client, resource: &ApiResource) -> bool {
    let served = client.list_api_group_resources(&resource.api_version).await;
    served.is_ok_and(|list| list.resources.iter().any(|r| r.name == resource.plural))
}
