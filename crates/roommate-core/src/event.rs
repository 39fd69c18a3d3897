//! Events are facts that worlds report to the engine; actions are what the engine asks of worlds.

use crate::idx::{GpuIdx, GpuSet, JobIdx, NodeIdx};
use crate::knobs::{Knobs, is_default};
use crate::number::{Number, Number32};
use crate::reason::Reason;
use serde::{Deserialize, Serialize};

/// Measurements of a running job; zero = not measured.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sample {
    /// Seconds of one step.
    #[serde(skip_serializing_if = "is_default")]
    pub step_s: Number,
    /// Steps completed since the job began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done: Option<Number>,
    /// Busy share of the SMs, 0 to 1.
    #[serde(skip_serializing_if = "is_default")]
    pub sm_util: Number32,
    /// Busy share of the memory bandwidth, 0 to 1.
    #[serde(skip_serializing_if = "is_default")]
    pub dram_util: Number32,
    /// GPU memory in use, MiB.
    #[serde(skip_serializing_if = "is_default")]
    pub mem_mib: u32,
    /// 99th percentile of request latency over the window, µs (services).
    #[serde(skip_serializing_if = "is_default")]
    pub p99_us: u32,
    /// Requests per second over the window (services).
    #[serde(skip_serializing_if = "is_default")]
    pub load_rps: Number32,
    /// Gradient noise scale.
    #[serde(skip_serializing_if = "is_default")]
    pub noise_scale: Number32,
    /// Batch size per GPU during this measurement.
    #[serde(skip_serializing_if = "is_default")]
    pub batch: u32,
    /// Whether its roommates stood still meanwhile: it says how fast the job is alone, and nothing
    /// of how fast it is now.
    #[serde(skip_serializing_if = "is_default")]
    pub alone: bool,
}

/// Totals of a service's measuring windows since its last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Served {
    /// Number of windows that ended.
    pub windows: u32,
    /// Windows in which more than 1 % of requests missed the SLO.
    #[serde(skip_serializing_if = "is_default")]
    pub over: u32,
    /// Requests in these windows.
    #[serde(skip_serializing_if = "is_default")]
    pub requests: u64,
    /// Requests answered later than the SLO allows, or not at all.
    #[serde(skip_serializing_if = "is_default")]
    pub late: u64,
    /// Median latency of a window, averaged over windows weighted by requests, µs.
    #[serde(skip_serializing_if = "is_default")]
    pub p50_us: u32,
    /// 99th percentile latency of a window, averaged over windows weighted by requests, µs.
    #[serde(skip_serializing_if = "is_default")]
    pub p99_us: u32,
    /// The largest 99th percentile latency of any window, µs.
    #[serde(skip_serializing_if = "is_default")]
    pub worst_us: u32,
}

impl Served {
    /// The totals of both reports.
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

/// A fact reported by the world.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A user submitted a registered job.
    Submitted(JobIdx),
    /// A job runs on the GPUs where it was placed.
    Started(JobIdx),
    /// A job left its GPUs as requested.
    Stopped {
        /// The job that stopped.
        job: JobIdx,
        /// Steps of progress that were saved.
        done: Number,
    },
    /// A job runs with its new knobs.
    Tuned(JobIdx),
    /// A job completed all its work.
    Finished(JobIdx),
    /// A job ended without being asked to.
    Failed {
        /// The job that failed.
        job: JobIdx,
        /// Why it failed.
        #[serde(rename = "why")]
        reason: Reason,
        /// Steps of progress that were saved.
        done: Number,
    },
    /// A user cancelled a job.
    Cancelled(JobIdx),
    /// A job is gone for now: whoever runs it will submit it again, with the progress that it has.
    Withdrawn(JobIdx),
    /// A running job was measured.
    Sampled {
        /// The job that was measured.
        job: JobIdx,
        /// The measurements.
        sample: Sample,
    },
    /// Totals of a service since its last report, for metrics only: it never causes a policy call,
    /// because windows that matter to a policy are also `Sampled`.
    Served {
        /// The service that reports.
        job: JobIdx,
        /// Totals since its last report.
        served: Served,
    },
    /// The world did something to a job by itself, for people: it never causes a policy call.
    Noted {
        /// The job.
        job: JobIdx,
        /// What was done, and why.
        #[serde(rename = "why")]
        reason: Reason,
    },
    /// A user made a job stand still where it is, or let it go on.
    Held {
        /// The job.
        job: JobIdx,
        /// Whether it stands still from now on.
        held: bool,
    },
    /// A user set how a job runs; what is left out stays as it was.
    Resized {
        /// The job.
        job: JobIdx,
        /// Batch size per GPU; 0 = as the policy wants it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        batch: Option<u32>,
        /// Most of each GPU, in permille; 0 = as the policy wants it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        share_permille: Option<u16>,
    },
    /// A node is usable.
    NodeUp(NodeIdx),
    /// A node is not usable; the jobs on it are reported as failed separately.
    NodeDown(NodeIdx),
    /// Jobs may have this much of a node's CPU and host memory: others use the rest.
    NodeRoom {
        /// The node.
        node: NodeIdx,
        /// CPU in thousandths of a core.
        cpu_milli: u32,
        /// Host memory in MiB.
        host_mib: u32,
    },
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
            | Self::Withdrawn(job)
            | Self::Sampled { job, .. }
            | Self::Served { job, .. }
            | Self::Noted { job, .. }
            | Self::Held { job, .. }
            | Self::Resized { job, .. } => Some(job),
            Self::NodeUp(_) | Self::NodeDown(_) | Self::NodeRoom { .. } => None,
        }
    }

    /// The node that it is about; none if it is about a job.
    pub fn node(&self) -> Option<NodeIdx> {
        match *self {
            Self::NodeUp(node) | Self::NodeDown(node) | Self::NodeRoom { node, .. } => Some(node),
            Self::Submitted(_)
            | Self::Started(_)
            | Self::Stopped { .. }
            | Self::Tuned(_)
            | Self::Finished(_)
            | Self::Failed { .. }
            | Self::Cancelled(_)
            | Self::Withdrawn(_)
            | Self::Sampled { .. }
            | Self::Served { .. }
            | Self::Noted { .. }
            | Self::Held { .. }
            | Self::Resized { .. } => None,
        }
    }

    /// Why it happened, where that is part of the fact.
    pub fn reason(&self) -> Option<Reason> {
        match *self {
            Self::Failed { reason, .. } | Self::Noted { reason, .. } => Some(reason),
            Self::Submitted(_)
            | Self::Started(_)
            | Self::Stopped { .. }
            | Self::Tuned(_)
            | Self::Finished(_)
            | Self::Cancelled(_)
            | Self::Withdrawn(_)
            | Self::Sampled { .. }
            | Self::Served { .. }
            | Self::Held { .. }
            | Self::Resized { .. }
            | Self::NodeUp(_)
            | Self::NodeDown(_)
            | Self::NodeRoom { .. } => None,
        }
    }
}

/// Where and how a job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Its GPUs, ascending.
    pub gpus: GpuSet,
    /// Its knobs on each of them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub knobs: Knobs,
}

/// What the engine asks of the world. Carries everything that the world needs to act on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Take the job off its GPUs and save its progress.
    Stop(JobIdx),
    /// Take the job off its GPUs, but keep its process in host memory, ready to resume.
    Suspend(JobIdx),
    /// Reject the job permanently.
    Reject(JobIdx, Reason),
    /// Change the knobs of a running job, where it is.
    Tune(JobIdx, Knobs),
    /// Take the job off its GPUs and start it on others.
    Move(JobIdx, Placement),
    /// Start the job.
    Start(JobIdx, Placement),
}

impl Action {
    /// The job that the action is about.
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

    /// Stops precede starts, so a world that acts in order never needs a GPU for two jobs at once.
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
