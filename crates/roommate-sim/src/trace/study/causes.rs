//! Attribution of queueing delays: to the team's quota (*fair share*) while the team's usage plus
//! the job's request exceeds it, otherwise to *fragmentation*. Every delay has exactly one cause at
//! a time.

use super::Quotas;
use crate::trace::TraceJob;
use std::collections::BTreeMap;

/// A job that queues longer than this, in seconds, counts as delayed. The study gives no limit; a
/// start alone takes half a minute in its log.
pub(super) const DELAYED_S: f64 = 60.0;

/// Seconds of each job's queueing attributed to fair share: as recorded in the trace, else computed
/// from the quotas.
pub(super) fn fair_share(jobs: &[TraceJob], quotas: &Quotas) -> Vec<Option<f64>> {
    let mut fair: Vec<Option<f64>> = jobs.iter().map(|job| job.observed().fair_share_s).collect();
    let mut teams: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, job) in jobs.iter().enumerate() {
        let quota_known = job.team.as_ref().filter(|team| quotas.contains_key(*team));
        if let Some(team) = quota_known.filter(|_| job.queue_s.is_some()) {
            teams.entry(team).or_default().push(i);
        }
    }
    for (team, members) in teams {
        let used = Usage::new(members.iter().map(|&i| &jobs[i]));
        let mut sizes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        members.iter().for_each(|&i| sizes.entry(jobs[i].gpus).or_default().push(i));
        for (gpus, members) in sizes {
            let over = used.over(i64::from(quotas[team]) - i64::from(gpus));
            for i in members.into_iter().filter(|&i| jobs[i].observed().fair_share_s.is_none()) {
                let (from, to) = wait_us(&jobs[i]);
                fair[i] = Some((over.until(to) - over.until(from)) as f64 / 1e6);
            }
        }
    }
    fair
}

/// Submission and first start, in µs.
fn wait_us(job: &TraceJob) -> (u64, u64) {
    let wait_us = (job.queue_s.unwrap_or(0.0) * 1e6).round() as u64;
    (job.submit_us, job.submit_us + wait_us)
}

/// GPUs used by a team over time, assuming that each job runs from its first start without
/// interruption.
struct Usage {
    /// Time and GPUs used from then on, ascending.
    steps: Vec<(u64, i64)>,
}

impl Usage {
    fn new<'a>(jobs: impl Iterator<Item = &'a TraceJob>) -> Self {
        let mut steps: Vec<(u64, i64)> = Vec::new();
        for job in jobs {
            let start = wait_us(job).1;
            let end = start + (job.duration_s * 1e6).round() as u64;
            steps.extend([(start, i64::from(job.gpus)), (end, -i64::from(job.gpus))]);
        }
        steps.sort_unstable();
        let mut used = 0;
        for step in &mut steps {
            used += step.1;
            step.1 = used;
        }
        Self { steps }
    }

    /// For every time, how long more than `limit` GPUs were used before it; computed once for all
    /// delays.
    fn over(&self, limit: i64) -> Over {
        let (mut total, mut before) = (0, (0, 0));
        let mut steps = vec![(0, 0, 0 > limit)];
        for &(at, used) in &self.steps {
            total += if before.1 > limit { at - before.0 } else { 0 };
            steps.push((at, total, used > limit));
            before = (at, used);
        }
        Over { steps }
    }
}

/// Steps of: time in µs, µs over the limit before it, and whether the limit is exceeded from then
/// on.
struct Over {
    steps: Vec<(u64, u64, bool)>,
}

impl Over {
    fn until(&self, at: u64) -> u64 {
        let (from, total, over) = self.steps[self.steps.partition_point(|s| s.0 <= at) - 1];
        total + if over { at - from } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(team: &str, submit_s: u64, gpus: u32, queue_s: f64, duration_s: f64) -> TraceJob {
        let mut job = TraceJob::new(String::new(), submit_s * 1_000_000, gpus, duration_s);
        (job.team, job.queue_s) = (Some(team.into()), Some(queue_s));
        job
    }

    /// Picture P1 of the study's specification: job c queues from 1 to 6 although every node has an
    /// idle GPU.
    #[test]
    fn a_delay_over_quota_is_fair_share_even_with_idle_gpus() {
        let jobs = [
            job("x", 0, 1, 0.0, 6.0),
            job("y", 0, 1, 0.0, 4.0),
            job("x", 1, 2, 5.0, 2.0),
            job("y", 1, 1, 0.0, 3.0),
        ];
        let quotas = Quotas::from([("x".into(), 2), ("y".into(), 2)]);
        assert_eq!(fair_share(&jobs, &quotas), [Some(0.0), Some(0.0), Some(5.0), Some(0.0)]);
    }

    #[test]
    fn a_delay_is_split_when_the_quota_becomes_free() {
        // Up to 10 the team uses 3 of 4 GPUs; the two-GPU job starts only at 25.
        let jobs = [job("x", 0, 3, 0.0, 10.0), job("x", 4, 2, 21.0, 1.0), job("z", 4, 2, 9.0, 1.0)];
        let quotas = Quotas::from([("x".into(), 4)]);
        assert_eq!(fair_share(&jobs, &quotas), [Some(0.0), Some(6.0), None]);
        // The job is larger than the quota: it can only run on GPUs that other teams leave idle.
        let narrow = Quotas::from([("x".into(), 1)]);
        assert_eq!(fair_share(&jobs, &narrow)[1], Some(21.0));
    }

    #[test]
    fn the_recorded_attribution_takes_precedence() {
        let mut jobs = [job("x", 0, 1, 8.0, 1.0)];
        jobs[0].observed =
            crate::trace::Observed { fair_share_s: Some(3.0), ..crate::trace::Observed::default() }
                .boxed();
        assert_eq!(fair_share(&jobs, &Quotas::from([("x".into(), 4)])), [Some(3.0)]);
    }
}
