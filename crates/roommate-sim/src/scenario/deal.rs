//! From a scenario and a seed to a workload: who comes, when, and how long it takes.

use super::{Arrivals, Scenario, ScenarioError};
use crate::trace::{self, ReadOptions, mix};
use crate::workload::Workload;
use crate::world::Arrival;
use roommate_core::idx::{Idx, ProfileIdx};
use roommate_core::interference::atlas::Atlas;
use roommate_core::interference::measured::Work;
use roommate_core::interference::rows::TaskKind;
use roommate_core::job::Spec;
use roommate_core::knobs::Knobs;
use roommate_core::math::rng::Rng;
use roommate_core::profile::Profile;
use roommate_core::time::Time;

/// The random streams of a scenario, so that one does not shift another.
const ORDER: u64 = 130;
const GAPS: u64 = 131;
const SIZES: u64 = 132;

/// A workload, and what its kinds of work are in the measurements.
#[derive(Clone, Debug)]
pub struct Dealt {
    /// The jobs.
    pub workload: Workload,
    /// The measured task of each profile.
    pub works: Vec<Work>,
    /// Seconds for which all training alone would keep all multiprocessors of a GPU busy.
    pub sm_s: f64,
}

impl Scenario {
    /// The workload of a seed. The same tasks in the same numbers for every seed; their order, their
    /// sizes and their times differ.
    pub fn deal(&self, seed: u64, atlas: &Atlas) -> Result<Dealt, ScenarioError> {
        let mut dealt = Dealt { workload: Workload::default(), works: Vec::new(), sm_s: 0.0 };
        dealt.workload.teams.push("all".into());
        for task in self.tasks() {
            let id = atlas.task(TaskKind::Train, &task.measured).expect("a checked scenario");
            let batch = task.measured_batch.unwrap_or(task.batch);
            let step_s = 1.0 / atlas.steps_per_s(id, batch);
            dealt.workload.profiles.push((task.model.clone(), Profile::of_step(step_s)));
            dealt.works.push(Work { task: id, batch, load: 1.0 });
        }
        let mut sizes = Rng::stream(seed, SIZES);
        let times = self.times_s(seed)?;
        for (number, (kind, at_s)) in self.order(seed).into_iter().zip(times).enumerate() {
            let task = self.tasks[kind].get_ref();
            let profile = ProfileIdx::from_usize(kind);
            let [from, to] = *self.sizes[&task.size].get_ref();
            let hours = mix::quantile(&[(0.0, from), (1.0, to)], sizes.unit());
            let step_s = dealt.workload.profiles[kind].1.step_s;
            let work = (hours * 3_600.0 / step_s).round().max(1.0);
            let Work { task: id, batch, .. } = dealt.works[kind];
            let counters = atlas.counters(id, batch);
            dealt.sm_s += work * step_s * counters.sm_util;
            let knobs = Knobs { batch: task.batch, mem_mib: counters.mem_mib, ..Knobs::WHOLE };
            let spec = Spec {
                knobs,
                declared_s: Some(work * step_s),
                retries: 3.into(),
                ..Spec::training(1, work, profile)
            };
            let name = format!("{}-{number}", task.model.to_lowercase().replace(' ', "-"));
            let at = Time::from_secs(at_s);
            dealt.workload.arrivals.push(Arrival { at, name, spec, work });
        }
        Ok(dealt)
    }

    /// How many of each kind there are: shares of the whole, remainders to those who lost most.
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

    /// The kinds of the tasks, in the order in which they come.
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

    /// When the tasks come; the first at 0.
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
