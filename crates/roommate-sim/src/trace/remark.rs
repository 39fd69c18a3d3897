//! What of a file is no job of the trace, or is there in another way than in the file; counted by
//! reason.

use std::collections::BTreeMap;

/// A reason, with the noun of what is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remark {
    /// Left out: it asks for no GPU.
    NoGpu,
    /// Left out: it asks for a part of a GPU, and the trace has whole ones.
    PartOfGpu,
    /// Left out: it ended, or still waits, without having had a GPU.
    NeverStarted,
    /// Left out: a row of a step of a job; the row of the job has its GPUs.
    Step,
    /// Left out: a server, which never finishes.
    Server,
    /// Left out: something that is neither a pod nor tells of one.
    OtherObject,
    /// Left out: it tells of a pod that the file does not have.
    UnknownPod,
    /// Kept: it had not ended, and is taken as ended when the file was written.
    StillRan,
    /// Kept: several attempts of one job are one job.
    Requeued,
    /// Kept: a number that Slurm used again is another job.
    ReusedId,
}

/// How often each reason occurred.
pub type Remarks = BTreeMap<Remark, u64>;

impl Remark {
    /// Whether what was counted is not in the trace.
    pub fn is_left_out(self) -> bool {
        !matches!(self, Self::StillRan | Self::Requeued | Self::ReusedId)
    }

    /// The count in words.
    pub fn told(self, n: u64) -> String {
        let s = if n == 1 { "" } else { "s" };
        match self {
            Self::NoGpu => format!("left out {n} job{s} without a GPU"),
            Self::PartOfGpu => format!("left out {n} job{s} on a part of a GPU (MIG, MPS, shard)"),
            Self::NeverStarted => format!("left out {n} job{s} that never started"),
            Self::Step => format!("left out {n} row{s} of steps, which belong to jobs"),
            Self::Server => format!("left out {n} pod{s} of servers (Deployments and the like)"),
            Self::OtherObject => {
                format!("left out {n} other object{s} (neither pods nor events of pods)")
            }
            Self::UnknownPod => {
                format!("left out {n} event{s} of pods that the file does not have")
            }
            Self::StillRan => {
                format!("took {n} job{s} as ended that still ran when the file was written")
            }
            Self::Requeued => format!("joined {n} further attempt{s} of jobs to their first"),
            Self::ReusedId => format!("named {n} job{s} ID@N, because their number was used again"),
        }
    }
}
