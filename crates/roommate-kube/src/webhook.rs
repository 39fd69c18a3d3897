//! The webhook: pods that ask for parts of GPUs in the spelling of another product are admitted as
//! if they had asked in ours.
//!
//! ```text
//!  pod ─▶ API server ─▶ /mutate ─▶ admit ─▶ patch, warnings ─▶ API server ─▶ scheduler
//!                                    └────▶ refusal in words ─▶ user
//! ```
//!
//! It is opt-in: nothing else needs it, and while it does not answer pods are created as they are.

mod admit;
mod certificate;
mod spelling;

pub use admit::{Admitted, admit, translated};
pub use certificate::Certificate;

use crate::client::Error;
use bytes::Bytes;
use certificate::Identity;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// How to run the webhook.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it answers, over HTTPS.
    pub listen: SocketAddr,
    /// How it proves who it is.
    pub certificate: Certificate,
    /// The scheduler that it gives pods to.
    pub scheduler: String,
}

/// How long a request may take: the API server does not wait longer.
const WITHIN: Duration = Duration::from_secs(10);
/// Most bytes of a request: a review has the pod and, at an update, the pod before; each may have
/// 1.5 MiB, as much as the API server stores.
const MOST_BYTES: usize = 4 << 20;

/// Answers until `ended` is ready. `told` hears what people want to know.
pub async fn run(
    options: Options,
    ended: impl Future<Output = ()>,
    told: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    let at = options.listen;
    let listener = TcpListener::bind(at).await.map_err(Error::io(format!("--listen {at}")))?;
    let at = listener.local_addr().map_err(Error::io("--listen"))?;
    let mut identity = Identity::of(&options.certificate, told).await?;
    told(&format!("https://{at}: /mutate, /healthz"));
    let mut ended = std::pin::pin!(ended);
    let mut look_again = tokio::time::interval(certificate::LOOK_AGAIN);
    look_again.reset();
    loop {
        tokio::select! {
            () = &mut ended => return Ok(()),
            _ = look_again.tick() => identity.renew(told).await,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let acceptor = TlsAcceptor::from(identity.config());
                    tokio::spawn(serve(stream, acceptor, options.scheduler.clone()));
                }
                // Too many open files, for example: it passes.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

async fn serve(stream: TcpStream, acceptor: TlsAcceptor, scheduler: String) {
    let Ok(Ok(stream)) = tokio::time::timeout(WITHIN, acceptor.accept(stream)).await else {
        // Not TLS, or a client that does not trust this certificate.
        return;
    };
    let answer = service_fn(move |request| answer(request, scheduler.clone()));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(WITHIN);
    // Whoever hangs up has lost interest.
    drop(http.serve_connection(TokioIo::new(stream), answer).await);
}

type Page = Response<Full<Bytes>>;

async fn answer(request: Request<Incoming>, scheduler: String) -> Result<Page, Infallible> {
    Ok(match (request.method(), request.uri().path()) {
        (&Method::GET, "/healthz") => page(StatusCode::OK, "text/plain", "ok\n"),
        (&Method::POST, "/mutate") => {
            let body = Limited::new(request.into_body(), MOST_BYTES).collect();
            match tokio::time::timeout(WITHIN, body).await {
                Ok(Ok(body)) => review(&body.to_bytes(), &scheduler),
                Ok(Err(_)) => page(StatusCode::PAYLOAD_TOO_LARGE, "text/plain", "too long\n"),
                Err(_) => page(StatusCode::REQUEST_TIMEOUT, "text/plain", "too late\n"),
            }
        }
        _ => page(StatusCode::NOT_FOUND, "text/plain", "there are POST /mutate and /healthz\n"),
    })
}

fn page(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Page {
    let mut page = Response::new(Full::new(text.into()));
    *page.status_mut() = status;
    page.headers_mut().insert("content-type", http::HeaderValue::from_static(kind));
    page
}

/// Answers a review.
fn review(body: &[u8], scheduler: &str) -> Page {
    let read = serde_json::from_slice::<AdmissionReview<DynamicObject>>(body);
    let read = read.map_err(|e| e.to_string());
    let response = match read.and_then(|review| review.try_into().map_err(|_| "no request".into()))
    {
        Ok(request) => respond(&request, scheduler),
        Err(what) => {
            let text = format!("not an AdmissionReview: {what}\n");
            return page(StatusCode::BAD_REQUEST, "text/plain", text);
        }
    };
    match serde_json::to_vec(&response.into_review()) {
        Ok(text) => page(StatusCode::OK, "application/json", text),
        Err(e) => page(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", format!("{e}\n")),
    }
}

/// The answer to a request: what may not be changed any more is not looked at.
fn respond(request: &AdmissionRequest<DynamicObject>, scheduler: &str) -> AdmissionResponse {
    let response = AdmissionResponse::from(request);
    let is_new_pod = request.operation == Operation::Create
        && request.kind.kind == "Pod"
        && request.sub_resource.is_none();
    let system = request.namespace.as_deref() == Some("kube-system");
    let pod = request.object.as_ref().filter(|_| is_new_pod && !system);
    let Some(Ok(pod)) = pod.map(serde_json::to_value) else { return response };
    match admit(&pod, scheduler) {
        Ok(Admitted { patch, .. }) if patch.0.is_empty() => response,
        Ok(Admitted { patch, warnings }) => {
            let mut response = response.with_patch(patch).expect("a patch can always be written");
            response.warnings = (!warnings.is_empty()).then_some(warnings);
            response
        }
        Err(why) => response.deny(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn asked(namespace: &str, operation: &str, limits: &Value) -> Value {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": namespace},
            "spec": {"containers": [{"name": "x", "resources": {"limits": limits}}]},
        });
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "operation": operation, "namespace": namespace, "name": "a",
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "userInfo": {}, "object": pod, "oldObject": null, "dryRun": false,
            },
        });
        let review: AdmissionReview<DynamicObject> = serde_json::from_value(review).unwrap();
        let answer = respond(&review.try_into().unwrap(), "roommate").into_review();
        serde_json::to_value(answer).unwrap()["response"].clone()
    }

    #[test]
    fn a_review_is_answered_with_a_patch() {
        let answer = asked("ml", "CREATE", &json!({"nvidia.com/gpumem-percentage": "50"}));
        assert_eq!((&answer["uid"], &answer["allowed"]), (&json!("u-1"), &json!(true)));
        assert_eq!(answer["patchType"], "JSONPatch");
        assert_eq!(answer["warnings"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_refusal_says_why() {
        let answer = asked("ml", "CREATE", &json!({"nvidia.com/gpucores": "x"}));
        assert_eq!(answer["allowed"], false);
        let why = answer["status"]["message"].as_str().unwrap();
        assert!(why.starts_with("nvidia.com/gpucores: expected"), "{why}");
    }

    #[test]
    fn the_system_and_pods_that_exist_are_not_looked_at() {
        let odd = json!({"nvidia.com/gpucores": "x"});
        for (namespace, operation) in [("kube-system", "CREATE"), ("ml", "UPDATE")] {
            let answer = asked(namespace, operation, &odd);
            assert_eq!((&answer["allowed"], &answer["patch"]), (&json!(true), &Value::Null));
        }
    }
}
