//! Knobs: how a job runs on each of its GPUs. Everything a policy may turn without moving the job.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// How a job runs on each of its GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct Knobs {
    /// Batch size per GPU; 0 = the job's own choice.
    #[serde(skip_serializing_if = "is_zero")]
    pub batch: u32,
    /// Share of the GPU's streaming multiprocessors that it is promised, in permille, and confined to
    /// where others are promised the rest; 1000 = the whole GPU, 0 = promised none, may use all.
    #[serde(skip_serializing_if = "is_whole")]
    pub sm_permille: u16,
    /// Most of its own speed that it may run at, in permille: it is held back between kernels.
    #[serde(skip_serializing_if = "is_whole")]
    pub pace_permille: u16,
    /// Share of its solo speed that roommates without a floor must leave it, in permille: the machine
    /// holds them back until they do; 0 = nothing is promised.
    #[serde(skip_serializing_if = "is_none")]
    pub floor_permille: u16,
    /// Whether it and its roommates run by turns, in the driver's time slices, instead of at once.
    #[serde(skip_serializing_if = "is_false")]
    pub turns: bool,
    /// GPU memory in MiB per GPU; 0 = not known, not checked.
    #[serde(skip_serializing_if = "is_zero")]
    pub mem_mib: u32,
    /// CPU in thousandths of a core per GPU; 0 = not known, not checked.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_milli: u32,
    /// Host memory in MiB per GPU; 0 = not known, not checked.
    #[serde(skip_serializing_if = "is_zero")]
    pub host_mib: u32,
    /// Offset of its stages in an interleaved group.
    #[serde(skip_serializing_if = "is_first")]
    pub stage: u8,
}

impl Knobs {
    /// A whole GPU, nothing else said.
    pub const WHOLE: Self = Self {
        batch: 0,
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
    /// A job that is not held back.
    pub const PACE_FULL: u16 = 1000;

    /// Share of the multiprocessors that it can use with nobody else there.
    pub fn reach(&self) -> f64 {
        if self.sm_permille == 0 { 1.0 } else { f64::from(self.sm_permille) / 1000.0 }
    }

    /// Whether all values are in their range.
    pub fn are_sane(&self) -> bool {
        let shares = [self.sm_permille, self.pace_permille, self.floor_permille];
        shares.iter().all(|v| *v <= 1000)
    }
}

/// Knobs as journals write them.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    batch: u32,
    sm_permille: u16,
    pace_permille: u16,
    floor_permille: u16,
    turns: bool,
    mem_mib: u32,
    cpu_milli: u32,
    host_mib: u32,
    stage: u8,
    /// Journals of before had a learning rate here that no world applied.
    #[serde(rename = "lr_permille")]
    _learning_rate: IgnoredAny,
}

impl Default for Written {
    fn default() -> Self {
        let Knobs { batch, sm_permille, pace_permille, floor_permille, turns, .. } = Knobs::WHOLE;
        let Knobs { mem_mib, cpu_milli, host_mib, stage, .. } = Knobs::WHOLE;
        Self {
            batch,
            sm_permille,
            pace_permille,
            floor_permille,
            turns,
            mem_mib,
            cpu_milli,
            host_mib,
            stage,
            _learning_rate: IgnoredAny,
        }
    }
}

impl From<Written> for Knobs {
    fn from(written: Written) -> Self {
        let Written { batch, sm_permille, pace_permille, floor_permille, turns, .. } = written;
        let Written { mem_mib, cpu_milli, host_mib, stage, .. } = written;
        Self {
            batch,
            sm_permille,
            pace_permille,
            floor_permille,
            turns,
            mem_mib,
            cpu_milli,
            host_mib,
            stage,
        }
    }
}

impl Default for Knobs {
    fn default() -> Self {
        Self::WHOLE
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_zero(v: &u32) -> bool {
    *v == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_whole(v: &u16) -> bool {
    *v == 1000
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_none(v: &u16) -> bool {
    *v == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_false(v: &bool) -> bool {
    !v
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_first(v: &u8) -> bool {
    *v == 0
}

#[cfg(test)]
mod tests {
    use super::*;

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
