//! Profiles: what is known of a profile (a model at a batch size on some GPUs) before it runs.

use crate::knobs::{Knobs, is_default};
use crate::performance::goodput::Training;
use crate::performance::latency::Profiled;
use crate::performance::sensitivity::{Host, Sensitivity};
use crate::time::Span;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// The four resources that the stages of a training step use, in stage order.
pub const STAGES: [&str; 4] = ["storage", "cpu", "gpu", "network"];

/// What is known of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Seconds of one step, alone on the reference GPU, gang on as few nodes as possible.
    pub step_s: f64,
    /// Measured speed by GPU model (index of the cluster's GPU model), where it is not the GPU model's own.
    #[serde(rename = "kind_speed", default, skip_serializing_if = "SmallVec::is_empty")]
    pub model_speed: SmallVec<[(u8, f64); 2]>,
    /// Speed when its gang is spread over more nodes than needed, relative to consolidated.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub spread_speed: f64,
    /// What more GPUs than asked for do for an elastic job: n instead of g give (n/g) to the power of
    /// this; [`Self::SCALING`] where not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<f64>,
    /// Share of the largest tensor in all parameters; decides whether spreading hurts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skew: Option<f32>,
    /// Seconds of one step in each of [`STAGES`], where profiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages_s: Option<[f64; 4]>,
    /// Time without progress at the very first start, where it is not the world's usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Span>,
    /// Time without progress at each restart, where it is not the world's usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<Span>,
    /// What it will take of a GPU, where that could be predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Predicted>,
    /// How its speed depends on CPU and host memory, where that was profiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<Box<Sensitivity>>,
    /// How it answers requests, if it is a service; a step is then one batch of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<Serving>,
    /// What another batch size makes of it, where its user allows others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
    /// What was profiled of its latency alone on the reference GPU, if it is a service: measurements that
    /// somebody had to make, so policies count how many they use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Box<[Profiled]>>,
}

/// What is known of a GPU model of service before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serving {
    /// Requests in the batch whose time is the profile's `step_s`.
    pub batch: u32,
    /// Longest that a request waits for others to fill a batch while the GPU could begin.
    pub timeout: Span,
    /// Time from every start, also the first, until it can answer.
    pub warm_up: Span,
    /// GPU memory in MiB without any request in the batch; 0 = not known.
    #[serde(default, skip_serializing_if = "is_default")]
    pub base_mib: f32,
    /// GPU memory in MiB that each request of the largest batch adds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub item_mib: f32,
}

impl Serving {
    /// GPU memory in MiB with batches of up to so many requests; 0 = not known.
    pub fn mem_mib(&self, batch: u32) -> u32 {
        (self.base_mib + self.item_mib * batch as f32).ceil() as u32
    }
}

/// What a profile is expected to take of a GPU that it has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Busy share of the multiprocessors, on average.
    pub sm_util: f64,
    /// The same where it peaks or where the prediction errs: one standard deviation more.
    pub sm_util_max: f64,
    /// Standard deviation of `sm_util`.
    pub std: f64,
    /// Busy share of the memory bandwidth.
    pub dram_util: f64,
    /// GPU memory in MiB, one standard deviation above the expectation.
    pub mem_mib: u32,
}

impl Profile {
    /// Twice the GPUs are 1.87 times as fast: what synchronous training loses on one node, roughly.
    pub const SCALING: f64 = 0.9;

    /// A profile that knows only the length of a step.
    pub fn of_step(step_s: f64) -> Self {
        Self {
            step_s,
            model_speed: SmallVec::new(),
            spread_speed: 1.0,
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

    /// Speed with the CPU and the host memory of these knobs, relative to the usual share of a GPU.
    pub fn fed_speed(&self, knobs: Knobs) -> f64 {
        self.sensitivity.as_ref().map_or(1.0, |s| s.speed(Host::of(knobs)))
    }
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_one(v: &f64) -> bool {
    *v == 1.0
}
