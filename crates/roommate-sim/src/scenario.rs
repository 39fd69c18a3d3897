//! Scenarios: published experiments as data. A file lists the cluster, the tasks and services with
//! their shares, arrivals and sizes, and the policies with their published results; a seed
//! determines a workload. `docs/reference/scenarios.md` describes the file.

mod error;
mod sample;
pub mod score;
#[cfg(test)]
mod tests;

pub use error::ScenarioError;
pub use sample::SampledWorkload;

use crate::oracle::{self, Space};
use crate::serving::requests::Bursts;
use error::Source;
use roommate_core::cluster::Cluster;
use roommate_core::interference::measured::Work;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::rows::TaskKind;
use roommate_core::performance::goodput::{LrRule, Noise, Training};
use roommate_core::policy::{self, Params};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// An experiment: everything except the seed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Description in one line.
    pub about: String,
    /// Publication.
    #[serde(default)]
    pub source: String,
    /// The GPUs.
    pub cluster: Cluster,
    /// Number of seeds, from 0.
    #[serde(default = "five")]
    pub seeds: u64,
    /// Label of the policy to whose results all others are compared.
    pub ours: Spanned<String>,
    /// Costs and noise of the simulation.
    #[serde(default)]
    pub world: World,
    /// Arrivals of tasks.
    pub arrivals: Spanned<Arrivals>,
    /// Range of GPU-hours of a task, by name of the size class.
    pub sizes: BTreeMap<String, Spanned<[f64; 2]>>,
    /// Training tasks.
    #[serde(rename = "task")]
    tasks: Vec<Spanned<Task>>,
    /// Services, all submitted at time 0.
    #[serde(rename = "service", default)]
    services: Vec<Spanned<Service>>,
    /// Policies to compare.
    #[serde(rename = "policy")]
    policies: Vec<Spanned<Contender>>,
    /// Search space of the oracle, for scenarios that are small enough.
    pub oracle: Option<Spanned<Space>>,
    /// The file.
    #[serde(skip)]
    path: PathBuf,
}

fn five() -> u64 {
    5
}

/// Costs of starts and changes, and noise of the truth.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct World {
    /// Seconds without progress at the first start.
    pub start_s: f64,
    /// Seconds without progress when a task restarts.
    pub restart_s: f64,
    /// Seconds without progress when a task's knobs change.
    pub tune_s: f64,
    /// Relative scatter of true speeds around the interference model.
    pub noise: f64,
    /// Whether services close a gate on the kernels of their roommates while a request would be
    /// late.
    pub gate: bool,
}

impl Default for World {
    /// A start took 17 to 25 s on the measured H200 (imports, CUDA context, warm-up).
    fn default() -> Self {
        Self { start_s: 20.0, restart_s: 20.0, tune_s: 0.0, noise: 0.0, gate: false }
    }
}

/// Arrivals of tasks. Exactly one of `gaps_s`, `mean_gap_s` and `trace` is given.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrivals {
    /// Number of tasks.
    pub tasks: usize,
    /// Distribution of gaps as points (share of gaps, upper bound in seconds), interpolated
    /// linearly in the logarithm.
    pub gaps_s: Option<Vec<(f64, f64)>>,
    /// Exponential gaps with this mean.
    pub mean_gap_s: Option<f64>,
    /// A trace file with the submission times; relative to the folder of the scenario.
    pub trace: Option<PathBuf>,
    /// Factor by which arrivals are accelerated.
    #[serde(default = "one")]
    pub times_faster: f64,
}

fn one() -> f64 {
    1.0
}

/// A training task, and the measured task that stands for it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Name of the model, as published.
    pub model: String,
    /// Name of the dataset, as published.
    #[serde(default)]
    pub dataset: String,
    /// Batch size with which every system starts.
    pub batch: u32,
    /// Optimiser, which determines how the learning rate scales.
    #[serde(default)]
    pub optimizer: String,
    /// Name of the size class.
    pub size: String,
    /// Share of all tasks; shares are normalised by their sum.
    pub share: f64,
    /// The measured task that stands for it.
    pub measured: String,
    /// The measured batch size that stands for `batch`; by default the same.
    pub measured_batch: Option<u32>,
    /// Why this measured task was chosen.
    pub because: String,
    /// Gradient noise scale at the start and at the end of training, in samples; without it the
    /// batch size is fixed.
    pub noise_scale: Option<[f32; 2]>,
    /// Smallest and largest batch size that the user allows; by default a quarter to four times
    /// `batch`.
    pub batch_range: Option<[u32; 2]>,
}

impl Task {
    /// How progress and memory depend on the batch size; `None` if the batch size is fixed.
    fn training(&self, atlas: &Atlas) -> Option<Training> {
        let [start, end] = self.noise_scale?;
        let work = self.work(atlas);
        let memory = atlas.memory(work.task, work.batch, self.batch);
        let around = Training::around(self.batch, start);
        let [batch_min, batch_max] =
            self.batch_range.unwrap_or([around.batch_min, around.batch_max]);
        let lr = match self.optimizer.to_lowercase().as_str() {
            "sgd" => LrRule::Linear,
            "adadelta" => LrRule::Keep,
            _ => LrRule::SquareRoot,
        };
        Some(Training { batch_min, batch_max, lr, noise: Noise { start, end }, memory, ..around })
    }

    /// The measured task; the check of the scenario has found it.
    fn work(&self, atlas: &Atlas) -> Work {
        let task = atlas.task(TaskKind::Train, &self.measured).expect("a checked scenario");
        Work { task, batch: self.measured_batch.unwrap_or(self.batch), load: 1.0 }
    }
}

/// A service, and the measured service that stands for it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Name of the model, as published.
    pub model: String,
    /// Name of the dataset, as published.
    #[serde(default)]
    pub dataset: String,
    /// SLO: upper limit of the 99th percentile of latency.
    pub slo_ms: f64,
    /// Requests per second to each replica.
    #[serde(default)]
    pub load_rps: f64,
    /// A load that changes: pairs of start in seconds and requests per second.
    pub load_steps: Option<Vec<(f64, f64)>>,
    /// Bursts of requests; by default arrivals are Poisson.
    pub bursts: Option<BurstsOf>,
    /// Number of replicas.
    #[serde(default = "single")]
    pub replicas: usize,
    /// Largest batch with which every system starts.
    pub batch: u32,
    /// Longest time that a request waits for a full batch; by default a tenth of the SLO.
    pub timeout_ms: Option<f64>,
    /// Seconds from a start until the service answers; by default 20.
    pub warm_up_s: Option<f64>,
    /// The measured service that stands for it.
    pub measured: String,
    /// Why this measured service was chosen.
    pub because: String,
}

fn single() -> usize {
    1
}

/// Two request rates that alternate at random; their mean is the load.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BurstsOf {
    /// Rate in a burst ÷ rate between bursts, at least 1.
    pub times: f64,
    /// Mean seconds of a burst.
    pub burst_s: f64,
    /// Mean seconds between bursts.
    pub calm_s: f64,
}

impl From<BurstsOf> for Bursts {
    fn from(BurstsOf { times, burst_s, calm_s }: BurstsOf) -> Self {
        Self { times, burst_s, calm_s }
    }
}

/// A policy of the comparison.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contender {
    /// Name of the policy.
    pub name: String,
    /// Label in tables, for a policy that is listed twice; by default its name.
    pub label: Option<String>,
    /// Parameters that differ from the defaults.
    #[serde(default)]
    pub params: Params,
    /// Published results, divided by those of `ours`.
    #[serde(default)]
    pub published: Published,
}

impl Contender {
    /// Label in tables.
    pub fn label(&self) -> &str {
        self.label.as_deref().unwrap_or(&self.name)
    }
}

/// Published results, each divided by that of `ours`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Published {
    /// Mean completion time.
    pub completion: Option<f64>,
    /// Mean wait.
    pub wait: Option<f64>,
    /// Makespan.
    pub makespan: Option<f64>,
}

impl Scenario {
    /// Reads and checks a scenario; later steps rely on the check.
    pub fn read(path: &Path, atlas: &Atlas) -> Result<Self, ScenarioError> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| ScenarioError::whole(path, &crate::trace::Problem::from(&e)))?;
        let source = Source { path, text: &text };
        let mut scenario: Self = toml::from_str(&text).map_err(|e| source.syntax(&e))?;
        scenario.path = path.into();
        scenario.check(&source, atlas)?;
        Ok(scenario)
    }

    /// Name of the file without its extension.
    pub fn name(&self) -> String {
        self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Training tasks, in the order of the file.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.tasks.iter().map(Spanned::get_ref)
    }

    /// Services, in the order of the file.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.iter().map(Spanned::get_ref)
    }

    /// Policies, in the order of the file.
    pub fn policies(&self) -> impl Iterator<Item = &Contender> {
        self.policies.iter().map(Spanned::get_ref)
    }

    /// Remarks on the interpretation of the file, to be shown with the results.
    pub fn remarks(&self) -> Vec<String> {
        let sum: f64 = self.tasks().map(|t| t.share).sum();
        let mut remarks = Vec::new();
        if (sum - 100.0).abs() > 1e-9 && (sum - 1.0).abs() > 1e-9 {
            remarks.push(format!("the shares of the tasks add to {sum} %; they are normalised"));
        }
        remarks
    }

    fn check(&self, source: &Source<'_>, atlas: &Atlas) -> Result<(), ScenarioError> {
        if !(1..=1_000).contains(&self.seeds) {
            return Err(source.field("seeds", "expected 1 to 1000 seeds"));
        }
        let costs = [self.world.start_s, self.world.restart_s, self.world.tune_s];
        if !costs.iter().all(|s| (0.0..=1e6).contains(s))
            || !(0.0..=1.0).contains(&self.world.noise)
        {
            return Err(
                source.field("[world]", "expected seconds from 0 to 1e6, and noise from 0 to 1")
            );
        }
        check_arrivals(&self.arrivals, source)?;
        for (name, range) in &self.sizes {
            let [from, to] = *range.get_ref();
            if !(from > 0.0 && to >= from && to <= 1e6) {
                let what = format!("size {name}: expected GPU-hours above 0, the smaller first");
                return Err(source.at(range, what, None));
            }
        }
        if self.tasks.is_empty() {
            return Err(source.field("[[task]]", "expected at least one task"));
        }
        self.tasks.iter().try_for_each(|t| self.check_task(t, source, atlas))?;
        let mut models: Vec<&str> = self.tasks().map(|t| t.model.as_str()).collect();
        models.sort_unstable();
        let twice = models.windows(2).find_map(|w| (w[0] == w[1]).then_some(w[0]));
        if let Some(twice) = twice {
            let what = format!("two tasks are called {twice:?}");
            return Err(source.field("[[task]]", &what));
        }
        self.services.iter().try_for_each(|s| check_service(s, source, atlas))?;
        self.policies.iter().try_for_each(|p| check_policy(p, source))?;
        if let Some(space) = &self.oracle {
            self.check_oracle(space, source)?;
        }
        let mut labels: Vec<&str> = self.policies().map(Contender::label).collect();
        if !labels.contains(&self.ours.get_ref().as_str()) {
            let what = format!("ours: no [[policy]] is called {:?}", self.ours.get_ref());
            return Err(source.at(&self.ours, what, error::closest(self.ours.get_ref(), &labels)));
        }
        labels.sort_unstable();
        match labels.windows(2).find(|w| w[0] == w[1]) {
            None => Ok(()),
            Some(twice) => {
                let second =
                    self.policies.iter().filter(|p| p.get_ref().label() == twice[0]).nth(1);
                let what = format!("two policies are called {:?}; give one a `label`", twice[0]);
                Err(second.map_or_else(
                    || source.field("[[policy]]", &what),
                    |p| source.at(p, what.clone(), None),
                ))
            }
        }
    }

    fn check_oracle(
        &self,
        space: &Spanned<Space>,
        source: &Source<'_>,
    ) -> Result<(), ScenarioError> {
        let wrong = |what: String| Err(source.at(space, format!("[oracle]: {what}"), None));
        let Space { batches, most, service_batches, service_shares } = space.get_ref();
        let services: usize = self.services().map(|s| s.replicas).sum();
        if self.arrivals.get_ref().tasks > oracle::MOST_TASKS {
            return wrong(format!("at most {} tasks can be tried in all ways", oracle::MOST_TASKS));
        }
        let constant = |t: &Task| t.noise_scale.is_none_or(|n| n[0] == n[1]);
        if !self.tasks().all(constant) {
            return wrong("expected tasks whose noise_scale does not change".into());
        }
        if self.cluster.gpu_models.len() > 1 {
            return wrong("expected GPUs that are all alike".into());
        }
        if services > 0 && services != self.cluster.gpus() as usize {
            return wrong("expected no service, or one for each GPU".into());
        }
        if *most == 0 || batches.is_empty() || !batches.iter().all(|b| *b > 0.0 && *b <= 64.0) {
            return wrong("expected most from 1, and batches as factors above 0".into());
        }
        let shares = service_shares.iter().all(|s| *s > 0.0 && *s < 1.0);
        if services > 0 && !(shares && service_batches.iter().all(|b| *b > 0)) {
            return wrong("expected service_shares between 0 and 1, service_batches from 1".into());
        }
        if services > 0 && service_batches.is_empty() {
            return wrong("expected service_batches".into());
        }
        Ok(())
    }

    fn check_task(
        &self,
        task: &Spanned<Task>,
        source: &Source<'_>,
        atlas: &Atlas,
    ) -> Result<(), ScenarioError> {
        let Task { model, batch, share, size, measured, measured_batch, .. } = task.get_ref();
        let wrong =
            |what: String, hint| Err(source.at(task, format!("task {model:?}: {what}"), hint));
        if *batch == 0 || *measured_batch == Some(0) {
            return wrong("expected a batch of at least 1".into(), None);
        }
        if !(share.is_finite() && *share > 0.0) {
            return wrong("expected a share above 0".into(), None);
        }
        let (noise, range) = (&task.get_ref().noise_scale, &task.get_ref().batch_range);
        if noise.is_some_and(|n| !n.iter().all(|v| v.is_finite() && *v >= 0.0)) {
            return wrong("noise_scale: expected two numbers from 0".into(), None);
        }
        if range.is_some_and(|[from, to]| from == 0 || from > *batch || to < *batch) {
            return wrong("batch_range: expected one that holds the batch".into(), None);
        }
        if !self.sizes.contains_key(size) {
            let known: Vec<&str> = self.sizes.keys().map(String::as_str).collect();
            return wrong(format!("[sizes] has no {size:?}"), error::closest(size, &known));
        }
        if atlas.task(TaskKind::Train, measured).is_none() {
            let tasks = atlas.tasks().filter(|(_, kind, _)| *kind == TaskKind::Train);
            let known: Vec<&str> = tasks.map(|(_, _, name)| name).collect();
            let what = format!("no training task {measured:?} was measured");
            return wrong(what, error::closest(measured, &known));
        }
        Ok(())
    }
}

fn check_arrivals(arrivals: &Spanned<Arrivals>, source: &Source<'_>) -> Result<(), ScenarioError> {
    let wrong = |what: &str| Err(source.at(arrivals, format!("[arrivals]: {what}"), None));
    let Arrivals { tasks, gaps_s, mean_gap_s, trace, times_faster } = arrivals.get_ref();
    if !(1..=1_000_000).contains(tasks) {
        return wrong("expected 1 to 1000000 tasks");
    }
    if !(times_faster.is_finite() && *times_faster > 0.0) {
        return wrong("times_faster: expected a number above 0");
    }
    let ways = [gaps_s.is_some(), mean_gap_s.is_some(), trace.is_some()];
    if ways.iter().filter(|w| **w).count() != 1 {
        return wrong("expected exactly one of gaps_s, mean_gap_s and trace");
    }
    if mean_gap_s.is_some_and(|s| !(0.0..=1e9).contains(&s)) {
        return wrong("mean_gap_s: expected seconds from 0");
    }
    if let Some(points) = gaps_s {
        let rises = points.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1);
        let whole =
            points.first().map(|p| p.0) == Some(0.0) && points.last().map(|p| p.0) == Some(1.0);
        if !(rises && whole && points.iter().all(|p| p.1.is_finite() && p.1 > 0.0)) {
            return wrong(
                "gaps_s: expected rising [share, seconds] from share 0 to 1, seconds above 0",
            );
        }
    }
    Ok(())
}

fn check_service(
    service: &Spanned<Service>,
    source: &Source<'_>,
    atlas: &Atlas,
) -> Result<(), ScenarioError> {
    let Service { model, slo_ms, load_rps, load_steps, bursts, .. } = service.get_ref();
    let Service { replicas, batch, timeout_ms, warm_up_s, measured, .. } = service.get_ref();
    let wrong =
        |what: String, hint| Err(source.at(service, format!("service {model:?}: {what}"), hint));
    let positive = |v: f64| v.is_finite() && v > 0.0;
    let some = |v: f64| v.is_finite() && v >= 0.0;
    let steps = load_steps.as_deref().unwrap_or_default();
    let rise = steps.windows(2).all(|w| w[0].0 < w[1].0);
    let rules = [
        (positive(*slo_ms), "slo_ms: expected milliseconds above 0"),
        (some(*load_rps) && *load_rps <= 1e6, "load_rps: expected requests a second from 0"),
        (
            rise && steps.iter().all(|s| some(s.0) && some(s.1)),
            "load_steps: expected [seconds, requests a second], sooner first",
        ),
        (load_steps.is_some() != (*load_rps > 0.0), "expected either load_rps or load_steps"),
        (
            bursts.is_none_or(|b| b.times >= 1.0 && positive(b.burst_s) && positive(b.calm_s)),
            "bursts: expected times of at least 1, and seconds above 0",
        ),
        ((1..=100_000).contains(replicas), "replicas: expected 1 to 100000"),
        (*batch > 0, "batch: expected at least 1"),
        (timeout_ms.is_none_or(some), "timeout_ms: expected milliseconds from 0"),
        (warm_up_s.is_none_or(some), "warm_up_s: expected seconds from 0"),
    ];
    if let Some((_, what)) = rules.iter().find(|(holds, _)| !holds) {
        return wrong((*what).into(), None);
    }
    if atlas.task(TaskKind::Serve, measured).is_none() {
        let services = atlas.tasks().filter(|(_, kind, _)| *kind == TaskKind::Serve);
        let known: Vec<&str> = services.map(|(_, _, name)| name).collect();
        let what = format!("no service {measured:?} was measured");
        return wrong(what, error::closest(measured, &known));
    }
    Ok(())
}

fn check_policy(policy: &Spanned<Contender>, source: &Source<'_>) -> Result<(), ScenarioError> {
    let Contender { name, params, published, .. } = policy.get_ref();
    let Ok(entry) = policy::find(name) else {
        let known: Vec<&str> = policy::POLICIES.iter().map(|e| e.name).collect();
        let what = format!("there is no policy {name:?}");
        return Err(source.at(policy, what, error::closest(name, &known)));
    };
    if let Err(wrong) = entry.build(params) {
        let hint = format!("`roommate policies {name}` lists its parameters");
        return Err(source.at(policy, wrong.to_string(), Some(hint)));
    }
    let ratios = [published.completion, published.wait, published.makespan];
    if ratios.into_iter().flatten().any(|r| !(r.is_finite() && r > 0.0)) {
        let what = format!("policy {name:?}: published ratios are numbers above 0");
        return Err(source.at(policy, what, None));
    }
    Ok(())
}
