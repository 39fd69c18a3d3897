//! Jobs: what the user asked for ([`Spec`], constant) and the current state of each ([`Job`]).

use crate::idx::{GpuSet, ProfileIdx, TeamIdx};
use crate::knobs::Knobs;
use crate::number::Number;
use crate::performance::progress::Meter;
use crate::reason::Reason;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

/// The service class of a job: what it is guaranteed when GPUs are short.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Training with guaranteed resources.
    #[default]
    Guaranteed,
    /// Training that uses idle resources and is preempted or throttled first.
    BestEffort,
    /// Inference that must keep a latency SLO.
    Service,
}

/// What is promised to a job that is said to be guaranteed: roommates make its steps at most this
/// many times as long.
pub const GUARANTEED_SLOWDOWN: f64 = 1.5;

/// A service level objective for latency.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slo {
    /// The 99th percentile of latency must stay at or below this, µs.
    pub p99_us: u32,
}

/// How many failures of its own a job may have and still be retried, by the class of the last
/// failure. Serialized as one number where the classes do not differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(from = "RetriesForm", into = "RetriesForm")]
pub struct Retries {
    /// Retries after an error in the user's code or input, which is likely to repeat.
    pub user: u16,
    /// Retries after an infrastructure error, which is likely to be transient.
    pub infra: u16,
    /// Retries after an error of unknown cause.
    pub unknown: u16,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum RetriesForm {
    Same(u16),
    ByClass { user: u16, infra: u16, unknown: u16 },
}

impl From<u16> for Retries {
    fn from(all: u16) -> Self {
        Self { user: all, infra: all, unknown: all }
    }
}

impl From<RetriesForm> for Retries {
    fn from(form: RetriesForm) -> Self {
        match form {
            RetriesForm::Same(all) => all.into(),
            RetriesForm::ByClass { user, infra, unknown } => Self { user, infra, unknown },
        }
    }
}

impl From<Retries> for RetriesForm {
    fn from(retries: Retries) -> Self {
        let Retries { user, infra, unknown } = retries;
        if retries == unknown.into() {
            Self::Same(unknown)
        } else {
            Self::ByClass { user, infra, unknown }
        }
    }
}

impl Retries {
    /// Whether a failure for this reason counts as one of the job's own. Losing a node, or failing
    /// because a roommate failed, does not.
    pub fn counts(reason: Reason) -> bool {
        !matches!(reason, Reason::NodeLost(_) | Reason::RoommateFailed)
    }

    /// Whether a job is given up when it fails for this reason. `failures` are those that count
    /// ([`Self::counts`]), this one included.
    pub fn is_exhausted(self, failures: u16, reason: Reason) -> bool {
        let limit = match reason {
            Reason::UserError => self.user,
            Reason::InfraError | Reason::StartFailed => self.infra,
            _ => self.unknown,
        };
        Self::counts(reason) && failures > limit
    }
}

/// What the user asked for. Constant after submission.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// GPUs it needs to start, all or nothing (a gang).
    pub gpus: u16,
    /// Most GPUs it can use; equal to `gpus` for a job that is not elastic.
    pub gpus_max: u16,
    /// The knobs that it requests on each GPU.
    #[serde(default)]
    pub knobs: Knobs,
    /// Its profile: what is known of it before it runs.
    pub profile: ProfileIdx,
    /// The team that owns it.
    #[serde(default)]
    pub team: TeamIdx,
    /// What it is guaranteed when GPUs are short.
    #[serde(default)]
    pub class: Class,
    /// Total steps, as declared. Policies that may not know job lengths do not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Number>,
    /// Seconds it takes alone, as estimated by its user; may differ from `work` × the profile's
    /// step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared_s: Option<Number>,
    /// When it has to finish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
    /// For a job with several deadlines, the value of finishing by each, earliest and most valuable
    /// first; `deadline` is the last of them.
    #[serde(rename = "worth", default, skip_serializing_if = "Vec::is_empty")]
    pub deadline_values: Vec<(Time, Number)>,
    /// The latency that a service has to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slo: Option<Slo>,
    /// Promised: roommates make its steps at most this many times as long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<Number>,
    /// Its weight in weighted fair sharing; 1 is the default.
    #[serde(default = "usual_weight", skip_serializing_if = "is_usual_weight")]
    pub weight: Number,
    /// Bit mask of the GPU models that it may run on.
    #[serde(rename = "kinds", default = "any_model", skip_serializing_if = "is_any_model")]
    pub gpu_models: u32,
    /// How often it is retried after failures of its own.
    #[serde(default)]
    pub retries: Retries,
    /// GPUs of one of its tasks, which have to be on one node; 1 = each GPU may be anywhere.
    #[serde(default = "one_gpu", skip_serializing_if = "is_one_gpu")]
    pub gpus_per_task: u16,
}

impl Spec {
    /// A training job of `gpus` whole GPUs with `work` steps and defaults for the rest.
    pub fn training(gpus: u16, work: f64, profile: ProfileIdx) -> Self {
        Self {
            gpus,
            gpus_max: gpus,
            knobs: Knobs::WHOLE,
            profile,
            team: TeamIdx(0),
            class: Class::Guaranteed,
            work: Some(Number::of(work)),
            declared_s: None,
            deadline: None,
            deadline_values: Vec::new(),
            slo: None,
            max_slowdown: None,
            weight: usual_weight(),
            gpu_models: u32::MAX,
            retries: Retries::default(),
            gpus_per_task: 1,
        }
    }

    /// What is wrong with it, where no type excludes that; such a job is neither written into a
    /// journal nor read from one.
    pub fn check(&self) -> Result<(), &'static str> {
        let sizes = self.gpus > 0 && self.gpus_max >= self.gpus;
        if !sizes {
            return Err("a job without GPUs");
        }
        let tasks = self.gpus_per_task > 0 && self.gpus.is_multiple_of(self.gpus_per_task);
        if !tasks {
            return Err("a job whose tasks do not have all of its GPUs");
        }
        let promise = self.max_slowdown.is_none_or(|most| most >= 1.0);
        if promise { Ok(()) } else { Err("a job promised a slowdown below 1") }
    }

    /// Whether the job may run on GPUs of this model.
    pub fn allows(&self, gpu_model: u8) -> bool {
        self.gpu_models >> gpu_model & 1 == 1
    }
}

fn usual_weight() -> Number {
    Number::of(1.0)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_usual_weight(v: &Number) -> bool {
    *v == 1.0
}

fn one_gpu() -> u16 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_one_gpu(gpus: &u16) -> bool {
    *gpus == 1
}

fn any_model() -> u32 {
    u32::MAX
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_any_model(v: &u32) -> bool {
    *v == u32::MAX
}

/// The phase of a job's life cycle, as confirmed by the world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Registered, but not submitted yet, or withdrawn.
    Expected,
    /// Waits for GPUs.
    Pending,
    /// Waits until its retry after a failure is due.
    BackingOff,
    /// Holds GPUs and is being started on them.
    Starting,
    /// Makes progress.
    Running,
    /// Was asked to leave its GPUs and has not confirmed yet; it still holds them.
    Stopping,
    /// Will not run again.
    Done,
}

/// What the user of a job set while it runs; zero leaves it to the policy. The world carries it
/// out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Overrides {
    /// Whether the job stands still where it is.
    pub held: bool,
    /// Batch size per GPU.
    pub batch: u32,
    /// Most of each GPU, in permille.
    pub share_permille: u16,
}

/// The current state of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Its phase.
    pub phase: Phase,
    /// The GPUs that it holds, ascending; empty when it holds none.
    pub gpus: GpuSet,
    /// Its knobs on each of them.
    pub knobs: Knobs,
    /// When it was submitted first.
    pub submitted: Time,
    /// Whether it was submitted before.
    pub was_submitted: bool,
    /// When it last acquired or released GPUs.
    pub since: Time,
    /// GPU-µs held up to `since`, weighted by its SM share.
    pub attained_gpu_us: u64,
    /// Its progress as believed by the engine.
    pub meter: Meter,
    /// Steps that it was believed to have done when its end was reported.
    pub done_before_end: f64,
    /// Its gradient noise scale as last measured; 0 = never measured.
    pub noise_scale: f32,
    /// The GPUs from which it was suspended to host memory; empty if it is not suspended.
    pub parked_on: GpuSet,
    /// Time it loses at the next step, where the world charges costs at every step.
    pub step_cost: Span,
    /// Number of starts so far.
    pub starts: u32,
    /// Number of failures of its own so far.
    pub failures: u16,
    /// What its user set.
    pub user: Overrides,
    /// The last reason noted for it, so that `explain` shows each reason once.
    pub last_reason: Option<Reason>,
}

impl Job {
    /// A job that is registered but not submitted.
    pub fn expected() -> Self {
        Self {
            phase: Phase::Expected,
            gpus: GpuSet::new(),
            knobs: Knobs::WHOLE,
            submitted: Time::ZERO,
            was_submitted: false,
            since: Time::ZERO,
            attained_gpu_us: 0,
            meter: Meter::default(),
            done_before_end: 0.0,
            noise_scale: 0.0,
            parked_on: GpuSet::new(),
            step_cost: Span::ZERO,
            starts: 0,
            failures: 0,
            user: Overrides::default(),
            last_reason: None,
        }
    }

    /// Whether the job holds GPUs.
    pub fn is_placed(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// GPU-µs of service that it attains in `span` on its present GPUs, weighted by its SM share.
    pub fn service(&self, span: Span) -> u64 {
        let whole = span.0.saturating_mul(self.gpus.len() as u64);
        match self.knobs.sm_permille {
            // A job with SM share 0 still prevents exclusive use of the GPU by others, so it counts
            // whole.
            Knobs::SM_ALL | 0 => whole,
            share => (u128::from(whole) * u128::from(share) / 1000) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::NodeIdx;

    #[test]
    fn retries_are_one_number_unless_classes_differ() {
        for (retries, text) in [
            (Retries::from(3), "3"),
            (Retries { user: 0, infra: 9, unknown: 1 }, r#"{"user":0,"infra":9,"unknown":1}"#),
        ] {
            assert_eq!(serde_json::to_string(&retries).unwrap(), text);
            assert_eq!(serde_json::from_str::<Retries>(text).unwrap(), retries);
        }
    }

    #[test]
    fn only_failures_of_its_own_exhaust_a_job() {
        let retries = Retries { user: 0, infra: 2, unknown: 1 };
        for (reason, most) in [
            (Reason::UserError, 0),
            (Reason::InfraError, 2),
            (Reason::StartFailed, 2),
            (Reason::Crashed, 1),
            (Reason::OutOfMemory, 1),
        ] {
            assert!(Retries::counts(reason));
            assert!(!retries.is_exhausted(most, reason), "{reason:?}");
            assert!(retries.is_exhausted(most + 1, reason), "{reason:?}");
        }
        for reason in [Reason::NodeLost(NodeIdx(0)), Reason::RoommateFailed] {
            assert!(!Retries::counts(reason));
            assert!(!retries.is_exhausted(u16::MAX, reason), "{reason:?}");
        }
    }
}
