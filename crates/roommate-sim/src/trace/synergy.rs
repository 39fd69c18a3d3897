//! Synergy (OSDI 2022): its replays, whose jobs are given in iterations of a model. A table of
//! models gives the iteration time and the effect of more CPU and memory.

use super::csv::{self, Header};
use super::error::{Bad, Problem, TraceError, shown};
use super::field::{self, Unit};
use super::layout::{RowReader, Wrong};
use super::lines::Source;
use super::{ReadOptions, TraceJob};
use roommate_core::performance::sensitivity::{Host, Sensitivity};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

/// CPU and memory per GPU of the servers on which the tables were measured: 24 cores and 500 GB for
/// eight GPUs.
const USUAL: Host = Host { cpu_milli: 3_000, mib: 64_000 };

const MIB_PER_GB: f64 = 1024.0;

pub(super) fn rows(header: &Header, options: &ReadOptions) -> Result<RowReader, Wrong> {
    let [id, model, arrival, iterations, gpus] =
        header.require(["job_id", "model", "arrival_s", "iterations", "gpus"])?;
    let table = options.throughputs.as_deref().ok_or(Wrong::File(Problem::NoModels))?;
    let table = models(table).map_err(Wrong::Elsewhere)?;
    Ok(Box::new(move |row| {
        let name = row.text(model);
        let (step_s, sensitivity) = table.get(name).ok_or_else(|| {
            let what = format!("model {:?}", shown(name));
            Bad::at("model", Problem::NoThroughput(what))
        })?;
        let submit_us = row.micros(arrival, Unit::Seconds)?;
        let steps = row.value(iterations, field::steps)?;
        let mut job =
            TraceJob::new(row.text(id).to_owned(), submit_us, row.gpus(gpus)?, steps * step_s);
        job.steps = steps;
        job.step_s = *step_s;
        job.model = Some(name.to_owned());
        job.sensitivity = Some(Arc::clone(sensitivity));
        Ok::<_, Bad>(Some(job))
    }))
}

/// Iteration time in seconds with the usual CPU and memory, and the effect of the best, by model.
fn models(path: &Path) -> Result<HashMap<String, (f64, Arc<Sensitivity>)>, TraceError> {
    let mut source = Source::open(path, "table of models")?;
    let header = csv::header(&mut source)?;
    let [model, step, cpus, mem, speedup] = header
        .require(["model", "iter_time_s", "best_cpus_per_gpu", "best_mem_gb_per_gpu", "speedup"])
        .map_err(|problem| source.error_here(problem))?;
    let mut table = HashMap::new();
    csv::rows(&mut source, &header, ',', |source, row| {
        let take = || {
            let row = row.map_err(Bad::from)?;
            let step_s = row.value(step, |s| field::positive_seconds(s, Unit::Seconds))?;
            let best = Host { cpu_milli: row.value(cpus, milli)?, mib: row.value(mem, mib)? };
            let found = Sensitivity::of_best(USUAL, best, row.number(speedup)?);
            let found = found.ok_or_else(|| row.bad(speedup, "a speed-up above 0"))?;
            table.insert(row.text(model).to_owned(), (step_s, Arc::new(found)));
            Ok(true)
        };
        take().map_err(|bad: Bad| source.error_here(bad))
    })?;
    Ok(table)
}

/// Measured speeds of models by CPU cores and memory per GPU, relative to the usual allocation.
pub(super) struct Grids(pub(super) BTreeMap<String, Arc<Sensitivity>>);

impl Grids {
    pub(super) fn read(path: &Path) -> Result<Self, TraceError> {
        let mut source = Source::open(path, "table of sensitivities")?;
        let header = csv::header(&mut source)?;
        let [model, cpus, mem, speed] = header
            .require(["model", "cpus", "mem_gb", "rel_throughput"])
            .map_err(|problem| source.error_here(problem))?;
        let mut points: BTreeMap<String, BTreeMap<(u32, u32), f64>> = BTreeMap::new();
        csv::rows(&mut source, &header, ',', |source, row| {
            let take = || {
                let row = row.map_err(Bad::from)?;
                let at = (row.value(cpus, milli)?, row.value(mem, mib)?);
                let speed = row.number(speed)?;
                points.entry(row.text(model).to_owned()).or_default().insert(at, speed);
                Ok(true)
            };
            take().map_err(|bad: Bad| source.error_here(bad))
        })?;
        let grids = points.into_iter().map(|(model, points)| {
            let grid = grid(&points).ok_or_else(|| {
                let what = format!("a speed above 0 for each pair of CPU and memory of {model}");
                source.whole_file(Problem::expected(what, "a grid with holes"))
            });
            Ok((model, Arc::new(grid?)))
        });
        grids.collect::<Result<_, TraceError>>().map(Self)
    }

    /// Sets the sensitivity of the jobs whose models are in the table.
    pub(super) fn tell(&self, jobs: &mut [TraceJob]) {
        for job in jobs {
            let known = job.model.as_ref().and_then(|m| self.0.get(m));
            job.sensitivity = known.map(Arc::clone).or(job.sensitivity.take());
        }
    }
}

fn grid(points: &BTreeMap<(u32, u32), f64>) -> Option<Sensitivity> {
    let cpus: BTreeSet<u32> = points.keys().map(|at| at.0).collect();
    let mems: BTreeSet<u32> = points.keys().map(|at| at.1).collect();
    let speeds = points.values().copied().collect();
    Sensitivity::new(cpus.into_iter().collect(), mems.into_iter().collect(), speeds, USUAL, None)
}

fn milli(cores: f64) -> Result<u32, Problem> {
    field::whole((field::number(cores)? * 1000.0).round(), u32::MAX)
}

fn mib(gb: f64) -> Result<u32, Problem> {
    field::whole((field::number(gb)? * MIB_PER_GB).floor(), u32::MAX)
}

#[cfg(test)]
mod tests {
    use crate::trace::{Format, ReadOptions, Trace, TraceError, read};
    use std::path::PathBuf;

    const TRACE: &str =
        "job_id,model,arrival_s,iterations,gpus\n0,alexnet,.5,3000,4\n1,gnmt,2,50,1\n";
    const MODELS: &str = "model,iter_time_s,best_cpus_per_gpu,best_mem_gb_per_gpu,speedup\n\
                          alexnet,0.6,12,125.0,2.94\ngnmt,0.12,1,20.0,1.0\n";

    fn read_with(
        trace: &str,
        models: Option<&str>,
        grid: Option<&str>,
    ) -> Result<Trace, TraceError> {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| -> PathBuf {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let options = ReadOptions {
            throughputs: models.map(|m| file("models.csv", m)),
            sensitivity: grid.map(|g| file("grid.csv", g)),
            ..ReadOptions::default()
        };
        read(&file("trace.csv", trace), &options)
    }

    #[test]
    fn jobs_get_the_sensitivity_of_their_models() {
        let trace = read_with(TRACE, Some(MODELS), None).unwrap();
        assert_eq!(trace.format, Format::Synergy);
        let job = &trace.jobs[0];
        assert_eq!((job.submit_us, job.gpus, job.steps, job.step_s), (500_000, 4, 3000.0, 0.6));
        let best = job.sensitivity.as_ref().unwrap().best();
        assert_eq!((best.cpu_milli, best.mib), (12_000, 128_000));
        // A measured grid has more information than the best point.
        let grid = "model,cpus,mem_gb,rel_throughput\nalexnet,3,62.5,1\nalexnet,6,62.5,1.75\n";
        let with_grid = read_with(TRACE, Some(MODELS), Some(grid)).unwrap();
        assert_eq!(with_grid.jobs[0].sensitivity.as_ref().unwrap().best().cpu_milli, 6_000);
        assert_eq!(with_grid.jobs[1].sensitivity, trace.jobs[1].sensitivity);
    }

    #[test]
    fn missing_tables_and_models_are_named() {
        let wrong = |trace: &str, models: Option<&str>, grid: Option<&str>| {
            let error = read_with(trace, models, grid).unwrap_err();
            (error.problem.to_string(), error.hint().is_some())
        };
        let none = "the jobs have iterations of models, and no table of models was given";
        assert_eq!(wrong(TRACE, None, None), (none.into(), true));
        let short = MODELS.replace("gnmt", "bert");
        let missing = "no throughput for model \"gnmt\"";
        assert_eq!(wrong(TRACE, Some(&short), None), (missing.into(), true));
        let grid = "model,cpus,mem_gb,rel_throughput\ngnmt,3,62.5,1\ngnmt,6,125,1\n";
        let holes = "expected a speed above 0 for each pair of CPU and memory of gnmt, \
                     found \"a grid with holes\"";
        assert_eq!(wrong(TRACE, Some(MODELS), Some(grid)).0, holes);
    }
}
