//! Stages of interleaved jobs: on each device one job at a time is in each of the stages load,
//! preprocess, compute and sync. The job that has waited longest is next.

use roommate_core::idx::{GpuIdx, GpuSet, JobIdx};
use std::collections::BTreeMap;

/// The jobs in each stage, and those that wait.
#[derive(Debug, Default)]
pub(crate) struct StageTurns {
    inside: BTreeMap<(GpuIdx, u8), JobIdx>,
    waiting: Vec<(JobIdx, u8, GpuSet)>,
}

impl StageTurns {
    /// A job asks to enter a stage on its devices; returns the jobs that may enter now.
    pub(crate) fn enter(&mut self, job: JobIdx, stage: u8, gpus: &[GpuIdx]) -> Vec<(JobIdx, u8)> {
        self.waiting.retain(|(j, s, _)| (*j, *s) != (job, stage));
        self.waiting.push((job, stage, GpuSet::from_slice(gpus)));
        self.admit()
    }

    /// A job left a stage; returns the jobs that may enter now.
    pub(crate) fn leave(&mut self, job: JobIdx, stage: u8) -> Vec<(JobIdx, u8)> {
        self.inside.retain(|(_, s), j| (*j, *s) != (job, stage));
        self.admit()
    }

    /// A job is gone; returns the jobs that may enter now.
    pub(crate) fn forget(&mut self, job: JobIdx) -> Vec<(JobIdx, u8)> {
        self.inside.retain(|_, j| *j != job);
        self.waiting.retain(|(j, _, _)| *j != job);
        self.admit()
    }

    fn admit(&mut self) -> Vec<(JobIdx, u8)> {
        let mut admitted = Vec::new();
        let inside = &mut self.inside;
        // A gang that waits for one of its devices does not reserve its other devices: they would
        // be idle meanwhile, and gangs are rare.
        self.waiting.retain(|(job, stage, gpus)| {
            let free = gpus.iter().all(|g| inside.get(&(*g, *stage)).is_none_or(|j| j == job));
            if free {
                gpus.iter().for_each(|g| {
                    inside.insert((*g, *stage), *job);
                });
                admitted.push((*job, *stage));
            }
            !free
        });
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: JobIdx = JobIdx(0);
    const B: JobIdx = JobIdx(1);
    const GPU: [GpuIdx; 1] = [GpuIdx(0)];

    #[test]
    fn one_job_loads_while_another_computes() {
        let mut stages = StageTurns::default();
        assert_eq!(stages.enter(A, 0, &GPU), [(A, 0)]);
        assert_eq!(stages.enter(B, 0, &GPU), []);
        assert_eq!(stages.leave(A, 0), [(B, 0)]);
        assert_eq!(stages.enter(A, 2, &GPU), [(A, 2)]);
        stages.leave(B, 0);
        assert_eq!(stages.enter(B, 2, &GPU), []);
        assert_eq!(stages.enter(A, 0, &[GpuIdx(1)]), [(A, 0)]);
        assert_eq!(stages.forget(A), [(B, 2)]);
    }

    #[test]
    fn a_repeated_request_counts_once() {
        let mut stages = StageTurns::default();
        stages.enter(A, 0, &GPU);
        assert_eq!(stages.enter(A, 0, &GPU), [(A, 0)]);
        stages.enter(B, 0, &GPU);
        stages.enter(B, 0, &GPU);
        assert_eq!(stages.leave(A, 0), [(B, 0)]);
    }
}
