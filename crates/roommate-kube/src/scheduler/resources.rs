//! The custom resources, as far as the scheduler reads them: queues and profiles, and their status.
//! They may not be installed; then the scheduler works without them and looks for them again.

use crate::controller;
use crate::crd::profile::GpuProfile;
use crate::crd::queue::{Queue, QueueStatus};
use crate::names;
use crate::scheduler::watch::News;
use crate::watch::{To, watch};
use crate::world::World;
use kube::runtime::watcher::Config;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

/// How often it is looked whether the custom resources were installed.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// The same after the API server did not answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The least time between two writes of the status of a queue: what it uses changes often.
const STATUS_EVERY: Duration = Duration::from_secs(1);
/// When a status is written again that did not arrive.
const STATUS_AGAIN: Duration = Duration::from_secs(15);

/// Watches the custom resources and carries them out, once they are there.
pub(super) async fn run(client: Client, scheduler: String, news: Sender<News>) {
    loop {
        let (told, pause) = match are_served(&client).await {
            Ok(true) => break,
            Ok(false) => (News::NoResources, LOOK_AGAIN),
            Err(error) => (News::Trouble(format!("custom resources: {error}")), ASK_AGAIN),
        };
        if news.send(told).await.is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
    }
    let name = |queue: &Queue| queue.name_any();
    let to = To {
        one: |one| News::Queue(Box::new(one)),
        gone: News::QueueGone,
        all: News::Queues,
        trouble: News::Trouble,
    };
    let all = Config::default;
    let queues =
        watch(Api::<Queue>::all(client.clone()), ("queues", all()), name, to, news.clone());
    let name = |profile: &GpuProfile| profile.name_any();
    let to = To {
        one: |one| News::Profile(Box::new(one)),
        gone: News::ProfileGone,
        all: News::Profiles,
        trouble: News::Trouble,
    };
    let profiles = Api::<GpuProfile>::all(client.clone());
    let profiles = watch(profiles, ("gpuprofiles", all()), name, to, news.clone());
    let composites = controller::run(client.clone(), scheduler, news);
    futures::future::join3(queues, profiles, composites).await;
}

async fn are_served(client: &Client) -> Result<bool, kube::Error> {
    match client.list_api_group_resources(&format!("{}/v1alpha1", names::GROUP)).await {
        Ok(list) => {
            let wanted = crate::crd::all().map(|crd| crd.spec.names.plural);
            Ok(wanted.iter().all(|name| list.resources.iter().any(|r| r.name == *name)))
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// A status that is to be written.
pub(super) struct StatusWrite {
    pub(super) path: String,
    pub(super) body: Value,
}

/// The queues as they were observed, and what was written of them.
#[derive(Default)]
pub(super) struct Queues {
    all: BTreeMap<String, Queue>,
    sent: BTreeMap<String, (QueueStatus, Instant)>,
    looked: Option<Instant>,
}

impl Queues {
    pub(super) fn set(&mut self, queue: Queue) {
        self.all.insert(queue.name_any(), queue);
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.all.remove(name);
        self.sent.remove(name);
    }

    pub(super) fn retain(&mut self, is: impl Fn(&String) -> bool) {
        self.all.retain(|name, _| is(name));
        self.sent.retain(|name, _| is(name));
    }

    /// Those whose status is not what the world says.
    pub(super) fn stale(&mut self, world: &World) -> Vec<StatusWrite> {
        if self.all.is_empty() || self.looked.is_some_and(|at| at.elapsed() < STATUS_EVERY) {
            return Vec::new();
        }
        self.looked = Some(Instant::now());
        let mut writes = Vec::new();
        for report in world.queue_reports() {
            let Some(queue) = self.all.get(&report.name) else { continue };
            let is = queue.status.as_ref();
            let shall = QueueStatus::of(&report, is, queue.metadata.generation);
            let under_way = self.sent.get(&report.name);
            let under_way =
                under_way.is_some_and(|(sent, at)| *sent == shall && at.elapsed() < STATUS_AGAIN);
            if is == Some(&shall) || under_way {
                continue;
            }
            writes.push(status_write(queue, &json!(shall)));
            self.sent.insert(report.name, (shall, Instant::now()));
        }
        writes
    }
}

/// Writes the status of a profile, if it is another than it has.
pub(super) fn status_of(profile: &GpuProfile) -> Option<StatusWrite> {
    let shall = profile.told();
    (profile.status.as_ref() != Some(&shall)).then(|| status_write(profile, &json!(shall)))
}

/// Another object of the same name has another uid, and such a patch is refused.
fn status_write<K: Resource<DynamicType = ()>>(of: &K, status: &Value) -> StatusWrite {
    StatusWrite {
        path: format!("{}/{}/status", K::url_path(&(), None), of.name_any()),
        body: json!({"metadata": {"uid": of.meta().uid}, "status": status}),
    }
}
