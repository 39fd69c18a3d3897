//! Statistics of a trace: sizes, durations, arrivals, load, final states. Rendering is in `render`.

pub(super) mod render;

use super::{Format, Remark, Status, Trace, TraceJob};
use serde::Serialize;
use std::collections::BTreeMap;

/// Statistics of a trace; its `Display` is a text of at most 100 columns. Sections without data are
/// empty and left out of the text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// The format it was read from.
    pub format: Format,
    /// Number of jobs.
    pub jobs: u64,
    /// Number of invalid rows that were dropped.
    pub dropped: u64,
    /// Number of jobs without GPUs, which are left out.
    pub cpu_jobs: u64,
    /// Seconds from the first submission to the last.
    pub span_s: f64,
    /// Work in GPU-hours.
    pub gpu_hours: f64,
    /// Mean number of GPUs of a job.
    pub mean_gpus: f64,
    /// Submitted GPU-seconds per second of the span and GPU of the cluster, if a cluster was given.
    pub offered_load: Option<f64>,
    /// The four size classes of the Philly study, without empty ones.
    pub classes: Vec<SizeClass>,
    /// The most frequent exact sizes, sorted by size.
    pub sizes: Vec<Share>,
    /// Number of further sizes.
    pub other_sizes: u64,
    /// Durations of all jobs, in seconds.
    pub duration_s: Summary,
    /// Seconds between submissions.
    pub gap_s: Option<Summary>,
    /// Coefficient of variation of those gaps: 1 for Poisson arrivals, more for bursts.
    pub burstiness: Option<f64>,
    /// Submissions by hour of the day; empty for a trace shorter than a day.
    pub hours: Vec<u64>,
    /// Whether the hours are those of a clock; else they count from the start of the trace.
    pub clock_hours: bool,
    /// Queueing time in the original cluster, in seconds.
    pub queue_s: Option<Summary>,
    /// Final states, where known.
    pub statuses: Vec<Share>,
    /// Mean number of attempts, over the jobs where it is known.
    pub mean_attempts: Option<f64>,
    /// The teams with the most jobs.
    pub teams: Vec<Share>,
    /// Number of teams.
    pub team_count: u64,
    /// The models with the most jobs.
    pub models: Vec<Share>,
    /// Number of models.
    pub model_count: u64,
    /// Number of jobs with a deadline.
    pub with_deadline: u64,
    /// Number of best-effort jobs.
    pub best_effort: u64,
}

/// A group of jobs and its share of all jobs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    /// The property that its jobs have in common.
    pub name: String,
    /// Number of jobs.
    pub jobs: u64,
    /// Share of all jobs, 0 to 1.
    pub of_jobs: f64,
    /// Share of the GPU time, 0 to 1.
    pub of_gpu_time: f64,
}

/// One of the Philly study's size classes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizeClass {
    /// The class and its share.
    #[serde(flatten)]
    pub share: Share,
    /// Durations, in seconds.
    pub duration_s: Summary,
    /// Queueing time in the original cluster, in seconds, where known.
    pub queue_s: Option<Summary>,
}

/// Mean and percentiles (nearest rank) of a set of values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The mean.
    pub mean: f64,
    /// 10th percentile.
    pub p10: f64,
    /// 25th percentile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// 75th percentile.
    pub p75: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// Summarises the values; `None` if there are none.
    pub(super) fn new(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let max = *values.last()?;
        let count = values.len() as f64;
        let at = |share: f64| values[((share * count).ceil() as usize).max(1) - 1];
        Some(Self {
            mean: values.iter().sum::<f64>() / count,
            p10: at(0.10),
            p25: at(0.25),
            p50: at(0.50),
            p75: at(0.75),
            p90: at(0.90),
            p95: at(0.95),
            p99: at(0.99),
            max,
        })
    }
}

/// Most sizes, teams or models that are listed.
const LISTED: usize = 10;

/// The size classes of the Philly study: name and largest size.
pub(super) const CLASSES: [(&str, u32); 4] = [("1", 1), ("2-4", 4), ("5-8", 8), (">8", u32::MAX)];

/// Computes the statistics of a trace; with the size of a cluster, also its offered load.
pub fn stats(trace: &Trace, cluster_gpus: Option<u32>) -> Stats {
    let jobs = &trace.jobs;
    let total = Total::new(jobs);
    let span_us = jobs.last().map_or(0, |j| j.submit_us) - jobs.first().map_or(0, |j| j.submit_us);
    let span_s = span_us as f64 / 1e6;
    let load = cluster_gpus.filter(|gpus| *gpus > 0 && span_us > 0);
    let by_size = total.by(jobs, |job| Some(job.gpus));
    let size_count = by_size.len();
    let mut sizes = top(by_size.clone());
    sizes.sort_by_key(|share| share.name.parse::<u32>().unwrap_or(0));
    let gap_s = Summary::new(gaps(jobs).collect());
    let attempts: Vec<u32> = jobs.iter().map(|j| j.attempts).filter(|n| *n > 0).collect();
    let teams = total.by(jobs, |job| job.team.as_deref());
    let models = total.by(jobs, |job| job.model.as_deref());
    Stats {
        format: trace.format,
        jobs: jobs.len() as u64,
        dropped: trace.dropped,
        cpu_jobs: trace.count(Remark::NoGpu),
        span_s,
        gpu_hours: total.gpu_s / 3600.0,
        mean_gpus: mean(jobs.iter().map(|j| f64::from(j.gpus))).unwrap_or(0.0),
        offered_load: load.map(|gpus| total.gpu_s / span_s / f64::from(gpus)),
        classes: classes(jobs, &total),
        other_sizes: (size_count - sizes.len()) as u64,
        sizes,
        duration_s: Summary::new(jobs.iter().map(|j| j.duration_s).collect())
            .unwrap_or_else(Summary::zero),
        burstiness: gap_s.as_ref().and_then(|gap| variation(jobs, gap.mean)),
        gap_s,
        hours: hours(trace, span_s),
        clock_hours: trace.origin_s.is_some(),
        queue_s: Summary::new(jobs.iter().filter_map(|j| j.queue_s).collect()),
        statuses: statuses(jobs, &total),
        mean_attempts: mean(attempts.iter().map(|n| f64::from(*n))),
        team_count: teams.len() as u64,
        teams: top(teams),
        model_count: models.len() as u64,
        models: top(models),
        with_deadline: count(jobs, |j| j.deadline_us.is_some()),
        best_effort: count(jobs, |j| j.class == super::TraceClass::BestEffort),
    }
}

impl Summary {
    fn zero() -> Self {
        let (p10, p25, p50, p75, p90, p95, p99) = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        Self { mean: 0.0, p10, p25, p50, p75, p90, p95, p99, max: 0.0 }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0u64);
    for value in values {
        sum += value;
        count += 1;
    }
    (count > 0).then(|| sum / count as f64)
}

fn count(jobs: &[TraceJob], has: impl Fn(&TraceJob) -> bool) -> u64 {
    jobs.iter().filter(|job| has(job)).count() as u64
}

pub(super) fn gpu_s(job: &TraceJob) -> f64 {
    job.duration_s * f64::from(job.gpus)
}

/// The totals that shares refer to.
struct Total {
    jobs: f64,
    gpu_s: f64,
}

impl Total {
    fn new(jobs: &[TraceJob]) -> Self {
        Self { jobs: jobs.len() as f64, gpu_s: jobs.iter().map(gpu_s).sum() }
    }

    fn share(&self, name: String, jobs: u64, gpu_s: f64) -> Share {
        // A trace of empty jobs has no GPU time.
        let of_gpu_time = if self.gpu_s > 0.0 { gpu_s / self.gpu_s } else { 0.0 };
        Share { name, jobs, of_jobs: jobs as f64 / self.jobs, of_gpu_time }
    }

    /// One share for each value of `key`, in the order of the keys.
    fn by<'a, K: Ord + ToString>(
        &self,
        jobs: &'a [TraceJob],
        key: impl Fn(&'a TraceJob) -> Option<K>,
    ) -> Vec<Share> {
        let mut groups: BTreeMap<K, (u64, f64)> = BTreeMap::new();
        for job in jobs {
            if let Some(key) = key(job) {
                let group = groups.entry(key).or_default();
                group.0 += 1;
                group.1 += gpu_s(job);
            }
        }
        groups.into_iter().map(|(k, (n, time))| self.share(k.to_string(), n, time)).collect()
    }
}

/// The shares with the most jobs.
fn top(mut shares: Vec<Share>) -> Vec<Share> {
    shares.sort_by_key(|share| std::cmp::Reverse(share.jobs));
    shares.truncate(LISTED);
    shares
}

fn classes(jobs: &[TraceJob], total: &Total) -> Vec<SizeClass> {
    let mut above = 0;
    let mut classes = Vec::new();
    for (name, largest) in CLASSES {
        let inside: Vec<&TraceJob> =
            jobs.iter().filter(|j| j.gpus > above && j.gpus <= largest).collect();
        above = largest;
        let durations = inside.iter().map(|j| j.duration_s).collect();
        if let Some(duration_s) = Summary::new(durations) {
            let time = inside.iter().map(|j| gpu_s(j)).sum();
            classes.push(SizeClass {
                share: total.share(name.to_owned(), inside.len() as u64, time),
                duration_s,
                queue_s: Summary::new(inside.iter().filter_map(|j| j.queue_s).collect()),
            });
        }
    }
    classes
}

fn gaps(jobs: &[TraceJob]) -> impl Iterator<Item = f64> {
    jobs.windows(2).map(|w| (w[1].submit_us - w[0].submit_us) as f64 / 1e6)
}

/// Coefficient of variation of the gaps; `None` where all jobs are submitted at once.
fn variation(jobs: &[TraceJob], mean_gap: f64) -> Option<f64> {
    let variance = mean(gaps(jobs).map(|gap| (gap - mean_gap).powi(2)))?;
    (mean_gap > 0.0).then(|| variance.sqrt() / mean_gap)
}

fn hours(trace: &Trace, span_s: f64) -> Vec<u64> {
    const HOUR_US: u64 = 3_600_000_000;
    // Less than a day shows when the trace was cut, not at which hours users submit.
    if span_s < 86_400.0 {
        return Vec::new();
    }
    let origin_us = trace.origin_s.unwrap_or(0) * 1_000_000;
    let mut hours = vec![0; 24];
    for job in &trace.jobs {
        hours[((origin_us + job.submit_us) / HOUR_US % 24) as usize] += 1;
    }
    hours
}

/// Shares of final states; jobs without one form a group of their own if any job has one.
fn statuses(jobs: &[TraceJob], total: &Total) -> Vec<Share> {
    if jobs.iter().all(|job| job.status.is_none()) {
        return Vec::new();
    }
    let known = |status: Option<Status>| status.map_or("unknown", Status::name);
    let mut shares = Vec::new();
    for status in Status::ALL.iter().copied().map(Some).chain([None]) {
        let inside = || jobs.iter().filter(|job| job.status == status);
        let jobs = inside().count() as u64;
        if jobs > 0 {
            shares.push(total.share(known(status).to_owned(), jobs, inside().map(gpu_s).sum()));
        }
    }
    shares
}

#[cfg(test)]
#[expect(clippy::needless_raw_string_hashes, reason = "expect-test writes its texts so")]
mod tests {
    use super::*;
    use expect_test::expect;

    fn trace(jobs: Vec<TraceJob>) -> Trace {
        let (format, first_dropped) = (Format::Philly, Vec::new());
        Trace {
            jobs,
            format,
            dropped: 2,
            first_dropped,
            origin_s: Some(7_200),
            remarks: crate::trace::Remarks::new(),
        }
    }

    /// Twelve jobs, two hours apart, of 1, 2, 4, 8 and 16 GPUs.
    fn sample() -> Trace {
        let job = |i: u32| TraceJob {
            team: Some(format!("t{}", i % 2)),
            status: (i != 5).then_some(Status::ALL[i as usize % 3]),
            queue_s: (i > 3).then_some(f64::from(i) * 10.0),
            attempts: i % 3,
            ..TraceJob::new(
                i.to_string(),
                u64::from(i) * 7_900_000_000,
                1 << (i % 5),
                100.0 * 3f64.powf(f64::from(i)),
            )
        };
        trace((0..12).map(job).collect())
    }

    #[test]
    fn the_text_is_aligned_and_narrow() {
        let text = stats(&sample(), Some(64)).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 100));
        expect![[r#"
            format                     philly
            jobs                           12
            rows dropped                    2
            submitted within            1.0 d
            GPU-hours                  22,021
            GPUs per job, mean           5.42
            offered load                14.25

            GPUs                                   jobs   of jobs  of GPU time
              1                                       3    25.0 %        7.5 %
              2-4                                     5    41.7 %       46.0 %
              5-8                                     2    16.7 %        6.6 %
              >8                                      2    16.7 %       39.9 %

            GPUs, exactly                          jobs   of jobs  of GPU time
              1                                       3    25.0 %        7.5 %
              2                                       3    25.0 %       44.9 %
              4                                       2    16.7 %        1.1 %
              8                                       2    16.7 %        6.6 %
              16                                      2    16.7 %       39.9 %

            duration                    mean     p10     p25     p50     p75     p90     p95     p99     max
              all                       26 d 5.0 min  15 min   6.8 h   7.6 d    68 d   205 d   205 d   205 d
              1 GPU                     23 d 1.7 min 1.7 min   6.8 h    68 d    68 d    68 d    68 d    68 d
              2-4 GPUs                  42 d 5.0 min  15 min    20 h   2.5 d   205 d   205 d   205 d   205 d
              5-8 GPUs                 3.8 d  45 min  45 min  45 min   7.6 d   7.6 d   7.6 d   7.6 d   7.6 d
              >8 GPUs                   11 d   2.2 h   2.2 h   2.2 h    23 d    23 d    23 d    23 d    23 d

            queueing                    mean     p10     p25     p50     p75     p90     p95     p99     max
              all                    1.2 min    40 s    50 s 1.2 min 1.5 min 1.8 min 1.8 min 1.8 min 1.8 min
              1 GPU                  1.2 min    50 s    50 s    50 s 1.7 min 1.7 min 1.7 min 1.7 min 1.7 min
              2-4 GPUs               1.3 min 1.0 min 1.0 min 1.2 min 1.8 min 1.8 min 1.8 min 1.8 min 1.8 min
              5-8 GPUs               1.3 min 1.3 min 1.3 min 1.3 min 1.3 min 1.3 min 1.3 min 1.3 min 1.3 min
              >8 GPUs                1.1 min    40 s    40 s    40 s 1.5 min 1.5 min 1.5 min 1.5 min 1.5 min

            arrivals                    mean     p10     p25     p50     p75     p90     p95     p99     max
              time between             2.2 h   2.2 h   2.2 h   2.2 h   2.2 h   2.2 h   2.2 h   2.2 h   2.2 h
              burstiness (CV)            0.0  (1 = independent arrivals)
              by hour of day         0 ▁▁█▁▅▁▅▁▅▁▅▁▅▁▁▅▁▅▁▅▁▅▁▅ 23  (0 to 2 jobs)

            outcome                                jobs   of jobs  of GPU time
              passed                                  4    33.3 %       39.9 %
              killed                                  4    33.3 %        8.7 %
              failed                                  3    25.0 %       51.3 %
              unknown                                 1     8.3 %       0.03 %
            attempts, mean               1.50

            team                                   jobs   of jobs  of GPU time
              t0                                      6    50.0 %       14.4 %
              t1                                      6    50.0 %       85.6 %
        "#]].assert_eq(&text);
    }

    #[test]
    fn sections_without_data_are_left_out() {
        let text = stats(&trace(vec![TraceJob::new("a".into(), 0, 1, 0.0)]), Some(8)).to_string();
        for absent in
            ["queueing", "outcome", "attempts", "team", "model", "arrivals", "load", "NaN"]
        {
            assert!(!text.contains(absent), "{absent} in\n{text}");
        }
        assert!(
            stats(&trace(Vec::new()), Some(8))
                .to_string()
                .contains("jobs                            0")
        );
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let summary = Summary::new((1..=100).rev().map(f64::from).collect()).unwrap();
        assert_eq!((summary.p10, summary.p50, summary.p99, summary.max), (10.0, 50.0, 99.0, 100.0));
        assert_eq!(summary.mean, 50.5);
        assert_eq!(Summary::new(vec![7.0]).unwrap().p10, 7.0);
        assert_eq!(Summary::new(Vec::new()), None);
    }

    #[test]
    fn shares_add_up() {
        let stats = stats(&sample(), None);
        let sum = |shares: &[Share]| {
            let time: f64 = shares.iter().map(|s| s.of_gpu_time).sum();
            (shares.iter().map(|s| s.jobs).sum::<u64>(), (time * 1e9).round())
        };
        for shares in [&stats.sizes, &stats.statuses, &stats.teams] {
            assert_eq!(sum(shares), (12, 1e9));
        }
        assert_eq!(stats.hours.iter().sum::<u64>(), 12);
        assert_eq!(stats.hours[2], 2, "the first job is submitted at 02:00, the last a day later");
        serde_json::to_string(&stats).unwrap();
    }
}
