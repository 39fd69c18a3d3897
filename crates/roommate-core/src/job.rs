//! Jobs: what the user asked for ([`Spec`], cold) and what is true of it now ([`Job`], hot).

use crate::idx::{GpuSet, ProfileIdx, TeamIdx};
use crate::knobs::Knobs;
use crate::performance::progress::Meter;
use crate::reason::Reason;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

/// How a job is treated when GPUs are short.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Training that was promised its resources.
    #[default]
    Guaranteed,
    /// Training that takes what is left.
    BestEffort,
    /// Inference that has to answer within an SLO.
    Service,
}

/// A latency objective.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slo {
    /// The 99th percentile of latency must stay at or below this, µs.
    pub p99_us: u32,
}

/// How many failures of its own a job may have and still be started again, by the class of the last.
/// Written as one number where the classes do not differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(from = "RetriesForm", into = "RetriesForm")]
pub struct Retries {
    /// After an error of its user, which would come back.
    pub user: u16,
    /// After an error beneath it, which may not.
    pub infra: u16,
    /// After an error of which nobody knows the cause.
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

/// What the user asked for. Never changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// GPUs it needs to start (a gang: all or nothing).
    pub gpus: u16,
    /// Most GPUs it can use; equal to `gpus` for a job that is not elastic.
    pub gpus_max: u16,
    /// How it asks to run on each GPU.
    #[serde(default)]
    pub knobs: Knobs,
    /// What is known of this profile.
    pub profile: ProfileIdx,
    /// Whose it is.
    #[serde(default)]
    pub team: TeamIdx,
    /// How it is treated when GPUs are short.
    #[serde(default)]
    pub class: Class,
    /// Steps in all, as declared; policies that must not know the length do not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<f64>,
    /// Seconds it takes alone, as its user says; may differ from `work` × the profile's step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared_s: Option<f64>,
    /// When it has to be finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
    /// What finishing by when is worth, soonest and worth most first, where it has several deadlines;
    /// `deadline` is the last of them.
    #[serde(rename = "worth", default, skip_serializing_if = "Vec::is_empty")]
    pub deadline_values: Vec<(Time, f64)>,
    /// The latency it has to keep (services).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slo: Option<Slo>,
    /// Its part against other jobs, where parts are given out; 1 is usual.
    #[serde(default = "usual_weight", skip_serializing_if = "is_usual_weight")]
    pub weight: f64,
    /// Bit mask of the GPU models it may run on.
    #[serde(rename = "kinds", default = "any_model", skip_serializing_if = "is_any_model")]
    pub gpu_models: u32,
    /// How often it is started again after failures of its own.
    #[serde(default)]
    pub retries: Retries,
}

impl Spec {
    /// A training job of `gpus` whole GPUs with `work` steps, all else at its default.
    pub fn training(gpus: u16, work: f64, profile: ProfileIdx) -> Self {
        Self {
            gpus,
            gpus_max: gpus,
            knobs: Knobs::WHOLE,
            profile,
            team: TeamIdx(0),
            class: Class::Guaranteed,
            work: Some(work),
            declared_s: None,
            deadline: None,
            deadline_values: Vec::new(),
            slo: None,
            weight: 1.0,
            gpu_models: u32::MAX,
            retries: Retries::default(),
        }
    }

    /// Whether it may run on GPUs of this model.
    pub fn allows(&self, gpu_model: u8) -> bool {
        self.gpu_models >> gpu_model & 1 == 1
    }
}

fn usual_weight() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_usual_weight(v: &f64) -> bool {
    *v == 1.0
}

fn any_model() -> u32 {
    u32::MAX
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_any_model(v: &u32) -> bool {
    *v == u32::MAX
}

/// Where a job is in its life: the place where what we want and what we see meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Registered; its submission has not been seen yet.
    Expected,
    /// Waits for GPUs.
    Pending,
    /// Waits out the pause after a failure.
    BackingOff,
    /// Has GPUs and is being started there.
    Starting,
    /// Makes progress.
    Running,
    /// Was told to leave its GPUs and has not confirmed yet.
    Stopping,
    /// Will not run again.
    Done,
}

/// What the user of a job set while it runs; zero leaves it to the policy. The world carries it out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Overrides {
    /// Whether the job stands still where it is.
    pub held: bool,
    /// Batch size per GPU.
    pub batch: u32,
    /// Most of each GPU, in permille.
    pub share_permille: u16,
}

/// What is true of a job now.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Where it is in its life.
    pub phase: Phase,
    /// The GPUs that it holds, ascending; empty when it holds none.
    pub gpus: GpuSet,
    /// How it runs on each of them.
    pub knobs: Knobs,
    /// When it was submitted.
    pub submitted: Time,
    /// When it last got GPUs or lost them.
    pub since: Time,
    /// GPU-µs held up to `since`, weighted by its share of the multiprocessors.
    pub attained_gpu_us: u64,
    /// Its believed progress.
    pub meter: Meter,
    /// Its gradient noise scale as last measured; 0 = never.
    pub noise_scale: f32,
    /// Where it waits in host memory since it was suspended; empty if it does not.
    pub parked_on: GpuSet,
    /// What it loses at the next step, where steps are charged.
    pub step_cost: Span,
    /// How often it started.
    pub starts: u32,
    /// Failures of its own so far.
    pub failures: u16,
    /// What its user set.
    pub user: Overrides,
    /// What was last said about it, so that `explain` hears each reason once.
    pub last_reason: Option<Reason>,
}

impl Job {
    /// A job that nobody has heard of yet.
    pub fn expected() -> Self {
        Self {
            phase: Phase::Expected,
            gpus: GpuSet::new(),
            knobs: Knobs::WHOLE,
            submitted: Time::ZERO,
            since: Time::ZERO,
            attained_gpu_us: 0,
            meter: Meter::default(),
            noise_scale: 0.0,
            parked_on: GpuSet::new(),
            step_cost: Span::ZERO,
            starts: 0,
            failures: 0,
            user: Overrides::default(),
            last_reason: None,
        }
    }

    /// Whether it holds GPUs.
    pub fn is_placed(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// GPU-µs that a span on its present GPUs is worth.
    pub fn service(&self, span: Span) -> u64 {
        let whole = span.0.saturating_mul(self.gpus.len() as u64);
        match self.knobs.sm_permille {
            // One that is promised nothing still keeps others from having the GPU for themselves.
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
