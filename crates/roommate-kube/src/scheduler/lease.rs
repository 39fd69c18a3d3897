//! Which of several schedulers leads: a Lease, as kube-scheduler has one.
//!
//! A leader that could not renew its Lease for [`Election::renew_within`] writes nothing more; the
//! others wait for [`Election::lasts`] before one of them takes it. What is between is longer than
//! a write may take, so that no write of an old leader meets one of the new. The number of changes
//! of the holder is the *term*: it is part of every assignment, and agents obey no older one.

use crate::client::{Failure, get, send};
use http::Method;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How schedulers elect a leader.
#[derive(Clone, Debug)]
pub struct Election {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// This scheduler.
    pub identity: String,
    /// How long a Lease holds after it was renewed.
    pub lasts: Duration,
    /// How long a leader tries to renew before it stops.
    pub renew_within: Duration,
    /// Pause between two tries.
    pub every: Duration,
}

/// A Lease that is held.
#[derive(Clone, Debug)]
pub(super) struct Held {
    election: Election,
    pub(super) term: u64,
    pub(super) renewed: Instant,
    version: String,
    transitions: u64,
}

/// The Lease as it was seen last, and since when.
struct Seen {
    version: String,
    since: Instant,
}

impl Election {
    fn path(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.namespace)
    }

    fn object(&self, version: Option<&str>, holder: &str, transitions: u64) -> Value {
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
        let mut metadata = json!({"name": self.name, "namespace": self.namespace});
        if let Some(version) = version {
            metadata["resourceVersion"] = version.into();
        }
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
            "spec": {
                "holderIdentity": holder, "leaseTransitions": transitions,
                "leaseDurationSeconds": self.lasts.as_secs().max(1),
                "acquireTime": now, "renewTime": now,
            },
        })
    }

    /// Waits until this scheduler leads. `told` hears once whom it waits for.
    pub(super) async fn acquire(
        &self,
        client: &Client,
        told: &mut dyn FnMut(&str),
    ) -> Result<Held, Failure> {
        let mut seen: Option<Seen> = None;
        let mut last = String::new();
        loop {
            match self.attempt(client, &mut seen).await {
                Ok(Ok(held)) => return Ok(held),
                Ok(Err(holder)) => {
                    if holder != last {
                        told(&format!("waits: {holder} leads"));
                        last = holder;
                    }
                }
                // Nobody will be let in later.
                Err(failure) if matches!(failure.code, 401 | 403) => return Err(failure),
                Err(failure) => told(&format!("lease {}: {failure}", self.name)),
            }
            tokio::time::sleep(self.every).await;
        }
    }

    /// One try; the holder if it is another one.
    async fn attempt(
        &self,
        client: &Client,
        seen: &mut Option<Seen>,
    ) -> Result<Result<Held, String>, Failure> {
        let began = Instant::now();
        let path = format!("{}/{}", self.path(), self.name);
        let lease = match get(client, &path).await {
            Ok(lease) => lease,
            Err(failure) if failure.code == 404 => {
                let body = self.object(None, &self.identity, 0);
                let text = send(client, Method::POST, &self.path(), JSON, &body).await?;
                return Ok(self.held(&text, 0, began));
            }
            Err(failure) => return Err(failure),
        };
        let text = |at: &str| lease.pointer(at).and_then(Value::as_str).unwrap_or_default();
        let (holder, version) = (text("/spec/holderIdentity"), text("/metadata/resourceVersion"));
        let transitions =
            lease.pointer("/spec/leaseTransitions").and_then(Value::as_u64).unwrap_or(0);
        let said = lease.pointer("/spec/leaseDurationSeconds").and_then(Value::as_u64);
        let lasts = Duration::from_secs(said.unwrap_or(0)).max(self.lasts);
        // Clocks of two machines differ: what counts is how long nothing changed here.
        let is_same = seen.as_ref().is_some_and(|s| s.version == version);
        if !is_same {
            *seen = Some(Seen { version: version.into(), since: began });
        }
        let expired = seen.as_ref().is_some_and(|s| began.duration_since(s.since) > lasts);
        if !holder.is_empty() && holder != self.identity && !expired {
            return Ok(Err(holder.into()));
        }
        let body = self.object(Some(version), &self.identity, transitions + 1);
        match send(client, Method::PUT, &path, JSON, &body).await {
            Ok(text) => Ok(self.held(&text, transitions + 1, began)),
            Err(failure) if failure.code == 409 => Ok(Err("another scheduler".into())),
            Err(failure) => Err(failure),
        }
    }

    fn held(&self, text: &str, transitions: u64, renewed: Instant) -> Result<Held, String> {
        Ok(Held {
            election: self.clone(),
            term: transitions + 1,
            renewed,
            version: version_of(text),
            transitions,
        })
    }
}

impl Held {
    /// Until when this scheduler may write.
    pub(super) fn valid_until(&self) -> Instant {
        self.renewed + self.election.renew_within
    }

    /// When to renew next.
    pub(super) fn next(&self) -> Duration {
        self.election.every
    }

    /// Renews the Lease; an error says that another scheduler holds it.
    pub(super) async fn renew(&mut self, client: &Client) -> Result<(), String> {
        let began = Instant::now();
        let election = &self.election;
        let path = format!("{}/{}", election.path(), election.name);
        let body = election.object(Some(&self.version), &election.identity, self.transitions);
        match send(client, Method::PUT, &path, JSON, &body).await {
            Ok(text) => {
                (self.version, self.renewed) = (version_of(&text), began);
                Ok(())
            }
            // It was changed by somebody, or by a renewal of ours whose answer was lost.
            Err(failure) if matches!(failure.code, 404 | 409) => {
                let lease = get(client, &path).await.unwrap_or_default();
                let text = |at: &str| lease.pointer(at).and_then(Value::as_str);
                match text("/spec/holderIdentity") {
                    Some(holder) if holder != election.identity => {
                        Err(format!("{holder} leads now"))
                    }
                    Some(_) => {
                        self.version = text("/metadata/resourceVersion").unwrap_or_default().into();
                        Ok(())
                    }
                    None => Ok(()),
                }
            }
            Err(_) => Ok(()),
        }
    }

    /// Gives the Lease back, so that another scheduler need not wait.
    pub(super) async fn release(self, client: &Client) {
        let path = format!("{}/{}", self.election.path(), self.election.name);
        let body = self.election.object(Some(&self.version), "", self.transitions);
        drop(send(client, Method::PUT, &path, JSON, &body).await);
    }
}

const JSON: &str = "application/json";

fn version_of(text: &str) -> String {
    let object: Value = serde_json::from_str(text).unwrap_or_default();
    let version = object.pointer("/metadata/resourceVersion").and_then(Value::as_str);
    version.unwrap_or_default().into()
}
