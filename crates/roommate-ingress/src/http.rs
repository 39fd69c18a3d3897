//! HTTP for clients: the Open Inference Protocol for workers with the SDK, a reverse proxy for
//! other servers.

use crate::front::{Answer, Content, Front, Refusal};
use crate::proxy::{Passed, Upstream};
use crate::spec::Server;
use crate::stats::End;
use crate::tensor::{HEADER_LENGTH, Infer};
use crate::trace::Trace;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use serde_json::json;
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Most bytes of a request's body.
const MOST_BODY: usize = crate::frame::MOST_BINARY;
/// How long the head of a request may take to arrive, and its body.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
const BODY_WITHIN: Duration = Duration::from_secs(30);
/// Bytes of a request's head at most.
const MOST_HEAD: usize = 64 << 10;
/// Pause of accepting where there are no file descriptors.
const NO_ROOM: Duration = Duration::from_millis(50);

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// The body of an answer.
pub(crate) enum Body {
    /// It is known as a whole.
    Whole(Full<Bytes>),
    /// It comes from the server behind the front.
    Passed(Passed),
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(context).map_err(|never| match never {}),
            Self::Passed(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Passed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Passed(body) => body.size_hint(),
        }
    }
}

/// Futures of connections run on the thread of the front.
#[derive(Clone, Copy)]
pub(crate) struct Local;

impl<F: Future + 'static> hyper::rt::Executor<F> for Local {
    fn execute(&self, future: F) {
        tokio::task::spawn_local(async move {
            future.await;
        });
    }
}

/// Accepts connections until the front ends.
pub(crate) async fn listen(front: Rc<Front>, upstream: Option<Rc<Upstream>>, at: TcpListener) {
    loop {
        match at.accept().await {
            Ok((stream, _)) => {
                let (front, upstream) = (Rc::clone(&front), upstream.clone());
                tokio::task::spawn_local(connection(front, upstream, stream));
            }
            Err(_) => tokio::time::sleep(NO_ROOM).await,
        }
    }
}

async fn connection(front: Rc<Front>, upstream: Option<Rc<Upstream>>, stream: TcpStream) {
    // Answers are small and awaited.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let (front, upstream) = (Rc::clone(&front), upstream.clone());
        async move { Ok::<_, Infallible>(answer(&front, upstream, request).await) }
    });
    let mut server = auto::Builder::new(Local);
    server
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(MOST_HEAD)
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(1024);
    // A client that hangs up is no error of the service.
    let _ = server.serve_connection(TokioIo::new(stream), service).await;
}

/// Counts a request while it is answered.
pub(crate) struct Open(Rc<Front>);

impl Open {
    pub(crate) fn new(front: &Rc<Front>) -> Self {
        front.open.set(front.open.get() + 1);
        front.asked.set(Some(Instant::now()));
        Self(Rc::clone(front))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
    }
}

async fn answer(
    front: &Rc<Front>,
    upstream: Option<Rc<Upstream>>,
    request: hyper::Request<Incoming>,
) -> Response<Body> {
    let arrived = Instant::now();
    let trace = Trace::of(request.headers());
    let open = Open::new(front);
    if let Some(text) = metrics(front, &request) {
        return reply(200, "text/plain; version=0.0.4", text.into());
    }
    if let Some(upstream) = upstream {
        return upstream.pass(front, request, arrived, &trace, open).await;
    }
    let route = Route::of(request.method(), request.uri().path(), &front.spec.model);
    let measured = matches!(route, Route::Infer | Route::Predict);
    let result = match route {
        Route::Infer => infer(front, request, arrived).await,
        Route::Predict => predict(front, request, arrived).await,
        other => Ok(plain(front, &other)),
    };
    let mut response = match result {
        Ok(response) => {
            if measured {
                front.ended(End::Answered, 200, arrived.elapsed());
            }
            response
        }
        Err(refusal) => {
            let Refusal { end, status, .. } = refusal;
            front.ended(end, status, arrived.elapsed());
            refused(&refusal)
        }
    };
    trace.mark(response.headers_mut());
    response
}

/// What a path means.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    Infer,
    Predict,
    Live,
    Ready,
    Server,
    Model,
    NoModel,
    NotAllowed,
    Nothing,
}

impl Route {
    fn of(method: &Method, path: &str, model: &str) -> Self {
        let words: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (named, rest) = match &words[..] {
            ["v2", "models", name, "versions", _, rest @ ..] => (Some(*name), rest),
            ["v2", "models", name, rest @ ..] => (Some(*name), rest),
            _ => (None, &[][..]),
        };
        let (route, wants) = match (named, rest) {
            (Some(name), _) if name != model => return Self::NoModel,
            (Some(_), ["infer"]) => (Self::Infer, Method::POST),
            (Some(_), ["ready"]) => (Self::Ready, Method::GET),
            (Some(_), []) => (Self::Model, Method::GET),
            (Some(_), _) => return Self::Nothing,
            (None, _) => match &words[..] {
                ["predict"] => (Self::Predict, Method::POST),
                ["v2"] => (Self::Server, Method::GET),
                ["v2", "health", "live"] => (Self::Live, Method::GET),
                ["v2", "health", "ready"] => (Self::Ready, Method::GET),
                _ => return Self::Nothing,
            },
        };
        let head = wants == Method::GET && method == Method::HEAD;
        if *method == wants || head { route } else { Self::NotAllowed }
    }
}

fn metrics(front: &Front, request: &hyper::Request<Incoming>) -> Option<String> {
    let path = request.uri().path();
    // A server of another kind has metrics of its own at the usual path.
    let usual = path == "/metrics" && matches!(front.spec.server, Server::Sdk {});
    (usual || path == "/roommate/metrics").then(|| {
        let queued = front.queue.borrow().len();
        front.stats.borrow().prometheus(&front.spec.model, queued, front.is_ready())
    })
}

/// Answers that need no worker.
fn plain(front: &Front, route: &Route) -> Response<Body> {
    let model = &front.spec.model;
    let value = match route {
        Route::Live => json!({ "live": true }),
        Route::Ready => {
            let ready = front.is_ready();
            let status = if ready { 200 } else { 503 };
            return as_json(status, &json!({ "name": model, "ready": ready }));
        }
        Route::Server => json!({
            "name": "roommate", "version": env!("CARGO_PKG_VERSION"),
            "extensions": ["binary_tensor_data"]
        }),
        Route::Model => {
            let ready = front.ready.borrow();
            json!({
                "name": model, "versions": ["1"],
                "platform": ready.platform.as_deref().unwrap_or("python"),
                "inputs": ready.inputs, "outputs": ready.outputs
            })
        }
        Route::NoModel => {
            let what = format!("there is no such model here, only {model:?}");
            return refused(&Refusal::wrong(404, what));
        }
        Route::NotAllowed => return refused(&Refusal::wrong(405, "another method is needed")),
        _ => {
            let what = format!("nothing is here; requests go to /v2/models/{model}/infer");
            return refused(&Refusal::wrong(404, what));
        }
    };
    as_json(200, &value)
}

/// The whole body of a request, within its limits of size and time. A service that cannot answer
/// takes no data.
async fn body(
    front: &Front,
    request: hyper::Request<Incoming>,
) -> Result<(HeaderMap, Bytes), Refusal> {
    if let Some(refusal) = front.closed() {
        return Err(refusal);
    }
    let (head, body) = request.into_parts();
    let large = || Refusal::wrong(413, format!("the body is longer than {MOST_BODY} bytes"));
    let length = head.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    if length.and_then(|v| v.parse::<u64>().ok()).is_some_and(|n| n > MOST_BODY as u64) {
        return Err(large());
    }
    if head.headers.contains_key(header::CONTENT_ENCODING) {
        return Err(Refusal::wrong(415, "compressed bodies are not supported"));
    }
    match timeout(BODY_WITHIN, Limited::new(body, MOST_BODY).collect()).await {
        Ok(Ok(whole)) => Ok((head.headers, whole.to_bytes())),
        Ok(Err(e)) if e.is::<LengthLimitError>() => Err(large()),
        Ok(Err(e)) => Err(Refusal::wrong(400, format!("the body could not be read: {e}"))),
        Err(_) => Err(Refusal::wrong(408, "the body did not arrive in time")),
    }
}

async fn infer(
    front: &Front,
    request: hyper::Request<Incoming>,
    arrived: Instant,
) -> Result<Response<Body>, Refusal> {
    let (headers, body) = body(front, request).await?;
    let wrong = |what: String| Refusal::wrong(400, what);
    let head = match headers.get(HEADER_LENGTH) {
        None => body.len(),
        Some(length) => length
            .to_str()
            .ok()
            .and_then(|v| v.parse().ok())
            .ok_or_else(|| wrong(format!("{HEADER_LENGTH} is not a number")))?,
    };
    let infer = match Infer::read(&body, head) {
        Ok(infer) => infer,
        Err(_) if is_plain(&body) => return hand_over(front, &body, arrived).await,
        Err(what) => return Err(wrong(what)),
    };
    let rows = infer.rows().filter(|rows| *rows > 0);
    let rows = rows.ok_or_else(|| wrong("inputs differ in their first dimension".into()))?;
    let most = front.queue.borrow().rules.max_batch;
    if rows > most {
        return Err(wrong(format!("{rows} rows in a request; the largest batch is {most}")));
    }
    let Answer::Tensors(infer, outputs) = front.ask(Content::Tensors(infer), rows, arrived).await?
    else {
        return Err(wrong("an answer of another kind".into()));
    };
    let failed = |what| Refusal { status: 500, end: End::Failed, what, retry_after_s: None };
    let (body, head) = infer.answer(&front.spec.model, &outputs).map_err(failed)?;
    let Some(length) = head else { return Ok(reply(200, JSON, body)) };
    let mut response = reply(200, "application/octet-stream", body);
    response.headers_mut().insert(HEADER_LENGTH, length.into());
    Ok(response)
}

/// Plain JSON, as the worker's function understands it.
async fn predict(
    front: &Front,
    request: hyper::Request<Incoming>,
    arrived: Instant,
) -> Result<Response<Body>, Refusal> {
    let (_, body) = body(front, request).await?;
    hand_over(front, &body, arrived).await
}

/// Whether a body is JSON without tensors.
fn is_plain(body: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Probe {
        #[serde(default)]
        inputs: Option<serde::de::IgnoredAny>,
    }
    serde_json::from_slice(body).is_ok_and(|probe: Probe| probe.inputs.is_none())
}

async fn hand_over(
    front: &Front,
    body: &[u8],
    arrived: Instant,
) -> Result<Response<Body>, Refusal> {
    let value = serde_json::from_slice(body)
        .map_err(|e| Refusal::wrong(400, format!("the body is not JSON: {e}")))?;
    match front.ask(Content::Json(value), 1, arrived).await? {
        Answer::Json(value) => Ok(reply(200, JSON, value.get().to_string().into())),
        Answer::Tensors(..) => Err(Refusal::wrong(400, "an answer of another kind")),
    }
}

const JSON: &str = "application/json";

pub(crate) fn as_json(status: u16, value: &serde_json::Value) -> Response<Body> {
    reply(status, JSON, value.to_string().into())
}

pub(crate) fn reply(status: u16, kind: &'static str, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::Whole(Full::new(body)));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A refusal as its client reads it.
pub(crate) fn refused(refusal: &Refusal) -> Response<Body> {
    let mut response = as_json(refusal.status, &json!({ "error": refusal.what }));
    if let Some(after) = refusal.retry_after_s {
        response.headers_mut().insert(header::RETRY_AFTER, after.into());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_protocol_are_known() {
        let of = |method: Method, path: &str| Route::of(&method, path, "m");
        assert_eq!(of(Method::POST, "/v2/models/m/infer"), Route::Infer);
        assert_eq!(of(Method::POST, "/v2/models/m/versions/1/infer"), Route::Infer);
        assert_eq!(of(Method::GET, "/v2/models/m"), Route::Model);
        assert_eq!(of(Method::GET, "/v2/models/m/versions/1/ready"), Route::Ready);
        assert_eq!(of(Method::HEAD, "/v2/health/live"), Route::Live);
        assert_eq!(of(Method::GET, "/v2"), Route::Server);
        assert_eq!(of(Method::GET, "/v2/models/m/infer"), Route::NotAllowed);
        assert_eq!(of(Method::POST, "/v2/models/other/infer"), Route::NoModel);
        assert_eq!(of(Method::POST, "/predict"), Route::Predict);
        assert_eq!(of(Method::GET, "/../etc"), Route::Nothing);
    }
}
