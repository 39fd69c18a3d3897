//! Facts that worlds report to the engine, and actions that the engine asks of worlds.

use crate::idx::{GpuIdx, GpuSet, JobIdx, NodeIdx};
use crate::knobs::{Knobs, is_default};
use crate::reason::Reason;
use serde::{Deserialize, Serialize};

/// What was measured of a running job; zero = not measured.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sample {
    /// Seconds of one step.
    #[serde(skip_serializing_if = "is_default")]
    pub step_s: f64,
    /// Steps done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done: Option<f64>,
    /// Busy share of the multiprocessors.
    #[serde(skip_serializing_if = "is_default")]
    pub sm_util: f32,
    /// Busy share of the memory bandwidth.
    #[serde(skip_serializing_if = "is_default")]
    pub dram_util: f32,
    /// GPU memory in use, MiB.
    #[serde(skip_serializing_if = "is_default")]
    pub mem_mib: u32,
    /// 99th percentile of request latency over the window, µs (services).
    #[serde(skip_serializing_if = "is_default")]
    pub p99_us: u32,
    /// Requests per second over the window (services).
    #[serde(skip_serializing_if = "is_default")]
    pub load_rps: f32,
    /// Gradient noise scale.
    #[serde(skip_serializing_if = "is_default")]
    pub noise_scale: f32,
    /// Batch size per GPU with which all of this was measured.
    #[serde(skip_serializing_if = "is_default")]
    pub batch: u32,
}

/// What a service did since it was last told: the account of its measuring windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Served {
    /// Measuring windows that ended.
    pub windows: u32,
    /// Those in which more than one request in a hundred was late.
    #[serde(skip_serializing_if = "is_default")]
    pub over: u32,
    /// Requests in them.
    #[serde(skip_serializing_if = "is_default")]
    pub requests: u64,
    /// Requests that were answered later than the objective, or not at all.
    #[serde(skip_serializing_if = "is_default")]
    pub late: u64,
    /// Mean over requests of their window's median latency, µs.
    #[serde(skip_serializing_if = "is_default")]
    pub p50_us: u32,
    /// Mean over requests of their window's 99th percentile, µs.
    #[serde(skip_serializing_if = "is_default")]
    pub p99_us: u32,
    /// The largest 99th percentile of a window, µs.
    #[serde(skip_serializing_if = "is_default")]
    pub worst_us: u32,
}

impl Served {
    /// Both accounts as one.
    pub fn and(self, other: Self) -> Self {
        let requests = self.requests.saturating_add(other.requests);
        let mean = |a: u32, b: u32| {
            let sum = u128::from(a) * u128::from(self.requests)
                + u128::from(b) * u128::from(other.requests);
            sum.checked_div(u128::from(requests)).unwrap_or(0) as u32
        };
        Self {
            windows: self.windows.saturating_add(other.windows),
            over: self.over.saturating_add(other.over),
            requests,
            late: self.late.saturating_add(other.late),
            p50_us: mean(self.p50_us, other.p50_us),
            p99_us: mean(self.p99_us, other.p99_us),
            worst_us: self.worst_us.max(other.worst_us),
        }
    }
}

/// A fact: something that happened in the world.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A user submitted a registered job.
    Submitted(JobIdx),
    /// A job now runs where it was placed.
    Started(JobIdx),
    /// A job left its GPUs as it was told to, with so many steps safely done.
    Stopped {
        /// The job.
        job: JobIdx,
        /// Steps that survive.
        done: f64,
    },
    /// A job now runs with its new knobs.
    Tuned(JobIdx),
    /// A job did all its work.
    Finished(JobIdx),
    /// A job stopped by itself, with so many steps safely done.
    Failed {
        /// The job.
        job: JobIdx,
        /// Why it failed.
        #[serde(rename = "why")]
        reason: Reason,
        /// Steps that survive.
        done: f64,
    },
    /// A user took a job back.
    Cancelled(JobIdx),
    /// Something was measured.
    Sampled {
        /// The job.
        job: JobIdx,
        /// What was measured.
        sample: Sample,
    },
    /// A service accounts for the time since it was last told. Never a reason to ask a policy: what
    /// matters to one is sampled as well.
    Served {
        /// The service.
        job: JobIdx,
        /// Its account.
        served: Served,
    },
    /// A node can be used.
    NodeUp(NodeIdx),
    /// A node cannot be used; the jobs on it are reported as failed by themselves.
    NodeDown(NodeIdx),
}

impl Event {
    /// The job that it is about; none if it is about a node.
    pub fn job(&self) -> Option<JobIdx> {
        match *self {
            Self::Submitted(job)
            | Self::Started(job)
            | Self::Stopped { job, .. }
            | Self::Tuned(job)
            | Self::Finished(job)
            | Self::Failed { job, .. }
            | Self::Cancelled(job)
            | Self::Sampled { job, .. }
            | Self::Served { job, .. } => Some(job),
            Self::NodeUp(_) | Self::NodeDown(_) => None,
        }
    }

    /// The node that it is about; none if it is about a job.
    pub fn node(&self) -> Option<NodeIdx> {
        match *self {
            Self::NodeUp(node) | Self::NodeDown(node) => Some(node),
            Self::Submitted(_)
            | Self::Started(_)
            | Self::Stopped { .. }
            | Self::Tuned(_)
            | Self::Finished(_)
            | Self::Failed { .. }
            | Self::Cancelled(_)
            | Self::Sampled { .. }
            | Self::Served { .. } => None,
        }
    }

    /// Why it happened, where that is part of the fact.
    pub fn reason(&self) -> Option<Reason> {
        match *self {
            Self::Failed { reason, .. } => Some(reason),
            Self::Submitted(_)
            | Self::Started(_)
            | Self::Stopped { .. }
            | Self::Tuned(_)
            | Self::Finished(_)
            | Self::Cancelled(_)
            | Self::Sampled { .. }
            | Self::Served { .. }
            | Self::NodeUp(_)
            | Self::NodeDown(_) => None,
        }
    }
}

/// Where and how a job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Its GPUs, ascending.
    pub gpus: GpuSet,
    /// How it runs on each.
    #[serde(default, skip_serializing_if = "is_default")]
    pub knobs: Knobs,
}

/// An action: what the engine asks of the world. Carries all that the world has to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Take the job off its GPUs, keeping its progress.
    Stop(JobIdx),
    /// The same, but the process waits in host memory, ready to go on where it was.
    Suspend(JobIdx),
    /// Refuse the job for good.
    Reject(JobIdx, Reason),
    /// Change how the job runs, where it is.
    Tune(JobIdx, Knobs),
    /// Take the job off its GPUs and start it on others.
    Move(JobIdx, Placement),
    /// Start the job.
    Start(JobIdx, Placement),
}

impl Action {
    /// The job it is about.
    pub fn job(&self) -> JobIdx {
        match self {
            Self::Stop(j) | Self::Suspend(j) | Self::Reject(j, _) | Self::Tune(j, _) => *j,
            Self::Move(j, _) | Self::Start(j, _) => *j,
        }
    }

    /// Why it is asked, where that is part of the action.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Reject(_, reason) => Some(*reason),
            Self::Stop(_) | Self::Suspend(_) | Self::Tune(..) => None,
            Self::Move(..) | Self::Start(..) => None,
        }
    }

    /// The GPUs that the job gets, where it gets any.
    pub fn gpus(&self) -> Option<&[GpuIdx]> {
        match self {
            Self::Move(_, placement) | Self::Start(_, placement) => Some(&placement.gpus),
            Self::Stop(_) | Self::Suspend(_) | Self::Reject(..) | Self::Tune(..) => None,
        }
    }

    /// Stops come before starts, so that a world that acts in order never needs a GPU twice.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::Stop(_) | Self::Suspend(_) => 0,
            Self::Reject(..) => 1,
            Self::Tune(..) => 2,
            Self::Move(..) => 3,
            Self::Start(..) => 4,
        }
    }
}
