//! Job traces: reading the public formats into one form, inventing new ones, and describing them.
//!
//! Here are the form and the way in ([`read`]); one file per format lies below. Names stay text: turning
//! them into the core's indices is the simulator's job. Reading streams, so memory is bounded by the
//! jobs themselves whatever the file holds.

mod chronus;
mod collect;
mod csv;
mod elasticflow;
mod error;
mod field;
mod gavel;
pub mod gzip;
mod helios;
mod layout;
mod lines;
pub(crate) mod mix;
mod muri;
pub mod native;
mod pai;
pub mod pairs;
mod philly;
mod philly_log;
pub mod recorded;
pub mod stats;
pub mod study;
mod synergy;
pub mod synth;
mod tiresias;

pub use error::{Problem, TraceError};

use crate::serving::requests::{Bursts, Requests};
use roommate_core::performance::goodput::Training;
use roommate_core::performance::sensitivity::Sensitivity;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One job of a trace, names still as text.
///
/// Times are microseconds since the trace began: the format's own zero, or the first submission where the
/// file has calendar times.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceJob {
    /// Name of the job; unique in its trace.
    pub id: String,
    /// When it was submitted.
    pub submit_us: u64,
    /// GPUs it asks for, at least 1.
    pub gpus: u32,
    /// Most GPUs it can use, at least `gpus`; not said for a job that is not elastic.
    pub gpus_max: Option<u32>,
    /// What more GPUs do for it: n instead of g make it (n/g) to the power of this as fast.
    pub scaling: Option<f64>,
    /// Work to do, in training steps. Where only a duration is known it is the duration in seconds.
    pub steps: f64,
    /// Seconds of one step, alone on the reference GPU; 1 where only a duration is known.
    pub step_s: f64,
    /// The trace's own duration column. In Muri's traces it can differ from `steps × step_s`.
    pub duration_s: f64,
    /// What it trains.
    pub model: Option<String>,
    /// Batch size; 0 = unknown.
    pub batch: u32,
    /// Storage, CPU, GPU and network part of one step, in seconds.
    pub stages_s: Option<[f64; 4]>,
    /// Team or virtual cluster.
    pub team: Option<String>,
    /// Who submitted it.
    pub user: Option<String>,
    /// What it is promised.
    pub class: TraceClass,
    /// When it must be done, in the time of `submit_us`. Of several deadlines it is the last.
    pub deadline_us: Option<u64>,
    /// What finishing by `deadline_us` is worth.
    pub value: Option<f64>,
    /// Earlier deadlines that are worth more, with their values, soonest first.
    pub soft_deadlines: Vec<(u64, f64)>,
    /// Share weight against other jobs (Gavel's priority weight); 1 where the trace has none.
    pub weight: f64,
    /// How it ended in the original cluster.
    pub status: Option<Status>,
    /// Seconds it queued in the original cluster.
    pub queue_s: Option<f64>,
    /// Times it was started in the original cluster; 0 = unknown.
    pub attempts: u32,
    /// GPU memory per GPU; 0 = unknown.
    pub mem_mib: u32,
    /// CPU share per GPU in thousandths of a core; 0 = unknown.
    pub cpu_milli: u32,
    /// Part of each GPU that was asked for, in thousandths; 1000 = whole GPUs.
    pub gpu_milli: u32,
    /// GPU models it may run on; empty = any.
    pub gpu_models: Vec<String>,
    /// Measured speed by GPU model relative to the reference; 0 = cannot run there.
    pub model_speed: Vec<(String, f64)>,
    /// What other batch sizes make of it, where its user allows others; `batch` is its own.
    pub training: Option<Box<Training>>,
    /// What its model makes of more or less CPU and host memory, where a table says so.
    pub sensitivity: Option<Arc<Sensitivity>>,
    /// What else the original cluster recorded of it. Few traces have it, so it costs the others a
    /// pointer.
    pub observed: Option<Box<Observed>>,
    /// What it is besides, if it is a service.
    pub service: Option<Box<TraceService>>,
}

/// A service besides its name, model and GPUs. Its `duration_s` is how long a run goes on for it at least.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TraceService {
    /// Latency that its 99th percentile must not exceed.
    pub slo_ms: Option<f64>,
    /// Longest that a request waits for others to fill a batch; a tenth of the SLO, unless said.
    pub timeout_ms: Option<f64>,
    /// Seconds from a start until it answers; 20, unless said.
    pub warm_up_s: Option<f64>,
    /// Seconds of a batch alone on the reference GPU; as measured for its model, unless said.
    pub batch_s: Option<f64>,
    /// Whether that was measured on our GPU.
    pub measured: bool,
    /// Requests a second, from so many seconds after its submission on.
    pub load: Vec<(f64, f64)>,
    /// Whether they come in bursts.
    pub bursts: Option<Bursts>,
    /// Name of a file of recorded requests, beside the trace.
    pub recorded_in: Option<String>,
    /// What is in it.
    pub recorded: Option<Requests>,
}

/// What the original cluster recorded of a job beyond its end: for studies, not for scheduling.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Observed {
    /// Machines of its last attempt; 0 = unknown.
    pub machines: u32,
    /// Share of the time in which its GPUs were busy, mean over GPUs and time, 0 to 1.
    pub gpu_util: Option<f64>,
    /// The part of its queueing during which its team was at its quota.
    pub fair_share_s: Option<f64>,
    /// Reason it failed, in the trace's own words.
    pub failure: Option<String>,
}

impl Observed {
    const NOTHING: &'static Self =
        &Self { machines: 0, gpu_util: None, fair_share_s: None, failure: None };

    /// Boxed, unless nothing was recorded.
    fn boxed(self) -> Option<Box<Self>> {
        (self != *Self::NOTHING).then(|| Box::new(self))
    }
}

impl TraceJob {
    /// A job of which only the duration is known; the rest is for the caller to fill in.
    pub fn new(id: String, submit_us: u64, gpus: u32, duration_s: f64) -> Self {
        Self {
            id,
            submit_us,
            gpus,
            gpus_max: None,
            scaling: None,
            steps: duration_s,
            step_s: 1.0,
            duration_s,
            model: None,
            batch: 0,
            stages_s: None,
            team: None,
            user: None,
            class: TraceClass::Guaranteed,
            deadline_us: None,
            value: None,
            soft_deadlines: Vec::new(),
            weight: 1.0,
            status: None,
            queue_s: None,
            attempts: 0,
            mem_mib: 0,
            cpu_milli: 0,
            gpu_milli: 1000,
            gpu_models: Vec::new(),
            model_speed: Vec::new(),
            observed: None,
            service: None,
            sensitivity: None,
            training: None,
        }
    }

    /// What else was recorded of it in the original cluster.
    pub fn observed(&self) -> &Observed {
        self.observed.as_deref().unwrap_or(Observed::NOTHING)
    }

    /// Seconds of work, alone on the reference GPU.
    pub fn work_s(&self) -> f64 {
        self.steps * self.step_s
    }
}

/// What a job is promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TraceClass {
    /// The GPUs it asked for, for as long as it runs.
    Guaranteed,
    /// What the others leave.
    BestEffort,
    /// A latency: it serves requests.
    Service,
}

/// How a job ended in its original cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// By itself, with success.
    Passed,
    /// By its user.
    Killed,
    /// By an error.
    Failed,
}

/// Gives an enum without fields its names: `ALL`, `name`, `Display` and `FromStr`.
macro_rules! named {
    ($type:ident, $what:literal, $($variant:ident = $name:literal),+ $(,)?) => {
        impl $type {
            /// All of them, in the order they are listed to users.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// The name in files and on the command line.
            pub fn name(self) -> &'static str {
                match self { $($type::$variant => $name),+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::trace::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let found = Self::ALL.iter().copied().find(|x| x.name() == text);
                found.ok_or_else(|| {
                    $crate::trace::UnknownName::new($what, text, [$($name),+].join(", "))
                })
            }
        }
    };
}
use named;

named!(
    TraceClass,
    "class",
    Guaranteed = "guaranteed",
    BestEffort = "best-effort",
    Service = "service"
);
named!(Status, "status", Passed = "passed", Killed = "killed", Failed = "failed");

/// A name that is none of the known ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}, expected one of {known}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    /// The names that would have been right.
    pub known: String,
}

impl UnknownName {
    fn new(what: &'static str, text: &str, known: String) -> Self {
        Self { what, name: error::shown(text), known }
    }
}

/// The layouts of trace files that we read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Told from the first line.
    #[default]
    Auto,
    /// Our own, as CSV or as JSON lines.
    Roommate,
    /// Microsoft Philly: job tables, or the original `cluster_job_log`.
    Philly,
    /// `SenseTime` Helios: the Venus sample, or the original `cluster_log.csv`.
    Helios,
    /// Alibaba PAI 2020: the task sample, or the original headerless `pai_task_table`.
    Pai,
    /// Muri, milliseconds with stage times.
    Muri,
    /// Gavel and Shockwave `.trace` files, or Gavel jobs as CSV. Needs a throughput table.
    Gavel,
    /// Chronus, minutes with deadlines.
    Chronus,
    /// Tiresias, seconds.
    Tiresias,
    /// `ElasticFlow`, seconds with deadlines.
    ElasticFlow,
    /// Synergy, seconds with iterations of models. Needs a table of models.
    Synergy,
}

named!(
    Format,
    "trace format",
    Auto = "auto",
    Roommate = "roommate",
    Philly = "philly",
    Helios = "helios",
    Pai = "pai",
    Muri = "muri",
    Gavel = "gavel",
    Chronus = "chronus",
    Tiresias = "tiresias",
    ElasticFlow = "elasticflow",
    Synergy = "synergy"
);

/// How to read a trace.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// The layout.
    pub format: Format,
    /// Drop rows that are wrong and count them, instead of stopping at the first.
    pub skip_bad_rows: bool,
    /// Table of steps per second, for traces that give steps without durations.
    pub throughputs: Option<PathBuf>,
    /// Table of speeds of models by CPU and host memory.
    pub sensitivity: Option<PathBuf>,
    /// GPU model of that table which counts as the reference GPU.
    pub gpu_model: String,
    /// Stop after so many jobs, counted in the order of the file.
    pub max_jobs: Option<usize>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            format: Format::Auto,
            skip_bad_rows: false,
            throughputs: None,
            sensitivity: None,
            gpu_model: "v100".to_owned(),
            max_jobs: None,
        }
    }
}

/// A trace in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The jobs by submission; equal times stay in the order of the file.
    pub jobs: Vec<TraceJob>,
    /// The layout it was read from, never `Auto`.
    pub format: Format,
    /// Wrong rows that were dropped.
    pub dropped: u64,
    /// The first few of them.
    pub first_dropped: Vec<TraceError>,
    /// The calendar time of zero, in seconds since 1970 on the cluster's own clock, where the file has it.
    pub origin_s: Option<u64>,
    /// Jobs that asked for no GPU, in formats that mix both kinds; they are left out.
    pub cpu_jobs: u64,
}

/// Reads a trace from a plain or gzip-compressed file.
///
/// ```no_run
/// # use std::path::Path;
/// # use roommate_sim::trace;
/// let trace = trace::read(Path::new("trace.csv.gz"), &trace::ReadOptions::default())?;
/// assert!(trace.jobs.is_sorted_by_key(|job| job.submit_us));
/// # Ok::<(), trace::TraceError>(())
/// ```
pub fn read(path: &Path, options: &ReadOptions) -> Result<Trace, TraceError> {
    let mut trace = layout::read(path, options)?;
    if let Some(table) = &options.sensitivity {
        synergy::Grids::read(table)?.tell(&mut trace.jobs);
    }
    read_requests(path, &mut trace.jobs)?;
    Ok(trace)
}

/// Reads the files of recorded requests that services name, each once.
fn read_requests(trace: &Path, jobs: &mut [TraceJob]) -> Result<(), TraceError> {
    let mut known: BTreeMap<String, Requests> = BTreeMap::new();
    for service in jobs.iter_mut().filter_map(|j| j.service.as_deref_mut()) {
        let Some(name) = &service.recorded_in else { continue };
        if !known.contains_key(name) {
            let file = trace.parent().unwrap_or(Path::new("")).join(name);
            known.insert(name.clone(), recorded::read(&file)?);
        }
        service.recorded = known.get(name).cloned();
    }
    Ok(())
}

#[cfg(test)]
mod tests;
