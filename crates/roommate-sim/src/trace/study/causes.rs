//! To what a wait is charged: to the team's quota (*fair share*) while what the team uses and the job
//! asks for together exceed it, otherwise to *fragmentation*. Never to both, never to neither.

use super::Quotas;
use crate::trace::TraceJob;
use std::collections::BTreeMap;

/// A job that waits longer than this counts as delayed. The study gives no limit of its own; a start
/// alone takes half a minute in its log.
pub(super) const DELAYED_S: f64 = 60.0;

/// Seconds of each job's wait that are charged to fair share: as the trace says, else as the quotas say.
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

/// From submission to first start.
fn wait_us(job: &TraceJob) -> (u64, u64) {
    let wait_us = (job.queue_s.unwrap_or(0.0) * 1e6).round() as u64;
    (job.submit_us, job.submit_us + wait_us)
}

/// GPUs that a team uses over time, as if each job ran from its first start without a break.
struct Usage {
    /// Time and what is used from then on, ascending.
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

    /// How long more than `limit` was used, up to any time: a walk here saves one for each wait.
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

/// Time, how long the limit was exceeded before it, and whether it is from then on.
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

    /// Picture P1 of the study's specification: c waits 1..6 although a GPU is idle on every node.
    #[test]
    fn a_wait_over_quota_is_fair_share_whether_or_not_gpus_are_free() {
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
    fn a_wait_is_split_at_the_instant_when_the_quota_is_free() {
        // Up to 10 the team uses 3 of 4; the two-GPU job starts only at 25.
        let jobs = [job("x", 0, 3, 0.0, 10.0), job("x", 4, 2, 21.0, 1.0), job("z", 4, 2, 9.0, 1.0)];
        let quotas = Quotas::from([("x".into(), 4)]);
        assert_eq!(fair_share(&jobs, &quotas), [Some(0.0), Some(6.0), None]);
        // Wider than the quota: it only ever runs on what others leave.
        let narrow = Quotas::from([("x".into(), 1)]);
        assert_eq!(fair_share(&jobs, &narrow)[1], Some(21.0));
    }

    #[test]
    fn what_the_trace_says_has_the_last_word() {
        let mut jobs = [job("x", 0, 1, 8.0, 1.0)];
        jobs[0].observed =
            crate::trace::Observed { fair_share_s: Some(3.0), ..crate::trace::Observed::default() }
                .boxed();
        assert_eq!(fair_share(&jobs, &Quotas::from([("x".into(), 4)])), [Some(3.0)]);
    }
}
