//! Reasons: why a job waits, moved, was stopped or refused. Data, not text, so that the core has no
//! strings until `roommate explain` asks for the sentence.

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

/// A reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Not enough suitable GPUs in a fitting place.
    NoRoom {
        /// GPUs it needs.
        need: u16,
        /// GPUs idle in the cluster when it was looked at.
        idle: u32,
    },
    /// Enough GPUs are idle, but not close enough together.
    Scattered {
        /// GPUs it needs together.
        need: u16,
        /// GPUs idle in the cluster when it was looked at.
        idle: u32,
    },
    /// A job in front of it waits, and this policy does not overtake.
    Behind(JobIdx),
    /// Stopped in favour of another job.
    PreemptedBy(JobIdx),
    /// Used so much service that it moved to a later queue (1 = first).
    Demoted(u8),
    /// Waited so long that it moved back to the first queue.
    Promoted,
    /// Was promised GPUs, waited for long, and begins without the promise.
    BeganWithoutPromise,
    /// Began without a promise and has it now.
    Upgraded,
    /// The cluster could never hold it.
    TooLarge {
        /// GPUs it needs.
        need: u16,
        /// Suitable GPUs that exist.
        exist: u32,
    },
    /// Its process ended with an error, nobody knows whose.
    Crashed,
    /// Its own code or input is wrong: it would fail again.
    UserError,
    /// Something beneath it failed: it may well work the next time.
    InfraError,
    /// A process with which it shared a GPU failed and took it along.
    RoommateFailed,
    /// The node it ran on went away.
    NodeLost(NodeIdx),
    /// It failed more often than it may.
    OutOfRetries,
    /// It waits out a pause after a failure.
    BacksOff(Span),
    /// Its user took it back.
    Cancelled,
    /// It needed more GPU memory than it was given, or than there is.
    OutOfMemory,
    /// It starts beside another job.
    Beside {
        /// The first of those who are there.
        job: JobIdx,
        /// How much it is predicted to be degraded, in permille; 1000 = not at all.
        pd_permille: u32,
        /// Where that comes from.
        source: Source,
    },
    /// There is room for it, but everybody together is done sooner if it waits.
    BetterToWait {
        /// The first of those it would have joined.
        than_beside: JobIdx,
        /// What that saves, summed over all jobs.
        saves: Span,
    },
    /// Its batch size was searched together with those of its roommates.
    BatchSettled {
        /// The batch size that it now runs with.
        batch: u32,
        /// Measurements of the search.
        measured: u32,
        /// How much it is degraded, in permille of its user's batch alone.
        pd_permille: u32,
    },
    /// It still runs with another batch size than it was told; it is left alone from now on.
    BatchNotApplied {
        /// The batch size that it was told.
        batch: u32,
    },
    /// The noise of its gradients moved, so batch sizes are searched again.
    NoiseDrifted {
        /// The noise scale of the last search.
        from: u32,
        /// The noise scale now.
        to: u32,
    },
    /// It could not be started where it was placed.
    StartFailed,
    /// More jobs live on its node than fit at once, and its turn has not come.
    WaitsForTurn,
    /// No node with idle GPUs has the CPU and the host memory that it asks for.
    NoHost,
    /// Fell back to its share of CPU and host memory so that another job could start.
    AtShare(JobIdx),
    /// The best shares of CPU and host memory were not found in time; they were tuned instead.
    SharesUnsolved,
    /// It is tried beside another job on the same GPUs.
    TriedWith(JobIdx),
    /// Beside this job the two were slower than taking turns.
    NotWorthSharing(JobIdx),
    /// Others are further behind what they are due.
    NotItsRound,
    /// Nobody measured it on GPUs of this kind; what is usual there is assumed.
    SpeedGuessed(u8),
    /// The program that divides the GPUs has no answer; everybody has an equal part.
    Unsolved,
    /// Its deadline cannot be kept beside those of others.
    DeadlineGivenUp,
    /// GPUs of its node were idle for long, so it has this many now.
    Grows(u16),
    /// With more GPUs it was not enough faster, so it is back to this many.
    NotWorthGrowing(u16),
    /// It gives back GPUs that this job needs.
    ShrinksFor(JobIdx),
    /// It was promised to be done by this instant.
    Promised {
        /// The deadline that was promised.
        by: Time,
    },
    /// Its deadline cannot be promised beside those promised before; it runs where room is left.
    NotPromised {
        /// A deadline that could have been promised; none if its length is not known.
        could: Option<Time>,
    },
    /// It ran longer than estimated, so its promise ended.
    PastEstimate,
    /// It can no longer meet its deadline.
    DeadlineLost,
    /// Waits in host memory: beside it this service could not keep its objective.
    PausedFor(JobIdx),
    /// Its objective cannot be kept even with the whole GPU; it has all that training can spare.
    SloOutOfReach,
    /// It has not answered a request yet, so nothing is known of its load.
    NotHeardOf,
    /// Nobody asks it anything; it has the least share until somebody does.
    NobodyAsks,
    /// Nothing was profiled of its latency: reckoned as if all its work were divided among multiprocessors.
    LatencyUnknown,
    /// So many profiled points are known of its latency alone, and none of it beside others.
    LatencyProfiled(u32),
    /// The exact plan of all leases could not be found, for so many times now; a rule made the plan.
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

    /// The job or the node that it names. Lists all reasons, so that a new one does not compile before
    /// it says what it names: a reader of journals checks these numbers.
    fn names(&self) -> (Option<JobIdx>, Option<NodeIdx>) {
        match self {
            Self::Behind(j)
            | Self::PreemptedBy(j)
            | Self::Beside { job: j, .. }
            | Self::BetterToWait { than_beside: j, .. }
            | Self::AtShare(j)
            | Self::TriedWith(j)
            | Self::NotWorthSharing(j)
            | Self::ShrinksFor(j)
            | Self::PausedFor(j) => (Some(*j), None),
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
            | Self::NotHeardOf
            | Self::NobodyAsks
            | Self::LatencyUnknown
            | Self::LatencyProfiled(_)
            | Self::PlannedByRule(_) => (None, None),
        }
    }

    /// The sentence for a person, with jobs called as `name` says.
    #[expect(clippy::too_many_lines, reason = "one line for each reason")]
    pub fn describe(&self, name: &dyn Fn(JobIdx) -> String) -> String {
        match self {
            Self::NoRoom { need, idle } => {
                format!("no room: needs {need} GPUs, {idle} idle in the cluster")
            }
            Self::Scattered { need, idle } => {
                format!("{idle} GPUs are idle, but no {need} of them are close enough together")
            }
            Self::Behind(j) => {
                format!("stands behind job {}, and this policy does not overtake", name(*j))
            }
            Self::PreemptedBy(j) => format!("stopped in favour of job {}", name(*j)),
            Self::Demoted(q) => format!("has used enough to be moved to queue {q}"),
            Self::Promoted => "waited long enough to be moved back to queue 1".into(),
            Self::BeganWithoutPromise => {
                "waited so long that it begins in the gaps of others, without a promise".into()
            }
            Self::Upgraded => "now has its GPUs with the promise it was due".into(),
            Self::TooLarge { need, exist } => {
                format!("can never run: needs {need} GPUs, {exist} suitable ones exist")
            }
            Self::Crashed => "its process failed".into(),
            Self::UserError => "its own code or input is wrong".into(),
            Self::InfraError => "something beneath it failed".into(),
            Self::RoommateFailed => "a roommate failed on its GPU and took it along".into(),
            Self::NodeLost(n) => format!("node {n} went down"),
            Self::OutOfRetries => "failed more often than its retries allow".into(),
            Self::BacksOff(s) => format!("waits {s} after a failure"),
            Self::OutOfMemory => {
                "needed more GPU memory than it was given, or than there is".into()
            }
            Self::Beside { job, pd_permille, source } => {
                let by = match source {
                    Source::Thumb => "by rule of thumb, nothing like it was measured yet",
                    Source::Learnt => "learnt from others",
                    Source::Measured => "as measured before",
                };
                let pd = f64::from(*pd_permille) / 1000.0;
                format!("starts beside job {}: {pd} times as long as alone, {by}", name(*job))
            }
            Self::BetterToWait { than_beside, saves } => format!(
                "waits: joining job {} would cost all jobs together {saves} more",
                name(*than_beside)
            ),
            Self::BatchSettled { batch, measured, pd_permille } => format!(
                "batch {batch} found in {measured} measurements: {} times as long as alone at its own",
                f64::from(*pd_permille) / 1000.0
            ),
            Self::BatchNotApplied { batch } => {
                format!("does not run with batch {batch} although it was told to; left alone")
            }
            Self::NoiseDrifted { from, to } => {
                format!("its noise scale moved from {from} to {to}: batch sizes are searched again")
            }
            Self::Cancelled => "was cancelled".into(),
            Self::StartFailed => "could not be started on its GPUs".into(),
            Self::WaitsForTurn => "waits for its turn on a node that it shares by time".into(),
            Self::NoHost => {
                "no node with idle GPUs has the CPU and the memory that it asks for".into()
            }
            Self::AtShare(j) => format!(
                "fell back to its share of CPU and memory so that job {} could start",
                name(*j)
            ),
            Self::SharesUnsolved => {
                "the best CPU and memory for everybody were not found in time: its share was tuned"
                    .into()
            }
            Self::TriedWith(j) => format!("is tried beside job {} on the same GPUs", name(*j)),
            Self::NotWorthSharing(j) => {
                format!("taking turns is faster than sharing with job {}", name(*j))
            }
            Self::NotItsRound => {
                "this round belongs to jobs that are further behind what they are due".into()
            }
            Self::SpeedGuessed(k) => {
                format!(
                    "was never measured on GPU model {k}; the usual speed of that kind is assumed"
                )
            }
            Self::Unsolved => {
                "the program that divides the GPUs has no answer; all jobs get equal parts".into()
            }
            Self::DeadlineGivenUp => {
                "its deadline cannot be kept beside those of the others and is given up".into()
            }
            Self::Grows(n) => format!("grows to {n} GPUs: those of its node have long been idle"),
            Self::NotWorthGrowing(n) => {
                format!("shrinks to {n} GPUs: it was not enough faster with more")
            }
            Self::ShrinksFor(j) => format!("gives back GPUs that job {} needs", name(*j)),
            Self::Promised { by } => format!("promised to be done by {by}"),
            Self::NotPromised { could: Some(by) } => {
                format!(
                    "its deadline cannot be promised, {by} could have been; runs where room is left"
                )
            }
            Self::NotPromised { could: None } => {
                "its deadline cannot be promised without a known length; runs where room is left"
                    .into()
            }
            Self::PastEstimate => "ran longer than estimated and lost its promise".into(),
            Self::DeadlineLost => "can no longer meet its deadline".into(),
            Self::PausedFor(j) => format!(
                "waits in host memory: beside it service {} could not keep its objective",
                name(*j)
            ),
            Self::SloOutOfReach => {
                "its objective is out of reach even with the whole GPU; it has all \
                                    that training can spare"
                    .into()
            }
            Self::NotHeardOf => {
                "has not answered yet; until it does it has the share at the knee of its curve"
                    .into()
            }
            Self::NobodyAsks => {
                "nobody asks it anything: the least share is enough until somebody does".into()
            }
            Self::LatencyUnknown => "nothing was profiled of its latency: reckoned as if it took \
                                     twice as long with half of the GPU"
                .into(),
            Self::LatencyProfiled(n) => format!(
                "{n} points of its latency alone were profiled before; beside others it is learned \
                 in the run"
            ),
            Self::PlannedByRule(n) => {
                format!("no exact plan of all leases was found, {n} times so far; planned by rule")
            }
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(&|j| j.to_string()))
    }
}

/// A reason about a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Note {
    /// The job.
    pub job: JobIdx,
    /// The reason.
    #[serde(rename = "why")]
    pub reason: Reason,
}
