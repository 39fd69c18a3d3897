//! Synthetic traces: the mixes of published clusters at any load, size and burstiness.
//!
//! Only statistics of those clusters are used, none of their rows. The jobs do not depend on the
//! arrival process: sizes, durations and models have random streams of their own.

pub use super::mix::Mix;

use super::mix::Choices;
use super::{TraceClass, TraceJob, named};
use roommate_core::math::rng::Rng;

/// Arrival process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// A Poisson process: independent arrivals at a constant rate.
    #[default]
    Poisson,
    /// A Markov-modulated Poisson process with two states: bursts of about 50 jobs at ten times the
    /// mean rate for 8 % of the time, and calm phases at about a fifth of it for the rest. The
    /// coefficient of variation of the gaps is about 3.
    Bursty,
    /// A Poisson process whose rate varies by ±80 % over a day, with its peak 15 hours after the
    /// start.
    Diurnal,
}

named!(Arrivals, "kind of arrivals", Poisson = "poisson", Bursty = "bursty", Diurnal = "diurnal");

/// A model that synthetic jobs train. All numbers are invented, of the order of the public profiles
/// of these models; policies that use stages or memory need them.
struct Model {
    name: &'static str,
    batch: u32,
    mem_mib: u32,
    /// Storage, CPU, GPU and network time of a step in seconds; the network time is for many GPUs.
    stages_s: [f64; 4],
}

const MODELS: [Model; 8] = [
    Model {
        name: "shufflenet_v2_x1_0",
        batch: 128,
        mem_mib: 4_200,
        stages_s: [0.32, 0.30, 0.06, 0.02],
    },
    Model { name: "vgg19", batch: 16, mem_mib: 7_800, stages_s: [0.05, 0.06, 0.09, 0.12] },
    Model { name: "vgg16", batch: 16, mem_mib: 7_200, stages_s: [0.05, 0.05, 0.07, 0.11] },
    Model { name: "resnet18", batch: 128, mem_mib: 5_600, stages_s: [0.35, 0.33, 0.11, 0.06] },
    Model { name: "bert", batch: 4, mem_mib: 11_500, stages_s: [0.001, 0.002, 0.17, 0.08] },
    Model { name: "gpt2", batch: 4, mem_mib: 14_800, stages_s: [0.001, 0.002, 0.40, 0.05] },
    Model { name: "a2c", batch: 64, mem_mib: 2_100, stages_s: [0.0, 0.45, 0.02, 0.001] },
    Model { name: "dqn", batch: 128, mem_mib: 1_900, stages_s: [0.0, 0.40, 0.01, 0.001] },
];

/// Parameters of a synthetic trace.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthOptions {
    /// Number of jobs.
    pub jobs: usize,
    /// Random seed; the same seed gives the same trace.
    pub seed: u64,
    /// Arrival process.
    pub arrivals: Arrivals,
    /// Offered load: GPU-seconds of work submitted per second and GPU of the cluster; at 1 the
    /// cluster is just busy.
    pub load: f64,
    /// GPUs of the cluster; no job asks for more.
    pub cluster_gpus: u32,
    /// Published mix that the jobs imitate.
    pub mix: Mix,
    /// Number of teams. The first submits the most jobs, each further one fewer, as in Philly,
    /// where one of 15 virtual clusters has half of the jobs.
    pub teams: u32,
    /// Share of best-effort jobs, 0 to 1.
    pub best_effort: f64,
    /// Share of elastic jobs, which can use two or four times the GPUs they ask for, 0 to 1.
    pub elastic: f64,
}

impl Default for SynthOptions {
    fn default() -> Self {
        Self {
            jobs: 1000,
            seed: 0,
            arrivals: Arrivals::Poisson,
            load: 0.8,
            cluster_gpus: 64,
            mix: Mix::Small,
            teams: 4,
            best_effort: 0.0,
            elastic: 0.0,
        }
    }
}

/// Options outside their range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("cannot generate a trace: {what} must be {expected}, not {found}")]
pub struct SynthError {
    what: &'static str,
    expected: &'static str,
    found: f64,
}

impl SynthOptions {
    /// Checks the ranges of the options.
    pub fn check(&self) -> Result<(), SynthError> {
        let rules = [
            (
                "the load",
                "above 0 and at most 1000",
                self.load,
                self.load > 0.0 && self.load <= 1e3,
            ),
            ("the cluster", "at least 1 GPU", self.cluster_gpus.into(), self.cluster_gpus > 0),
            (
                "the number of teams",
                "1 to 10000",
                self.teams.into(),
                (1..=10_000).contains(&self.teams),
            ),
            (
                "the share of best effort",
                "0 to 1",
                self.best_effort,
                (0.0..=1.0).contains(&self.best_effort),
            ),
            (
                "the share of elastic jobs",
                "0 to 1",
                self.elastic,
                (0.0..=1.0).contains(&self.elastic),
            ),
        ];
        match rules.into_iter().find(|(.., holds)| !holds) {
            Some((what, expected, found, _)) => Err(SynthError { what, expected, found }),
            None => Ok(()),
        }
    }
}

/// Generates a trace, job by job in submission order. The options must pass their `check`.
pub fn synth(options: &SynthOptions) -> impl Iterator<Item = TraceJob> + use<> {
    if let Err(error) = options.check() {
        panic!("{error}");
    }
    let choices = Choices::new(options.mix, options.cluster_gpus);
    let rate = options.load * f64::from(options.cluster_gpus) / choices.mean_gpu_s;
    let mut arrivals = Process::new(options.arrivals, rate, Rng::stream(options.seed, 1));
    let mut shape = Rng::stream(options.seed, 2);
    let mut labels = Rng::stream(options.seed, 3);
    let teams = Teams::new(options.teams);
    let mut widths = Rng::stream(options.seed, 4);
    let SynthOptions { best_effort, elastic, cluster_gpus, .. } = *options;
    (0..options.jobs).map(move |number| {
        let (gpus, seconds) = choices.draw(&mut shape);
        let submit_us = (arrivals.next_s(number) * 1e6).round() as u64;
        let model = &MODELS[labels.below(MODELS.len() as u64) as usize];
        let mut job = trained(model, number, submit_us, gpus, seconds);
        let team = teams.draw(&mut labels);
        job.team = Some(format!("team{team}"));
        job.user = Some(format!("user{team}-{}", labels.below(8)));
        if labels.chance(best_effort) {
            job.class = TraceClass::BestEffort;
        }
        if widths.chance(elastic) {
            job.gpus_max = Some((gpus << (1 + widths.below(2))).min(cluster_gpus));
        }
        job
    })
}

/// A job that trains `model` for about the given time.
fn trained(model: &Model, number: usize, submit_us: u64, gpus: u32, seconds: f64) -> TraceJob {
    let mut stages = model.stages_s;
    // A ring of g GPUs moves (g - 1) / g of the gradients per link.
    stages[3] *= f64::from(gpus - 1) / f64::from(gpus);
    // Alone, the stages of a step run one after another.
    let step_s: f64 = stages.iter().sum();
    let steps = (seconds / step_s).round().max(1.0);
    let mut job = TraceJob::new(number.to_string(), submit_us, gpus, steps * step_s);
    job.steps = steps;
    job.step_s = step_s;
    job.stages_s = Some(stages);
    job.model = Some(model.name.to_owned());
    job.batch = model.batch;
    job.mem_mib = model.mem_mib;
    job
}

/// Draws teams: team `i` submits in proportion to 1 / (i + 1).
struct Teams {
    sums: Vec<f64>,
}

impl Teams {
    fn new(teams: u32) -> Self {
        let mut sum = 0.0;
        let weight = |i| {
            sum += 1.0 / f64::from(i + 1);
            sum
        };
        Self { sums: (0..teams).map(weight).collect() }
    }

    fn draw(&self, rng: &mut Rng) -> usize {
        let at = rng.unit() * self.sums[self.sums.len() - 1];
        self.sums.partition_point(|sum| *sum <= at).min(self.sums.len() - 1)
    }
}

/// Mean number of jobs in a burst.
const BURST_JOBS: f64 = 50.0;
/// Arrival rate in a burst, relative to the mean rate.
const BURST_RATE: f64 = 10.0;
/// Share of time spent in bursts.
const BURST_SHARE: f64 = 0.08;
const DAY_S: f64 = 86_400.0;
const DAY_SWING: f64 = 0.8;
const PEAK_S: f64 = 15.0 * 3600.0;

/// The state of an arrival process.
struct Process {
    kind: Arrivals,
    rate: f64,
    rng: Rng,
    now_s: f64,
    bursting: bool,
    /// Seconds left in the present state.
    left_s: f64,
}

impl Process {
    fn new(kind: Arrivals, rate: f64, mut rng: Rng) -> Self {
        let bursting = rng.chance(BURST_SHARE);
        let mut process = Self { kind, rate, rng, now_s: 0.0, bursting, left_s: 0.0 };
        process.left_s = process.dwell_s();
        process
    }

    /// Submission time in seconds of the job of this number; the first is submitted at 0.
    fn next_s(&mut self, number: usize) -> f64 {
        if number > 0 {
            match self.kind {
                Arrivals::Poisson => self.now_s += self.rng.exp(1.0 / self.rate),
                Arrivals::Bursty => self.bursty(),
                Arrivals::Diurnal => self.diurnal(),
            }
        }
        self.now_s
    }

    /// Duration of the present state in seconds. Calm phases are so long that bursts get their
    /// share of time.
    fn dwell_s(&mut self) -> f64 {
        let burst_s = BURST_JOBS / (BURST_RATE * self.rate);
        let mean =
            if self.bursting { burst_s } else { burst_s * (1.0 - BURST_SHARE) / BURST_SHARE };
        self.rng.exp(mean)
    }

    fn bursty(&mut self) {
        loop {
            let calm_rate = (1.0 - BURST_SHARE * BURST_RATE) / (1.0 - BURST_SHARE);
            let factor = if self.bursting { BURST_RATE } else { calm_rate };
            let gap = self.rng.exp(1.0 / (self.rate * factor));
            if gap < self.left_s {
                self.now_s += gap;
                self.left_s -= gap;
                return;
            }
            // Exponential gaps are memoryless, so the draw can be discarded when the state changes.
            self.now_s += self.left_s;
            self.bursting = !self.bursting;
            self.left_s = self.dwell_s();
        }
    }

    /// Thinning: candidates at the peak rate, kept in proportion to the rate at their time.
    fn diurnal(&mut self) {
        loop {
            self.now_s += self.rng.exp(1.0 / (self.rate * (1.0 + DAY_SWING)));
            let angle = (self.now_s - PEAK_S) / DAY_S * std::f64::consts::TAU;
            let wanted = (1.0 + DAY_SWING * angle.cos()) / (1.0 + DAY_SWING);
            if self.rng.chance(wanted) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Format, Trace, native, stats};
    use super::*;
    use roommate_core::math::hash::fnv1a;

    fn options(mix: Mix, arrivals: Arrivals, jobs: usize) -> SynthOptions {
        SynthOptions {
            jobs,
            seed: 1,
            arrivals,
            load: 0.7,
            cluster_gpus: 256,
            mix,
            ..SynthOptions::default()
        }
    }

    fn described(options: &SynthOptions) -> stats::Stats {
        let trace = Trace {
            jobs: synth(options).collect(),
            format: Format::Roommate,
            dropped: 0,
            first_dropped: Vec::new(),
            origin_s: None,
            remarks: crate::trace::Remarks::new(),
        };
        assert!(trace.jobs.is_sorted_by_key(|job| job.submit_us));
        stats::stats(&trace, Some(options.cluster_gpus))
    }

    #[test]
    fn offered_load_matches_the_option() {
        for mix in Mix::ALL {
            let stats = described(&options(*mix, Arrivals::Poisson, 200_000));
            let load = stats.offered_load.unwrap();
            assert!((load / 0.7 - 1.0).abs() < 0.05, "{mix}: {load}");
        }
        for arrivals in Arrivals::ALL {
            let stats = described(&options(Mix::Small, *arrivals, 200_000));
            let load = stats.offered_load.unwrap();
            assert!((load / 0.7 - 1.0).abs() < 0.1, "{arrivals}: {load}");
        }
    }

    #[test]
    fn arrivals_have_the_documented_burstiness() {
        let burstiness =
            |arrivals| described(&options(Mix::Small, arrivals, 200_000)).burstiness.unwrap();
        assert!((burstiness(Arrivals::Poisson) - 1.0).abs() < 0.02);
        assert!((2.5..3.5).contains(&burstiness(Arrivals::Bursty)));
        // At a load of 0.7 of a small cluster a day has thousands of jobs, enough to show its
        // shape.
        let hours = described(&options(Mix::Small, Arrivals::Diurnal, 200_000)).hours;
        let (night, day) = (hours[3] as f64, hours[15] as f64);
        assert!((7.0..11.0).contains(&(day / night)), "1.8 / 0.2 expected, found {}", day / night);
    }

    #[test]
    fn mixes_match_the_published_statistics() {
        let philly = described(&options(Mix::Philly, Arrivals::Poisson, 300_000));
        assert!((philly.mean_gpus - 1.30).abs() < 0.02, "{}", philly.mean_gpus);
        assert!((philly.duration_s.p50 / 1_144.0 - 1.0).abs() < 0.1, "{}", philly.duration_s.p50);
        let eight = &philly.classes[2].share;
        assert!((eight.of_gpu_time - 0.484).abs() < 0.05, "{}", eight.of_gpu_time);
        let helios = described(&options(Mix::Helios, Arrivals::Poisson, 300_000));
        assert!((helios.duration_s.mean / 9_088.0 - 1.0).abs() < 0.1, "{}", helios.duration_s.mean);
        assert!((helios.duration_s.p50 / 204.0 - 1.0).abs() < 0.1, "{}", helios.duration_s.p50);
        let pai = described(&options(Mix::Pai, Arrivals::Poisson, 300_000));
        assert!((pai.duration_s.mean / 5_029.0 - 1.0).abs() < 0.1, "{}", pai.duration_s.mean);
    }

    #[test]
    fn no_job_is_larger_than_the_cluster() {
        let small = SynthOptions { cluster_gpus: 3, ..options(Mix::Pai, Arrivals::Poisson, 2_000) };
        assert!(synth(&small).all(|job| job.gpus <= 3));
    }

    #[test]
    fn a_seed_never_changes_its_trace() {
        let hash = |options: &SynthOptions| {
            let jobs: Vec<TraceJob> = synth(options).collect();
            let mut text = Vec::new();
            native::write_csv(&mut text, &jobs).unwrap();
            fnv1a(&text)
        };
        let one = options(Mix::Philly, Arrivals::Bursty, 1_000);
        assert_eq!(hash(&one), hash(&one));
        assert_ne!(hash(&one), hash(&SynthOptions { seed: 2, ..one.clone() }));
        assert_eq!(format!("{:016x}", hash(&one)), "fce92fad17a86484");
    }

    #[test]
    fn arrivals_do_not_change_the_jobs() {
        let shapes = |arrivals| {
            let jobs = synth(&options(Mix::Helios, arrivals, 500));
            jobs.map(|job| (job.gpus, job.steps.to_bits(), job.model)).collect::<Vec<_>>()
        };
        assert_eq!(shapes(Arrivals::Poisson), shapes(Arrivals::Diurnal));
    }

    #[test]
    fn elastic_option_changes_no_other_field() {
        let plain = options(Mix::Philly, Arrivals::Poisson, 2_000);
        let some = SynthOptions { elastic: 0.3, ..plain.clone() };
        let elastic = synth(&some).filter(|j| j.gpus_max.is_some_and(|m| m > j.gpus)).count();
        assert!((500..700).contains(&elastic), "{elastic}");
        assert!(synth(&some).all(|j| j.gpus_max.is_none_or(|m| (j.gpus..=256).contains(&m))));
        let inelastic = synth(&some).map(|j| TraceJob { gpus_max: None, ..j });
        assert!(inelastic.eq(synth(&plain)));
    }

    #[test]
    fn invalid_options_are_named() {
        let wrong = SynthOptions { load: f64::NAN, ..SynthOptions::default() };
        let error = wrong.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot generate a trace: the load must be above 0 and at most 1000, not NaN"
        );
    }
}
