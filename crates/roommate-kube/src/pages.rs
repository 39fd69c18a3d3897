//! Pages over HTTP, for probes and metrics: what scheduler and agent answer to `GET`.

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
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// A page.
pub(crate) type Page = Response<Full<Bytes>>;

/// How long an answer may take.
const WITHIN: Duration = Duration::from_secs(10);

/// Listens, and answers each `GET` from now on; `answer` hears the path and who asks.
pub(crate) async fn serve<A, F>(at: SocketAddr, answer: A) -> Result<SocketAddr, Error>
where
    A: Fn(String, SocketAddr) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Page> + Send + 'static,
{
    let listener = TcpListener::bind(at).await.map_err(Error::io(format!("--listen {at}")))?;
    let at = listener.local_addr().map_err(Error::io("--listen"))?;
    tokio::spawn(async move {
        loop {
            let Ok((stream, peer)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let answer = answer.clone();
            tokio::spawn(async move {
                let answer = service_fn(move |request: Request<Incoming>| {
                    let is_get = request.method() == Method::GET;
                    let page_of = is_get.then(|| answer(request.uri().path().into(), peer));
                    async move {
                        Ok::<_, Infallible>(match page_of {
                            Some(found) => found.await,
                            None => page(StatusCode::METHOD_NOT_ALLOWED, "only GET\n"),
                        })
                    }
                });
                let mut http = hyper::server::conn::http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(WITHIN);
                // Whoever hangs up has lost interest.
                drop(http.serve_connection(TokioIo::new(stream), answer).await);
            });
        }
    });
    Ok(at)
}

/// Asks the loop that knows, and waits for its answer for a bounded time.
pub(crate) async fn ask<Q, T>(asks: &Sender<Q>, what: fn(oneshot::Sender<T>) -> Q) -> Option<T> {
    let (answer, answered) = oneshot::channel();
    asks.send(what(answer)).await.ok()?;
    tokio::time::timeout(WITHIN, answered).await.ok()?.ok()
}

/// A page with this text.
pub(crate) fn page(status: StatusCode, text: impl Into<Bytes>) -> Page {
    let mut page = Response::new(Full::new(text.into()));
    *page.status_mut() = status;
    page
}

/// A page of metrics.
pub(crate) fn metrics(text: String) -> Page {
    let mut page = page(StatusCode::OK, text);
    page.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(EXPOSITION));
    page
}
