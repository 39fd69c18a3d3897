//! Flags of the commands for Kubernetes.

mod user;

pub(crate) use user::{
    Explain, Namespace, OnPod, Resize, Shown, Snapshot, SnapshotArgs, Ui, User, WhatIf, Who,
};

use super::Output;
use clap::{Args, Subcommand};
use roommate_kube::client::Access;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The commands of `roommate kube`.
#[derive(Subcommand, Debug)]
pub(crate) enum Kube {
    /// Schedule the pods of a cluster that name the scheduler
    Scheduler(Scheduler),
    /// Take care of a node: put what the scheduler decided into force, and measure
    Agent(Agent),
    /// Stand in front of a model server in its pod: form batches, and measure every request
    Front(Front),
    /// Print the definitions of the custom resources, for kubectl apply --server-side -f -
    Crds,
    /// Translate what pods ask for in the spelling of other products, as an admission webhook
    Webhook(Webhook),
    #[command(flatten)]
    User(User),
    /// Measure how fast pods are bound on an API server, beside a peer
    Bench(Bench),
    /// Try the scheduler with random operations against an API server that fails in every way
    Fuzz(Fuzz),
}

/// How to reach the API server.
#[derive(Args, Debug, Clone)]
pub(crate) struct Cluster {
    /// Kubeconfig file; `$KUBECONFIG`, `~/.kube/config`, or the service account of the pod, unless
    /// given
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, if not its current one
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

impl Cluster {
    pub(crate) fn access(&self) -> Access {
        Access { kubeconfig: self.kubeconfig.clone(), context: self.context.clone() }
    }
}

/// Flags of `roommate kube scheduler`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Scheduler {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    /// The policy that decides; `roommate policies` lists them
    #[arg(long, short, default_value = "roommate", value_name = "POLICY")]
    pub(crate) policy: String,
    /// Set a parameter of the policy: name=value, the value as JSON or plain text
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// Most pods on a GPU; nodes that offer fewer places are not used
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = super::tenants())]
    pub(crate) max_tenants: u8,
    /// Seed of the policy's randomness
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,
    /// Name by which pods choose this scheduler (`spec.schedulerName`)
    #[arg(long, default_value = roommate_kube::names::SCHEDULER, value_name = "NAME")]
    pub(crate) name: String,
    /// Address for health checks, metrics and snapshots; `none` = no address
    #[arg(long, default_value = "127.0.0.1:10261", value_name = "ADDRESS")]
    #[arg(value_parser = address)]
    pub(crate) listen: Address,
    /// Address of this machine for the dashboard, which asks for a token of the cluster; `none` =
    /// no address
    #[arg(long, default_value = "none", value_name = "ADDRESS", value_parser = address)]
    pub(crate) dashboard: Address,
    /// Namespace of the lease by which schedulers elect their leader
    #[arg(long, default_value = "kube-system", value_name = "NAMESPACE")]
    pub(crate) lease_namespace: String,
    /// Name of the lease
    #[arg(long, default_value = "roommate-scheduler", value_name = "NAME")]
    pub(crate) lease_name: String,
    /// Seconds that a lease holds after it was renewed
    #[arg(long, default_value_t = 15.0, value_name = "SECONDS", value_parser = lease_seconds)]
    pub(crate) lease_seconds: f64,
    /// Do not elect a leader: this is the only scheduler
    #[arg(long)]
    pub(crate) no_leader_election: bool,
    /// Most writes that are under way at a time
    #[arg(long, default_value_t = 16, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) in_flight: u16,
}

/// An address, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address(pub(crate) Option<SocketAddr>);

fn address(text: &str) -> Result<Address, String> {
    if text == "none" {
        return Ok(Address(None));
    }
    text.parse()
        .map(|at| Address(Some(at)))
        .map_err(|_| "expected an address with a port such as 127.0.0.1:10261, or none".to_string())
}

fn lease_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (1.0..=3600.0).contains(s));
    seconds.ok_or_else(|| "expected a number from 1 to 3600".into())
}

/// Flags of `roommate kube agent`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Agent {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    /// The node on which it runs
    #[arg(long, value_name = "NAME")]
    pub(crate) node_name: String,
    /// Type of the devices that pods share; auto: GPUs if there are any, else cores
    #[arg(long, default_value = "auto", value_name = "TYPE", value_parser = ["auto", "cpu", "cuda"])]
    pub(crate) device: String,
    /// Number of devices, if not all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) devices: Option<u16>,
    /// Most pods on a device; at least as many as the scheduler's --max-tenants
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = super::tenants())]
    pub(crate) max_tenants: u8,
    /// Do not use a mechanism, to compare or where it makes trouble
    #[arg(long, value_name = "MECHANISM", value_delimiter = ',')]
    pub(crate) without: Vec<super::machine::Left>,
    /// Folder of the agent's own files
    #[arg(long, default_value = "/var/lib/roommate", value_name = "FOLDER")]
    pub(crate) state: PathBuf,
    /// Folder with the socket for containers, the same path on the node
    #[arg(long, default_value = "/run/roommate", value_name = "FOLDER")]
    pub(crate) run: PathBuf,
    /// Folder of the kubelet
    #[arg(long, default_value = "/var/lib/kubelet", value_name = "FOLDER")]
    pub(crate) kubelet: PathBuf,
    /// Folder of device descriptions for the container runtime
    #[arg(long, default_value = "/var/run/cdi", value_name = "FOLDER")]
    pub(crate) cdi: PathBuf,
    /// Address for health checks and metrics; `none` = no address
    #[arg(long, default_value = "127.0.0.1:10262", value_name = "ADDRESS")]
    #[arg(value_parser = address)]
    pub(crate) listen: Address,
}

/// Flags of `roommate kube front`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Front {
    /// Address at which requests are taken; `$ROOMMATE_PORT` of all addresses, or else 8000
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// The latency that has to be kept, p99=25ms; `$ROOMMATE_OBJECTIVE` unless given
    #[arg(long, value_name = "OBJECTIVE")]
    pub(crate) objective: Option<String>,
    /// Name of the model in requests; `$ROOMMATE_MODEL`, or else the name of the pod
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Most requests in a batch; `$ROOMMATE_MAX_BATCH`, or else 32
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_batch: Option<u32>,
    /// The command is an HTTP server of its own, which answers at this path once it is ready;
    /// otherwise it uses the SDK (`roommate.serve`)
    #[arg(long, value_name = "PATH")]
    pub(crate) http_health: Option<String>,
    /// Port of that server, if it does not take it from `PORT`
    #[arg(long, value_name = "PORT", requires = "http_health")]
    pub(crate) http_port: Option<u16>,
    /// The command of the model server
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Flags of `roommate kube webhook`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Webhook {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    /// Address at which it answers the API server, over HTTPS
    #[arg(long, default_value = "127.0.0.1:9443", value_name = "ADDRESS")]
    pub(crate) listen: SocketAddr,
    /// Its certificate (PEM), with those between it and its authority; read again when it changes.
    /// One of its own making, which the API server is told to trust, unless given
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// Key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
    /// Its `MutatingWebhookConfiguration`, whose `caBundle` gets the certificate of its own making
    #[arg(long, default_value = "roommate", value_name = "NAME", conflicts_with = "cert")]
    pub(crate) configuration: String,
    /// The scheduler that pods are given to
    #[arg(long, default_value = roommate_kube::names::SCHEDULER, value_name = "NAME")]
    pub(crate) scheduler: String,
}

/// Flags of `roommate kube bench`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    /// Nodes to create, without kubelets
    #[arg(long, default_value_t = 1000, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub(crate) nodes: u32,
    /// GPUs of each node
    #[arg(long, default_value_t = 8, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) gpus: u32,
    /// Pods of one GPU each
    #[arg(long, default_value_t = 2000, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=200_000))]
    pub(crate) pods: u32,
    /// The part of a GPU that each pod asks for, in percent
    #[arg(long, default_value_t = 100, value_name = "PERCENT")]
    #[arg(value_parser = clap::value_parser!(u32).range(25..=100))]
    pub(crate) share: u32,
    /// The policy
    #[arg(long, short, default_value = "roommate", value_name = "POLICY")]
    pub(crate) policy: String,
    /// A scheduler to measure in the same run
    #[arg(long, value_name = "NAME", value_parser = ["kube-scheduler"])]
    pub(crate) peer: Option<String>,
    /// Its program; unless given, looked for on the search path and where `make kube` keeps it
    #[arg(long, value_name = "FILE", requires = "peer")]
    pub(crate) peer_program: Option<PathBuf>,
    /// Seconds that a scheduler may take
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub(crate) within: u64,
    /// How to print the figures
    #[arg(long, short, default_value = "table", value_name = "FORMAT")]
    pub(crate) output: Output,
}

/// Flags of `roommate kube fuzz`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Fuzz {
    /// Number of random operations
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    pub(crate) operations: u64,
    /// Seed of all of them
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,
    /// The policy
    #[arg(long, short, default_value = "roommate", value_name = "POLICY")]
    pub(crate) policy: String,
    /// How to print what became of it
    #[arg(long, short, default_value = "table", value_name = "FORMAT")]
    pub(crate) output: Output,
}
