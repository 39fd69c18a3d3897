//! What the agent answers over HTTP: whether it lives and is ready, and what it measures.

use crate::client::Error;
use crate::pages::{self, Page, page};
use http::StatusCode;
use std::net::SocketAddr;
use tokio::sync::{mpsc, oneshot};

/// What is asked of the agent.
pub(super) enum Ask {
    /// Whether it is ready.
    Ready(oneshot::Sender<Result<String, String>>),
    /// What it measures.
    Metrics(oneshot::Sender<String>),
}

/// Listens and answers from now on.
pub(super) async fn serve(at: SocketAddr, asks: mpsc::Sender<Ask>) -> Result<SocketAddr, Error> {
    pages::serve(at, move |path, _| answer(path, asks.clone())).await
}

async fn answer(path: String, asks: mpsc::Sender<Ask>) -> Page {
    let silent = || page(StatusCode::SERVICE_UNAVAILABLE, "the agent does not answer\n");
    match path.as_str() {
        "/healthz" | "/livez" => match pages::ask(&asks, Ask::Ready).await {
            Some(_) => page(StatusCode::OK, "ok\n"),
            None => silent(),
        },
        "/readyz" => match pages::ask(&asks, Ask::Ready).await {
            Some(Ok(what)) => page(StatusCode::OK, what + "\n"),
            Some(Err(why)) => page(StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
            None => silent(),
        },
        "/metrics" => match pages::ask(&asks, Ask::Metrics).await {
            Some(text) => pages::metrics(text),
            None => silent(),
        },
        _ => page(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
    }
}
