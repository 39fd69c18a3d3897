//! Gavel (OSDI 2020): its `.trace` files, Shockwave's wider variant, and Gavel jobs as CSV.
//!
//! Jobs are given in steps; a throughput table gives the step time.

use super::csv::{self, Header};
use super::error::{Bad, Problem, TraceError};
use super::field::{self, Unit};
use super::layout::{RowReader, Wrong};
use super::lines::Source;
use super::{ReadOptions, TraceJob};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

const GAVEL: [&str; 7] = [
    "job_type",
    "command",
    "steps_flag",
    "needs_data_dir",
    "total_steps",
    "arrival_s",
    "scale_factor",
];
const SHOCKWAVE: [&str; 12] = [
    "job_type",
    "command",
    "working_dir",
    "steps_flag",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "mode",
    "priority_weight",
    "slo",
    "duration_s",
    "arrival_s",
];

/// Columns of a file without header that has this many tab-separated fields.
pub(super) fn headerless(fields: usize) -> Option<Header> {
    match fields {
        7 => Some(Header::fixed(&GAVEL)),
        12 => Some(Header::fixed(&SHOCKWAVE)),
        _ => None,
    }
}

pub(super) fn rows(header: &Header, options: &ReadOptions) -> Result<RowReader, Wrong> {
    let [kind, steps, gpus, arrival] =
        header.require(["job_type", "total_steps", "scale_factor", "arrival_s"])?;
    let (id, weight) = (header.find("job_id"), header.find("priority_weight"));
    let (duration, slo) = (header.find("duration_s"), header.find("slo"));
    let table = options.throughputs.as_deref().ok_or(Wrong::File(Problem::NoThroughputs))?;
    let table = Throughputs::read(table, &options.gpu_model).map_err(Wrong::Elsewhere)?;
    // A trace has many jobs of few types: cache the lookups.
    let mut known: Vec<(String, u32, Measured)> = Vec::new();
    Ok(Box::new(move |row| {
        let name = row.text(kind);
        let count = row.gpus(gpus)?;
        let submit_us = row.micros(arrival, Unit::Seconds)?;
        let work = row.value(steps, field::steps)?;
        let found = known.iter().position(|(n, gpus, _)| *gpus == count && n == name);
        let at = found.unwrap_or(known.len());
        if found.is_none() {
            known.push((name.to_owned(), count, table.measured(name, count)?));
        }
        let Measured { step_s, ref model_speed } = known[at].2;
        let id = row.owned(id).unwrap_or_else(|| row.index.to_string());
        let duration_s = match duration {
            Some(column) => row.seconds(column, Unit::Seconds)?,
            None => work * step_s,
        };
        let mut job = TraceJob::new(id, submit_us, count, duration_s);
        job.steps = work;
        job.step_s = step_s;
        job.model_speed.clone_from(model_speed);
        job.batch = batch_size(name);
        job.model = Some(name.to_owned());
        job.weight = row.number_of(weight)?.unwrap_or(1.0);
        // Written as a multiple of the duration; a negative number means no SLO.
        if let Some(factor) = slo.and_then(|c| row.text(c).trim().parse::<f64>().ok())
            && factor > 0.0
            && factor * duration_s < field::MAX_S
        {
            job.deadline_us = Some(submit_us + (factor * duration_s * 1e6).round() as u64);
        }
        Ok::<_, Bad>(Some(job))
    }))
}

/// Batch size from a name like `ResNet-18 (batch size 32)`; 0 where it has none.
fn batch_size(job_type: &str) -> u32 {
    let tail = job_type.split_once("(batch size ").map(|(_, tail)| tail);
    tail.and_then(|tail| tail.strip_suffix(')')?.parse().ok()).unwrap_or(0)
}

/// Steps per second of each job type alone, by GPU model.
pub(super) struct Throughputs {
    /// The reference GPU model.
    kind: String,
    by_type: HashMap<String, Vec<Rate>>,
}

struct Rate {
    gpus: u32,
    kind: String,
    steps_per_s: f64,
}

impl Throughputs {
    /// Keeps the rows with consolidated workers and no second job; `kind` is the reference GPU
    /// model.
    pub(super) fn read(path: &Path, kind: &str) -> Result<Self, TraceError> {
        let mut source = Source::open(path, "throughput table")?;
        let header = csv::header(&mut source)?;
        let [gpu, job_type, scale, rate] = header
            .require(["gpu", "job_type", "scale_factor", "steps_per_s"])
            .map_err(|problem| source.error_here(problem))?;
        let (spread, other) = (header.find("unconsolidated"), header.find("other_job_type"));
        let mut by_type: HashMap<String, Vec<Rate>> = HashMap::new();
        let mut known = BTreeSet::new();
        csv::rows(&mut source, &header, ',', |source, row| {
            let take = || {
                let row = row.map_err(Bad::from)?;
                if !known.contains(row.text(gpu)) {
                    known.insert(row.text(gpu).to_owned());
                }
                let alone =
                    row.text_of(other).is_none() && matches!(row.text_of(spread), None | Some("0"));
                if alone {
                    let rates = by_type.entry(row.text(job_type).to_owned()).or_default();
                    let (gpus, steps_per_s) = (row.gpus(scale)?, row.number(rate)?);
                    rates.push(Rate { gpus, kind: row.text(gpu).to_owned(), steps_per_s });
                }
                Ok(true)
            };
            take().map_err(|bad: Bad| source.error_here(bad))
        })?;
        if !by_type.values().flatten().any(|r| r.kind == kind) {
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            return Err(source.whole_file(Problem::NoGpuModel { kind: kind.to_owned(), known }));
        }
        Ok(Self { kind: kind.to_owned(), by_type })
    }

    /// Rates of a job type on this number of GPUs, by GPU model.
    fn rates(&self, job_type: &str, gpus: u32) -> impl Iterator<Item = &Rate> {
        let rates = self.by_type.get(job_type).map_or(&[][..], Vec::as_slice);
        rates.iter().filter(move |r| r.gpus == gpus)
    }

    /// Step time in seconds on this GPU model; `None` if the job cannot run there.
    pub(super) fn step_on(&self, job_type: &str, gpus: u32, kind: &str) -> Option<f64> {
        let rate = self.rates(job_type, gpus).find(|r| r.kind == kind);
        rate.filter(|r| r.steps_per_s > 0.0).map(|r| 1.0 / r.steps_per_s)
    }

    /// Step time in seconds on the reference GPU model.
    pub(super) fn step_s(&self, job_type: &str, gpus: u32) -> Result<f64, Bad> {
        self.step_on(job_type, gpus, &self.kind).ok_or_else(|| {
            let kind = &self.kind;
            let job_type = super::error::shown(job_type);
            let what = format!("{job_type:?} on {gpus} GPUs of model {kind:?}");
            Bad::at("job_type", Problem::NoThroughput(what))
        })
    }

    /// The step time and speeds of a job type on this number of GPUs.
    fn measured(&self, job_type: &str, gpus: u32) -> Result<Measured, Bad> {
        let nearest = self.step_s(job_type, gpus)?;
        let rates: Vec<&Rate> = self.rates(job_type, gpus).collect();
        let (mut up, mut down) = (nearest, nearest);
        let mut near = vec![nearest];
        for _ in 0..4 {
            (up, down) = (up.next_up(), down.next_down());
            near.extend([up, down]);
        }
        let exact = |step_s: &f64| {
            rates.iter().all(|r| relative(r.steps_per_s, *step_s) / step_s == r.steps_per_s)
        };
        let step_s = near.into_iter().find(exact).unwrap_or(nearest);
        let speed = |r: &&Rate| (r.kind.clone(), relative(r.steps_per_s.max(0.0), step_s));
        Ok(Measured { step_s, model_speed: rates.iter().map(speed).collect() })
    }
}

/// The speed of one job type.
struct Measured {
    /// Step time in seconds on the reference GPU model, adjusted by a few units in the last place
    /// if that lets all rates be recovered exactly: the released policies break ties by the last
    /// bit of a rate.
    step_s: f64,
    /// Speed on every GPU model of the table relative to the reference.
    model_speed: Vec<(String, f64)>,
}

/// A rate relative to the reference, chosen so that dividing by the step time recovers the exact
/// rate where possible.
fn relative(steps_per_s: f64, step_s: f64) -> f64 {
    let speed = steps_per_s * step_s;
    let exact = |s: &f64| *s / step_s == steps_per_s;
    [speed, speed.next_up(), speed.next_down()].into_iter().find(exact).unwrap_or(speed)
}
