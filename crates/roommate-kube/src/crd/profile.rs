//! `GpuProfile`: what is known of a kind of work before it runs.

use crate::crd::condition;
use crate::world::Expected;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use roommate_core::number::Positive;
use roommate_core::performance::goodput::{LrRule, Noise, Training};
use roommate_core::profile::{Profile, Serving};
use roommate_core::time::Span;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The largest batch size.
const MOST_BATCH: u32 = 1 << 24;

/// What is known of a kind of work before it runs. Pods name it by the annotation
/// roommate.dev/profile. What is not given is learned while they run.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "roommate.dev",
    version = "v1alpha1",
    kind = "GpuProfile",
    plural = "gpuprofiles",
    shortname = "gpup",
    category = "roommate",
    status = "GpuProfileStatus",
    derive = "PartialEq",
    doc = "What is known of a kind of work. Pods name it by the annotation roommate.dev/profile.",
    printcolumn(name = "Step-Seconds", type_ = "number", json_path = ".spec.stepSeconds"),
    printcolumn(name = "Memory-MiB", type_ = "integer", json_path = ".spec.memoryMiB"),
    printcolumn(name = "Batch", type_ = "integer", json_path = ".spec.batch.usual"),
    printcolumn(
        name = "Known",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Known\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("!(has(self.batch) && has(self.service))")
    .message("batch is for training and service for services: give one of them"))]
#[serde(rename_all = "camelCase")]
pub struct GpuProfileSpec {
    /// Seconds of one step alone on a GPU of the slowest model of the cluster; for a service, of
    /// one full batch of requests. If not given it is measured while pods run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1_000_000.0))]
    #[x_kube(validation = Rule::new("self > 0.0").message("expected seconds above 0"))]
    pub step_seconds: Option<f64>,
    /// Memory that it takes of each GPU, MiB, for pods without the annotation roommate.dev/gpu-mem.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 1, max = 4_000_000))]
    pub memory_mib: Option<u32>,
    /// For training: batch sizes per GPU that its user allows. Policies that tune batch sizes stay
    /// within them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// For services: how they batch requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
}

/// Batch sizes per GPU.
#[derive(KubeSchema, Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[x_kube(validation = Rule::new("self.least <= self.usual && self.usual <= self.most")
    .message("expected least <= usual <= most"))]
#[serde(rename_all = "camelCase")]
pub struct Batch {
    /// Its own batch size; in a profile, that with which stepSeconds was measured.
    #[schemars(with = "i32", range(min = 1, max = 16_777_216))]
    pub usual: u32,
    /// The smallest that may be used.
    #[schemars(with = "i32", range(min = 1, max = 16_777_216))]
    pub least: u32,
    /// The largest that may be used.
    #[schemars(with = "i32", range(min = 1, max = 16_777_216))]
    pub most: u32,
}

impl FromStr for Batch {
    type Err = String;

    /// `32..64..256`: the least, the usual and the most.
    fn from_str(text: &str) -> Result<Self, String> {
        let sizes: Option<Vec<u32>> = text.split("..").map(|n| n.trim().parse().ok()).collect();
        match sizes.as_deref() {
            Some(&[least, usual, most])
                if 1 <= least && least <= usual && usual <= most && most <= MOST_BATCH =>
            {
                Ok(Self { usual, least, most })
            }
            _ => Err(format!(
                "expected the least, its own and the most, such as 32..64..256, found {text:?}"
            )),
        }
    }
}

impl fmt::Display for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}..{}", self.least, self.usual, self.most)
    }
}

impl Batch {
    /// What the engine may know of it: noise and memory are measured, and the SDK adapts the
    /// learning rate.
    pub fn training(&self) -> Training {
        Training {
            batch: self.usual,
            batch_min: self.least,
            batch_max: self.most,
            lr: LrRule::default(),
            noise: Noise::default(),
            memory: Vec::new(),
        }
    }
}

/// How a service batches requests.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// Requests in its largest batch.
    #[schemars(with = "i32", range(min = 1, max = 65_536))]
    pub max_batch: u32,
    /// Milliseconds that a request waits for others while the GPU is idle.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 60_000.0))]
    pub fill_milliseconds: f64,
    /// Seconds from a start until it can answer.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 86_400.0))]
    pub warm_up_seconds: f64,
}

/// Whether the scheduler knows it.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuProfileStatus {
    /// The generation of the spec that the scheduler knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Known`: whether the scheduler decides with it. Its reasons are `Read` and `Invalid`.
    #[schemars(schema_with = "crate::crd::conditions")]
    pub conditions: Vec<Condition>,
}

impl GpuProfileSpec {
    /// What the engine may know of it; or what is wrong with it.
    pub fn expected(&self) -> Result<Expected, String> {
        let step_s = self.step_seconds;
        let serving = |service: &Service| Serving {
            batch: service.max_batch,
            timeout: Span::from_secs(service.fill_milliseconds / 1e3),
            warm_up: Span::from_secs(service.warm_up_seconds),
            base_mib: self.memory_mib.unwrap_or(0) as f32,
            item_mib: 0.0,
        };
        let profile = Profile {
            step_s: Positive::of(step_s.unwrap_or(Profile::UNKNOWN_STEP_S)),
            step_unknown: step_s.is_none(),
            training: self.batch.as_ref().map(Batch::training),
            serving: self.service.as_ref().map(serving),
            ..Profile::of_step(Profile::UNKNOWN_STEP_S)
        };
        profile.check()?;
        Ok(Expected { profile, mem_mib: self.memory_mib.unwrap_or(0) })
    }
}

impl GpuProfile {
    /// Its status.
    pub fn told(&self) -> GpuProfileStatus {
        let generation = self.metadata.generation;
        let before = self.status.as_ref().map_or(&[][..], |status| &status.conditions);
        let is = self.spec.expected();
        let told = match &is {
            Ok(_) => ("Read", "counts for the pods that name it".to_string()),
            Err(why) => ("Invalid", (*why).clone()),
        };
        let known = condition(before, "Known", is.is_ok(), told, generation);
        GpuProfileStatus { observed_generation: generation, conditions: vec![known] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(spec: serde_json::Value) -> Expected {
        serde_json::from_value::<GpuProfileSpec>(spec).unwrap().expected().unwrap()
    }

    #[test]
    fn batch_sizes_are_written_from_the_least_to_the_most() {
        let batch: Batch = "32..64..256".parse().unwrap();
        assert_eq!(batch, Batch { least: 32, usual: 64, most: 256 });
        assert_eq!(batch.to_string(), "32..64..256");
        for wrong in ["", "64", "32..256", "64..32..256", "0..1..2", "1..2..99999999", "1..x..3"] {
            assert!(wrong.parse::<Batch>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_given_is_learned() {
        let nothing = read(json!({}));
        assert!(nothing.profile.step_unknown && nothing.profile.training.is_none());
        assert_eq!(nothing.mem_mib, 0);
        let full = read(json!({"stepSeconds": 0.25, "memoryMiB": 9000,
                               "batch": {"usual": 32, "least": 16, "most": 64}}));
        assert_eq!((full.profile.step_s.get(), full.profile.step_unknown), (0.25, false));
        assert_eq!(full.mem_mib, 9000);
        let batch = full.profile.training.unwrap();
        assert_eq!((batch.batch, batch.batch_min, batch.batch_max), (32, 16, 64));
        let service = read(json!({"service": {"maxBatch": 8, "warmUpSeconds": 2}}));
        let serving = service.profile.serving.unwrap();
        assert_eq!((serving.batch, serving.warm_up), (8, Span(2_000_000)));
    }
}
