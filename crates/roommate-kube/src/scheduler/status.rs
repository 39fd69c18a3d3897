//! What the scheduler answers over HTTP: whether it lives, what it counts, and all that it knows.
//!
//! `/debug/` is for this machine only: `kubectl port-forward` ends on it, and whom the API server
//! lets forward ports may read names of pods.

use crate::client::Error;
use crate::exposition::CONTENT_TYPE as EXPOSITION;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
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
}

/// How long an answer of the scheduler may take.
const WITHIN: Duration = Duration::from_secs(10);

/// Listens and answers from now on.
pub(super) async fn serve(at: SocketAddr, asks: Sender<Ask>) -> Result<SocketAddr, Error> {
    let listener = TcpListener::bind(at).await.map_err(Error::io(format!("--listen {at}")))?;
    let at = listener.local_addr().map_err(Error::io("--listen"))?;
    tokio::spawn(async move {
        loop {
            let Ok((stream, peer)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let asks = asks.clone();
            tokio::spawn(async move {
                let answer = service_fn(move |request| answer(request, peer, asks.clone()));
                let mut http = hyper::server::conn::http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(WITHIN);
                // Whoever hangs up has lost interest.
                drop(http.serve_connection(TokioIo::new(stream), answer).await);
            });
        }
    });
    Ok(at)
}

type Page = Response<Full<Bytes>>;

async fn answer(
    request: Request<Incoming>,
    peer: SocketAddr,
    asks: Sender<Ask>,
) -> Result<Page, Infallible> {
    if request.method() != Method::GET {
        return Ok(page(StatusCode::METHOD_NOT_ALLOWED, "only GET\n"));
    }
    Ok(match request.uri().path() {
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
            Some(text) => {
                let mut page = page(StatusCode::OK, text);
                page.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(EXPOSITION));
                page
            }
            None => page(StatusCode::SERVICE_UNAVAILABLE, "the scheduler does not answer\n"),
        },
        "/debug/snapshot" if !peer.ip().is_loopback() => page(
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
        _ => page(
            StatusCode::NOT_FOUND,
            "there are /healthz, /readyz, /metrics and /debug/snapshot\n",
        ),
    })
}

async fn ask<T>(asks: &Sender<Ask>, what: fn(oneshot::Sender<T>) -> Ask) -> Option<T> {
    let (answer, answered) = oneshot::channel();
    asks.send(what(answer)).await.ok()?;
    tokio::time::timeout(WITHIN, answered).await.ok()?.ok()
}

fn page(status: StatusCode, text: impl Into<Bytes>) -> Page {
    let mut page = Response::new(Full::new(text.into()));
    *page.status_mut() = status;
    page
}
