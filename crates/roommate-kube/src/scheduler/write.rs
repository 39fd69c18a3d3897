//! Writes of the world, carried out.

use crate::client::{Failure, get, send};
use crate::event::{About, Says, cut, event, now};
use crate::names;
use crate::scheduler::resources::StatusWrite;
use crate::world::{Answer, PodRef, Write};
use http::Method;
use kube::Client;
use serde_json::{Value, json};

const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// Who writes.
#[derive(Clone)]
pub(super) struct Writer {
    pub(super) client: Client,
    /// The scheduler that pods name; events are from it.
    pub(super) scheduler: String,
    /// This process.
    pub(super) instance: String,
}

impl Writer {
    /// Carries out a write; what went wrong is told besides.
    pub(super) async fn carry_out(&self, write: &Write) -> (Answer, Option<String>) {
        match write {
            Write::Bind { pod, node, assignment } => self.bind(pod, node, assignment).await,
            Write::Assign { pod, assignment } => answer(self.assign(pod, assignment).await),
            Write::Evict { pod, why } => answer(self.evict(pod, why).await),
            Write::Explain { pod, why } => answer(self.explain(pod, why).await),
        }
    }

    async fn bind(&self, pod: &PodRef, node: &str, text: &str) -> (Answer, Option<String>) {
        let body = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid,
                         "annotations": {names::ASSIGNMENT: text}},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        });
        let path = format!("{}/binding", path_of(pod));
        match send(&self.client, Method::POST, &path, JSON, &body).await {
            Ok(_) => (Answer::Done, None),
            // Bound by somebody, or by this very binding when its answer was lost.
            Err(failure) if failure.code == 409 => match get(&self.client, &path_of(pod)).await {
                Ok(now) if is_bound_so(&now, pod, node, text) => (Answer::Done, None),
                Ok(_) => (Answer::Refused, Some(failure.to_string())),
                Err(other) => (other.answer(), Some(other.to_string())),
            },
            Err(failure) => (failure.answer(), Some(failure.to_string())),
        }
    }

    async fn assign(&self, pod: &PodRef, text: &str) -> Result<(), Failure> {
        // Another pod of the same name has another uid, and such a patch is refused.
        let body = json!({"metadata": {"uid": pod.uid, "annotations": {names::ASSIGNMENT: text}}});
        send(&self.client, Method::PATCH, &path_of(pod), MERGE, &body).await.map(drop)
    }

    /// The pod is told first why it goes: a Job that sees its pod end looks for the reason.
    async fn evict(&self, pod: &PodRef, why: &str) -> Result<(), Failure> {
        self.condition(pod, "DisruptionTarget", "True", "PreemptionByScheduler", why).await?;
        let body = json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        });
        let path = format!("{}/eviction", path_of(pod));
        send(&self.client, Method::POST, &path, JSON, &body).await?;
        let (reason, action) = ("Preempted", "Preempting");
        let says = Says { warns: false, reason, action, note: why };
        self.event(pod, says).await.unwrap_or_default();
        Ok(())
    }

    async fn explain(&self, pod: &PodRef, why: &str) -> Result<(), Failure> {
        // Autoscalers look for this reason.
        self.condition(pod, "PodScheduled", "False", "Unschedulable", why).await?;
        let (reason, action) = ("FailedScheduling", "Scheduling");
        self.event(pod, Says { warns: true, reason, action, note: why }).await
    }

    async fn condition(
        &self,
        pod: &PodRef,
        kind: &str,
        status: &str,
        reason: &str,
        message: &str,
    ) -> Result<(), Failure> {
        let body = json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [{
            "type": kind, "status": status, "reason": reason, "message": cut(message),
            "lastTransitionTime": now(),
        }]}});
        let path = format!("{}/status", path_of(pod));
        send(&self.client, Method::PATCH, &path, STRATEGIC, &body).await.map(drop)
    }

    /// Writes the status of a custom resource.
    pub(super) async fn status(&self, write: &StatusWrite) -> Result<(), Failure> {
        match send(&self.client, Method::PATCH, &write.path, MERGE, &write.body).await {
            // It was deleted meanwhile.
            Err(failure) if [404, 409, 422].contains(&failure.code) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Writes an event of a pod.
    pub(super) async fn event(&self, pod: &PodRef, says: Says<'_>) -> Result<(), Failure> {
        let about = About::Pod(&pod.namespace, &pod.name, &pod.uid);
        let (path, body) = event(about, says, (&self.scheduler, &self.instance));
        send(&self.client, Method::POST, &path, JSON, &body).await.map(drop)
    }
}

fn answer(result: Result<(), Failure>) -> (Answer, Option<String>) {
    match result {
        Ok(()) => (Answer::Done, None),
        Err(failure) => (failure.answer(), Some(failure.to_string())),
    }
}

fn path_of(pod: &PodRef) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name)
}

fn is_bound_so(now: &Value, pod: &PodRef, node: &str, text: &str) -> bool {
    let at = |path: &str| now.pointer(path).and_then(Value::as_str);
    let annotation = now["metadata"]["annotations"][names::ASSIGNMENT].as_str();
    at("/metadata/uid") == Some(&pod.uid)
        && at("/spec/nodeName") == Some(node)
        && annotation == Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conflict_is_ours_if_the_pod_is_bound_as_we_wrote() {
        let pod = PodRef { namespace: "ns".into(), name: "a".into(), uid: "u".into() };
        let is = |uid: &str, node: &str, text: &str| {
            let now = json!({"metadata": {"uid": uid, "annotations": {names::ASSIGNMENT: text}},
                             "spec": {"nodeName": node}});
            is_bound_so(&now, &pod, "n", "x")
        };
        assert!(is("u", "n", "x"));
        assert!(!is("v", "n", "x") && !is("u", "m", "x") && !is("u", "n", "y"));
    }
}
