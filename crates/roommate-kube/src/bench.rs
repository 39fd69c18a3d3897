//! How fast pods are bound on a real API server, beside kube-scheduler in the same run.
//!
//! Each contender gets the same: nodes without kubelets, all pods created first, then the scheduler
//! is started as a process of its own. A watch that belongs to nobody counts the bindings; CPU time
//! and memory are what the system says of the process.

use crate::client::{Access, Error, Failure, client, send};
use crate::names;
use crate::objects::Pod;
use futures::StreamExt as _;
use http::Method;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The API server.
    pub access: Access,
    /// Nodes.
    pub nodes: u32,
    /// GPUs of each.
    pub gpus: u32,
    /// Pods of one GPU each.
    pub pods: u32,
    /// The part of a GPU that each pod asks for, in percent; 100 = whole GPUs.
    pub share: u32,
    /// This program.
    pub program: PathBuf,
    /// The policy.
    pub policy: String,
    /// The program of kube-scheduler, if it is to run as well.
    pub peer: Option<PathBuf>,
    /// How long the slowest contender may take.
    pub within: Duration,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Nodes.
    pub nodes: u32,
    /// GPUs of each.
    pub gpus_per_node: u32,
    /// Pods.
    pub pods: u32,
    /// The part of a GPU that each pod asks for, in percent.
    pub share: u32,
    /// The policy.
    pub policy: String,
    /// Roommate.
    #[serde(flatten)]
    pub own: Figures,
    /// From the creation of a gang that needs more nodes than its selector leaves to the condition
    /// of all its pods that says so.
    pub unschedulable_gang_s: Option<f64>,
    /// The peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<PeerFigures>,
}

/// Figures of a peer.
#[derive(Clone, Debug, Serialize)]
pub struct PeerFigures {
    /// Its name.
    pub name: String,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Figures of a contender.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// Pods that were bound.
    pub bound: u32,
    /// From the first to the last binding.
    pub seconds: f64,
    /// Bindings per second in that time.
    pub binds_per_s: f64,
    /// CPU time of the scheduler from its start to the last binding.
    pub cpu_s: f64,
    /// The most memory that it had.
    pub peak_mib: f64,
    /// From its start to the first binding.
    pub first_bind_s: f64,
    /// Bindings that the GPUs of their nodes do not allow.
    pub over_allocations: u32,
}

const NAMESPACE: &str = "roommate-bench";
/// A label of all nodes of the bench.
const LABEL: &str = "roommate.dev/bench";
/// A label that tells a few of them from the others.
const ZONE: &str = "roommate.dev/bench-zone";
/// Requests at a time.
const AT_ONCE: usize = 32;
/// Pods that may share a GPU of ours.
const SLOTS: u32 = 4;
/// How often the lease of each node is renewed, as a kubelet does.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Pods of the gang that does not fit.
const GANG: u32 = 10;
const JSON: &str = "application/json";

/// Measures. `told` hears of the progress.
pub async fn run(plan: &Plan, told: &mut dyn FnMut(&str)) -> Result<Outcome, Error> {
    let client = client(&plan.access).await?;
    let bench = Bench { client, plan };
    let outcome = bench.measure(told).await;
    told("removes its nodes and pods");
    bench.clear().await?;
    outcome
}

struct Bench<'a> {
    client: Client,
    plan: &'a Plan,
}

/// A scheduler that is killed with its measurement.
struct Contender {
    process: Child,
    started: Instant,
}

impl Drop for Contender {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

impl Contender {
    fn start(command: &mut Command, log: &Path) -> Result<Self, Error> {
        let doing = || format!("{}", log.display());
        let out = std::fs::File::create(log).map_err(Error::io(doing()))?;
        let err = out.try_clone().map_err(Error::io(doing()))?;
        let program = command.get_program().to_string_lossy().into_owned();
        let process = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let process = process.map_err(Error::io(program))?;
        Ok(Self { process, started: Instant::now() })
    }

    fn cpu_s(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()));
        let stat = stat.unwrap_or_default();
        let after = stat.rsplit(')').next().unwrap_or_default();
        let ticks = after.split_whitespace().skip(11).take(2);
        // The kernel counts in hundredths of a second on all of its architectures.
        ticks.filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
    }

    fn peak_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
        kib.unwrap_or(0.0) / 1024.0
    }

    fn check(&mut self, log: &Path) -> Result<(), Error> {
        let Ok(Some(status)) = self.process.try_wait() else { return Ok(()) };
        let text = std::fs::read_to_string(log).unwrap_or_default();
        let last: Vec<&str> = text.lines().rev().take(3).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Err(Error::Other(format!("the scheduler has ended ({status}): {}", last.join(" | "))))
    }
}

impl Bench<'_> {
    async fn measure(&self, told: &mut dyn FnMut(&str)) -> Result<Outcome, Error> {
        let plan = self.plan;
        let folder = std::env::temp_dir().join(format!("roommate-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(Error::io(folder.display().to_string()))?;
        let mut gang_s = None;
        let mut own = Command::new(&plan.program);
        own.args(["kube", "scheduler", "--no-leader-election", "--listen", "none"]);
        own.args(["--policy", &plan.policy, "--max-tenants", &SLOTS.to_string()]);
        if let Some(path) = &plan.access.kubeconfig {
            own.arg("--kubeconfig").arg(path);
        }
        if let Some(context) = &plan.access.context {
            own.args(["--context", context]);
        }
        let log = folder.join("roommate.log");
        let figures =
            self.contend(&mut own, names::SCHEDULER, &log, Some(&mut gang_s), told).await?;
        let mut peer = None;
        if let Some(program) = &plan.peer {
            let config = self.peer_config(&folder)?;
            let mut command = Command::new(program);
            command.arg("--config").arg(config);
            command.args(["--bind-address=127.0.0.1", "--secure-port=0"]);
            let log = folder.join("peer.log");
            let scheduler = "default-scheduler";
            let figures = self.contend(&mut command, scheduler, &log, None, told).await?;
            peer = Some(PeerFigures { name: "kube-scheduler".into(), figures });
        }
        drop(std::fs::remove_dir_all(&folder));
        Ok(Outcome {
            nodes: plan.nodes,
            gpus_per_node: plan.gpus,
            pods: plan.pods,
            share: plan.share,
            policy: plan.policy.clone(),
            own: figures,
            unschedulable_gang_s: gang_s,
            peer,
        })
    }

    /// kube-scheduler with no limit of its own on its requests.
    fn peer_config(&self, folder: &Path) -> Result<PathBuf, Error> {
        let from_env = || std::env::var_os("KUBECONFIG").map(PathBuf::from);
        let home = || std::env::home_dir().map(|home| home.join(".kube/config"));
        let kubeconfig = self.plan.access.kubeconfig.clone().or_else(from_env).or_else(home);
        let kubeconfig = kubeconfig.unwrap_or_default();
        let kubeconfig = kubeconfig.canonicalize().unwrap_or(kubeconfig);
        let config = json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": false},
            "clientConnection": {"kubeconfig": kubeconfig, "qps": 5000, "burst": 10000},
        });
        let path = folder.join("kube-scheduler.json");
        let text = serde_json::to_string_pretty(&config).unwrap_or_default();
        std::fs::write(&path, text).map_err(Error::io(path.display().to_string()))?;
        Ok(path)
    }

    async fn contend(
        &self,
        command: &mut Command,
        scheduler: &str,
        log: &Path,
        gang_s: Option<&mut Option<f64>>,
        told: &mut dyn FnMut(&str),
    ) -> Result<Figures, Error> {
        let plan = self.plan;
        self.clear().await?;
        told(&format!("{scheduler}: creates {} nodes and {} pods", plan.nodes, plan.pods));
        self.create_namespace().await?;
        self.each(plan.nodes, "create nodes", |i| self.create_node(i, scheduler)).await?;
        let heartbeats = tokio::spawn(heartbeats(self.client.clone(), plan.nodes));
        self.each(plan.pods, "create pods", |i| self.create_pod(i, scheduler, None)).await?;
        let measured = self.time(command, scheduler, log, gang_s, told).await;
        heartbeats.abort();
        measured
    }

    async fn time(
        &self,
        command: &mut Command,
        scheduler: &str,
        log: &Path,
        gang_s: Option<&mut Option<f64>>,
        told: &mut dyn FnMut(&str),
    ) -> Result<Figures, Error> {
        let api = Api::<Pod>::namespaced(self.client.clone(), NAMESPACE);
        let mut watch = std::pin::pin!(watcher(api, watcher::Config::default()));
        let mut figures = Figures::default();
        let (mut bound, mut of_gang) = (HashSet::new(), HashSet::new());
        // Nothing is bound before the scheduler is started: the first list shows that.
        let listed = async {
            loop {
                match watch.next().await {
                    Some(Ok(Event::InitDone)) => return Ok(()),
                    Some(Ok(_)) => {}
                    Some(Err(e)) => return Err(Error::Other(format!("watch of pods: {e}"))),
                    None => return Err(Error::Other("the watch of pods has ended".into())),
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), listed)
            .await
            .map_err(|_| Error::Other("the pods were not listed within 60 s".into()))??;
        let mut contender = Contender::start(command, log)?;
        let (mut first, mut last) = (None, contender.started);
        let mut gang_began: Option<Instant> = None;
        let wants_gang = gang_s.is_some();
        let mut found = None;
        loop {
            if contender.started.elapsed() > plan_end(self.plan, gang_began.is_some()) {
                break;
            }
            let event = tokio::time::timeout(Duration::from_millis(500), watch.next()).await;
            let Ok(event) = event else {
                contender.check(log)?;
                continue;
            };
            let Some(Ok(Event::Apply(pod) | Event::InitApply(pod))) = event else { continue };
            let name = pod.name().to_string();
            if name.starts_with("gang-") {
                if is_unschedulable(&self.client, &name).await {
                    of_gang.insert(name);
                }
                if let Some(began) = gang_began.filter(|_| of_gang.len() == GANG as usize) {
                    found = Some(began.elapsed().as_secs_f64());
                    break;
                }
            } else if pod.spec.node_name.is_some() && bound.insert(name) {
                last = Instant::now();
                first.get_or_insert(last);
            }
            if bound.len() == self.plan.pods as usize && gang_began.is_none() {
                figures.cpu_s = contender.cpu_s();
                if !wants_gang {
                    break;
                }
                told(&format!("{scheduler}: a gang that does not fit"));
                gang_began = Some(Instant::now());
                let size = Some(GANG);
                self.each(GANG, "create the gang", |i| self.create_pod(i, scheduler, size)).await?;
            }
        }
        if figures.cpu_s == 0.0 {
            figures.cpu_s = contender.cpu_s();
        }
        figures.peak_mib = contender.peak_mib();
        figures.bound = bound.len() as u32;
        if let Some(first) = first {
            figures.seconds = last.duration_since(first).as_secs_f64();
            figures.first_bind_s = first.duration_since(contender.started).as_secs_f64();
            figures.binds_per_s = f64::from(figures.bound) / figures.seconds.max(1e-3);
        }
        if let Some(gang_s) = gang_s {
            *gang_s = found;
        }
        figures.over_allocations = self.over_allocations(scheduler).await?;
        Ok(figures)
    }

    /// GPUs of which more was given away than there is.
    async fn over_allocations(&self, scheduler: &str) -> Result<u32, Error> {
        let api = Api::<Pod>::namespaced(self.client.clone(), NAMESPACE);
        let pods = api.list(&ListParams::default()).await.map_err(Error::api("list of pods"))?;
        let mut over = 0;
        if scheduler == names::SCHEDULER {
            let mut ledger = crate::ledger::Ledger::default();
            for i in 0..self.plan.nodes {
                let limits =
                    crate::ledger::Limits { gpus: self.plan.gpus as u16, mem_mib: 0, pods: SLOTS };
                ledger.set_node(&node_name(i), limits);
            }
            for pod in &pods.items {
                let assignment = crate::assignment::Assignment::of(pod);
                if let (Some(node), Some(a)) = (&pod.spec.node_name, assignment) {
                    ledger.set(pod.uid(), Some(crate::ledger::Hold::of(node, &a)));
                }
            }
            over += ledger.over() as u32;
        } else {
            let mut of_nodes = std::collections::HashMap::<String, u32>::new();
            for node in pods.items.iter().filter_map(|p| p.spec.node_name.clone()) {
                *of_nodes.entry(node).or_default() += 1;
            }
            let most = self.plan.gpus * self.slots(scheduler);
            over += of_nodes.values().map(|n| n.saturating_sub(most)).sum::<u32>();
        }
        Ok(over)
    }

    async fn each<F: Future<Output = Result<(), Failure>>>(
        &self,
        n: u32,
        doing: &str,
        one: impl Fn(u32) -> F,
    ) -> Result<(), Error> {
        let mut all = futures::stream::iter((0..n).map(one)).buffer_unordered(AT_ONCE);
        while let Some(done) = all.next().await {
            done.map_err(|e| Error::Other(format!("{doing}: {e}")))?;
        }
        Ok(())
    }

    async fn create_namespace(&self) -> Result<(), Error> {
        let namespace = json!({"metadata": {"name": NAMESPACE}});
        // Where no controller makes it, pods would be refused.
        let account = json!({"metadata": {"name": "default"}});
        let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
        for (path, body) in [("/api/v1/namespaces", namespace), (&accounts, account)] {
            match send(&self.client, Method::POST, path, JSON, &body).await {
                Ok(_) => {}
                Err(failure) if failure.code == 409 => {}
                Err(failure) => return Err(Error::Other(format!("{path}: {failure}"))),
            }
        }
        Ok(())
    }

    /// Places for pods on a GPU of a node: ours can always be shared.
    fn slots(&self, scheduler: &str) -> u32 {
        let shared = 100 / self.plan.share.clamp(1, 100);
        if scheduler == names::SCHEDULER { SLOTS } else { shared }
    }

    async fn create_node(&self, i: u32, scheduler: &str) -> Result<(), Failure> {
        let name = node_name(i);
        let slots = self.slots(scheduler);
        let places = (self.plan.gpus * slots).to_string();
        let zone = if i < GANG / 2 { "small" } else { "large" };
        let room = json!({names::RESOURCE: places, "cpu": "128", "memory": "1Ti", "pods": "110"});
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let node = json!({
            "metadata": {
                "name": name,
                "labels": {LABEL: "true", "kubernetes.io/hostname": name, ZONE: zone,
                           names::SLOTS: slots.to_string(),
                           "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
                "annotations": {"kwok.x-k8s.io/node": "fake"},
            },
            "status": {
                "capacity": room, "allocatable": room,
                "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady",
                                "message": "", "lastHeartbeatTime": now,
                                "lastTransitionTime": now}],
            },
        });
        send(&self.client, Method::POST, "/api/v1/nodes", JSON, &node).await?;
        // Admission taints every new node; without a controller nobody takes that away.
        let taints = json!({"spec": {"taints": null}});
        let path = format!("/api/v1/nodes/{name}");
        let kind = "application/merge-patch+json";
        send(&self.client, Method::PATCH, &path, kind, &taints).await.map(drop)
    }

    async fn create_pod(&self, i: u32, scheduler: &str, gang: Option<u32>) -> Result<(), Failure> {
        let mut annotations = json!({names::PROFILE: "bench"});
        let (name, gpus) = match gang {
            Some(size) => {
                annotations[names::GROUP_SIZE] = size.to_string().into();
                (format!("gang-{i}"), self.plan.gpus)
            }
            None => (format!("pod-{i}"), 1),
        };
        if self.plan.share < 100 && gang.is_none() {
            annotations[names::SHARE] = self.plan.share.to_string().into();
        }
        let labels = match gang {
            Some(_) => json!({names::GROUP_LABELS[0]: "gang"}),
            None => json!({}),
        };
        // Each pod of the gang wants a node of a zone that has fewer of them.
        let selector = if gang.is_some() { json!({ZONE: "small"}) } else { json!({}) };
        let pod = json!({
            "metadata": {"name": name, "annotations": annotations, "labels": labels},
            "spec": {
                "nodeSelector": selector,
                "schedulerName": scheduler, "automountServiceAccountToken": false,
                "containers": [{"name": "work", "image": "none", "resources": {
                    "requests": {"cpu": "1", "memory": "1Gi"},
                    "limits": {names::RESOURCE: gpus.to_string()}}}],
            },
        });
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods");
        send(&self.client, Method::POST, &path, JSON, &pod).await.map(drop)
    }

    /// Removes all pods and nodes of a bench.
    async fn clear(&self) -> Result<(), Error> {
        let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods?gracePeriodSeconds=0");
        let nodes = format!("/api/v1/nodes?labelSelector={LABEL}%3Dtrue");
        for path in [&pods, &nodes] {
            let deadline = Instant::now() + Duration::from_secs(120);
            loop {
                let request = http::Request::delete(path.as_str()).body(Vec::new());
                let request = request.map_err(|e| Error::Other(e.to_string()))?;
                let done = self.client.request::<Value>(request).await;
                let left = done
                    .map_err(Error::api("remove what is left of a bench"))?
                    .pointer("/items")
                    .and_then(Value::as_array)
                    .map_or(0, Vec::len);
                if left == 0 {
                    break;
                }
                if Instant::now() > deadline {
                    return Err(Error::Other(format!(
                        "{path}: {left} are still there after 120 s"
                    )));
                }
                sleep(Duration::from_millis(200)).await;
            }
        }
        Ok(())
    }
}

fn plan_end(plan: &Plan, gang: bool) -> Duration {
    plan.within + if gang { Duration::from_secs(30) } else { Duration::ZERO }
}

fn node_name(i: u32) -> String {
    format!("bench-{i:05}")
}

async fn is_unschedulable(client: &Client, name: &str) -> bool {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}");
    let Ok(pod) = crate::client::get(client, &path).await else { return false };
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    let says = |c: &Value| c["type"] == "PodScheduled" && c["reason"] == "Unschedulable";
    conditions.is_some_and(|all| all.iter().any(says))
}

/// Renews the leases of all nodes, as their kubelets would.
async fn heartbeats(client: Client, nodes: u32) {
    let path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    for i in (0..nodes).cycle() {
        let name = node_name(i);
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
        let spec = json!({"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now});
        let lease = json!({"metadata": {"name": name}, "spec": spec});
        let one = format!("{path}/{name}");
        let kind = "application/merge-patch+json";
        let renewed = send(&client, Method::PATCH, &one, kind, &lease).await;
        if renewed.is_err_and(|e| e.code == 404) {
            drop(send(&client, Method::POST, path, JSON, &lease).await);
        }
        sleep(HEARTBEAT / nodes.max(1)).await;
    }
}

/// The program of a peer: on the search path, or where `make kube` keeps it.
pub fn find_peer(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|p| p.is_file());
    let cache = || {
        let named = std::env::var_os("ROOMMATE_KUBE_CACHE").map(PathBuf::from);
        let home = || std::env::home_dir().map(|home| home.join(".cache"));
        let user = || std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        let root = named.or_else(|| Some(user()?.join("roommate/kube")))?;
        let below = |dir: &Path| {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|e| e.path()).filter(|p| p.is_dir()).collect::<Vec<_>>()
        };
        let mut folders = vec![root.clone()];
        for dir in below(&root) {
            folders.extend(below(&dir));
            folders.push(dir);
        }
        let newest = |p: &PathBuf| p.metadata().and_then(|m| m.modified()).ok();
        folders.into_iter().map(|d| d.join(name)).filter(|p| p.is_file()).max_by_key(newest)
    };
    on_path.or_else(cache)
}
