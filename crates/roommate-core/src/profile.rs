//! Profiles: what is known of a kind of work (a model at a batch size on some GPUs) before it runs.

use crate::idx::ProfileIdx;
use crate::knobs::{Knobs, is_default};
use crate::number::{Number, Positive};
use crate::performance::goodput::Training;
use crate::performance::sensitivity::{Host, Sensitivity};
use crate::time::Span;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// The four resources that the stages of a training step use, in stage order.
pub const STAGES: [&str; 4] = ["storage", "cpu", "gpu", "network"];

/// What is known of a kind of work before it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Seconds of one step, alone on the reference GPU, with the gang on as few nodes as possible.
    pub step_s: Positive,
    /// Whether `step_s` says nothing: the length of a step is then learned from samples
    /// ([`crate::performance::solo`]), and `step_s` only stands for it until the first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub step_unknown: bool,
    /// The first profile of the same kind of work (model and batch size), where it is another one:
    /// profiles of a kind differ in the length of their steps only, so that what is measured of
    /// counters and roommates holds for all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ProfileIdx>,
    /// Measured speed by GPU model (index into the cluster's models), where it differs from the
    /// model's default.
    #[serde(rename = "kind_speed", default, skip_serializing_if = "SmallVec::is_empty")]
    pub model_speed: SmallVec<[(u8, Positive); 2]>,
    /// Speed with the gang on more nodes than needed, relative to a consolidated gang.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub spread_speed: Positive,
    /// Exponent of elastic scaling: n GPUs where g were requested give the speed (n/g) to the power
    /// of this; [`Self::SCALING`] where not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<f64>,
    /// Size of the largest tensor relative to all parameters; Tiresias consolidates skewed models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skew: Option<f32>,
    /// Seconds of one step in each of [`STAGES`], where profiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages_s: Option<[Number; 4]>,
    /// Time without progress at the first start, where it differs from the world's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Span>,
    /// Time without progress at each restart, where it differs from the world's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<Span>,
    /// Predicted GPU usage, where a prediction exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Predicted>,
    /// How its speed depends on CPU and host memory, where profiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<Box<Sensitivity>>,
    /// Batching and memory of a service; a step is then one batch of requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<Serving>,
    /// How other batch sizes change throughput and convergence, where its user allows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
    /// Profiled latency of a service, alone on the reference GPU. Each point is a measurement that
    /// costs GPU time, so policies report how many they use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Box<[Profiled]>>,
}

/// A profiled point of a service that has the GPU for itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profiled {
    /// Requests in the batch.
    pub batch: u32,
    /// Share of the multiprocessors, permille.
    pub sm_permille: u16,
    /// Seconds of the batch.
    pub seconds: f64,
}

/// What is known of a service before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serving {
    /// Requests per batch at which the profile's `step_s` was measured.
    pub batch: u32,
    /// Longest time a request waits for others to fill a batch while the GPU is idle.
    pub timeout: Span,
    /// Time from every start, including the first, until it can answer requests.
    pub warm_up: Span,
    /// GPU memory in MiB with an empty batch; 0 = not known.
    #[serde(default, skip_serializing_if = "is_default")]
    pub base_mib: f32,
    /// GPU memory in MiB per request in the largest batch.
    #[serde(default, skip_serializing_if = "is_default")]
    pub item_mib: f32,
}

impl Serving {
    /// GPU memory in MiB with batches of up to this many requests; 0 = not known.
    pub fn mem_mib(&self, batch: u32) -> u32 {
        (self.base_mib + self.item_mib * batch as f32).ceil() as u32
    }
}

/// Predicted usage of a GPU by a profile that runs alone on it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Mean busy share of the SMs.
    pub sm_util: f64,
    /// Upper estimate of the busy share of the SMs: the mean plus one standard deviation.
    pub sm_util_max: f64,
    /// Standard deviation of `sm_util`.
    pub std: f64,
    /// Busy share of the memory bandwidth.
    pub dram_util: f64,
    /// GPU memory in MiB, one standard deviation above the mean.
    pub mem_mib: u32,
}

impl Profile {
    /// Twice the GPUs are 1.87 times as fast: the approximate loss of synchronous training on one
    /// node.
    pub const SCALING: f64 = 0.9;

    /// A profile of which only the length of a step is known.
    pub fn of_step(step_s: f64) -> Self {
        Self {
            step_s: Positive::of(step_s),
            step_unknown: false,
            kind: None,
            model_speed: SmallVec::new(),
            spread_speed: one(),
            scaling: None,
            skew: None,
            stages_s: None,
            start: None,
            restart: None,
            predicted: None,
            sensitivity: None,
            serving: None,
            training: None,
            latency: None,
        }
    }

    /// The length of a step of a profile of which none is known, in seconds.
    pub const UNKNOWN_STEP_S: f64 = 1.0;

    /// The same profile as somebody sees it who does not know how long its steps are, on any GPU.
    /// What is relative to the length of a step stays.
    pub fn with_unknown_step(&self) -> Self {
        Self {
            step_s: Positive::of(Self::UNKNOWN_STEP_S),
            step_unknown: true,
            model_speed: SmallVec::new(),
            stages_s: None,
            predicted: None,
            latency: None,
            ..self.clone()
        }
    }

    /// Whether its kind of work is one that a profile with this index may have: its own, or that of
    /// an earlier one.
    pub fn has_kind_before(&self, idx: ProfileIdx) -> bool {
        self.kind.is_none_or(|kind| kind < idx)
    }

    /// What is wrong with those of its numbers that no type keeps within bounds; such a profile is
    /// neither written into a journal nor read from one.
    pub fn check(&self) -> Result<(), &'static str> {
        // Lists all fields, so that a new one does not compile before it is decided here.
        let Self {
            scaling,
            skew,
            predicted,
            serving,
            training,
            latency,
            step_s: _,
            step_unknown: _,
            kind: _,
            model_speed: _,
            spread_speed: _,
            stages_s: _,
            start: _,
            restart: _,
            sensitivity: _,
        } = self;
        if scaling.is_some_and(|s| !(0.0..=2.0).contains(&s)) {
            return Err("a profile whose scaling is not from 0 to 2");
        }
        let floats = predicted.iter().flat_map(|p| [p.sm_util, p.sm_util_max, p.std, p.dram_util]);
        let floats = floats.chain(latency.iter().flatten().map(|p| p.seconds));
        let small = serving.iter().flat_map(|s| [s.base_mib, s.item_mib]).chain(*skew);
        let small = small.chain(training.iter().flat_map(|t| [t.noise.start, t.noise.end]));
        let mut all = floats.chain(small.map(f64::from));
        if all.all(f64::is_finite) { Ok(()) } else { Err("a profile with an infinite number") }
    }

    /// Measured speed on a GPU model, if it was measured.
    pub fn speed_on(&self, gpu_model: u8) -> Option<f64> {
        self.model_speed.iter().find(|(k, _)| *k == gpu_model).map(|(_, s)| s.get())
    }

    /// Speed with the CPU and host memory of these knobs, relative to a GPU's proportional share.
    pub fn fed_speed(&self, knobs: Knobs) -> f64 {
        self.sensitivity.as_ref().map_or(1.0, |s| s.speed(Host::of(knobs)))
    }
}

fn one() -> Positive {
    Positive::of(1.0)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_one(v: &Positive) -> bool {
    *v == 1.0
}
