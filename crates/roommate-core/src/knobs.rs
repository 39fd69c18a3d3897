//! Knobs: how a job runs on each of its GPUs. Everything a policy may turn without moving the job.

use serde::{Deserialize, Serialize};

/// How a job runs on each of its GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Knobs {
    /// Batch size per GPU; 0 = the job's own choice.
    #[serde(skip_serializing_if = "is_default")]
    pub batch: u32,
    /// Learning rate relative to the job's own, in permille: what goes with the batch size.
    #[serde(skip_serializing_if = "is_whole")]
    pub lr_permille: u32,
    /// Share of the GPU's streaming multiprocessors that it is promised, in permille, and confined to
    /// where others are promised the rest; 1000 = the whole GPU, 0 = promised none, may use all.
    #[serde(skip_serializing_if = "is_whole")]
    pub sm_permille: u16,
    /// Most of its own speed that it may run at, in permille: it is held back between kernels.
    #[serde(skip_serializing_if = "is_whole")]
    pub pace_permille: u16,
    /// Share of its solo speed that roommates without a floor must leave it, in permille: the machine
    /// holds them back until they do; 0 = nothing is promised.
    #[serde(skip_serializing_if = "is_default")]
    pub floor_permille: u16,
    /// Whether it and its roommates run by turns, in the driver's time slices, instead of at once.
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
    /// Offset of its stages in an interleaved group.
    #[serde(skip_serializing_if = "is_default")]
    pub stage: u8,
}

impl Knobs {
    /// A whole GPU, nothing else said.
    pub const WHOLE: Self = Self {
        batch: 0,
        lr_permille: Self::LR_OWN,
        sm_permille: Self::SM_ALL,
        pace_permille: Self::PACE_FULL,
        floor_permille: 0,
        turns: false,
        mem_mib: 0,
        cpu_milli: 0,
        host_mib: 0,
        stage: 0,
    };
    /// The whole of a GPU's multiprocessors.
    pub const SM_ALL: u16 = 1000;
    /// The job's own learning rate.
    pub const LR_OWN: u32 = 1000;
    /// A job that is not held back.
    pub const PACE_FULL: u16 = 1000;

    /// Share of the multiprocessors that it can use with nobody else there.
    pub fn reach(&self) -> f64 {
        if self.sm_permille == 0 { 1.0 } else { f64::from(self.sm_permille) / 1000.0 }
    }

    /// Whether none of them changes how fast the job is where no other is, but for its batch size. Lists all
    /// knobs, so that a new one does not compile before it is clear what it does.
    pub fn is_plain(&self) -> bool {
        let Self {
            sm_permille,
            pace_permille,
            batch: _,
            lr_permille: _,
            floor_permille: _,
            turns: _,
            mem_mib: _,
            cpu_milli: _,
            host_mib: _,
            stage: _,
        } = *self;
        [0, Self::SM_ALL].contains(&sm_permille) && pace_permille == Self::PACE_FULL
    }

    /// Whether all values are in their range.
    pub fn are_sane(&self) -> bool {
        let shares = [self.sm_permille, self.pace_permille, self.floor_permille];
        self.lr_permille > 0 && shares.iter().all(|v| *v <= 1000)
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

/// Whether a share in permille is the whole.
fn is_whole<T: From<u16> + PartialEq>(permille: &T) -> bool {
    *permille == T::from(1000)
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
    }
}
