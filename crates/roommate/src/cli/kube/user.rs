//! Flags of the commands for users of a cluster; `kubectl roommate` has the same.

use super::Cluster;
use clap::{Args, Subcommand, ValueEnum};
use roommate_kube::snapshot;
use std::path::PathBuf;

/// The commands for users of a cluster.
#[derive(Subcommand, Debug)]
pub(crate) enum User {
    /// Show the GPUs with their pods: shares, limits, speeds
    Top(Who),
    /// Show the pods that wait for GPUs: since when, and why
    Queue(Who),
    /// Say why a pod waits, or why it is where it is
    Why(OnPod),
    /// Tell the history of a pod: why it waited, where it ran, what preempted it
    Explain(Explain),
    /// Set the most of each GPU that a pod may use, while it runs
    Resize(Resize),
    /// Predict where a job would run, when, and what that would cost its roommates
    WhatIf(WhatIf),
    /// Print the journal of the scheduler's decisions; `roommate replay` decides them again
    Snapshot(Snapshot),
    /// Show the dashboard of the cluster in a browser, until Ctrl-C
    Ui(Ui),
}

/// How to print something.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Shown {
    /// Table as text
    Table,
    /// Table with more columns
    Wide,
    /// One JSON document
    Json,
}

/// Which namespace.
#[derive(Args, Debug, Clone)]
pub(crate) struct Namespace {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    /// Namespace; that of the context, unless given
    #[arg(long, short, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
}

/// Flags of `top` and `queue`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Who {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    /// Only pods of this namespace; those of all, unless given: they share GPUs and queues
    #[arg(long, short, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Pods of all namespaces
    #[arg(long, short = 'A', conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
    /// How to print it
    #[arg(long, short, default_value = "table", value_name = "FORMAT")]
    pub(crate) output: Shown,
}

/// Flags of `why`.
#[derive(Args, Debug, Clone)]
pub(crate) struct OnPod {
    /// Name of the pod
    pub(crate) pod: String,
    #[command(flatten)]
    pub(crate) at: Namespace,
    /// How to print it
    #[arg(long, short, default_value = "table", value_name = "FORMAT")]
    pub(crate) output: Shown,
}

/// Where a snapshot comes from.
#[derive(Args, Debug, Clone)]
pub(crate) struct SnapshotArgs {
    /// File with a snapshot, instead of the scheduler's own
    #[arg(long, value_name = "FILE")]
    pub(crate) snapshot: Option<PathBuf>,
    /// Address of the scheduler, where it can be reached from here; otherwise a port is forwarded
    /// to its pod with kubectl
    #[arg(long, value_name = "ADDRESS", conflicts_with = "snapshot")]
    pub(crate) scheduler: Option<String>,
    /// The lease by which schedulers elect their leader; unless given, that of the Helm chart's
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = lease)]
    pub(crate) lease: Option<(String, String)>,
}

impl SnapshotArgs {
    pub(crate) fn source(&self) -> snapshot::Scheduler {
        match &self.scheduler {
            Some(address) => snapshot::Scheduler::At(address.clone()),
            None => snapshot::Scheduler::Leader(self.lease.clone()),
        }
    }
}

fn lease(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('/').filter(|(a, b)| !a.is_empty() && !b.is_empty());
    let parts = parts.map(|(namespace, name)| (namespace.to_string(), name.to_string()));
    parts.ok_or_else(|| "expected NAMESPACE/NAME".into())
}

/// Flags of `explain`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Explain {
    /// Name of the pod, or of its gang
    pub(crate) pod: String,
    #[command(flatten)]
    pub(crate) at: Namespace,
    #[command(flatten)]
    pub(crate) from: SnapshotArgs,
    /// How to print it
    #[arg(long, short, default_value = "table", value_name = "FORMAT")]
    pub(crate) output: Shown,
}

/// Flags of `resize`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Resize {
    /// Name of the pod
    pub(crate) pod: String,
    /// The most of each GPU that it may use, in percent
    #[arg(value_name = "PERCENT", value_parser = percent)]
    pub(crate) percent: f64,
    #[command(flatten)]
    pub(crate) at: Namespace,
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.trim_end_matches('%').trim().parse::<f64>().ok();
    let number = number.filter(|n| (1.0..=100.0).contains(n));
    number.ok_or_else(|| "expected a number from 1 to 100".into())
}

/// Flags of `what-if`.
#[derive(Args, Debug, Clone)]
pub(crate) struct WhatIf {
    /// Manifest of a pod, a Job or anything else that makes pods of a template; `-` for standard
    /// input
    pub(crate) manifest: PathBuf,
    #[command(flatten)]
    pub(crate) at: Namespace,
    #[command(flatten)]
    pub(crate) from: SnapshotArgs,
    /// How to print it
    #[arg(long, short, default_value = "table", value_name = "FORMAT")]
    pub(crate) output: Shown,
}

/// Flags of `snapshot`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Snapshot {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    #[command(flatten)]
    pub(crate) from: SnapshotArgs,
}

/// Flags of `ui`.
#[derive(Args, Debug, Clone)]
pub(crate) struct Ui {
    #[command(flatten)]
    pub(crate) cluster: Cluster,
    #[command(flatten)]
    pub(crate) from: SnapshotArgs,
    #[command(flatten)]
    pub(crate) page: crate::cli::machine::Page,
}
