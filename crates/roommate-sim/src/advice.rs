//! What other policies would have made of a cluster's own past, and what may be concluded from it.
//!
//! A history does not tell what kind of work its jobs were, how such work disturbs roommates, and
//! what a restart costs. Each [`World`] assumes an answer; every policy is tried in the same worlds
//! and compared with today's world by world. Seeds are draws, so over them there is a confidence
//! interval (Student's t, 95 %). Truths are alternatives and no draws, so over them the interval is
//! from the lowest end to the highest: it holds whichever truth is right.

mod words;

pub use words::{hours, percent};

use crate::trace::TraceJob;
use roommate_core::journal::metrics::Metrics;
use roommate_core::math::rng::Rng;
use roommate_core::math::stat;
use serde::Serialize;
use std::ops::Range;

/// Truths that are assumed unless others are named: measured on real GPUs; from the total demand;
/// and the least that sharing can bring.
pub const TRUTHS: [&str; 3] = ["measured", "utilization", "saturated"];

/// Policies that are tried unless others are named: none has to know how long jobs take.
/// `roommate` is the default of a machine; the others are the most cited ones without sharing, with
/// time slices and with sharing, and sharing without a choice of roommates.
pub const SHORTLIST: [&str; 5] = ["roommate", "tiresias", "gandiva", "muri-l", "mps"];

/// The usual baseline, similar to the defaults of Slurm and Kubernetes.
pub const TODAY: &str = "fifo-backfill";

/// Relative scatter of true speeds around the truth.
pub const SCATTER: f64 = 0.1;

/// Least and most seconds without progress when a job restarts.
const RESTART_S: (f64, f64) = (15.0, 240.0);

/// Purposes of random numbers.
const OF_RESTARTS: u64 = 0x7265_7374;
const OF_WINDOWS: u64 = 0x7769_6e64;

/// Assumptions about what a history does not tell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct World {
    /// Decides the kinds of work and how speeds scatter.
    pub seed: u64,
    /// How roommates disturb each other.
    pub truth: String,
    /// Seconds without progress when a job restarts.
    pub restart_s: f64,
    /// The part of the history that is simulated, by order of submission.
    pub jobs: Range<usize>,
}

/// The worlds of these seeds and truths for a history of so many jobs, of which at most `window` in
/// a row are simulated. All truths of a seed have the same jobs, kinds of work and restart costs.
pub fn worlds(
    seeds: Range<u64>,
    truths: &[String],
    jobs: usize,
    window: usize,
    restart_s: Option<f64>,
) -> Vec<World> {
    let one = |seed: u64| {
        let n = window.min(jobs);
        let first = Rng::stream(seed, OF_WINDOWS).below((jobs - n) as u64 + 1) as usize;
        let (least, most) = RESTART_S;
        let drawn = least * (most / least).powf(Rng::stream(seed, OF_RESTARTS).unit());
        let restart_s = restart_s.unwrap_or_else(|| drawn.round());
        let world = move |truth: &String| World {
            seed,
            truth: truth.clone(),
            restart_s,
            jobs: first..first + n,
        };
        truths.iter().map(world).collect::<Vec<_>>()
    };
    seeds.flat_map(one).collect()
}

/// The results of a policy, by world.
#[derive(Clone, Debug)]
pub struct Tried {
    /// Its name.
    pub policy: String,
    /// Whether it has to know how long jobs take.
    pub knows_durations: bool,
    /// What it made of each world.
    pub runs: Vec<Metrics>,
}

/// A mean and the interval in which it lies whichever truth is right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Mean over all worlds.
    pub mean: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// Whether 0 is inside of it: no difference that these seeds can show.
    pub fn has_zero(&self) -> bool {
        self.low <= 0.0 && self.high >= 0.0
    }
}

/// What can be said of a policy beside today's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is what is compared with.
    Today,
    /// Jobs finish sooner under every truth.
    Sooner,
    /// Jobs finish sooner under some truths, and under none later.
    SoonerOrEqual,
    /// No difference that these seeds can show, under no truth.
    NoDifference,
    /// Jobs finish sooner under some truths, and later under others.
    Depends,
    /// Jobs finish later under some truths, and under none sooner.
    Later,
    /// It does not finish all jobs, so that its times do not compare.
    Unfinished,
}

/// A policy beside today's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Standing {
    /// Its name.
    pub policy: String,
    /// Whether it has to know how long jobs take.
    pub knows_durations: bool,
    /// What can be said of it.
    pub verdict: Verdict,
    /// Mean completion time, over all worlds.
    pub mean_jct_s: f64,
    /// 99th percentile of completion times, mean over all worlds.
    pub p99_jct_s: f64,
    /// Mean time without GPUs between submission and completion.
    pub mean_wait_s: f64,
    /// Share of the GPU time of the cluster that jobs held.
    pub gpu_held: f64,
    /// Jobs of all worlds that did not finish.
    pub unfinished: u64,
    /// GPU-hours held less than today.
    pub saved_gpu_hours: f64,
    /// Lower end of the interval of `saved_gpu_hours`.
    pub low: f64,
    /// Upper end of the interval of `saved_gpu_hours`.
    pub high: f64,
    /// Mean completion time: how much shorter than today's, as a share of it.
    pub sooner: Interval,
    /// The same of the 99th percentile.
    pub p99_sooner: Interval,
    /// The same under each truth alone.
    pub by_truth: Vec<UnderTruth>,
}

/// Savings under one truth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnderTruth {
    /// Its name.
    pub truth: String,
    /// How much shorter the mean completion time is than today's, as a share of it.
    pub sooner: Interval,
    /// GPU-hours held less than today.
    pub saved_gpu_hours: Interval,
}

/// The comparison of all policies, and what follows from it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Today's policy, the first of the list, and the others, the soonest first.
    pub policies: Vec<Standing>,
    /// Mean completion time below which no policy can be, mean over the worlds.
    pub bound_s: Option<f64>,
    /// Mean wait in the history itself, where it tells.
    pub recorded_wait_s: Option<f64>,
    /// What follows, in sentences.
    pub advice: Vec<String>,
}

/// Compares policies that were tried in the same worlds; the first is today's.
pub fn advise(
    worlds: &[World],
    tried: &[Tried],
    gpus: u32,
    bound_s: Option<f64>,
    recorded_wait_s: Option<f64>,
) -> Advice {
    let Some(today) = tried.first() else {
        unreachable!("today's policy is always tried");
    };
    let lab = Comparison { worlds, today, gpus };
    let mut policies: Vec<Standing> = tried.iter().map(|one| lab.standing(one)).collect();
    policies[1..].sort_by(|a, b| b.sooner.mean.total_cmp(&a.sooner.mean));
    let equals = |a: &Standing, b: &Standing| {
        let found = |name: &str| tried.iter().find(|t| t.policy == name);
        let pair = found(&a.policy).zip(found(&b.policy));
        pair.is_some_and(|(a, b)| {
            lab.by_truth(|world| share(a, b, jct_s, world)).iter().all(|(_, i)| i.has_zero())
        })
    };
    let advice = words::advice(&policies, &equals, bound_s, recorded_wait_s);
    Advice { policies, bound_s, recorded_wait_s, advice }
}

/// Mean wait of the jobs of a history, where most of them say it.
pub fn recorded_wait_s(jobs: &[TraceJob]) -> Option<f64> {
    let waits: Vec<f64> = jobs.iter().filter_map(|job| job.queue_s).collect();
    if 2 * waits.len() > jobs.len() { stat::mean(&waits) } else { None }
}

struct Comparison<'a> {
    worlds: &'a [World],
    today: &'a Tried,
    gpus: u32,
}

fn jct_s(metrics: &Metrics) -> f64 {
    metrics.avg_jct_s.unwrap_or(0.0)
}

fn p99_s(metrics: &Metrics) -> f64 {
    metrics.p99_jct_s.unwrap_or(0.0)
}

impl Comparison<'_> {
    fn standing(&self, tried: &Tried) -> Standing {
        let mean = |of: &dyn Fn(&Metrics) -> f64| {
            stat::mean(&tried.runs.iter().map(of).collect::<Vec<_>>()).unwrap_or(0.0)
        };
        let held =
            |m: &Metrics| m.gpu_util.unwrap_or(0.0) * m.makespan_s / 3_600.0 * f64::from(self.gpus);
        let saved = |world: usize| held(&self.today.runs[world]) - held(&tried.runs[world]);
        let shares = self.by_truth(|world| share(tried, self.today, jct_s, world));
        let by_truth: Vec<UnderTruth> = shares
            .into_iter()
            .zip(self.by_truth(saved))
            .map(|((truth, sooner), (_, saved_gpu_hours))| UnderTruth {
                truth,
                sooner,
                saved_gpu_hours,
            })
            .collect();
        let saved = self.interval(saved);
        let unfinished: u64 = tried.runs.iter().map(|m| m.jobs - m.finished).sum();
        let sooner = self.sooner(tried, self.today, jct_s);
        Standing {
            policy: tried.policy.clone(),
            knows_durations: tried.knows_durations,
            verdict: if tried.policy == self.today.policy {
                Verdict::Today
            } else if unfinished > 0 {
                Verdict::Unfinished
            } else {
                verdict(&by_truth)
            },
            mean_jct_s: mean(&jct_s),
            p99_jct_s: mean(&p99_s),
            mean_wait_s: mean(&|m| m.avg_queue_s.unwrap_or(0.0)),
            gpu_held: mean(&|m| m.gpu_util.unwrap_or(0.0)),
            unfinished,
            saved_gpu_hours: saved.mean,
            low: saved.low,
            high: saved.high,
            sooner,
            p99_sooner: self.sooner(tried, self.today, p99_s),
            by_truth,
        }
    }

    /// How much shorter a time is with `one` than with `other`, as a share of the latter.
    fn sooner(&self, one: &Tried, other: &Tried, of: fn(&Metrics) -> f64) -> Interval {
        self.interval(|world| share(one, other, of, world))
    }

    /// The mean over all worlds, and the interval from the lowest to the highest end of all truths.
    fn interval(&self, of: impl Fn(usize) -> f64) -> Interval {
        let truths = self.by_truth(of);
        let intervals = || truths.iter().map(|(_, interval)| interval);
        Interval {
            mean: stat::mean(&intervals().map(|i| i.mean).collect::<Vec<_>>()).unwrap_or(0.0),
            low: intervals().map(|i| i.low).fold(f64::INFINITY, f64::min),
            high: intervals().map(|i| i.high).fold(f64::NEG_INFINITY, f64::max),
        }
    }

    /// The confidence interval over seeds of each truth.
    fn by_truth(&self, of: impl Fn(usize) -> f64) -> Vec<(String, Interval)> {
        let mut truths: Vec<(String, Vec<f64>)> = Vec::new();
        for (i, world) in self.worlds.iter().enumerate() {
            match truths.iter_mut().find(|(truth, _)| *truth == world.truth) {
                Some((_, values)) => values.push(of(i)),
                None => truths.push((world.truth.clone(), vec![of(i)])),
            }
        }
        // What is left of a difference of equal numbers is no difference.
        let clean = |v: f64| if v.abs() < 1e-9 { 0.0 } else { v };
        let interval = |values: &[f64]| {
            let (mean, half) = stat::mean_interval(values).unwrap_or((0.0, None));
            let half = half.unwrap_or(0.0);
            Interval { mean: clean(mean), low: clean(mean - half), high: clean(mean + half) }
        };
        truths.into_iter().map(|(truth, values)| (truth, interval(&values))).collect()
    }
}

/// What can be said of a policy from its savings under each truth.
fn verdict(by_truth: &[UnderTruth]) -> Verdict {
    let sooner = by_truth.iter().filter(|one| one.sooner.low > 0.0).count();
    let later = by_truth.iter().filter(|one| one.sooner.high < 0.0).count();
    match (sooner, later) {
        (0, 0) => Verdict::NoDifference,
        (_, 0) if sooner == by_truth.len() => Verdict::Sooner,
        (_, 0) => Verdict::SoonerOrEqual,
        (0, _) => Verdict::Later,
        _ => Verdict::Depends,
    }
}

fn share(one: &Tried, other: &Tried, of: fn(&Metrics) -> f64, world: usize) -> f64 {
    let (one, other) = (of(&one.runs[world]), of(&other.runs[world]));
    if other > 0.0 { 1.0 - one / other } else { 0.0 }
}

#[cfg(test)]
mod tests;
