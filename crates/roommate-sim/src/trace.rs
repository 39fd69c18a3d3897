//! Job traces: reading public formats into one representation, generating and describing traces.
//!
//! This file has the representation and the entry point ([`read`]); each format has a file below.
//! Names stay text; the simulator turns them into the core's indices. Reading streams the file, so
//! memory is bounded by the number of jobs.

mod chronus;
mod collect;
mod csv;
mod elasticflow;
mod error;
mod field;
mod gavel;
pub mod gzip;
mod helios;
pub mod in_use;
mod kube;
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
mod remark;
mod sacct;
pub mod stats;
pub mod study;
mod synergy;
pub mod synth;
mod tiresias;

pub use error::{Problem, TraceError};
pub use remark::{Remark, Remarks};

use crate::serving::requests::{Bursts, Requests};
use roommate_core::performance::goodput::Training;
use roommate_core::performance::sensitivity::Sensitivity;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One job of a trace, with names as text.
///
/// Times are microseconds since the start of the trace: the format's own zero, or the first
/// submission where the file has calendar times.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceJob {
    /// Name of the job; unique in its trace.
    pub id: String,
    /// Submission time, in µs since the start of the trace.
    pub submit_us: u64,
    /// GPUs it asks for, at least 1.
    pub gpus: u32,
    /// Most GPUs it can use, at least `gpus`; `None` for a job that is not elastic.
    pub gpus_max: Option<u32>,
    /// Scaling exponent: n GPUs instead of g make the job (n/g)^`scaling` times as fast.
    pub scaling: Option<f64>,
    /// Work in training steps. Where only a duration is known, the duration in seconds.
    pub steps: f64,
    /// Seconds per step alone on the reference GPU; 1 where only a duration is known.
    pub step_s: f64,
    /// The trace's own duration column. In Muri's traces it can differ from `steps × step_s`.
    pub duration_s: f64,
    /// Name of the model it trains.
    pub model: Option<String>,
    /// Batch size; 0 = unknown.
    pub batch: u32,
    /// Storage, CPU, GPU and network time of one step, in seconds.
    pub stages_s: Option<[f64; 4]>,
    /// Team or virtual cluster.
    pub team: Option<String>,
    /// User who submitted it.
    pub user: Option<String>,
    /// Guarantee of the job.
    pub class: TraceClass,
    /// Promised: roommates make its steps at most this many times as long.
    pub max_slowdown: Option<f64>,
    /// Deadline, in the time of `submit_us`; the last one of several.
    pub deadline_us: Option<u64>,
    /// Value of finishing by `deadline_us`.
    pub value: Option<f64>,
    /// Earlier deadlines with greater values, soonest first.
    pub soft_deadlines: Vec<(u64, f64)>,
    /// Weight of its share against other jobs (Gavel's priority weight); 1 where the trace has
    /// none.
    pub weight: f64,
    /// How it ended in the original cluster.
    pub status: Option<Status>,
    /// Queueing time in the original cluster, in seconds.
    pub queue_s: Option<f64>,
    /// Number of attempts in the original cluster; 0 = unknown.
    pub attempts: u32,
    /// GPU memory per GPU in MiB; 0 = unknown.
    pub mem_mib: u32,
    /// CPU request per GPU in thousandths of a core; 0 = unknown.
    pub cpu_milli: u32,
    /// Requested share of each GPU in thousandths; 1000 = whole GPUs.
    pub gpu_milli: u32,
    /// GPU models it may run on; empty = any.
    pub gpu_models: Vec<String>,
    /// Measured speed by GPU model relative to the reference; 0 = cannot run there.
    pub model_speed: Vec<(String, f64)>,
    /// Effect of other batch sizes, where the user allows them; `batch` is the job's own batch
    /// size.
    pub training: Option<Box<Training>>,
    /// Effect of more or less CPU and host memory, where a table has the job's model.
    pub sensitivity: Option<Arc<Sensitivity>>,
    /// Further records of the original cluster. Few traces have them, so they are boxed.
    pub observed: Option<Box<Observed>>,
    /// Set if the job is a service.
    pub service: Option<Box<TraceService>>,
}

/// The parameters of a service beside its name, model and GPUs. Its `duration_s` is how long a run
/// lasts for it at least.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TraceService {
    /// Objective for the 99th percentile of latency, in ms.
    pub slo_ms: Option<f64>,
    /// Longest time a request waits for its batch to fill, in ms; default: a tenth of the SLO.
    pub timeout_ms: Option<f64>,
    /// Seconds from start to the first answer; default: 20.
    pub warm_up_s: Option<f64>,
    /// Seconds per batch alone on the reference GPU; default: as measured for its model.
    pub batch_s: Option<f64>,
    /// Whether `batch_s` was measured on our GPU.
    pub measured: bool,
    /// Request rate as steps: (seconds after submission, requests per second from then on).
    pub load: Vec<(f64, f64)>,
    /// Burstiness of the arrivals, if they are bursty.
    pub bursts: Option<Bursts>,
    /// Name of a file of recorded requests, relative to the trace.
    pub recorded_in: Option<String>,
    /// The requests read from that file.
    pub recorded: Option<Requests>,
}

/// Further records of the original cluster about a job: for studies, not for scheduling.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Observed {
    /// Machines of its last attempt; 0 = unknown.
    pub machines: u32,
    /// Mean utilization of its GPUs over GPUs and time, 0 to 1.
    pub gpu_util: Option<f64>,
    /// Part of the queueing time, in seconds, during which its team was at its quota.
    pub fair_share_s: Option<f64>,
    /// Reason of the failure, in the trace's own words.
    pub failure: Option<String>,
}

impl Observed {
    const NOTHING: &'static Self =
        &Self { machines: 0, gpu_util: None, fair_share_s: None, failure: None };

    /// Boxes the record, or returns `None` if it is empty.
    fn boxed(self) -> Option<Box<Self>> {
        (self != *Self::NOTHING).then(|| Box::new(self))
    }
}

impl TraceJob {
    /// A job with a duration and nothing else; the caller fills in the rest.
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
            max_slowdown: None,
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

    /// Further records of the original cluster; empty if there are none.
    pub fn observed(&self) -> &Observed {
        self.observed.as_deref().unwrap_or(Observed::NOTHING)
    }

    /// Seconds of work alone on the reference GPU.
    pub fn work_s(&self) -> f64 {
        self.steps * self.step_s
    }
}

/// Guarantee of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TraceClass {
    /// The GPUs it asked for, for as long as it runs.
    Guaranteed,
    /// Capacity that guaranteed jobs leave idle.
    BestEffort,
    /// A latency objective: the job serves requests.
    Service,
}

/// How a job ended in its original cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Successfully.
    Passed,
    /// Cancelled by its user.
    Killed,
    /// With an error.
    Failed,
}

/// Gives a field-less enum its names: `ALL`, `name`, `Display` and `FromStr`.
macro_rules! named {
    ($type:ident, $what:literal, $($variant:ident = $name:literal),+ $(,)?) => {
        impl $type {
            /// All variants, in the order in which they are listed to users.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// Name in files and on the command line.
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
    /// The known names.
    pub known: String,
}

impl UnknownName {
    fn new(what: &'static str, text: &str, known: String) -> Self {
        Self { what, name: error::shown(text), known }
    }
}

/// Trace file formats that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Detected from the first line.
    #[default]
    Auto,
    /// Roommate's own format, as CSV or as JSON lines.
    Roommate,
    /// Microsoft Philly: job tables, or the original `cluster_job_log`.
    Philly,
    /// `SenseTime` Helios: the Venus sample, or the original `cluster_log.csv`.
    Helios,
    /// Alibaba PAI 2020: the task sample, or the original headerless `pai_task_table`.
    Pai,
    /// Muri: times in milliseconds, with stage times.
    Muri,
    /// Gavel and Shockwave `.trace` files, or Gavel jobs as CSV. Needs a throughput table.
    Gavel,
    /// Chronus: times in minutes, with deadlines.
    Chronus,
    /// Tiresias: times in seconds.
    Tiresias,
    /// `ElasticFlow`: times in seconds, with deadlines.
    ElasticFlow,
    /// Synergy: times in seconds, work in iterations of a model. Needs a table of models.
    Synergy,
    /// Slurm: what `sacct --parsable2` prints of a cluster's own past.
    Sacct,
    /// Kubernetes: pods, events and audit logs as JSON.
    Kube,
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
    Synergy = "synergy",
    Sacct = "sacct",
    Kube = "kube"
);

/// Options of reading a trace.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// File format.
    pub format: Format,
    /// Drop and count invalid rows instead of stopping at the first.
    pub skip_bad_rows: bool,
    /// Table of steps per second, for traces that give steps without durations.
    pub throughputs: Option<PathBuf>,
    /// Table of model speeds by CPU and host memory.
    pub sensitivity: Option<PathBuf>,
    /// The table's GPU model that serves as the reference GPU.
    pub gpu_model: String,
    /// Most jobs to read, in the order of the file.
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
    /// Jobs sorted by submission time; ties keep the order of the file.
    pub jobs: Vec<TraceJob>,
    /// The detected format, never `Auto`.
    pub format: Format,
    /// Number of invalid rows that were dropped.
    pub dropped: u64,
    /// The first few dropped rows.
    pub first_dropped: Vec<TraceError>,
    /// Calendar time of zero in seconds since 1970 on the cluster's own clock, where the file has
    /// it.
    pub origin_s: Option<u64>,
    /// What was left out of the file or changed, by reason.
    pub remarks: Remarks,
}

impl Trace {
    /// How often a reason occurred.
    pub fn count(&self, remark: Remark) -> u64 {
        self.remarks.get(&remark).copied().unwrap_or(0)
    }
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

/// Measured speeds of models by CPU and host memory per GPU: columns
/// `model,cpus,mem_gb,rel_throughput`.
pub fn sensitivities(path: &Path) -> Result<BTreeMap<String, Arc<Sensitivity>>, TraceError> {
    Ok(synergy::Grids::read(path)?.0)
}

/// Reads each file of recorded requests named by a service, once.
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
