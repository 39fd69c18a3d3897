//! Queues of similar jobs that earn credit by waiting, so that no kind of job starves. Jobs are
//! clustered by k-means; inside a queue the smallest rank goes first.

use crate::idx::JobIdx;
use crate::policy::horus::kmeans;
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};

/// Features by which jobs are clustered: GPUs, mean and highest utilisation, memory, in any unit.
pub(crate) type Point = [f64; 4];

/// Weights of the features. GPUs and memory stand for two features each of the published clustering
/// (tasks and total GPUs, mean and highest memory) that are equal in a gang of equal tasks.
const FEATURE_WEIGHTS: Point = [2.0, 1.0, 1.0, 2.0];

/// The order inside a queue: rank (mean utilisation), submission, index.
pub(crate) type Key = (u32, Time, JobIdx);

/// A waiting job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    /// Its position in the queue.
    pub(crate) key: Key,
    /// When it started to wait.
    pub(crate) since: Time,
    /// Its features.
    pub(crate) point: Point,
}

#[derive(Debug, Default)]
struct CreditQueue {
    by_rank: BTreeSet<Key>,
    /// When each job started to wait, ascending.
    by_age: Vec<(Time, JobIdx)>,
}

impl CreditQueue {
    /// Median waiting time in seconds (at least 1) × number of jobs.
    fn credit(&self, now: Time) -> f64 {
        let n = self.by_age.len();
        if n == 0 {
            return 0.0;
        }
        let waited = |i: usize| (now - self.by_age[i].0).secs();
        let median = f64::midpoint(waited((n - 1) / 2), waited(n / 2));
        n as f64 * if median < 1.0 { 1.0 } else { median }
    }
}

/// All queues, lowest mean utilisation first.
#[derive(Debug)]
pub(crate) struct CreditQueues {
    queues: Vec<CreditQueue>,
    jobs: BTreeMap<JobIdx, (usize, Waiting)>,
    centres: Vec<Point>,
    scale: Point,
    /// Jobs that arrived since the last clustering.
    arrived: usize,
}

impl CreditQueues {
    /// `count` empty queues.
    pub(crate) fn new(count: usize) -> Self {
        let queues = (0..count).map(|_| CreditQueue::default()).collect();
        let (jobs, centres) = (BTreeMap::new(), Vec::new());
        Self { queues, jobs, centres, scale: [1.0; 4], arrived: 0 }
    }

    /// Number of queues.
    pub(crate) fn count(&self) -> usize {
        self.queues.len()
    }

    /// Adds a job to the queue of similar jobs, or moves it there.
    pub(crate) fn add(&mut self, job: Waiting) {
        self.remove(job.key.2);
        self.insert(job);
        self.arrived += 1;
    }

    /// Removes a job, if it waits.
    pub(crate) fn remove(&mut self, job: JobIdx) {
        let Some((queue, Waiting { key, since, .. })) = self.jobs.remove(&job) else { return };
        let queue = &mut self.queues[queue];
        queue.by_rank.remove(&key);
        let at = queue.by_age.binary_search(&(since, job));
        queue.by_age.remove(at.expect("every waiting job is also in `by_age`"));
    }

    /// Clusters the waiting jobs anew when a fifth of them arrived since the last clustering.
    pub(crate) fn regroup(&mut self) {
        if self.queues.len() == 1 || self.arrived == 0 || self.arrived * 5 < self.jobs.len() {
            return;
        }
        self.arrived = 0;
        let mut jobs: Vec<Waiting> = self.jobs.values().map(|(_, w)| *w).collect();
        jobs.sort_by_key(|w| w.key);
        let mut points: Vec<Point> = jobs.iter().map(|w| w.point).collect();
        self.scale = kmeans::scale(&points, &FEATURE_WEIGHTS);
        points.iter_mut().for_each(|p| *p = kmeans::scaled(p, &self.scale));
        self.centres = kmeans::centres(&points, self.queues.len());
        // Queues of lower utilisation come first and win ties.
        self.centres.sort_by(|a, b| a[1].total_cmp(&b[1]));
        self.queues.iter_mut().for_each(|queue| *queue = CreditQueue::default());
        jobs.into_iter().for_each(|job| self.insert(job));
    }

    /// The non-empty queue with the most credit among those that `open` accepts; the first of
    /// equals.
    pub(crate) fn most_credit(&self, now: Time, open: impl Fn(usize) -> bool) -> Option<usize> {
        let queues =
            (0..self.queues.len()).filter(|i| open(*i) && !self.queues[*i].by_age.is_empty());
        queues
            .map(|i| (self.queues[i].credit(now), i))
            .reduce(|best, queue| if queue.0 > best.0 { queue } else { best })
            .map(|(_, i)| i)
    }

    /// The first job of a queue behind this position.
    pub(crate) fn next(&self, queue: usize, after: Option<Key>) -> Option<Key> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        self.queues[queue].by_rank.range((from, Unbounded)).next().copied()
    }

    fn insert(&mut self, job: Waiting) {
        let Waiting { key, since, point } = job;
        let queue = kmeans::nearest(&self.centres, &kmeans::scaled(&point, &self.scale));
        self.jobs.insert(key.2, (queue, job));
        let queue = &mut self.queues[queue];
        queue.by_rank.insert(key);
        let at = queue.by_age.partition_point(|a| *a < (since, key.2));
        queue.by_age.insert(at, (since, key.2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(idx: u32, rank: u32, since: f64) -> Waiting {
        let since = Time::from_secs(since);
        let point = [1.0, f64::from(rank), f64::from(rank), 0.0];
        Waiting { key: (rank, since, JobIdx(idx)), since, point }
    }

    fn first(queues: &CreditQueues, now: f64) -> Option<u32> {
        let queue = queues.most_credit(Time::from_secs(now), |_| true)?;
        queues.next(queue, None).map(|k| k.2.0)
    }

    #[test]
    fn the_most_credit_wins_and_low_utilisation_wins_ties() {
        let mut queues = CreditQueues::new(3);
        queues.add(job(0, 95, 0.0));
        queues.add(job(1, 20, 0.0));
        queues.regroup();
        assert_eq!(first(&queues, 0.0), Some(1), "equal credit: the queue of lower utilisation");
        queues.remove(JobIdx(1));
        queues.add(job(2, 20, 1.0));
        queues.regroup();
        assert_eq!(first(&queues, 1.0), Some(2), "1 s × 1 against 1 × 1");
        queues.remove(JobIdx(2));
        queues.add(job(3, 20, 2.0));
        queues.regroup();
        assert_eq!(first(&queues, 2.0), Some(0), "2 s × 1 against 1 × 1");
    }

    #[test]
    fn next_walks_through_a_queue_in_order() {
        let mut queues = CreditQueues::new(1);
        for (i, rank) in [30, 10, 20, 10].into_iter().enumerate() {
            queues.add(job(i as u32, rank, 0.0));
        }
        queues.remove(JobIdx(2));
        queues.remove(JobIdx(9));
        let mut order = Vec::new();
        let mut at = None;
        while let Some(key) = queues.next(0, at) {
            order.push(key.2.0);
            at = Some(key);
        }
        assert_eq!(order, [1, 3, 0]);
        assert_eq!(queues.most_credit(Time::ZERO, |_| false), None);
    }

    #[test]
    fn under_saturation_every_queue_is_served() {
        // Each second a job of low utilisation arrives and one job is served: those of high
        // utilisation are served too. (A queue that grew without bound would always have the most
        // credit, as published.)
        let mut queues = CreditQueues::new(2);
        (0..5).for_each(|i| queues.add(job(i, 90, 0.0)));
        let mut served = [0, 0];
        for second in 0..60u32 {
            queues.add(job(10 + second, 10 + second % 3, f64::from(second)));
            queues.regroup();
            let next = first(&queues, f64::from(second)).unwrap();
            served[usize::from(next < 5)] += 1;
            queues.remove(JobIdx(next));
        }
        assert_eq!(served[1], 5, "{served:?}");
    }
}
