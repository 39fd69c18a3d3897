//! Any HTTP server behind the front: requests are passed on and measured.

use crate::front::{Front, Phase, Refusal};
use crate::http::{Body, Error, Open, refused};
use crate::stats::End;
use crate::trace::Trace;
use crate::worker::{self, Crashes};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Request, Response, Uri, Version};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// How often the server is asked for its health, before it is ready and then.
const ASK_STARTING: Duration = Duration::from_millis(100);
const ASK_READY: Duration = Duration::from_secs(1);
/// How long an answer about its health may take, and how many may fail in a row.
const HEALTHY: Duration = Duration::from_secs(5);
const MOST_UNHEALTHY: u32 = 5;

/// Headers between two neighbours only.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The server behind the front.
pub(crate) struct Upstream {
    client: Client<HttpConnector, UnsyncBoxBody<Bytes, Error>>,
    port: u16,
    health: String,
}

impl Upstream {
    pub(crate) fn new(port: u16, health: String) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), port, health }
    }

    fn uri(&self, path: &str) -> Result<Uri, hyper::http::uri::InvalidUri> {
        format!("http://127.0.0.1:{}{path}", self.port).parse()
    }

    /// Passes a request on and the answer back, as it comes.
    pub(crate) async fn pass(
        &self,
        front: &Rc<Front>,
        request: Request<Incoming>,
        arrived: Instant,
        trace: &Trace,
        open: Open,
    ) -> Response<Body> {
        let ended = |refusal: Refusal| {
            front.ended(refusal.end, refusal.status, arrived.elapsed());
            let mut response = refused(&refusal);
            trace.mark(response.headers_mut());
            response
        };
        if let Some(refusal) = front.closed() {
            return ended(refusal);
        }
        let down = || Refusal::later(End::GivenUp, 503, "the server does not answer", 1);
        if front.phase.get() == Phase::Restarting {
            return ended(down());
        }
        if front.open.get() > front.spec.queue as usize {
            return ended(Refusal::later(End::Refused, 429, "too many requests at a time", 1));
        }
        let passing = Passing::new(front, arrived);
        let (mut head, body) = request.into_parts();
        let path = head.uri.path_and_query().map_or("/", |p| p.as_str());
        let Ok(uri) = self.uri(path) else {
            return ended(Refusal::wrong(400, "a path that cannot be passed on"));
        };
        (head.uri, head.version) = (uri, Version::HTTP_11);
        without_hops(&mut head.headers);
        trace.mark(&mut head.headers);
        let body = body.map_err(Error::from).boxed_unsync();
        let answer = self.client.request(Request::from_parts(head, body));
        // Answers that are streamed may take as long as they do; their beginning may not.
        let waits = front.spec.patience().max(Duration::from_secs(60));
        let mut response = match timeout(waits, answer).await {
            Ok(Ok(response)) => response,
            Ok(Err(_)) => return ended(down()),
            Err(_) => {
                return ended(Refusal::later(End::GivenUp, 504, "not answered in time", 1));
            }
        };
        without_hops(response.headers_mut());
        trace.mark(response.headers_mut());
        let status = response.status().as_u16();
        let end = match status {
            500.. => End::Failed,
            400..500 => End::Wrong,
            _ => End::Answered,
        };
        let measured = Measured {
            front: Rc::clone(front),
            end,
            status,
            arrived,
            _open: open,
            _passing: passing,
        };
        response.map(|body| Body::Passed(Passed { body, measured: Some(measured) }))
    }

    async fn is_healthy(&self) -> bool {
        let Ok(uri) = self.uri(&self.health) else { return false };
        let empty = Empty::<Bytes>::new().map_err(|never| match never {}).boxed_unsync();
        let Ok(request) = Request::get(uri).body(empty) else { return false };
        let answer = timeout(HEALTHY, self.client.request(request)).await;
        matches!(answer, Ok(Ok(answer)) if answer.status().as_u16() < 400)
    }

    /// Keeps the server running until the service is drained. The error says why it could not be
    /// kept.
    pub(crate) async fn keep(&self, front: &Front, words: &[String]) -> Result<(), String> {
        let env = [("PORT", self.port.to_string())];
        let mut crashes = Crashes::default();
        loop {
            let why = match worker::spawn(words, &env) {
                Err(e) => format!("could not start {:?}: {e}", words.first()),
                Ok(mut child) => {
                    let died = tokio::select! {
                        status = child.wait() => Some(worker::exit("server", status)),
                        why = self.watch(front) => why,
                    };
                    let Some(why) = died else {
                        worker::end(&mut child).await;
                        return Ok(());
                    };
                    worker::kill(&mut child).await;
                    why
                }
            };
            if front.phase.get() == Phase::Draining {
                return Ok(());
            }
            if front.phase.get() == Phase::Ready {
                front.phase.set(Phase::Restarting);
            }
            front.stats.borrow_mut().restarts += 1;
            crate::say(&why);
            match crashes.another(Instant::now()) {
                Some(pause) => sleep(pause).await,
                None => return Err(format!("too many crashes within a minute; the last: {why}")),
            }
        }
    }

    /// Watches the server's health; `None` when the service is drained.
    async fn watch(&self, front: &Front) -> Option<String> {
        let mut bad = 0;
        let mut asked: Option<Instant> = None;
        loop {
            if front.phase.get() == Phase::Draining && front.open.get() == 0 {
                return None;
            }
            let ready = front.phase.get() == Phase::Ready;
            let every = if ready { ASK_READY } else { ASK_STARTING };
            if asked.is_some_and(|at| at.elapsed() < every) {
                sleep(Duration::from_millis(20)).await;
                continue;
            }
            asked = Some(Instant::now());
            let healthy = self.is_healthy().await;
            bad = if healthy || !ready { 0 } else { bad + 1 };
            if bad >= MOST_UNHEALTHY {
                return Some("the server does not answer about its health and is killed".into());
            }
            if healthy && matches!(front.phase.get(), Phase::Starting | Phase::Restarting) {
                front.phase.set(Phase::Ready);
                front.urgent.notify_one();
            }
        }
    }
}

fn without_hops(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    named.into_iter().for_each(|name| {
        headers.remove(name);
    });
    HOP_BY_HOP.iter().for_each(|name| {
        headers.remove(*name);
    });
}

/// A request of which the answer is on its way.
struct Measured {
    front: Rc<Front>,
    end: End,
    status: u16,
    arrived: Instant,
    _open: Open,
    _passing: Passing,
}

/// A request that the server has not answered yet.
struct Passing {
    front: Rc<Front>,
    id: u64,
}

impl Passing {
    fn new(front: &Rc<Front>, arrived: Instant) -> Self {
        let id = front.pass_begins(arrived);
        Self { front: Rc::clone(front), id }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        self.front.pass_ends(self.id);
    }
}

impl Measured {
    fn count(self, end: End) {
        self.front.ended(end, self.status, self.arrived.elapsed());
    }
}

/// The body of an answer that is passed on; the request is counted at its end.
pub(crate) struct Passed {
    body: Incoming,
    measured: Option<Measured>,
}

impl hyper::body::Body for Passed {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let next = Pin::new(&mut self.body).poll_frame(context);
        let end = match &next {
            Poll::Ready(Some(Err(_))) => Some(End::GivenUp),
            Poll::Ready(None) => None,
            _ if self.body.is_end_stream() => None,
            _ => return next.map_err(Error::from),
        };
        if let Some(measured) = self.measured.take() {
            let end = end.unwrap_or(measured.end);
            measured.count(end);
        }
        next.map_err(Error::from)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && self.measured.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        // An answer without a body is complete; one that its client left is nobody's fault.
        if let Some(measured) = self.measured.take() {
            let whole = self.body.is_end_stream();
            let end = if whole { measured.end } else { End::Wrong };
            measured.count(end);
        }
    }
}
