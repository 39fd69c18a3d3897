//! Stages of interleaved jobs: on each device one job at a time is in each of the stages load,
//! preprocess, compute and sync. The job that has waited longest is next.
//!
//! A job that stays in a stage for much longer than usual is set aside while others wait: they are
//! admitted, and the job has to ask again. So a job that hangs costs its partners a bounded time.

use roommate_core::idx::{GpuIdx, GpuSet, JobIdx};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a job may stay in a stage while others wait for it: this many times as long as it
/// usually does.
const STAY_TIMES: u32 = 10;
/// Bounds of that time. The longest is for a job of which nothing is known yet.
const LEAST_STAY: Duration = Duration::from_secs(2);
const LONGEST_STAY: Duration = Duration::from_secs(30);

/// The jobs in each stage, and those that wait.
#[derive(Debug, Default)]
pub(crate) struct StageTurns {
    inside: BTreeMap<(GpuIdx, u8), Holder>,
    waiting: Vec<(JobIdx, u8, GpuSet)>,
    /// How long a job may stay in a stage, by what it did so far.
    stays: BTreeMap<(JobIdx, u8), Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    job: JobIdx,
    since: Instant,
    /// From then on it is set aside if another job waits.
    until: Instant,
}

impl StageTurns {
    /// A job asks to enter a stage on its devices; returns the jobs that may enter now.
    pub(crate) fn enter(
        &mut self,
        job: JobIdx,
        stage: u8,
        gpus: &[GpuIdx],
        now: Instant,
    ) -> Vec<(JobIdx, u8)> {
        self.waiting.retain(|(j, s, _)| (*j, *s) != (job, stage));
        self.waiting.push((job, stage, GpuSet::from_slice(gpus)));
        self.admit(now)
    }

    /// A job left a stage; returns the jobs that may enter now. Without effect if the job was set
    /// aside.
    pub(crate) fn leave(&mut self, job: JobIdx, stage: u8, now: Instant) -> Vec<(JobIdx, u8)> {
        if let Some(since) = self.out_of(job, stage) {
            let stay = self.stays.entry((job, stage)).or_insert(LEAST_STAY);
            // A longer stay counts at once, shorter ones by and by.
            let usual = now.saturating_duration_since(since).saturating_mul(STAY_TIMES);
            *stay = usual.max(*stay * 3 / 4).clamp(LEAST_STAY, LONGEST_STAY);
        }
        self.admit(now)
    }

    /// A job is gone; returns the jobs that may enter now.
    pub(crate) fn forget(&mut self, job: JobIdx, now: Instant) -> Vec<(JobIdx, u8)> {
        self.inside.retain(|_, holder| holder.job != job);
        self.waiting.retain(|(j, _, _)| *j != job);
        self.stays.retain(|(j, _), _| *j != job);
        self.admit(now)
    }

    /// Sets aside jobs that have stayed too long while others wait; returns the jobs that may enter
    /// now.
    pub(crate) fn admit(&mut self, now: Instant) -> Vec<(JobIdx, u8)> {
        let late = self.in_the_way().filter(|(_, holder)| holder.until <= now);
        for (stage, job) in late.map(|(stage, h)| (stage, h.job)).collect::<Vec<_>>() {
            if self.out_of(job, stage).is_some() {
                // It has less time at its next turn, until it leaves in time.
                let stay = self.stays.entry((job, stage)).or_insert(LONGEST_STAY);
                *stay = (*stay / 2).max(LEAST_STAY);
            }
        }
        let mut admitted = Vec::new();
        let (inside, stays) = (&mut self.inside, &self.stays);
        // A gang that waits for one of its devices does not reserve its other devices: they would
        // be idle meanwhile, and gangs are rare.
        self.waiting.retain(|(job, stage, gpus)| {
            let free = gpus.iter().all(|g| inside.get(&(*g, *stage)).is_none_or(|h| h.job == *job));
            if free {
                let stay = stays.get(&(*job, *stage)).copied().unwrap_or(LONGEST_STAY);
                let holder = Holder { job: *job, since: now, until: now + stay };
                inside.extend(gpus.iter().map(|g| ((*g, *stage), holder)));
                admitted.push((*job, *stage));
            }
            !free
        });
        admitted
    }

    /// When the next job is to be set aside, if it has not left by then.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.in_the_way().map(|(_, holder)| holder.until).min()
    }

    /// Jobs that are in a stage for which another job waits.
    fn in_the_way(&self) -> impl Iterator<Item = (u8, &Holder)> {
        self.waiting.iter().flat_map(|(job, stage, gpus)| {
            let holders = gpus.iter().filter_map(|g| self.inside.get(&(*g, *stage)));
            holders.filter(|h| h.job != *job).map(|h| (*stage, h))
        })
    }

    /// Takes a job out of a stage; returns since when it was inside, if it was.
    fn out_of(&mut self, job: JobIdx, stage: u8) -> Option<Instant> {
        let mut since = None;
        self.inside.retain(|(_, s), holder| {
            let is_it = (holder.job, *s) == (job, stage);
            since = since.or(is_it.then_some(holder.since));
            !is_it
        });
        since
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
        let (mut stages, now) = (StageTurns::default(), Instant::now());
        assert_eq!(stages.enter(A, 0, &GPU, now), [(A, 0)]);
        assert_eq!(stages.enter(B, 0, &GPU, now), []);
        assert_eq!(stages.leave(A, 0, now), [(B, 0)]);
        assert_eq!(stages.enter(A, 2, &GPU, now), [(A, 2)]);
        stages.leave(B, 0, now);
        assert_eq!(stages.enter(B, 2, &GPU, now), []);
        assert_eq!(stages.enter(A, 0, &[GpuIdx(1)], now), [(A, 0)]);
        assert_eq!(stages.forget(A, now), [(B, 2)]);
    }

    #[test]
    fn a_repeated_request_counts_once() {
        let (mut stages, now) = (StageTurns::default(), Instant::now());
        stages.enter(A, 0, &GPU, now);
        assert_eq!(stages.enter(A, 0, &GPU, now), [(A, 0)]);
        stages.enter(B, 0, &GPU, now);
        stages.enter(B, 0, &GPU, now);
        assert_eq!(stages.leave(A, 0, now), [(B, 0)]);
    }

    #[test]
    fn a_job_that_hangs_in_a_stage_is_set_aside() {
        let (mut stages, base) = (StageTurns::default(), Instant::now());
        let at = |s: f64| base + Duration::from_secs_f64(s);
        stages.enter(A, 0, &GPU, at(0.0));
        // Nobody waits, so it may stay.
        assert_eq!((stages.due(), stages.admit(at(29.0))), (None, vec![]));
        assert_eq!(stages.enter(B, 0, &GPU, at(29.0)), []);
        assert_eq!(stages.due(), Some(at(30.0)));
        assert_eq!(stages.admit(at(29.9)), []);
        assert_eq!(stages.admit(at(30.0)), [(B, 0)]);
        assert_eq!(stages.due(), None);
        // Its late departure is not that of its partner.
        assert_eq!(stages.leave(A, 0, at(31.0)), []);
        assert_eq!(stages.enter(A, 0, &GPU, at(31.0)), []);
        assert_eq!(stages.leave(B, 0, at(32.0)), [(A, 0)]);
        // It hangs again, and has half of the time, and so on.
        stages.enter(B, 0, &GPU, at(33.0));
        assert_eq!(stages.due(), Some(at(32.0 + 15.0)));
    }

    #[test]
    fn the_time_in_a_stage_follows_its_usual_length() {
        let (mut stages, base) = (StageTurns::default(), Instant::now());
        let mut now = base;
        let mut stay = |stages: &mut StageTurns, s: f64| {
            stages.enter(A, 2, &GPU, now);
            now += Duration::from_secs_f64(s);
            stages.leave(A, 2, now);
            stages.enter(A, 2, &GPU, now);
            stages.enter(B, 2, &GPU, now);
            let limit = stages.due().unwrap() - now;
            stages.forget(B, now);
            stages.leave(A, 2, now);
            limit.as_secs_f64()
        };
        let limits = [0.1, 1.0, 60.0].map(|s| stay(&mut stages, s));
        assert_eq!(limits, [2.0, 10.0, 30.0]);
        let later: Vec<f64> = (0..8).map(|_| stay(&mut stages, 0.5)).collect();
        assert!(later.is_sorted_by(|a, b| a >= b) && later[7] == 5.0, "{later:?}");
    }

    #[test]
    fn a_gang_is_set_aside_on_all_its_devices() {
        let (mut stages, base) = (StageTurns::default(), Instant::now());
        let both = [GpuIdx(0), GpuIdx(1)];
        stages.enter(A, 0, &both, base);
        stages.enter(B, 0, &[GpuIdx(1)], base);
        assert_eq!(stages.admit(base + LONGEST_STAY), [(B, 0)]);
        assert_eq!(stages.enter(JobIdx(2), 0, &GPU, base + LONGEST_STAY), [(JobIdx(2), 0)]);
    }
}
