//! A cluster that could have run a trace as it was recorded: a guess from what was in use at the
//! same time.

use super::TraceJob;
use roommate_core::cluster::Cluster;
use std::collections::BTreeMap;

/// What was in use, and the smallest cluster of equal nodes that has it.
#[derive(Clone, Debug, PartialEq)]
pub struct InUse {
    /// The most GPUs that were in use at the same time.
    pub gpus: u32,
    /// The guess. Jobs took as long as recorded on the GPUs that they had, so every GPU model has
    /// the speed 1.
    pub cluster: Cluster,
    /// The number of jobs whose start is not known; the guess is without them.
    pub without_start: usize,
}

/// GPUs of a node, where they are not known.
const USUAL: u32 = 8;

/// The guess; `None` if no job says when it started.
pub fn in_use(jobs: &[TraceJob]) -> Option<InUse> {
    let started = |job: &&TraceJob| job.queue_s.is_some();
    let without_start = jobs.iter().filter(|job| !started(job)).count();
    let models = by_model(jobs.iter().filter(started));
    let mut parts = Vec::new();
    let mut all = Vec::new();
    for (model, jobs) in models {
        let per_node = gpus_per_node(&jobs);
        let most = most_gpus(&jobs);
        let nodes = most.div_ceil(per_node).max(1);
        let model = if model.is_empty() { String::new() } else { format!(":{model}=1") };
        parts.push(format!("{nodes}x{per_node}{model}"));
        all.extend(jobs);
    }
    let cluster = parts.join(",").parse().ok()?;
    Some(InUse { gpus: most_gpus(&all), cluster, without_start })
}

/// Jobs by the GPU model that they had. If only some name one, the others count for the model that
/// most have.
fn by_model<'a>(jobs: impl Iterator<Item = &'a TraceJob>) -> BTreeMap<String, Vec<&'a TraceJob>> {
    let mut models: BTreeMap<String, Vec<&TraceJob>> = BTreeMap::new();
    for job in jobs {
        let model = job.gpu_models.first().map(|model| model.to_ascii_lowercase());
        models.entry(model.unwrap_or_default()).or_default().push(job);
    }
    if models.len() > 1
        && let Some(others) = models.remove("")
        && let Some(largest) = models.values_mut().max_by_key(|jobs| jobs.len())
    {
        largest.extend(others);
    }
    models
}

/// The next common size of a node above the most GPUs that a job had on each of its machines.
fn gpus_per_node(jobs: &[&TraceJob]) -> u32 {
    let of = |job: &&TraceJob| match job.observed().machines {
        0 if job.gpus <= USUAL => job.gpus,
        0 => USUAL,
        machines => job.gpus.div_ceil(machines),
    };
    jobs.iter().map(of).max().unwrap_or(1).next_power_of_two()
}

/// The most GPUs in use at the same time.
fn most_gpus(jobs: &[&TraceJob]) -> u32 {
    let mut moments: Vec<(u64, i64)> = Vec::with_capacity(2 * jobs.len());
    for job in jobs {
        let us = |s: f64| (s * 1e6) as u64;
        let start = job.submit_us + us(job.queue_s.unwrap_or(0.0));
        let gpus = i64::from(job.gpus);
        moments.extend([(start, gpus), (start + us(job.duration_s), -gpus)]);
    }
    // At the same moment ends come first: their GPUs are free for those that start.
    moments.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, change) in moments {
        now += change;
        most = most.max(now);
    }
    // A gang that ended at once was there nevertheless.
    let largest = jobs.iter().map(|job| job.gpus).max().unwrap_or(0);
    u32::try_from(most).unwrap_or(u32::MAX).max(largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Observed;

    fn job(at_s: u64, gpus: u32, seconds: f64, machines: u32, model: &str) -> TraceJob {
        let mut job = TraceJob::new(format!("{at_s}"), at_s * 1_000_000, gpus, seconds);
        job.queue_s = Some(10.0);
        job.observed = Observed { machines, ..Observed::default() }.boxed();
        job.gpu_models.extend((!model.is_empty()).then(|| model.to_owned()));
        job
    }

    fn guess(jobs: &[TraceJob]) -> (u32, String) {
        let found = in_use(jobs).unwrap();
        (found.gpus, found.cluster.to_string())
    }

    #[test]
    fn the_guess_has_what_was_in_use_at_once() {
        // The second starts when the first ends; the third beside the second.
        let jobs = [job(0, 8, 100.0, 2, ""), job(100, 4, 100.0, 1, ""), job(150, 2, 9.0, 1, "")];
        assert_eq!(guess(&jobs), (8, "2x4".to_owned()));
        let jobs = [job(0, 8, 100.0, 1, ""), job(50, 1, 100.0, 1, "")];
        assert_eq!(guess(&jobs), (9, "2x8".to_owned()));
    }

    #[test]
    fn models_keep_their_own_nodes() {
        let named = [(0, 4, "A100"), (100, 4, "a100"), (0, 8, "h100"), (0, 1, "")];
        let jobs = named.map(|(at_s, gpus, model)| job(at_s, gpus, 10.0, 1, model));
        assert_eq!(guess(&jobs), (13, "2x4:a100=1,1x8:h100=1".to_owned()));
    }

    #[test]
    fn without_starts_nothing_is_guessed() {
        assert_eq!(in_use(&[TraceJob::new("a".into(), 0, 1, 1.0)]), None);
        assert_eq!(in_use(&[]), None);
    }
}
