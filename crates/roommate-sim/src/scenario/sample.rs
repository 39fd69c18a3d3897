//! From a scenario and a seed to a workload: order, arrival times and sizes of the tasks.

use super::{Arrivals, Scenario, ScenarioError, Service};
use crate::trace::{self, ReadOptions, TraceClass, TraceJob, TraceService, mix};
use crate::workload::{self, Measurements, Setting, Unfit, Workload};
use roommate_core::interference::measured::Work;
use roommate_core::math::rng::Rng;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::rows::TaskKind;
use roommate_core::profile::Profile;

/// Random streams, one for each purpose, so that they are independent.
const ORDER: u64 = 130;
const GAPS: u64 = 131;
const SIZES: u64 = 132;

/// A workload, and the measured tasks of its profiles.
#[derive(Clone, Debug)]
pub struct SampledWorkload {
    /// The jobs; services, which are submitted at time 0, come first.
    pub workload: Workload,
    /// The measured task of each profile.
    pub works: Vec<Option<Work>>,
    /// GPU seconds of all training at full SM utilisation.
    pub sm_s: f64,
}

impl Scenario {
    /// The workload of a seed. Every seed has the same number of each task; order, sizes and
    /// arrival times differ.
    pub fn deal(&self, seed: u64, atlas: &Atlas) -> Result<SampledWorkload, ScenarioError> {
        let mut jobs: Vec<TraceJob> = self.services().flat_map(replicas).collect();
        let mut sm_s = 0.0;
        let mut sizes = Rng::stream(seed, SIZES);
        let times = self.times_s(seed)?;
        for (number, (kind, at_s)) in self.order(seed).into_iter().zip(times).enumerate() {
            let task = self.tasks[kind].get_ref();
            let Work { task: id, batch, .. } = task.work(atlas);
            let step_s = 1.0 / atlas.steps_per_s(id, batch);
            let [from, to] = *self.sizes[&task.size].get_ref();
            let hours = mix::quantile(&[(0.0, from), (1.0, to)], sizes.unit());
            let steps = (hours * 3_600.0 / step_s).round().max(1.0);
            let counters = atlas.counters(id, batch);
            sm_s += steps * step_s * counters.sm_util;
            let name = format!("{}-{number}", task.model.to_lowercase().replace(' ', "-"));
            jobs.push(TraceJob {
                steps,
                step_s,
                model: Some(task.model.clone()),
                batch: task.batch,
                mem_mib: counters.mem_mib,
                training: task.training(atlas).map(Box::new),
                ..TraceJob::new(name, (at_s * 1e6).round() as u64, 1, steps * step_s)
            });
        }
        let unfit = |e: Unfit| ScenarioError::whole(&self.path, &e);
        let measured = Some(Measurements::of_h200(atlas));
        let setting = Setting { measured, ..Setting::of(&self.cluster) };
        let (workload, _) = workload::prepare(jobs, &setting).map_err(unfit)?;
        let works = workload.profiles.iter().map(|p| self.work(p, atlas)).collect();
        Ok(SampledWorkload { workload, works, sm_s })
    }

    /// The measured task of a profile.
    fn work(&self, (name, profile): &(String, Profile), atlas: &Atlas) -> Option<Work> {
        match profile.serving {
            Some(serving) => {
                let task = atlas.task(TaskKind::Serve, name)?;
                Some(Work { task, batch: serving.batch, load: 0.0 })
            }
            None => self.tasks().find(|t| t.model == *name).map(|t| t.work(atlas)),
        }
    }

    /// Number of each task by its share, rounded by the largest remainder.
    pub(super) fn counts(&self) -> Vec<usize> {
        let tasks = self.arrivals.get_ref().tasks;
        let sum: f64 = self.tasks().map(|t| t.share).sum();
        let exact: Vec<f64> = self.tasks().map(|t| t.share / sum * tasks as f64).collect();
        let mut counts: Vec<usize> = exact.iter().map(|e| e.floor() as usize).collect();
        let mut by_loss: Vec<usize> = (0..counts.len()).collect();
        by_loss.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
        let missing = tasks - counts.iter().sum::<usize>();
        by_loss.into_iter().take(missing).for_each(|kind| counts[kind] += 1);
        counts
    }

    /// Indices into `tasks`, in order of arrival.
    fn order(&self, seed: u64) -> Vec<usize> {
        let counts = self.counts().into_iter().enumerate();
        let mut order: Vec<usize> =
            counts.flat_map(|(kind, count)| std::iter::repeat_n(kind, count)).collect();
        let mut rng = Rng::stream(seed, ORDER);
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        order
    }

    /// Arrival times; the first is 0.
    pub(super) fn times_s(&self, seed: u64) -> Result<Vec<f64>, ScenarioError> {
        let Arrivals { tasks, gaps_s, mean_gap_s, trace, times_faster } = self.arrivals.get_ref();
        if let Some(trace) = trace {
            return self.submissions(trace);
        }
        let mut rng = Rng::stream(seed, GAPS);
        let mut now = 0.0;
        let times = (0..*tasks).map(|number| {
            if number > 0 {
                now += match (gaps_s, mean_gap_s) {
                    (Some(points), _) => mix::quantile(points, rng.unit()),
                    (None, mean) => rng.exp(mean.unwrap_or_default()),
                } / times_faster;
            }
            now
        });
        Ok(times.collect())
    }

    fn submissions(&self, file: &std::path::Path) -> Result<Vec<f64>, ScenarioError> {
        let Arrivals { tasks, times_faster, .. } = self.arrivals.get_ref();
        let path = self.path.parent().map_or(file.into(), |folder| folder.join(file));
        let options = ReadOptions { max_jobs: Some(*tasks), ..ReadOptions::default() };
        let wrong = |what: String| ScenarioError::whole(&self.path, &what);
        let read = trace::read(&path, &options).map_err(|e| wrong(e.to_string()))?;
        if read.jobs.len() < *tasks {
            let (has, path) = (read.jobs.len(), path.display());
            return Err(wrong(format!("trace {path} has {has} jobs, expected {tasks}")));
        }
        let first = read.jobs[0].submit_us;
        let since = |us: u64| (us - first) as f64 / 1e6 / times_faster;
        Ok(read.jobs.iter().map(|job| since(job.submit_us)).collect())
    }
}

/// The replicas of a service, all submitted at time 0.
fn replicas(service: &Service) -> impl Iterator<Item = TraceJob> {
    (0..service.replicas).map(|number| {
        let load = match &service.load_steps {
            Some(steps) => steps.clone(),
            None => vec![(0.0, service.load_rps)],
        };
        let about = TraceService {
            slo_ms: Some(service.slo_ms),
            timeout_ms: service.timeout_ms,
            warm_up_s: service.warm_up_s,
            load,
            bursts: service.bursts.map(Into::into),
            ..TraceService::default()
        };
        let name = format!("{}-service-{number}", service.model.to_lowercase().replace(' ', "-"));
        TraceJob {
            model: Some(service.measured.clone()),
            batch: service.batch,
            class: TraceClass::Service,
            service: Some(Box::new(about)),
            ..TraceJob::new(name, 0, 1, 1.0)
        }
    })
}
