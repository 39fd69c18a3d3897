//! Reasons: why a job waits, moved, was stopped or was rejected. They are data, so that decisions
//! carry no strings; `roommate explain` and `ps` turn them into sentences with
//! [`Reason::describe`].

use crate::idx::{JobIdx, NodeIdx};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a prediction of how much sharing costs comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A rule of thumb: too little was measured.
    Thumb,
    /// A model learnt from other pairs.
    Learnt,
    /// The same pair was measured.
    Measured,
}

/// Why a job waits, moved, was stopped or was rejected; shown by `explain` and `ps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The gang does not fit: too few suitable GPUs are idle within one place that the policy
    /// accepts.
    NoRoom {
        /// GPUs that the job needs.
        need: u16,
        /// GPUs idle in the cluster at the time of the attempt.
        idle: u32,
    },
    /// Enough GPUs are idle, but not on few enough nodes.
    Scattered {
        /// GPUs that the job needs close together.
        need: u16,
        /// GPUs idle in the cluster at the time of the attempt.
        idle: u32,
    },
    /// An earlier job waits, and this policy does not backfill.
    Behind(JobIdx),
    /// Preempted by this job.
    PreemptedBy(JobIdx),
    /// Moved down to this queue (1 = first) because of the GPU time it has used.
    Demoted(u8),
    /// Moved back to the first queue because of the time it has waited.
    Promoted,
    /// A guaranteed job that starts as best-effort after a long wait.
    BeganWithoutPromise,
    /// A guaranteed job that started as best-effort and now has its guaranteed GPUs.
    Upgraded,
    /// The cluster could not hold the job even if it were empty.
    TooLarge {
        /// GPUs that the job needs.
        need: u16,
        /// Suitable GPUs that exist.
        exist: u32,
    },
    /// Its process ended with an error of unknown cause.
    Crashed,
    /// Its code or its input is wrong, so a retry would fail again.
    UserError,
    /// Hardware, driver or node failed beneath it, so a retry may succeed.
    InfraError,
    /// A roommate's process failed on a shared GPU and ended this job's process too.
    RoommateFailed,
    /// The node on which it ran was lost.
    NodeLost(NodeIdx),
    /// It failed more often than its retries allow.
    OutOfRetries,
    /// It waits this long before the retry that follows a failure.
    BacksOff(Span),
    /// Its user cancelled it.
    Cancelled,
    /// It needed more GPU memory than it was allocated, or than the GPU has.
    OutOfMemory,
    /// It starts on GPUs that it shares with another job.
    Beside {
        /// The first of the jobs that already run there.
        job: JobIdx,
        /// Predicted length of a step relative to running alone, in permille; 1000 = no slowdown.
        pd_permille: u32,
        /// How the prediction was made.
        source: Source,
    },
    /// It would fit beside another job, but the sum of all completion times is smaller if it waits.
    BetterToWait {
        /// The first of the jobs that it would have shared with.
        than_beside: JobIdx,
        /// Completion time saved by waiting, summed over all jobs.
        saves: Span,
    },
    /// It starts beside others: that is worth more than to wait.
    SharesWith {
        /// The first of its roommates.
        job: JobIdx,
        /// Its speed there, relative to alone, in permille.
        own_permille: u32,
        /// What its roommates lose of their speeds, summed, in permille.
        cost_permille: u32,
    },
    /// It waits: its best place beside others costs them more than it gains.
    BetterAlone {
        /// The first of its roommates there.
        than_beside: JobIdx,
        /// Its speed there, relative to alone, in permille.
        own_permille: u32,
        /// What its roommates would lose of their speeds, summed, in permille.
        cost_permille: u32,
    },
    /// Suspended for a job that is worth more per GPU.
    PushedOut {
        /// The job that takes its place.
        job: JobIdx,
        /// How many times as much that is worth per GPU, in permille.
        times_permille: u32,
    },
    /// Suspended: its roommates gain more without it than it does beside them.
    RoommatesGain {
        /// What its roommates gain of their speeds, summed, in permille.
        gain_permille: u32,
        /// Its own speed, relative to alone, in permille.
        own_permille: u32,
    },
    /// It moves to idle GPUs.
    MovesToIdle {
        /// Its speed before, in permille.
        from_permille: u32,
        /// Its speed there, in permille.
        to_permille: u32,
        /// What its roommates gain of their speeds, summed, in permille.
        gain_permille: u32,
    },
    /// Its kernels start before those of this roommate, which would slow it more than was promised.
    First(JobIdx),
    /// Confined to this part of the SMs, so that this roommate keeps what it was promised.
    ConfinedFor {
        /// The roommate.
        job: JobIdx,
        /// The largest part of the SMs that it may use, in permille.
        permille: u16,
    },
    /// Suspended: this roommate would be slowed more than was promised, however it is held back.
    PromiseTo(JobIdx),
    /// Its batch size was searched together with those of its roommates.
    BatchSettled {
        /// The batch size with which it runs from now on.
        batch: u32,
        /// Measurements that the search took.
        measured: u32,
        /// Length of a step relative to the user's batch size alone, in permille.
        pd_permille: u32,
    },
    /// It still reports another batch size than requested, so its batch size is no longer tuned.
    BatchNotApplied {
        /// The requested batch size.
        batch: u32,
    },
    /// The noise scale of its gradients changed, so batch sizes are searched again.
    NoiseDrifted {
        /// The noise scale of the last search.
        from: u32,
        /// The noise scale now.
        to: u32,
    },
    /// The process could not be started on the GPUs it was placed on.
    StartFailed,
    /// Its node holds more jobs than fit at once, and this time slice belongs to others.
    WaitsForTurn,
    /// No node with idle GPUs has the CPU and the host memory that it requests.
    NoHost,
    /// Reduced to its proportional CPU and host memory so that this job could start.
    AtShare(JobIdx),
    /// The optimal CPU and host memory of all jobs were not found in time; a greedy rule set them.
    SharesUnsolved,
    /// It is placed on trial beside this job on the same GPUs.
    TriedWith(JobIdx),
    /// Sharing GPUs with this job was slower than running one after the other.
    NotWorthSharing(JobIdx),
    /// This round goes to jobs that are further below their fair share.
    NotItsRound,
    /// The job was never measured on this GPU model; the model's usual relative speed is assumed.
    SpeedGuessed(u8),
    /// The optimization problem that divides the GPUs has no solution; all jobs get equal shares.
    Unsolved,
    /// Its deadline cannot be met together with the deadlines of other jobs.
    DeadlineGivenUp,
    /// GPUs of its node were idle for long, so it was scaled up to this many.
    Grows(u16),
    /// More GPUs did not speed it up enough, so it was scaled down to this many.
    NotWorthGrowing(u16),
    /// It releases GPUs that this job needs.
    ShrinksFor(JobIdx),
    /// Admitted: it is guaranteed to finish by its deadline.
    Promised {
        /// The guaranteed deadline.
        by: Time,
    },
    /// Not admitted: its deadline cannot be guaranteed beside those already guaranteed, so it runs
    /// best-effort.
    NotPromised {
        /// The earliest deadline that could be guaranteed; none if the job's length is not known.
        could: Option<Time>,
    },
    /// It ran longer than estimated, so its deadline is no longer guaranteed.
    PastEstimate,
    /// It can no longer meet its deadline.
    DeadlineLost,
    /// Suspended in host memory, because this service would miss its SLO beside it.
    PausedFor(JobIdx),
    /// The machine holds it back, because this service is about to miss its SLO beside it.
    HeldBackFor(JobIdx),
    /// The machine does not hold it back any more: this service keeps its SLO beside it.
    NotHeldBackFor(JobIdx),
    /// Its SLO is missed even with the whole GPU; it gets all but the training's minimum share.
    SloOutOfReach,
    /// The service has not reported a request yet, so its load is unknown.
    #[serde(rename = "not_heard_of")]
    NoSamplesYet,
    /// The service receives no requests; it has the minimum share until one comes.
    #[serde(rename = "nobody_asks")]
    NoRequests,
    /// Its latency was not profiled; it is assumed proportional to the inverse of the SM share.
    LatencyUnknown,
    /// Its latency alone was profiled at this many points, and never beside other jobs.
    LatencyProfiled(u32),
    /// The solver found no exact plan of all leases, this many times so far; a greedy rule planned.
    PlannedByRule(u32),
}

impl Reason {
    /// The jobs that it names.
    pub fn jobs(&self) -> impl Iterator<Item = JobIdx> + use<> {
        self.names().0.into_iter()
    }

    /// The nodes that it names.
    pub fn nodes(&self) -> impl Iterator<Item = NodeIdx> + use<> {
        self.names().1.into_iter()
    }

    /// The job or the node that it names. Lists all reasons, so that a new one does not compile
    /// before it says what it names: a reader of journals checks these numbers.
    fn names(&self) -> (Option<JobIdx>, Option<NodeIdx>) {
        match self {
            Self::Behind(j)
            | Self::PreemptedBy(j)
            | Self::Beside { job: j, .. }
            | Self::BetterToWait { than_beside: j, .. }
            | Self::SharesWith { job: j, .. }
            | Self::BetterAlone { than_beside: j, .. }
            | Self::PushedOut { job: j, .. }
            | Self::First(j)
            | Self::ConfinedFor { job: j, .. }
            | Self::PromiseTo(j)
            | Self::AtShare(j)
            | Self::TriedWith(j)
            | Self::NotWorthSharing(j)
            | Self::ShrinksFor(j)
            | Self::PausedFor(j)
            | Self::HeldBackFor(j)
            | Self::NotHeldBackFor(j) => (Some(*j), None),
            Self::NodeLost(n) => (None, Some(*n)),
            Self::NoRoom { .. }
            | Self::Scattered { .. }
            | Self::Demoted(_)
            | Self::Promoted
            | Self::BeganWithoutPromise
            | Self::Upgraded
            | Self::TooLarge { .. }
            | Self::Crashed
            | Self::UserError
            | Self::InfraError
            | Self::RoommateFailed
            | Self::OutOfRetries
            | Self::BacksOff(_)
            | Self::Cancelled
            | Self::OutOfMemory
            | Self::RoommatesGain { .. }
            | Self::MovesToIdle { .. }
            | Self::BatchSettled { .. }
            | Self::BatchNotApplied { .. }
            | Self::NoiseDrifted { .. }
            | Self::StartFailed
            | Self::WaitsForTurn
            | Self::NoHost
            | Self::SharesUnsolved
            | Self::NotItsRound
            | Self::SpeedGuessed(_)
            | Self::Unsolved
            | Self::DeadlineGivenUp
            | Self::Grows(_)
            | Self::NotWorthGrowing(_)
            | Self::Promised { .. }
            | Self::NotPromised { .. }
            | Self::PastEstimate
            | Self::DeadlineLost
            | Self::SloOutOfReach
            | Self::NoSamplesYet
            | Self::NoRequests
            | Self::LatencyUnknown
            | Self::LatencyProfiled(_)
            | Self::PlannedByRule(_) => (None, None),
        }
    }

    /// The sentence that `explain` and `ps` show, with jobs named by `name`.
    #[expect(clippy::too_many_lines, reason = "one line for each reason")]
    pub fn describe(&self, name: &dyn Fn(JobIdx) -> String) -> String {
        match self {
            Self::NoRoom { need, idle } => {
                format!("does not fit: needs {need} GPUs, {idle} idle in the cluster")
            }
            Self::Scattered { need, idle } => {
                format!("{idle} GPUs are idle, but no {need} of them are close enough together")
            }
            Self::Behind(j) => {
                format!("waits behind job {}: this policy does not backfill", name(*j))
            }
            Self::PreemptedBy(j) => format!("preempted by job {}", name(*j)),
            Self::Demoted(q) => format!("moved to queue {q} for the GPU time it has used"),
            Self::Promoted => "moved back to queue 1 for the time it has waited".into(),
            Self::BeganWithoutPromise => {
                "starts as best-effort, because it waited too long for guaranteed GPUs".into()
            }
            Self::Upgraded => "its GPUs are now guaranteed; it was best-effort".into(),
            Self::TooLarge { need, exist } => {
                format!("can never run: needs {need} GPUs, {exist} suitable ones exist")
            }
            Self::Crashed => "its process failed".into(),
            Self::UserError => "error in its own code or input".into(),
            Self::InfraError => "hardware, driver or node error".into(),
            Self::RoommateFailed => "failed together with a roommate on the same GPU".into(),
            Self::NodeLost(n) => format!("node {n} went down"),
            Self::OutOfRetries => "failed more often than its retries allow".into(),
            Self::BacksOff(s) => format!("waits {s} before it is retried after a failure"),
            Self::OutOfMemory => {
                "out of GPU memory: needed more than it was allocated or than the GPU has".into()
            }
            Self::Beside { job, pd_permille, source } => {
                let by = match source {
                    Source::Thumb => "by rule of thumb, as nothing similar was measured yet",
                    Source::Learnt => "predicted from similar jobs",
                    Source::Measured => "as measured before",
                };
                let pd = f64::from(*pd_permille) / 1000.0;
                format!("starts beside job {}: {pd} times as long as alone, {by}", name(*job))
            }
            Self::BetterToWait { than_beside, saves } => format!(
                "waits: sharing with job {} would add {saves} to the completion times of all jobs",
                name(*than_beside)
            ),
            Self::SharesWith { job, own_permille, cost_permille } => format!(
                "shares with job {}: runs at {} of its speed alone and costs its roommates {}, \
                 which is worth more than to wait",
                name(*job),
                hundredths(*own_permille),
                hundredths(*cost_permille)
            ),
            Self::BetterAlone { than_beside, own_permille, cost_permille } => format!(
                "waits: beside job {} it would run at {} of its speed alone and cost its \
                 roommates {}",
                name(*than_beside),
                hundredths(*own_permille),
                hundredths(*cost_permille)
            ),
            Self::PushedOut { job, times_permille } => format!(
                "suspended for job {}, which is worth {} times as much per GPU",
                name(*job),
                hundredths(*times_permille)
            ),
            Self::RoommatesGain { gain_permille, own_permille } => format!(
                "suspended: its roommates gain {} of their speed without it, and it ran at {} of \
                 its own",
                hundredths(*gain_permille),
                hundredths(*own_permille)
            ),
            Self::MovesToIdle { from_permille, to_permille, gain_permille } => format!(
                "moves to idle GPUs: {} of its speed instead of {}, and its roommates gain {}",
                hundredths(*to_permille),
                hundredths(*from_permille),
                hundredths(*gain_permille)
            ),
            Self::First(j) => {
                format!("has priority: job {} would slow it more than was promised", name(*j))
            }
            Self::ConfinedFor { job, permille } => format!(
                "confined to {} of the GPU: job {} was promised more speed",
                hundredths(u32::from(*permille)),
                name(*job)
            ),
            Self::PromiseTo(j) => {
                format!("suspended: beside it job {} would be slower than was promised", name(*j))
            }
            Self::BatchSettled { batch, measured, pd_permille } => format!(
                "batch size {batch} chosen after {measured} measurements: {} times as long as \
                 alone at its own batch size",
                f64::from(*pd_permille) / 1000.0
            ),
            Self::BatchNotApplied { batch } => {
                format!("did not apply the requested batch size {batch}; it is no longer tuned")
            }
            Self::NoiseDrifted { from, to } => format!(
                "its gradient noise scale changed from {from} to {to}: batch sizes are searched \
                 again"
            ),
            Self::Cancelled => "was cancelled".into(),
            Self::StartFailed => "could not be started on its GPUs".into(),
            Self::WaitsForTurn => "waits for its time slice on an oversubscribed node".into(),
            Self::NoHost => {
                "no node with idle GPUs has the CPU and host memory that it requests".into()
            }
            Self::AtShare(j) => format!(
                "reduced to its proportional CPU and host memory so that job {} could start",
                name(*j)
            ),
            Self::SharesUnsolved => "the optimal CPU and host memory of all jobs were not found \
                                     in time: a heuristic set them"
                .into(),
            Self::TriedWith(j) => format!("is tried beside job {} on the same GPUs", name(*j)),
            Self::NotWorthSharing(j) => {
                format!("time slicing is faster than sharing GPUs with job {}", name(*j))
            }
            Self::NotItsRound => {
                "this round goes to jobs that are further below their fair share".into()
            }
            Self::SpeedGuessed(k) => {
                format!("was never measured on GPU model {k}; that model's usual speed is assumed")
            }
            Self::Unsolved => "the optimization that divides the GPUs found no solution; all \
                               jobs get equal shares"
                .into(),
            Self::DeadlineGivenUp => {
                "its deadline cannot be met together with those of other jobs and is dropped".into()
            }
            Self::Grows(n) => format!("scales up to {n} GPUs: GPUs of its node were long idle"),
            Self::NotWorthGrowing(n) => {
                format!("scales down to {n} GPUs: more GPUs did not speed it up enough")
            }
            Self::ShrinksFor(j) => format!("releases GPUs that job {} needs", name(*j)),
            Self::Promised { by } => format!("guaranteed to finish by {by}"),
            Self::NotPromised { could: Some(by) } => {
                format!("its deadline cannot be guaranteed ({by} could be); runs as best-effort")
            }
            Self::NotPromised { could: None } => "its deadline cannot be guaranteed, because its \
                                                  length is not known; runs as best-effort"
                .into(),
            Self::PastEstimate => "ran longer than estimated and lost its guarantee".into(),
            Self::DeadlineLost => "can no longer meet its deadline".into(),
            Self::HeldBackFor(j) => {
                format!(
                    "held back: job {}, a service, would miss its objective beside it",
                    name(*j)
                )
            }
            Self::NotHeldBackFor(j) => {
                format!("runs at full pace again: job {}, a service, keeps its objective", name(*j))
            }
            Self::PausedFor(j) => format!(
                "suspended in host memory: service {} would miss its SLO beside it",
                name(*j)
            ),
            Self::SloOutOfReach => "misses its SLO even with the whole GPU; it has all but the \
                                    minimum share of training"
                .into(),
            Self::NoSamplesYet => {
                "has not reported a request yet; its share is a first guess until it does".into()
            }
            Self::NoRequests => {
                "receives no requests; it has the minimum share until one comes".into()
            }
            Self::LatencyUnknown => "its latency was not profiled: assumed to double with half \
                                     of the GPU"
                .into(),
            Self::LatencyProfiled(n) => format!(
                "its latency alone was profiled at {n} points; beside other jobs it is learned \
                 while it runs"
            ),
            Self::PlannedByRule(n) => format!(
                "no exact plan of all leases was found ({n} times so far); planned by a heuristic"
            ),
        }
    }
}

/// Permille as a number with two decimals.
fn hundredths(permille: u32) -> String {
    format!("{:.2}", f64::from(permille) / 1000.0)
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(&|j| j.to_string()))
    }
}

/// A reason together with the job that it is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Note {
    /// The job that the reason is about.
    pub job: JobIdx,
    /// Why.
    #[serde(rename = "why")]
    pub reason: Reason,
}
