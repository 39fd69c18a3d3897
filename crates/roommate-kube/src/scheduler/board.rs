//! The dashboard that the scheduler serves, and who may see it: whoever has a token of the cluster
//! whose user may list the pods of all namespaces, because that is what it shows.

use super::status::Ask;
use crate::board::Board;
use crate::client::{Client, Error, Failure, send};
use http::Method;
use roommate_agent::api::dashboard::viewer::{Keys, Shown, Viewer};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// What to do without a token.
const HINT: &str = "`kubectl create token SERVICEACCOUNT` makes one; its user has to be allowed to \
                    list the pods of all namespaces";
/// How long a verdict about a token holds.
const HOLDS: Duration = Duration::from_secs(10);
/// How long it holds while the API server cannot be asked.
const HOLDS_AT_MOST: Duration = Duration::from_secs(120);
/// Most tokens of which a verdict is kept.
const MOST_TOKENS: usize = 256;

/// Serves the page at an address of this machine from now on; returns the address.
pub(super) fn serve(at: SocketAddr, client: Client, asks: Sender<Ask>) -> Result<String, Error> {
    let runtime = Handle::current();
    let read = move |from| {
        let (answer, answered) = oneshot::channel();
        let gone = || "the scheduler ends".to_string();
        asks.blocking_send(Ask::Journal(from, answer)).map_err(|_| gone())?;
        answered.blocking_recv().map_err(|_| gone())?
    };
    let board = Board::new(Box::new(read), client.clone(), runtime.clone());
    let guard = Guard { client, runtime, known: Mutex::default() };
    let keys = Keys::Others(Box::new(move |token| guard.lets_in(token)), HINT.into());
    let viewer = Viewer::at(at, Shown::Live(Arc::new(board)), keys).map_err(Error::agent)?;
    let url = viewer.url();
    let thread = std::thread::Builder::new().name("dashboard".into());
    thread.spawn(move || viewer.serve()).map_err(Error::io("the dashboard"))?;
    Ok(url)
}

/// Asks the API server who has a token, and what that user may do.
struct Guard {
    client: Client,
    runtime: Handle,
    /// Verdicts, and when they were given.
    known: Mutex<HashMap<String, (Instant, bool)>>,
}

impl Guard {
    fn lets_in(&self, token: &str) -> bool {
        if token.is_empty() {
            return false;
        }
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known().get(token).copied();
        let within = |age: Duration| before.filter(|(at, _)| at.elapsed() < age);
        if let Some((_, verdict)) = within(HOLDS) {
            return verdict;
        }
        match self.runtime.block_on(review(&self.client, token)) {
            Ok(verdict) => {
                let mut known = known();
                if known.len() >= MOST_TOKENS {
                    known.clear();
                }
                known.insert(token.into(), (Instant::now(), verdict));
                verdict
            }
            // Who was let in stays while the API server is away for a moment.
            Err(_) => within(HOLDS_AT_MOST).is_some_and(|(_, verdict)| verdict),
        }
    }
}

/// Whether a token belongs to somebody who may list the pods of all namespaces.
async fn review(client: &Client, token: &str) -> Result<bool, Failure> {
    let kind = "authentication.k8s.io/v1";
    let who = json!({"apiVersion": kind, "kind": "TokenReview", "spec": {"token": token}});
    let who = create(client, &format!("/apis/{kind}/tokenreviews"), &who).await?;
    if who.pointer("/status/authenticated") != Some(&Value::Bool(true)) {
        return Ok(false);
    }
    let user = |field: &str| who.pointer(&format!("/status/user/{field}")).cloned();
    let kind = "authorization.k8s.io/v1";
    let may = json!({
        "apiVersion": kind, "kind": "SubjectAccessReview",
        "spec": {
            "user": user("username"), "uid": user("uid"), "groups": user("groups"),
            "extra": user("extra"),
            "resourceAttributes": {"verb": "list", "resource": "pods"},
        },
    });
    let may = create(client, &format!("/apis/{kind}/subjectaccessreviews"), &may).await?;
    Ok(may.pointer("/status/allowed") == Some(&Value::Bool(true)))
}

async fn create(client: &Client, path: &str, what: &Value) -> Result<Value, Failure> {
    let text = send(client, Method::POST, path, "application/json", what).await?;
    serde_json::from_str(&text).map_err(|e| Failure { code: 0, what: format!("{path}: {e}") })
}
