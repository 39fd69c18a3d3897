//! The controller: it turns each `GpuJob` and `GpuService` into the objects of Kubernetes of which
//! it consists, and keeps their status. It runs in the scheduler that leads.
//!
//! Objects are applied by server-side apply, so that doing it again changes nothing, and belong to
//! their resource, so that they are deleted with it. An object that somebody else made is left
//! alone.

use crate::client::{Failure, get, send};
use crate::crd::job::GpuJob;
use crate::crd::service::GpuService;
use crate::names;
use crate::scheduler::watch::News;
use futures::StreamExt as _;
use http::Method;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use kube::runtime::controller::Action;
use kube::runtime::{Controller, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::Sender;

const APPLY: &str = "application/apply-patch+yaml";
const MERGE: &str = "application/merge-patch+json";
/// Who applies, for the fields that the API server notes.
const MANAGER: &str = "roommate";
/// How often a resource is looked at again whose pods wait: the reason may have changed.
const WHILE_WAITING: Duration = Duration::from_secs(10);
/// How often it is looked at again whose objects were refused.
const AFTER_REFUSAL: Duration = Duration::from_secs(60);
/// The first pause after a failure; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Resources that are carried out at a time.
const AT_A_TIME: u16 = 4;

/// A resource that consists of objects of Kubernetes; the first of them has the pods.
trait Composite: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned {
    /// The labels of its pods.
    fn pods(&self) -> String;
    fn children(&self, scheduler: &str) -> Result<Vec<Value>, String>;
    fn is_ready(&self, status: &Value) -> bool;
    /// Its status, and the one that it has.
    fn status(&self, made: Made<'_>, found: Option<&Value>, waits: Option<String>) -> [Value; 2];
}

type Made<'a> = Result<(), (&'a str, String)>;

impl Composite for GpuJob {
    fn pods(&self) -> String {
        format!("batch.kubernetes.io/job-name={}", self.name_any())
    }

    fn children(&self, scheduler: &str) -> Result<Vec<Value>, String> {
        Self::children(self, scheduler)
    }

    fn is_ready(&self, found: &Value) -> bool {
        let ended = found["status"]["completionTime"].is_string();
        let failed = found["status"]["conditions"].as_array().into_iter().flatten();
        let failed = failed.into_iter().any(|c| c["type"] == "Failed" && c["status"] == "True");
        let ready = found["status"]["ready"].as_u64().unwrap_or(0);
        let done = found["status"]["succeeded"].as_u64().unwrap_or(0);
        ended || failed || ready + done >= u64::from(self.spec.pods)
    }

    fn status(&self, made: Made<'_>, found: Option<&Value>, waits: Option<String>) -> [Value; 2] {
        [json!(self.progress(made, found, waits)), json!(self.status)]
    }
}

impl Composite for GpuService {
    fn pods(&self) -> String {
        format!("{}={}", names::SERVICE, self.name_any())
    }

    fn children(&self, scheduler: &str) -> Result<Vec<Value>, String> {
        Self::children(self, scheduler)
    }

    fn is_ready(&self, found: &Value) -> bool {
        let ready = found["status"]["readyReplicas"].as_u64().unwrap_or(0);
        ready >= u64::from(self.spec.replicas)
    }

    fn status(&self, made: Made<'_>, found: Option<&Value>, waits: Option<String>) -> [Value; 2] {
        [json!(self.progress(made, found, waits)), json!(self.status)]
    }
}

/// What all reconciliations share.
struct Context {
    client: Client,
    /// The scheduler that pods name.
    scheduler: String,
    /// Failures of each resource since it was carried out last.
    failures: Mutex<HashMap<String, u32>>,
}

/// Carries out all resources for this scheduler until it is dropped. `told` hears of failures.
pub(crate) async fn run(client: Client, scheduler: String, told: Sender<News>) {
    let failures = Mutex::default();
    let context = Arc::new(Context { client: client.clone(), scheduler, failures });
    let jobs = carry_out::<GpuJob, Job>(context.clone(), &told);
    let services = carry_out::<GpuService, Deployment>(context, &told);
    futures::future::join(jobs, services).await;
}

/// Carries out one kind of resource; `C` is the kind of its first object.
async fn carry_out<K, C>(context: Arc<Context>, told: &Sender<News>)
where
    K: Composite + Send + Sync + 'static,
    C: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    K::DynamicType: Eq + Hash + Clone + Debug + Unpin,
{
    let ours = watcher::Config::default().labels(&format!("{}={MANAGER}", names::MANAGED_BY));
    let all = Api::<K>::all(context.client.clone());
    let children = Api::<C>::all(context.client.clone());
    let config = kube::runtime::controller::Config::default().concurrency(AT_A_TIME);
    let outcomes = Controller::new(all, watcher::Config::default())
        .owns(children, ours)
        .with_config(config)
        .run(reconcile::<K>, |one, failure, context| later(&*one, failure, &context), context);
    let mut outcomes = std::pin::pin!(outcomes);
    while let Some(outcome) = outcomes.next().await {
        if let Err(error) = outcome {
            let what = format!("{}: {error}", K::plural(&()));
            if told.send(News::Trouble(what)).await.is_err() {
                return;
            }
        }
    }
}

/// After a failure: each pause is twice as long as the one before.
fn later<K: Resource>(one: &K, _: &Failure, context: &Context) -> Action {
    let mut failures = context.failures.lock().unwrap_or_else(PoisonError::into_inner);
    let uid = one.meta().uid.clone().unwrap_or_default();
    let count = failures.entry(uid).or_default();
    *count += 1;
    Action::requeue(pause(*count))
}

fn pause(failures: u32) -> Duration {
    (FIRST_PAUSE * 2u32.saturating_pow(failures.saturating_sub(1).min(16))).min(LONGEST_PAUSE)
}

async fn reconcile<K: Composite>(one: Arc<K>, context: Arc<Context>) -> Result<Action, Failure> {
    if one.meta().deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let done = reconcile_once(&*one, &context).await?;
    let mut failures = context.failures.lock().unwrap_or_else(PoisonError::into_inner);
    failures.remove(&one.meta().uid.clone().unwrap_or_default());
    Ok(done)
}

async fn reconcile_once<K: Composite>(one: &K, context: &Context) -> Result<Action, Failure> {
    let client = &context.client;
    let (made, first) = match one.children(&context.scheduler) {
        Err(why) => (Err(("Invalid", why)), None),
        Ok(children) => make(one, children, client).await?,
    };
    let ready = first.as_ref().is_some_and(|found| one.is_ready(found));
    let waits = if made.is_ok() && !ready { why_pods_wait(one, client).await? } else { None };
    let next = match (&made, ready) {
        (Err(_), _) => Action::requeue(AFTER_REFUSAL),
        (Ok(()), false) => Action::requeue(WHILE_WAITING),
        (Ok(()), true) => Action::await_change(),
    };
    let [status, before] = one.status(made, first.as_ref(), waits);
    if status != before {
        // Another object of the same name has another uid, and such a patch is refused.
        let body = json!({"metadata": {"uid": one.meta().uid}, "status": status});
        let path = format!("{}/status", path_of(one));
        match send(client, Method::PATCH, &path, MERGE, &body).await {
            Ok(_) => {}
            // It was deleted meanwhile.
            Err(failure) if [404, 409, 422].contains(&failure.code) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(next)
}

/// Makes the objects of a resource, or makes them as they should be; also returns the first of them
/// as it is.
async fn make<K: Composite>(
    one: &K,
    children: Vec<Value>,
    client: &Client,
) -> Result<(Made<'static>, Option<Value>), Failure> {
    let mut first = None;
    for mut child in children {
        let path = child_path(&child, &one.namespace().unwrap_or_default());
        let kind = child["kind"].as_str().unwrap_or_default().to_string();
        let found = match get(client, &path).await {
            Ok(found) => Some(found),
            Err(failure) if failure.code == 404 => None,
            Err(failure) => return Err(failure),
        };
        if let Some(found) = found.filter(|found| !is_owned(found, one)) {
            let name = found["metadata"]["name"].as_str().unwrap_or_default();
            let what = format!("there is a {kind} {name} that was not made for this: rename one");
            return Ok((Err(("NameTaken", what)), first));
        }
        child["metadata"]["labels"] = json!({names::MANAGED_BY: MANAGER});
        child["metadata"]["ownerReferences"] = json!([one.controller_owner_ref(&())]);
        let apply = format!("{path}?fieldManager={MANAGER}&force=true");
        match send(client, Method::PATCH, &apply, APPLY, &child).await {
            Ok(text) => {
                first = first.or_else(|| serde_json::from_str(&text).ok());
            }
            // What is wrong with it stays wrong until somebody changes it.
            Err(failure) if [400, 403, 404, 422].contains(&failure.code) => {
                return Ok((Err(("Refused", format!("{kind}: {}", failure.what))), first));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok((Ok(()), first))
}

/// Why pods of a resource wait, as the scheduler told the first of them that does.
async fn why_pods_wait<K: Composite>(one: &K, client: &Client) -> Result<Option<String>, Failure> {
    let namespace = one.namespace().unwrap_or_default();
    let labels = one.pods().replace('=', "%3D").replace('/', "%2F");
    let path = format!("/api/v1/namespaces/{namespace}/pods?labelSelector={labels}&limit=100");
    let found = get(client, &path).await?;
    let pods = found["items"].as_array().into_iter().flatten();
    let waits = |pod: &Value| {
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let told = conditions.find(|c| c["type"] == "PodScheduled" && c["status"] == "False")?;
        Some(told["message"].as_str()?.to_string())
    };
    Ok(pods.into_iter().find_map(waits))
}

fn is_owned<K: Resource>(found: &Value, one: &K) -> bool {
    let uid = one.meta().uid.as_deref();
    let mut owners = found["metadata"]["ownerReferences"].as_array().into_iter().flatten();
    owners.any(|owner| owner["uid"].as_str() == uid && owner["controller"] == true)
}

fn path_of<K: Resource<DynamicType = ()>>(one: &K) -> String {
    let namespace = one.namespace().unwrap_or_default();
    format!("{}/{}", K::url_path(&(), Some(&namespace)), one.name_any())
}

fn child_path(child: &Value, namespace: &str) -> String {
    let name = child["metadata"]["name"].as_str().unwrap_or_default();
    let at = match child["kind"].as_str() {
        Some("Job") => format!("/apis/batch/v1/namespaces/{namespace}/jobs"),
        Some("Deployment") => format!("/apis/apps/v1/namespaces/{namespace}/deployments"),
        _ => format!("/api/v1/namespaces/{namespace}/services"),
    };
    format!("{at}/{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> GpuJob {
        let mut job = GpuJob::new("train", serde_json::from_value(json!({"image": "x"})).unwrap());
        job.metadata.namespace = Some("ml".into());
        job.metadata.uid = Some("u".into());
        job
    }

    #[test]
    fn pauses_grow_and_end() {
        let seconds: Vec<u64> = [1, 2, 3, 9, 10, 40].map(|n| pause(n).as_secs()).into();
        assert_eq!(seconds, [1, 2, 4, 256, 300, 300]);
    }

    #[test]
    fn only_an_object_that_was_made_for_it_is_its_own() {
        let of = |uid: &str, controller: bool| {
            let owners = json!([{"uid": uid, "controller": controller}]);
            is_owned(&json!({"metadata": {"ownerReferences": owners}}), &job())
        };
        assert!(of("u", true));
        assert!(!of("v", true) && !of("u", false));
        assert!(!is_owned(&json!({"metadata": {}}), &job()));
    }

    #[test]
    fn paths_name_the_object_and_its_resource() {
        assert_eq!(path_of(&job()), "/apis/roommate.dev/v1alpha1/namespaces/ml/gpujobs/train");
        let [child] = &GpuJob::children(&job(), "r").unwrap()[..] else { panic!("one Job") };
        assert_eq!(child_path(child, "ml"), "/apis/batch/v1/namespaces/ml/jobs/train");
    }
}
