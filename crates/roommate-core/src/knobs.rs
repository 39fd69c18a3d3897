//! Knobs: how a job runs on each of its GPUs. Everything a policy can change without moving the
//! job.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// How a job runs on each of its GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct Knobs {
    /// Batch size per GPU; 0 = the job's own choice.
    #[serde(skip_serializing_if = "is_default")]
    pub batch: u32,
    /// Guaranteed share of the GPU's streaming multiprocessors (SMs) in permille; where roommates
    /// are guaranteed the rest, the job is confined to its share. 1000 = the whole GPU; 0 = nothing
    /// is guaranteed, and the job may use every idle SM.
    #[serde(skip_serializing_if = "is_whole")]
    pub sm_permille: u16,
    /// Largest share of the SMs that the job may use, guaranteed or not, in permille; 1000 = no
    /// limit.
    #[serde(skip_serializing_if = "is_whole")]
    pub sm_most_permille: u16,
    /// Whether the GPU starts its kernels before those of roommates without priority.
    #[serde(skip_serializing_if = "is_default")]
    pub priority: bool,
    /// Upper limit of the job's own speed, in permille; enforced by pauses between kernels.
    #[serde(skip_serializing_if = "is_whole")]
    pub pace_permille: u16,
    /// Guaranteed share of the job's solo speed in permille: the machine throttles roommates
    /// without a floor until the job reaches it. 0 = no guarantee.
    #[serde(skip_serializing_if = "is_default")]
    pub floor_permille: u16,
    /// Whether the GPU's tenants run one at a time, in the driver's time slices, and not
    /// concurrently.
    #[serde(skip_serializing_if = "is_default")]
    pub turns: bool,
    /// GPU memory in MiB per GPU; 0 = not known, not checked.
    #[serde(skip_serializing_if = "is_default")]
    pub mem_mib: u32,
    /// CPU in thousandths of a core per GPU; 0 = not known, not checked.
    #[serde(skip_serializing_if = "is_default")]
    pub cpu_milli: u32,
    /// Host memory in MiB per GPU; 0 = not known, not checked.
    #[serde(skip_serializing_if = "is_default")]
    pub host_mib: u32,
    /// Offset of its stages in an interleaved group (Muri).
    #[serde(skip_serializing_if = "is_default")]
    pub stage: u8,
    /// Longest time for which a service fills a batch, in microseconds; 0 = its own choice.
    #[serde(skip_serializing_if = "is_default")]
    pub fill_us: u32,
}

impl Knobs {
    /// A whole GPU, every other knob at its default.
    pub const WHOLE: Self = Self {
        batch: 0,
        sm_permille: Self::SM_ALL,
        sm_most_permille: Self::SM_ALL,
        priority: false,
        pace_permille: Self::PACE_FULL,
        floor_permille: 0,
        turns: false,
        mem_mib: 0,
        cpu_milli: 0,
        host_mib: 0,
        stage: 0,
        fill_us: 0,
    };
    /// SM share of a whole GPU.
    pub const SM_ALL: u16 = 1000;
    /// Pace of a job that is not throttled.
    pub const PACE_FULL: u16 = 1000;

    /// Share of the SMs that the job can use while it is the only tenant.
    pub fn reach(&self) -> f64 {
        let share = if self.sm_permille == 0 { Self::SM_ALL } else { self.sm_permille };
        f64::from(share.min(self.sm_most_permille)) / 1000.0
    }

    /// Whether no knob but the batch size changes the speed of a job that is alone on its GPUs.
    /// Lists all knobs, so that a new one does not compile before this is decided for it.
    pub fn is_plain(&self) -> bool {
        let Self {
            sm_permille,
            sm_most_permille,
            pace_permille,
            priority: _,
            batch: _,
            floor_permille: _,
            turns: _,
            mem_mib: _,
            cpu_milli: _,
            host_mib: _,
            stage: _,
            fill_us: _,
        } = *self;
        [0, Self::SM_ALL].contains(&sm_permille)
            && sm_most_permille == Self::SM_ALL
            && pace_permille == Self::PACE_FULL
    }

    /// Whether all knobs are within their ranges.
    pub fn are_sane(&self) -> bool {
        let shares =
            [self.sm_permille, self.sm_most_permille, self.pace_permille, self.floor_permille];
        shares.iter().all(|v| *v <= 1000) && self.sm_most_permille > 0
    }
}

/// Knobs as journals write them.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    batch: u32,
    sm_permille: u16,
    sm_most_permille: u16,
    priority: bool,
    pace_permille: u16,
    floor_permille: u16,
    turns: bool,
    mem_mib: u32,
    cpu_milli: u32,
    host_mib: u32,
    stage: u8,
    fill_us: u32,
    /// Journals of before had a learning rate here that no world applied.
    #[serde(rename = "lr_permille")]
    _learning_rate: IgnoredAny,
}

impl Default for Written {
    fn default() -> Self {
        let Knobs {
            batch,
            sm_permille,
            sm_most_permille,
            priority,
            pace_permille,
            floor_permille,
            turns,
            mem_mib,
            cpu_milli,
            host_mib,
            stage,
            fill_us,
        } = Knobs::WHOLE;
        Self {
            batch,
            sm_permille,
            sm_most_permille,
            priority,
            pace_permille,
            floor_permille,
            turns,
            mem_mib,
            cpu_milli,
            host_mib,
            stage,
            fill_us,
            _learning_rate: IgnoredAny,
        }
    }
}

impl From<Written> for Knobs {
    fn from(written: Written) -> Self {
        let Written {
            batch,
            sm_permille,
            sm_most_permille,
            priority,
            pace_permille,
            floor_permille,
            turns,
            mem_mib,
            cpu_milli,
            host_mib,
            stage,
            fill_us,
            _learning_rate,
        } = written;
        Self {
            batch,
            sm_permille,
            sm_most_permille,
            priority,
            pace_permille,
            floor_permille,
            turns,
            mem_mib,
            cpu_milli,
            host_mib,
            stage,
            fill_us,
        }
    }
}

impl Default for Knobs {
    fn default() -> Self {
        Self::WHOLE
    }
}

/// Whether a value is the default of its type: what serde leaves out.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_whole(permille: &u16) -> bool {
    *permille == 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_knobs_that_are_turned_are_written() {
        assert_eq!(serde_json::to_string(&Knobs::WHOLE).unwrap(), "{}");
        let turned = Knobs { sm_permille: 0, pace_permille: 500, stage: 1, ..Knobs::WHOLE };
        let text = r#"{"sm_permille":0,"pace_permille":500,"stage":1}"#;
        assert_eq!(serde_json::to_string(&turned).unwrap(), text);
        assert_eq!(serde_json::from_str::<Knobs>(text).unwrap(), turned);
    }

    #[test]
    fn a_job_that_is_held_back_or_confined_is_not_plain() {
        assert!(Knobs::WHOLE.is_plain());
        assert!(Knobs { sm_permille: 0, batch: 8, turns: true, ..Knobs::WHOLE }.is_plain());
        assert!(!Knobs { sm_permille: 500, ..Knobs::WHOLE }.is_plain());
        assert!(!Knobs { pace_permille: 999, ..Knobs::WHOLE }.is_plain());
        assert!(!Knobs { sm_most_permille: 800, ..Knobs::WHOLE }.is_plain());
        assert!(Knobs { priority: true, ..Knobs::WHOLE }.is_plain());
    }

    #[test]
    fn a_job_reaches_its_share_within_its_limit() {
        let reach = |sm_permille, sm_most_permille| {
            Knobs { sm_permille, sm_most_permille, ..Knobs::WHOLE }.reach()
        };
        assert_eq!((reach(0, 1000), reach(500, 1000), reach(0, 700)), (1.0, 0.5, 0.7));
        assert_eq!(reach(500, 300), 0.3);
    }

    #[test]
    fn a_learning_rate_of_old_journals_is_read_and_forgotten() {
        let read = |text: &str| serde_json::from_str::<Knobs>(text);
        let knobs = read(r#"{"batch":256,"lr_permille":707,"pace_permille":500}"#).unwrap();
        assert_eq!(knobs, Knobs { batch: 256, pace_permille: 500, ..Knobs::WHOLE });
        assert_eq!(serde_json::to_string(&knobs).unwrap(), r#"{"batch":256,"pace_permille":500}"#);
        assert_eq!(read("{}").unwrap(), Knobs::WHOLE);
        assert!(read(r#"{"bacth":1}"#).is_err());
    }
}
