//! Crash attribution: processes that share a GPU under MPS die together when one of them is killed
//! in the middle of a kernel or accesses invalid memory.
//!
//! An end with an error is attributed a few seconds later, when it is known which other processes
//! ended. A process killed by a signal is the cause of its own end and of those of its roommates.
//! If all exited by themselves the cause is unknown. Only an end that the job caused itself counts
//! as its failure; after an end of unknown cause a job is started isolated from other tenants,
//! where another crash proves that it is the cause.

use crate::process::Exit;
use roommate_core::idx::{GpuIdx, JobIdx};
use std::time::{Duration, Instant};

/// Roommates of a process that crashed end within this time; most of it is Python printing a
/// traceback.
const TOGETHER: Duration = Duration::from_secs(3);

/// An end that is not attributed yet.
#[derive(Clone, Debug)]
struct Ended {
    job: JobIdx,
    gpus: Vec<GpuIdx>,
    exit: Exit,
    at: Instant,
}

/// The cause of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The process itself, or whoever killed it.
    Own,
    /// A roommate that was killed.
    Roommate,
    /// One of several processes that ended together.
    Unknown,
}

/// Ends with an error that are not attributed yet.
#[derive(Debug, Default)]
pub(crate) struct CrashAttribution {
    ends: Vec<Ended>,
    /// Ends that were attributed recently: a later end may belong to them.
    past: Vec<Ended>,
}

impl CrashAttribution {
    /// Adds the end of a process that may have had roommates.
    pub(crate) fn add(&mut self, job: JobIdx, gpus: &[GpuIdx], exit: Exit, now: Instant) {
        self.ends.push(Ended { job, gpus: gpus.to_vec(), exit, at: now });
    }

    /// When the next end can be attributed.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.ends.iter().map(|e| e.at + TOGETHER).min()
    }

    /// The ends whose cause is decided now.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<(JobIdx, Exit, Cause)> {
        let is_due = |e: &Ended| e.at + TOGETHER <= now;
        let causes =
            self.ends.iter().filter(|e| is_due(e)).map(|e| (e.job, e.exit.clone(), self.judge(e)));
        let causes = causes.collect();
        let (due, left) = std::mem::take(&mut self.ends).into_iter().partition(is_due);
        self.ends = left;
        self.past.extend::<Vec<Ended>>(due);
        self.past.retain(|e| now.duration_since(e.at) < 3 * TOGETHER);
        causes
    }

    fn judge(&self, end: &Ended) -> Cause {
        let others = self.ends.iter().chain(&self.past).filter(|o| {
            let (first, last) = if o.at < end.at { (o.at, end.at) } else { (end.at, o.at) };
            o.job != end.job
                && last.duration_since(first) <= TOGETHER
                && o.gpus.iter().any(|g| end.gpus.contains(g))
        });
        let killed = |e: &Ended| !matches!(e.exit, Exit::Code(_));
        let others: Vec<&Ended> = others.collect();
        match (killed(end), &others[..]) {
            (true, _) | (false, []) => Cause::Own,
            (false, others) if others.iter().any(|o| killed(o)) => Cause::Roommate,
            (false, _) => Cause::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Duration = Duration::from_secs(10);

    fn causes(ends: &[(u32, u32, Exit, u64)]) -> Vec<(u32, Cause)> {
        let now = Instant::now();
        let mut attribution = CrashAttribution::default();
        for (job, gpu, exit, ms) in ends {
            let at = now + Duration::from_millis(*ms);
            attribution.add(JobIdx(*job), &[GpuIdx(*gpu)], exit.clone(), at);
        }
        attribution.take_due(now + LATER).into_iter().map(|(j, _, v)| (j.0, v)).collect()
    }

    #[test]
    fn a_killed_process_is_the_cause_of_its_roommates_end() {
        use Cause::{Own, Roommate};
        let ends =
            [(0, 0, Exit::Signal(9), 0), (1, 0, Exit::Code(1), 400), (2, 0, Exit::Code(1), 900)];
        assert_eq!(causes(&ends), [(0, Own), (1, Roommate), (2, Roommate)]);
        // A process on another GPU, or one that ends much later, ended for its own reasons.
        let ends =
            [(0, 0, Exit::Signal(9), 0), (1, 1, Exit::Code(1), 400), (2, 0, Exit::Code(1), 5_000)];
        assert_eq!(causes(&ends), [(0, Own), (1, Own), (2, Own)]);
    }

    #[test]
    fn without_a_killed_process_the_cause_is_unknown() {
        use Cause::{Own, Unknown};
        let ends = [(0, 0, Exit::Code(1), 0), (1, 0, Exit::Code(1), 300)];
        assert_eq!(causes(&ends), [(0, Unknown), (1, Unknown)]);
        assert_eq!(causes(&ends[..1]), [(0, Own)]);
    }

    #[test]
    fn a_later_end_is_attributed_to_an_earlier_one() {
        let now = Instant::now();
        let mut attribution = CrashAttribution::default();
        attribution.add(JobIdx(0), &[GpuIdx(0)], Exit::Signal(9), now);
        assert_eq!(attribution.due(), Some(now + TOGETHER));
        attribution.add(JobIdx(1), &[GpuIdx(0)], Exit::Code(1), now + Duration::from_secs(2));
        let first = attribution.take_due(now + TOGETHER);
        assert_eq!(first, [(JobIdx(0), Exit::Signal(9), Cause::Own)]);
        let then = attribution.take_due(now + LATER);
        assert_eq!(then, [(JobIdx(1), Exit::Code(1), Cause::Roommate)]);
        assert_eq!(attribution.due(), None);
    }
}
