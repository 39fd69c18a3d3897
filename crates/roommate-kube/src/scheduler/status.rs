//! What the scheduler answers over HTTP: whether it lives, what it counts, and all that it knows.
//!
//! `/debug/` is for this machine only: `kubectl port-forward` ends on it, and whom the API server
//! lets forward ports may read names of pods.

use crate::board::written::{self, Written};
use crate::client::Error;
use crate::pages::{self, Page, ask, page};
use http::StatusCode;
use roommate_agent::process::rotated_file::Place;
use std::net::SocketAddr;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// What is asked of the scheduler.
pub(super) enum Ask {
    /// Whether it is ready.
    Ready(oneshot::Sender<Result<String, String>>),
    /// What it counts.
    Metrics(oneshot::Sender<String>),
    /// The journal of all decisions since the nodes changed last.
    Snapshot(oneshot::Sender<Vec<u8>>),
    /// What was written of that journal from a place on.
    Journal(Place, oneshot::Sender<Result<Written, String>>),
}

/// Listens and answers from now on.
pub(super) async fn serve(at: SocketAddr, asks: Sender<Ask>) -> Result<SocketAddr, Error> {
    pages::serve(at, move |path, peer| answer(path, peer, asks.clone())).await
}

async fn answer(path: String, peer: SocketAddr, asks: Sender<Ask>) -> Page {
    match path.as_str() {
        "/healthz" | "/livez" => match ask(&asks, Ask::Ready).await {
            Some(_) => page(StatusCode::OK, "ok\n"),
            None => page(StatusCode::SERVICE_UNAVAILABLE, "the scheduler does not answer\n"),
        },
        "/readyz" => match ask(&asks, Ask::Ready).await {
            Some(Ok(what)) => page(StatusCode::OK, what + "\n"),
            Some(Err(why)) => page(StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
            None => page(StatusCode::SERVICE_UNAVAILABLE, "the scheduler does not answer\n"),
        },
        "/metrics" => match ask(&asks, Ask::Metrics).await {
            Some(text) => pages::metrics(text),
            None => page(StatusCode::SERVICE_UNAVAILABLE, "the scheduler does not answer\n"),
        },
        path if path.starts_with("/debug/") && !peer.ip().is_loopback() => page(
            StatusCode::FORBIDDEN,
            "only from this machine: use kubectl port-forward, or kubectl roommate snapshot\n",
        ),
        "/debug/snapshot" => match ask(&asks, Ask::Snapshot).await {
            Some(journal) if !journal.is_empty() => page(StatusCode::OK, journal),
            Some(_) => page(
                StatusCode::NOT_FOUND,
                "nothing was decided: this scheduler does not lead, or no node has GPUs for it\n",
            ),
            None => page(StatusCode::SERVICE_UNAVAILABLE, "the scheduler does not answer\n"),
        },
        path if path.starts_with(written::PATH) => journal(path, &asks).await,
        _ => page(
            StatusCode::NOT_FOUND,
            "there are /healthz, /readyz, /metrics, /debug/snapshot and /debug/journal/PART/AT\n",
        ),
    }
}

/// A piece of the journal as JSON.
async fn journal(path: &str, asks: &Sender<Ask>) -> Page {
    let Some(from) = written::place(path) else {
        return page(StatusCode::BAD_REQUEST, "expected /debug/journal/PART/AT with two numbers\n");
    };
    let (answer, answered) = oneshot::channel();
    let sent = asks.send(Ask::Journal(from, answer)).await;
    match (sent, answered.await) {
        (Ok(()), Ok(Ok(written))) => match serde_json::to_vec(&written) {
            Ok(text) => page(StatusCode::OK, text),
            Err(e) => page(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()),
        },
        (Ok(()), Ok(Err(why))) => page(StatusCode::NOT_FOUND, why + "\n"),
        _ => page(StatusCode::SERVICE_UNAVAILABLE, "the scheduler does not answer\n"),
    }
}
