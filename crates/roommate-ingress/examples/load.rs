//! A client for measurements: sends requests to a server and prints latencies as JSON.
//!
//! usage: load URL BODY WAY AMOUNT SECONDS [OBJECTIVE-MS]
//!
//! WAY AMOUNT is one of:
//!
//! * open RATE: requests come at this rate whatever the server does (Poisson, seeded); latencies
//!   count from the moment at which a request was due, so that waiting is not left out;
//! * rates:FILE RATE: the same at a rate that changes: each line of the file is the factor on the
//!   rate in a part of the time;
//! * closed CONNECTIONS: each connection sends its next request when the last one was answered;
//! * hold CONNECTIONS: opens connections that each send one request and then stay open.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{sleep, sleep_until};

type Peer = SendRequest<Full<Bytes>>;

#[derive(Default)]
struct Found {
    latencies_us: RefCell<Vec<u64>>,
    /// When each request was due, and its latency if it was answered.
    each: RefCell<Vec<(Instant, Option<Duration>)>>,
    statuses: RefCell<BTreeMap<String, u64>>,
    open: Cell<usize>,
}

impl Found {
    fn count(&self, status: &str, due: Instant, took: Option<Duration>) {
        self.each.borrow_mut().push((due, took));
        *self.statuses.borrow_mut().entry(status.into()).or_default() += 1;
        if let Some(took) = took {
            self.latencies_us.borrow_mut().push(took.as_micros() as u64);
        }
    }
}

struct Target {
    address: String,
    uri: Uri,
    body: Bytes,
}

impl Target {
    async fn connect(&self) -> Option<Peer> {
        let stream = TcpStream::connect(&self.address).await.ok()?;
        stream.set_nodelay(true).ok()?;
        let (peer, connection) = handshake(TokioIo::new(stream)).await.ok()?;
        spawn_local(async move {
            let _ = connection.await;
        });
        Some(peer)
    }

    async fn ask(&self, peer: &mut Peer) -> Option<u16> {
        let request = Request::post(self.uri.path())
            .header("host", &self.address)
            .header("content-type", "application/json")
            .body(Full::new(self.body.clone()))
            .ok()?;
        peer.ready().await.ok()?;
        let answer = peer.send_request(request).await.ok()?;
        let status = answer.status().as_u16();
        answer.into_body().collect().await.ok()?;
        Some(status)
    }

    /// Sends a request over a connection, or a new one; counts from `since`.
    async fn once(&self, kept: &RefCell<Vec<Peer>>, found: &Found, since: Instant) {
        let idle = kept.borrow_mut().pop();
        let peer = match idle {
            Some(peer) => Some(peer),
            None => self.connect().await,
        };
        let Some(mut peer) = peer else { return found.count("no connection", since, None) };
        match self.ask(&mut peer).await {
            Some(status) => {
                let answered = (status == 200).then(|| since.elapsed());
                found.count(&status.to_string(), since, answered);
                kept.borrow_mut().push(peer);
            }
            None => found.count("closed", since, None),
        }
    }
}

/// The factors on the rate.
fn factors(way: &str) -> Vec<f64> {
    let Some(file) = way.strip_prefix("rates:") else { return vec![1.0] };
    let text = std::fs::read_to_string(file).expect("the file of rates can be read");
    let found: Vec<f64> = text.split_whitespace().map(|n| n.parse().expect("a number")).collect();
    assert!(!found.is_empty(), "the file of rates has no line");
    found
}

/// The time after the first request from which on at most one of a hundred is late.
fn restored_s(mut each: Vec<(Instant, Option<Duration>)>, most: Duration) -> Option<f64> {
    each.sort_by_key(|(due, _)| *due);
    let (first, _) = *each.first()?;
    let (mut late, mut from) = (0, each.len());
    for (n, (_, took)) in each.iter().enumerate().rev() {
        late += usize::from(took.is_none_or(|took| took > most));
        if late * 100 <= each.len() - n {
            from = n;
        }
    }
    each.get(from).map(|(due, _)| due.duration_since(first).as_secs_f64())
}

/// Exponential times between requests, from a seed.
struct Arrivals(u64, f64);

impl Arrivals {
    fn next(&mut self) -> Duration {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = ((self.0 >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        Duration::from_secs_f64(-uniform.ln() / self.1)
    }
}

async fn measure(target: Rc<Target>, way: &str, amount: f64, seconds: f64) -> Rc<Found> {
    let (found, kept) = (Rc::new(Found::default()), Rc::new(RefCell::new(Vec::new())));
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut tasks = Vec::new();
    match way {
        open if open == "open" || open.starts_with("rates:") => {
            let factors = factors(open);
            let mut arrivals = Arrivals(1, amount);
            let began = Instant::now();
            let mut at = began;
            while at < end {
                sleep_until(at.into()).await;

                let (target, found, kept) =
                    (Rc::clone(&target), Rc::clone(&found), Rc::clone(&kept));
                tasks.push(spawn_local(async move { target.once(&kept, &found, at).await }));
                // Within a part of the time the rate is constant; beyond its end there is another.
                loop {
                    let passed = at.duration_since(began).as_secs_f64() / seconds;
                    let part = (passed * factors.len() as f64) as usize;
                    let Some(factor) = factors.get(part) else {
                        at = end;
                        break;
                    };
                    let over = began
                        + Duration::from_secs_f64(
                            seconds * (part + 1) as f64 / factors.len() as f64,
                        );
                    arrivals.1 = amount * factor.max(1e-6);
                    at += arrivals.next();
                    if at < over {
                        break;
                    }
                    at = over + Duration::from_nanos(1);
                }
            }
        }
        "closed" => {
            for _ in 0..amount as usize {
                let (target, found) = (Rc::clone(&target), Rc::clone(&found));
                tasks.push(spawn_local(async move {
                    let kept = RefCell::new(Vec::new());
                    while Instant::now() < end {
                        target.once(&kept, &found, Instant::now()).await;
                    }
                }));
            }
        }
        _ => {
            for _ in 0..amount as usize {
                let Some(mut peer) = target.connect().await else { continue };
                if target.ask(&mut peer).await.is_some() {
                    found.open.set(found.open.get() + 1);
                }
                kept.borrow_mut().push(peer);
            }
            sleep(end.saturating_duration_since(Instant::now())).await;
        }
    }
    for task in tasks {
        let _ = task.await;
    }
    found
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [url, body, way, amount, seconds, objective @ ..] = &words[..] else {
        panic!("usage: load URL BODY WAY AMOUNT SECONDS [OBJECTIVE-MS]");
    };
    let uri: Uri = url.parse().expect("URL is a URL");
    let address = uri.authority().expect("URL has a host").to_string();
    let target = Rc::new(Target { address, uri, body: body.clone().into() });
    let (amount, seconds): (f64, f64) =
        (amount.parse().expect("a number"), seconds.parse().expect("seconds"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let found = LocalSet::new().block_on(&runtime, measure(target, way, amount, seconds));
    let mut all = found.latencies_us.take();
    all.sort_unstable();
    let at = |q: f64| all.get(((all.len() as f64 * q) as usize).min(all.len().saturating_sub(1)));
    let ms = |q: f64| at(q).map(|us| *us as f64 / 1e3);
    // Whoever was not answered is over as well.
    let objective_us = objective.first().map(|ms| ms.parse::<f64>().expect("ms") * 1e3);
    let statuses = found.statuses.take();
    let sent = statuses.values().sum::<u64>();
    let over = objective_us.map(|most| {
        let kept = all.iter().filter(|us| **us as f64 <= most).count() as u64;
        (sent - kept) as f64 / sent.max(1) as f64
    });
    let restored = objective_us
        .and_then(|most| restored_s(found.each.take(), Duration::from_secs_f64(most / 1e6)));
    let report = json!({
        "answered": all.len(), "requests_per_s": all.len() as f64 / seconds,
        "p50_ms": ms(0.5), "p90_ms": ms(0.9), "p99_ms": ms(0.99), "worst_ms": ms(1.0),
        "statuses": statuses, "open": found.open.get(), "over_share": over,
        "restored_s": restored,
    });
    let _ = writeln!(std::io::stdout(), "{report}");
}
