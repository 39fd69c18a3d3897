//! Where a snapshot comes from: the scheduler that leads answers on its own machine only, so that
//! only those read it whom the API server lets forward ports to its pod.

use crate::client::{Access, Error, get};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use kube::Client;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

/// The scheduler that is asked.
#[derive(Clone, Debug)]
pub enum Scheduler {
    /// At an address that this machine reaches.
    At(String),
    /// The one that holds this lease, by namespace and name; unless given, the lease is that of
    /// the schedulers that are found.
    Leader(Option<(String, String)>),
}

const SNAPSHOT: &str = "/debug/snapshot";
/// The port on which schedulers answer.
const PORT: u16 = 10261;
/// The labels of schedulers.
const SCHEDULERS: &str = "app.kubernetes.io/component=scheduler,app.kubernetes.io/name=roommate";
/// The lease of a scheduler that nobody told another.
const USUAL_LEASE: (&str, &str) = ("kube-system", "roommate-scheduler");
/// How long a scheduler may take for its snapshot.
const WITHIN: Duration = Duration::from_secs(60);
/// How long it may take until a port is forwarded.
const FORWARDED_WITHIN: Duration = Duration::from_secs(15);

/// Fetches the snapshot.
pub async fn fetch(
    client: &Client,
    access: &Access,
    scheduler: &Scheduler,
) -> Result<Vec<u8>, Error> {
    match scheduler {
        Scheduler::At(address) => {
            page(address, SNAPSHOT).await.map_err(|e| unreachable(address, &e))
        }
        Scheduler::Leader(lease) => {
            let mut forwarded = Forwarded::to_leader(client, access, lease.as_ref()).await?;
            let page = forwarded.page(SNAPSHOT).await;
            // It ends with its parent anyway; this way it is not left behind as a zombie.
            forwarded.child.kill().await.unwrap_or_default();
            page
        }
    }
}

/// A port of this machine that is forwarded to the scheduler that leads, as long as this exists.
pub(crate) struct Forwarded {
    child: Child,
    address: String,
    pod: String,
}

impl Forwarded {
    /// Forwards a port to the pod that holds a lease: this one, or that of the schedulers found.
    pub(crate) async fn to_leader(
        client: &Client,
        access: &Access,
        lease: Option<&(String, String)>,
    ) -> Result<Self, Error> {
        let (namespace, lease) = match lease {
            Some(lease) => lease.clone(),
            None => lease_of(client).await?,
        };
        let (namespace, pod) = leader(client, &namespace, &lease).await?;
        let (child, address) = forward(access, &namespace, &pod).await?;
        Ok(Self { child, address, pod: format!("pod {namespace}/{pod}") })
    }

    /// What the scheduler answers at a path.
    pub(crate) async fn page(&self, path: &str) -> Result<Vec<u8>, Error> {
        page(&self.address, path).await.map_err(|e| unreachable(&self.pod, &e))
    }
}

pub(crate) fn unreachable(what: &str, why: &str) -> Error {
    Error::Other(format!("scheduler at {what}: {why}"))
}

/// The lease of the schedulers of this cluster, as the Helm chart labels them and tells them.
async fn lease_of(client: &Client) -> Result<(String, String), Error> {
    let path = format!("/api/v1/pods?labelSelector={}", SCHEDULERS.replace('=', "%3D"));
    let found = get(client, &path).await;
    let found = found.map_err(|e| Error::Other(format!("no scheduler was found: pods: {e}")))?;
    let pods = found["items"].as_array().map_or(&[][..], Vec::as_slice);
    let leases: BTreeSet<_> = pods.iter().filter_map(lease_told).collect();
    let mut leases = leases.into_iter();
    match (leases.next(), leases.next()) {
        (None, _) => Ok((USUAL_LEASE.0.into(), USUAL_LEASE.1.into())),
        (Some(lease), None) => Ok(lease),
        (Some(one), Some(other)) => Err(Error::Other(format!(
            "there are several schedulers: say --lease {}/{} or --lease {}/{}",
            one.0, one.1, other.0, other.1
        ))),
    }
}

/// The lease that a pod was told to hold.
fn lease_told(pod: &Value) -> Option<(String, String)> {
    let containers = pod["spec"]["containers"].as_array()?;
    let words = containers.iter().flat_map(|c| [&c["command"], &c["args"]]);
    let words: Vec<&str> =
        words.filter_map(Value::as_array).flatten().filter_map(Value::as_str).collect();
    let told = |flag: &str| words.iter().find_map(|word| word.strip_prefix(flag));
    Some((told("--lease-namespace=")?.into(), told("--lease-name=")?.into()))
}

/// The pod of the scheduler that leads.
async fn leader(client: &Client, namespace: &str, lease: &str) -> Result<(String, String), Error> {
    let named = format!("lease {namespace}/{lease}");
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}");
    let found = get(client, &path).await;
    let found = found.map_err(|e| Error::Other(format!("no scheduler was found: {named}: {e}")))?;
    let holder = found.pointer("/spec/holderIdentity").and_then(Value::as_str);
    let holder = holder.filter(|h| !h.is_empty());
    let holder =
        holder.ok_or_else(|| Error::Other(format!("no scheduler leads: {named} is not held")))?;
    // The name of its machine, which is that of its pod; its process and when that began.
    let host = holder.rsplitn(3, '_').nth(2).unwrap_or(holder);
    let path = format!("/api/v1/pods?fieldSelector=metadata.name%3D{host}");
    let pods = get(client, &path).await;
    let pods = pods.map_err(|e| Error::Other(format!("pod {host} of the scheduler: {e}")))?;
    let pod = pods.pointer("/items/0/metadata/namespace").and_then(Value::as_str);
    match pod {
        Some(namespace) => Ok((namespace.into(), host.into())),
        None => Err(Error::Other(format!("the scheduler that leads, {holder}, is not a pod"))),
    }
}

/// Forwards a port to a pod with kubectl, as long as the child lives.
async fn forward(access: &Access, namespace: &str, pod: &str) -> Result<(Child, String), Error> {
    let mut command = Command::new("kubectl");
    if let Some(path) = &access.kubeconfig {
        command.arg("--kubeconfig").arg(path);
    }
    if let Some(context) = &access.context {
        command.args(["--context", context]);
    }
    command.args(["--namespace", namespace, "port-forward", &format!("pod/{pod}")]);
    command.args(["--address", "127.0.0.1", &format!(":{PORT}")]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(Error::io("could not start kubectl"))?;
    let out = child.stdout.take().map(BufReader::new);
    let line = async {
        let mut line = String::new();
        match out {
            Some(mut out) => out.read_line(&mut line).await.map(|_| line),
            None => Ok(line),
        }
    };
    let line = tokio::time::timeout(FORWARDED_WITHIN, line).await;
    // Forwarding from 127.0.0.1:41234 -> 10261
    let address = |line: &str| {
        let after = line.strip_prefix("Forwarding from ")?;
        Some(after.split(" ->").next()?.trim().to_string())
    };
    match line {
        Ok(Ok(line)) if address(&line).is_some() => Ok((child, address(&line).unwrap_or_default())),
        Ok(_) => {
            let mut said = String::new();
            if let Some(mut errors) = child.stderr.take() {
                drop(errors.read_to_string(&mut said).await);
            }
            let said = said.trim().lines().last().unwrap_or("it said nothing").to_string();
            Err(Error::Other(format!("kubectl port-forward to pod {namespace}/{pod}: {said}")))
        }
        Err(_) => {
            let s = FORWARDED_WITHIN.as_secs();
            Err(Error::Other(format!(
                "kubectl port-forward to pod {namespace}/{pod}: nothing within {s} s"
            )))
        }
    }
}

/// What the scheduler at an address answers at a path.
pub(crate) async fn page(address: &str, path: &str) -> Result<Vec<u8>, String> {
    let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let asked = async {
        let stream = TcpStream::connect(address).await.map_err(|e| e.to_string())?;
        let http = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = http.map_err(|e| e.to_string())?;
        tokio::spawn(connection);
        let request = Request::get(path).header("host", address);
        let request = request.body(Empty::<Bytes>::new()).map_err(|e| e.to_string())?;
        let answer = sender.send_request(request).await.map_err(|e| e.to_string())?;
        let ok = answer.status().is_success();
        let body = answer.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
        if ok { Ok(body.to_vec()) } else { Err(String::from_utf8_lossy(&body).trim().to_string()) }
    };
    match tokio::time::timeout(WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {} s", WITHIN.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_scheduler_says_by_its_flags_which_lease_it_holds() {
        let words =
            json!(["kube", "scheduler", "--lease-namespace=gpu", "--lease-name=rm-scheduler"]);
        let pod = |words: &Value| json!({"spec": {"containers": [{"name": "x", "args": words}]}});
        assert_eq!(lease_told(&pod(&words)), Some(("gpu".into(), "rm-scheduler".into())));
        assert_eq!(lease_told(&pod(&json!(["--no-leader-election"]))), None);
        assert_eq!(lease_told(&json!({})), None);
    }
}
