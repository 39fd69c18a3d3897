//! Waiting lines of similar jobs that earn credit by waiting, so that a kind of job which nobody serves
//! wins in the end. Jobs are grouped by k-means; inside a line the smallest rank goes first.

use crate::idx::JobIdx;
use crate::policy::horus::kmeans;
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};

/// What jobs are compared by: GPUs, mean and highest utilisation, memory, in any unit.
pub(crate) type Point = [f64; 4];

/// GPUs and memory stand for two features each of the published clustering (tasks and total GPUs, mean
/// and highest memory) that are the same in a gang of equal tasks.
const WEIGHTS: Point = [2.0, 1.0, 1.0, 2.0];

/// The order inside a line: rank, submission, index.
pub(crate) type Key = (u32, Time, JobIdx);

/// A waiting job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    /// Its place in line.
    pub(crate) key: Key,
    /// Since when it waits.
    pub(crate) since: Time,
    /// What it is like.
    pub(crate) point: Point,
}

#[derive(Debug, Default)]
struct Line {
    by_rank: BTreeSet<Key>,
    /// Since when they wait, ascending.
    by_age: Vec<(Time, JobIdx)>,
}

impl Line {
    /// Median waiting time × length; the length alone while the median is below a second.
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

/// All lines.
#[derive(Debug)]
pub(crate) struct Lines {
    all: Vec<Line>,
    jobs: BTreeMap<JobIdx, (usize, Waiting)>,
    centres: Vec<Point>,
    scale: Point,
    /// Jobs that came since the lines were last drawn.
    came: usize,
}

impl Lines {
    /// So many empty lines.
    pub(crate) fn new(count: usize) -> Self {
        let all = (0..count).map(|_| Line::default()).collect();
        let (jobs, centres) = (BTreeMap::new(), Vec::new());
        Self { all, jobs, centres, scale: [1.0; 4], came: 0 }
    }

    /// How many lines there are.
    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// Adds a job to the line of those like it, or moves it there.
    pub(crate) fn add(&mut self, job: Waiting) {
        self.remove(job.key.2);
        self.enter(job);
        self.came += 1;
    }

    /// Takes a job out, if it is there.
    pub(crate) fn remove(&mut self, job: JobIdx) {
        let Some((line, Waiting { key, since, .. })) = self.jobs.remove(&job) else { return };
        let line = &mut self.all[line];
        line.by_rank.remove(&key);
        let at = line.by_age.binary_search(&(since, job));
        line.by_age.remove(at.expect("who stands in line stands there by age too"));
    }

    /// Draws the lines anew when a fifth of those who wait have come since.
    pub(crate) fn regroup(&mut self) {
        if self.all.len() == 1 || self.came == 0 || self.came * 5 < self.jobs.len() {
            return;
        }
        self.came = 0;
        let mut jobs: Vec<Waiting> = self.jobs.values().map(|(_, w)| *w).collect();
        jobs.sort_by_key(|w| w.key);
        let mut points: Vec<Point> = jobs.iter().map(|w| w.point).collect();
        self.scale = kmeans::scale(&points, &WEIGHTS);
        points.iter_mut().for_each(|p| *p = kmeans::scaled(p, &self.scale));
        self.centres = kmeans::centres(&points, self.all.len());
        // Lighter lines come first and win ties.
        self.centres.sort_by(|a, b| a[1].total_cmp(&b[1]));
        self.all.iter_mut().for_each(|line| *line = Line::default());
        jobs.into_iter().for_each(|job| self.enter(job));
    }

    /// The line with most credit of those that are not empty and still open; the first of equals.
    pub(crate) fn richest(&self, now: Time, open: impl Fn(usize) -> bool) -> Option<usize> {
        let lines = (0..self.all.len()).filter(|i| open(*i) && !self.all[*i].by_age.is_empty());
        lines
            .map(|i| (self.all[i].credit(now), i))
            .reduce(|best, line| if line.0 > best.0 { line } else { best })
            .map(|(_, i)| i)
    }

    /// The first job of a line that stands behind this place.
    pub(crate) fn next(&self, line: usize, after: Option<Key>) -> Option<Key> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        self.all[line].by_rank.range((from, Unbounded)).next().copied()
    }

    fn enter(&mut self, job: Waiting) {
        let Waiting { key, since, point } = job;
        let line = kmeans::nearest(&self.centres, &kmeans::scaled(&point, &self.scale));
        self.jobs.insert(key.2, (line, job));
        let line = &mut self.all[line];
        line.by_rank.insert(key);
        let at = line.by_age.partition_point(|a| *a < (since, key.2));
        line.by_age.insert(at, (since, key.2));
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

    fn first(lines: &Lines, now: f64) -> Option<u32> {
        let line = lines.richest(Time::from_secs(now), |_| true)?;
        lines.next(line, None).map(|k| k.2.0)
    }

    #[test]
    fn who_waited_most_wins_and_light_lines_win_ties() {
        let mut lines = Lines::new(3);
        lines.add(job(0, 95, 0.0));
        lines.add(job(1, 20, 0.0));
        lines.regroup();
        assert_eq!(first(&lines, 0.0), Some(1), "one each: the lighter line");
        lines.remove(JobIdx(1));
        lines.add(job(2, 20, 1.0));
        lines.regroup();
        assert_eq!(first(&lines, 1.0), Some(2), "1 s × 1 against 1 × 1");
        lines.remove(JobIdx(2));
        lines.add(job(3, 20, 2.0));
        lines.regroup();
        assert_eq!(first(&lines, 2.0), Some(0), "2 s × 1 against 1 × 1");
    }

    #[test]
    fn a_walk_goes_through_a_line_in_order() {
        let mut lines = Lines::new(1);
        for (i, rank) in [30, 10, 20, 10].into_iter().enumerate() {
            lines.add(job(i as u32, rank, 0.0));
        }
        lines.remove(JobIdx(2));
        lines.remove(JobIdx(9));
        let mut order = Vec::new();
        let mut at = None;
        while let Some(key) = lines.next(0, at) {
            order.push(key.2.0);
            at = Some(key);
        }
        assert_eq!(order, [1, 3, 0]);
        assert_eq!(lines.richest(Time::ZERO, |_| false), None);
    }

    #[test]
    fn under_saturation_every_line_is_served() {
        // A light job comes each second and one job is served: the heavy ones still get their turn. (If
        // the light line grew without end, its length would win for ever, as published.)
        let mut lines = Lines::new(2);
        (0..5).for_each(|i| lines.add(job(i, 90, 0.0)));
        let mut served = [0, 0];
        for second in 0..60u32 {
            lines.add(job(10 + second, 10 + second % 3, f64::from(second)));
            lines.regroup();
            let next = first(&lines, f64::from(second)).unwrap();
            served[usize::from(next < 5)] += 1;
            lines.remove(JobIdx(next));
        }
        assert_eq!(served[1], 5, "{served:?}");
    }
}
