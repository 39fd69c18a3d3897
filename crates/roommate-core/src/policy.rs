//! The one trait, and the registry: names, papers, parameters and builders of all policies. The
//! command line, the documentation and the laws come from the registry.

use crate::plan::Plan;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

mod antman;
mod chronus;
mod fifo;
mod gandiva;
mod gavel;
mod gpulets;
mod gslice;
mod horus;
mod iadeep;
mod mps;
mod mudi;
mod muri;
mod muxflow;
pub mod serving;
mod sjf;
mod srsf;
mod srtf;
mod synergy;
mod tiresias;

/// A scheduling policy: edits a plan when asked.
pub trait Policy: Send {
    /// Edits the plan. Called when something happened that could matter, and at [`Plan::wake_at`].
    fn schedule(&mut self, plan: &mut Plan<'_>);
}

/// Parameters as given by the user: a JSON object.
pub type Params = Map<String, Value>;

/// Reason a policy cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No policy of this name.
    #[error("there is no policy {0:?}")]
    Unknown(String),
    /// A parameter that does not exist or has an impossible value.
    #[error("policy {policy:?}: {what}")]
    Params {
        /// The policy.
        policy: String,
        /// What is wrong.
        what: String,
    },
    /// The policy has no parameters for this published simulator.
    #[error("policy {policy:?} has no parameters for --compat {compat}")]
    Compat {
        /// The policy.
        policy: String,
        /// The published simulator.
        compat: String,
    },
}

/// A policy in the registry.
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Where it was published.
    pub paper: &'static str,
    /// Its source, whose header is its documentation.
    source: &'static str,
    /// Parameters that make it the policy of a published simulator.
    pub compat: &'static [(&'static str, &'static str)],
    /// Parameters that set this entry apart from others of the same file.
    preset: &'static str,
    build: fn(Params) -> Result<Box<dyn Policy>, String>,
    defaults: fn(Params) -> Result<Value, String>,
}

/// Part of a policy that an ablation of it does without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Changing batch sizes.
    BatchTuning,
    /// Predicting slowdowns: choosing a device by them, and waiting because of them.
    Prediction,
    /// Choosing who shares a group by what the group gains.
    Matching,
    /// Seating a group in the order with the shortest step.
    StageOrder,
    /// Giving jobs more CPU and host memory than the share of their GPUs.
    AboveShare,
    /// Giving jobs less CPU and host memory than they ask for.
    BelowDemand,
}

/// A policy that exists to show what a part of another one is worth.
#[derive(Clone, Copy, Debug)]
pub struct Ablation {
    name: &'static str,
    /// The policy that has the part.
    pub of: &'static str,
    /// What the ablation never does.
    pub lacks: Part,
}

const ABLATIONS: &[Ablation] = &[
    Ablation { name: "muri-l-worst-ordering", of: "muri-l", lacks: Part::StageOrder },
    Ablation { name: "muri-l-no-blossom", of: "muri-l", lacks: Part::Matching },
    Ablation { name: "synergy-proportional", of: "synergy-tune", lacks: Part::AboveShare },
    Ablation { name: "synergy-greedy", of: "synergy-tune", lacks: Part::BelowDemand },
    Ablation { name: "iadeep-no-tuner", of: "iadeep", lacks: Part::BatchTuning },
    Ablation { name: "iadeep-no-predictor", of: "iadeep", lacks: Part::Prediction },
];

impl Entry {
    /// Whether it only shows what a part of another policy is worth; `compare` leaves it out unless it
    /// is named.
    pub fn is_ablation(&self) -> bool {
        self.ablation().is_some()
    }

    /// What it does without, if it is an ablation.
    pub fn ablation(&self) -> Option<Ablation> {
        ABLATIONS.iter().find(|a| a.name == self.name).copied()
    }

    /// The parameters that set it apart from other entries of the same file.
    pub fn preset(&self) -> Params {
        object(self.preset)
    }

    /// The policy with its defaults, then these parameters.
    pub fn build(&self, params: &Params) -> Result<Box<dyn Policy>, PolicyError> {
        (self.build)(self.merged(params)).map_err(|what| self.wrong(what))
    }

    /// All parameters and their values when these are given.
    pub fn params(&self, params: &Params) -> Result<Value, PolicyError> {
        (self.defaults)(self.merged(params)).map_err(|what| self.wrong(what))
    }

    /// Its parameters in a published simulator.
    pub fn compat_params(&self, compat: &str) -> Result<Params, PolicyError> {
        let known = self.compat.iter().find(|(name, _)| *name == compat);
        let (_, text) = known.ok_or_else(|| PolicyError::Compat {
            policy: self.name.into(),
            compat: compat.into(),
        })?;
        Ok(object(text))
    }

    /// Its documentation: the header of its file.
    pub fn doc(&self) -> String {
        let header = self.source.lines().map_while(|l| l.strip_prefix("//!"));
        let mut text = String::new();
        for line in header {
            text.push_str(line.strip_prefix(' ').unwrap_or(line));
            text.push('\n');
        }
        text
    }

    fn merged(&self, params: &Params) -> Params {
        let mut all = self.preset();
        all.extend(params.clone());
        all
    }

    fn wrong(&self, what: String) -> PolicyError {
        PolicyError::Params { policy: self.name.into(), what }
    }
}

fn object(text: &str) -> Params {
    serde_json::from_str(text).expect("presets in the registry are JSON objects")
}

/// Reads parameters strictly: an unknown name is an error that lists the known ones.
fn read<P: DeserializeOwned>(params: Params) -> Result<P, String> {
    serde_json::from_value(Value::Object(params)).map_err(|e| e.to_string())
}

fn shown<P: DeserializeOwned + Serialize>(params: Params) -> Result<Value, String> {
    serde_json::to_value(read::<P>(params)?).map_err(|e| e.to_string())
}

macro_rules! entry {
    ($file:ident, $name:literal, preset: $preset:literal, summary: $summary:literal, paper: $paper:literal, compat: $compat:expr) => {
        Entry {
            name: $name,
            summary: $summary,
            paper: $paper,
            source: include_str!(concat!("policy/", stringify!($file), ".rs")),
            compat: $compat,
            preset: $preset,
            build: |params| Ok(Box::new($file::build(read(params)?)?)),
            defaults: shown::<$file::Params>,
        }
    };
}

/// All policies, in the order in which they are shown.
pub static POLICIES: &[Entry] = &[
    entry!(fifo, "fifo", preset: r"{}",
        summary: "first come, first served; nobody overtakes",
        paper: "-", compat: &[]),
    entry!(fifo, "fifo-backfill", preset: r#"{"backfill": true}"#,
        summary: "first come, first served; smaller jobs fill the holes",
        paper: "-", compat: &[]),
    entry!(sjf, "sjf", preset: r"{}",
        summary: "shortest declared job first, never preempts",
        paper: "-", compat: &[]),
    entry!(srtf, "srtf", preset: r"{}",
        summary: "shortest remaining time first, preempts",
        paper: "-", compat: &[("muri", r#"{"rule": "first_fit", "repack": true}"#)]),
    entry!(srsf, "srsf", preset: r"{}",
        summary: "shortest remaining service (time x GPUs) first, preempts",
        paper: "-", compat: &[("muri", r#"{"rule": "first_fit", "repack": true}"#)]),
    entry!(tiresias, "tiresias", preset: r"{}",
        summary: "least attained service in discrete queues, needs no durations",
        paper: "Gu et al., Tiresias, NSDI 2019",
        compat: &[("muri", r#"{"bounds_gpu_s": [3250, 7200], "placement": "count", "whole_second_wakes": true}"#)]),
    entry!(tiresias, "tiresias-gittins", preset: r#"{"order": "gittins"}"#,
        summary: "as tiresias, ordered by the Gittins index of past jobs",
        paper: "Gu et al., Tiresias, NSDI 2019", compat: &[]),
    entry!(gandiva, "gandiva", preset: r"{}",
        summary: "nobody queues: jobs take turns, and packs and moves that were measured to help are kept",
        paper: "Xiao et al., Gandiva, OSDI 2018", compat: &[]),
    entry!(gandiva, "gandiva-tiresias-style",
        preset: r#"{"pack": false, "max_height": 65535, "balance_s": 10.0, "cool_s": 0.0, "defrag_stop": 1.0, "grow": false}"#,
        summary: "as the Tiresias simulator has gandiva: turns only, and nodes by each class's share of the demand",
        paper: "Xiao et al., Gandiva, OSDI 2018; Gu et al., Tiresias, NSDI 2019", compat: &[]),
    entry!(muri, "muri-s", preset: r"{}",
        summary: "interleaves the stages of up to four jobs, shortest remaining service first",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: &[("muri", r#"{"weight": "efficiency", "matcher": "released", "guard": false, "budget": null, "fill": false, "repack": true}"#)]),
    entry!(muri, "muri-l", preset: r#"{"urgency": "attained"}"#,
        summary: "the same, least attained service first, needs no durations",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: &[("muri", r#"{"weight": "efficiency", "matcher": "released", "guard": false, "budget": null, "fill": false, "repack": true}"#)]),
    entry!(muri, "muri-l-worst-ordering", preset: r#"{"urgency": "attained", "worst_order": true}"#,
        summary: "an ablation of muri-l: groups sit in the worst order",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: &[("muri", r#"{"weight": "efficiency", "matcher": "released", "guard": false, "budget": null, "fill": false, "repack": true}"#)]),
    entry!(muri, "muri-l-no-blossom", preset: r#"{"urgency": "attained", "grouping": "in_order"}"#,
        summary: "an ablation of muri-l: neighbours in line are grouped instead of matched",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: &[("muri", r#"{"guard": false, "budget": null, "fill": false, "repack": true, "inflation": [1.310344827586207, 1.4778325123152711, 1.2807881773399017]}"#)]),
    entry!(antman, "antman", preset: r"{}",
        summary: "guaranteed jobs run as if alone, best-effort ones in the gaps they leave",
        paper: "Xiao et al., AntMan, OSDI 2020",
        compat: &[("muri", r#"{"mode": "static"}"#)]),
    entry!(gavel, "gavel", preset: r"{}",
        summary: "max-min fairness of effective speeds over GPU kinds, realised by rounds",
        paper: "Narayanan et al., Gavel, OSDI 2020", compat: &[("gavel", r#"{"released": true}"#)]),
    entry!(gavel, "gavel-packed", preset: r#"{"packed": true}"#,
        summary: "the same, and two jobs share GPUs where they are known to gain by it",
        paper: "Narayanan et al., Gavel, OSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)]),
    entry!(gavel, "gavel-makespan", preset: r#"{"objective": "makespan"}"#,
        summary: "the same rounds, so that all jobs are done as early as possible",
        paper: "Narayanan et al., Gavel, OSDI 2020", compat: &[("gavel", r#"{"released": true}"#)]),
    entry!(gavel, "gavel-finish-time", preset: r#"{"objective": "finish_time"}"#,
        summary: "the same rounds, so that nobody ends much later than with an equal part",
        paper: "Narayanan et al., Gavel, OSDI 2020; Mahajan et al., Themis, NSDI 2020",
        compat: &[("gavel", r#"{"released": true}"#)]),
    entry!(gavel, "gavel-fifo", preset: r#"{"objective": "fifo"}"#,
        summary: "the same rounds, first come, first served on the fastest kind that is free",
        paper: "Narayanan et al., Gavel, OSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)]),
    entry!(gavel, "gavel-allox", preset: r#"{"objective": "allox"}"#,
        summary: "the same rounds, the best queue behind every GPU, so that the mean completion time is least",
        paper: "Narayanan et al., Gavel, OSDI 2020; Le et al., AlloX, EuroSys 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)]),
    entry!(gavel, "gavel-couples", preset: r#"{"objective": "couples"}"#,
        summary: "the same rounds, equal parts; who shares is drawn, and couples that lose by it part",
        paper: "Narayanan et al., Gavel, OSDI 2020; Xiao et al., Gandiva, OSDI 2018",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)]),
    entry!(horus, "horus", preset: r"{}",
        summary: "packs by utilisation predicted from the architecture, up to just under 100 %",
        paper: "Yeung et al., Horus, TPDS 2022", compat: &[]),
    entry!(horus, "horus-plus", preset: r#"{"queues": 3}"#,
        summary: "the same with lines of similar jobs, the one that waited most first",
        paper: "Yeung et al., Horus, TPDS 2022", compat: &[]),
    entry!(synergy, "synergy-proportional", preset: r#"{"mechanism": "proportional"}"#,
        summary: "every job gets the CPU and memory of its GPUs",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: &[("synergy", r#"{"layout": "first_fit", "fill": false, "top_up": false, "repack": true, "as_released": true}"#)]),
    entry!(synergy, "synergy-greedy", preset: r#"{"mechanism": "greedy"}"#,
        summary: "every job gets the CPU and memory that it asks for, or waits",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: &[("synergy", r#"{"layout": "first_fit", "fill": false, "top_up": false, "repack": true, "as_released": true}"#)]),
    entry!(synergy, "synergy-tune", preset: r#"{"mechanism": "tune"}"#,
        summary: "CPU and memory by what jobs make of them, nobody below its share",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: &[("synergy", r#"{"layout": "first_fit", "fill": false, "top_up": false, "repack": true, "as_released": true}"#)]),
    entry!(synergy, "synergy-opt", preset: r#"{"mechanism": "opt"}"#,
        summary: "CPU and memory such that the sum of all speeds is largest",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: &[("synergy", r#"{"layout": "first_fit", "fill": false, "top_up": false, "repack": true, "as_released": true}"#)]),
    entry!(chronus, "chronus", preset: r"{}",
        summary: "promises deadlines that fit on a time-line of leases; the rest runs in what is left",
        paper: "Gao et al., Chronus, SoCC 2021", compat: &[]),
    entry!(mps, "mps", preset: r"{}",
        summary: "up to three tasks on a GPU at once, unlimited, the emptiest GPU first",
        paper: "-", compat: &[]),
    entry!(mps, "mps-split", preset: r#"{"sharing": "split", "max_tasks": 2}"#,
        summary: "two tasks on a GPU, each confined to a half of it for good",
        paper: "-", compat: &[]),
    entry!(mps, "time-slicing", preset: r#"{"sharing": "turns"}"#,
        summary: "up to three tasks on a GPU, by turns in the driver's time slices",
        paper: "-", compat: &[]),
    entry!(mps, "random-colocate", preset: r#"{"choice": "random"}"#,
        summary: "up to three tasks on a GPU at once, on a random one with room",
        paper: "-", compat: &[]),
    entry!(mps, "kernel-est", preset: r#"{"choice": "predicted"}"#,
        summary: "up to three tasks on a GPU at once, where the slowdown predicted from utilisation is least",
        paper: "Xu et al., HotCloud 2019", compat: &[]),
    entry!(iadeep, "iadeep", preset: r"{}",
        summary: "shares GPUs where that harms least, and tunes the batch sizes of roommates together",
        paper: "Chen et al., IADeep, SC 2023", compat: &[]),
    entry!(iadeep, "iadeep-no-tuner", preset: r#"{"tune": false}"#,
        summary: "an ablation of iadeep: batch sizes stay as they are",
        paper: "Chen et al., IADeep, SC 2023", compat: &[]),
    entry!(iadeep, "iadeep-no-predictor", preset: r#"{"predictor": "off", "admission": false}"#,
        summary: "an ablation of iadeep: the device with the fewest tenants, and nobody waits for a better one",
        paper: "Chen et al., IADeep, SC 2023", compat: &[]),
    entry!(mudi, "mudi", preset: r"{}",
        summary: "one service and training on each GPU; batch and share tuned to the service's objective",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[]),
    entry!(mudi, "mudi-published",
        preset: r#"{"slo_model": "published", "curve": "share", "score": "slope", "batches": [16, 32, 64, 128, 256, 512], "joint": false, "calm_s": 0.0, "max_training": 1}"#,
        summary: "the same as printed: no fill or waiting time, search at the knee",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[]),
    entry!(gslice, "gslice-like", preset: r"{}",
        summary: "shares and batches of services by feedback, training on the emptiest GPU",
        paper: "Dhakal et al., GSLICE, SoCC 2020", compat: &[]),
    entry!(gpulets, "gpulets-like", preset: r"{}",
        summary: "partitions of a few sizes from profiled throughput, training by best fit",
        paper: "Choi et al., gpulets, USENIX ATC 2022", compat: &[]),
    entry!(muxflow, "muxflow-like", preset: r"{}",
        summary: "services have what they are busy with, training is matched to what is left",
        paper: "Zhao et al., MuxFlow, 2023", compat: &[]),
];

/// The policy of this name.
pub fn find(name: &str) -> Result<&'static Entry, PolicyError> {
    POLICIES.iter().find(|e| e.name == name).ok_or_else(|| PolicyError::Unknown(name.into()))
}
