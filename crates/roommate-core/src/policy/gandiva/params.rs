//! Parameters of `gandiva`, its names in the registry, and the values that the laws try.

use super::build;
use crate::policy::Fuzz;
use serde::{Deserialize, Serialize};

registry! { "../gandiva.rs"
    ("gandiva", family: TimeSharing, knows_durations: false, preset: r"{}",
        summary: "time slices on oversubscribed nodes; packing and migration kept where measured \
            to help",
        paper: "Xiao et al., Gandiva, OSDI 2018", compat: &[])
    ("gandiva-tiresias-style", family: TimeSharing, knows_durations: false,
        preset: r#"{"pack": false, "max_height": 65535, "balance_s": 10.0, "cool_s": 0.0,
            "defrag_stop": 1.0, "grow": false}"#,
        summary: "gandiva of the Tiresias simulator: time slices only, nodes by each class's share \
            of the demand",
        paper: "Xiao et al., Gandiva, OSDI 2018; Gu et al., Tiresias, NSDI 2019", compat: &[])
}

/// Parameters of `gandiva`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Params {
    /// Length of a time slice, seconds.
    pub(super) slice_s: f64,
    /// Time between two scans for packing and migration, seconds.
    pub(super) scan_s: f64,
    /// Most GPUs requested on a node, as a multiple of its GPUs (oversubscription).
    pub(super) max_height: u16,
    /// Whether jobs are packed.
    pub(super) pack: bool,
    /// Largest summed utilisation of jobs that are packed.
    pub(super) pack_util_cap: f64,
    /// Utilisation assumed for a profile that was never measured.
    pub(super) default_util: f64,
    /// Share of a GPU's memory that a pack leaves free.
    pub(super) pack_mem_margin: f64,
    /// Steps of the slower job that a trial measures.
    pub(super) trial_steps: f64,
    /// Steps at the beginning of a trial that are not measured.
    pub(super) trial_skip: f64,
    /// Least seconds of a trial, and of measuring the speed of a job alone.
    pub(super) trial_s: f64,
    /// A pack is kept if the speeds relative to running alone add up to more than this.
    pub(super) keep_gain: f64,
    /// Seconds after which a refused pair of profiles is tried again.
    pub(super) refuse_s: f64,
    /// Seconds after which the measured speed of a job alone is out of date.
    pub(super) stale_s: f64,
    /// Whether jobs are migrated.
    pub(super) migrate: bool,
    /// Relative speed that a consolidation must gain, and that a defragmentation may cost.
    pub(super) migrate_gain: f64,
    /// Share of idle GPUs from which a node is emptied by defragmentation.
    pub(super) defrag_stop: f64,
    /// Seconds between two migrations of a job, and between two trials on a GPU.
    pub(super) cool_s: f64,
    /// Seconds between two reassignments of nodes to classes of jobs; none = never.
    pub(super) balance_s: Option<f64>,
    /// Whether elastic jobs grow onto idle GPUs.
    pub(super) grow: bool,
    /// Seconds for which GPUs must be idle before a job grows onto them.
    pub(super) grow_idle_s: f64,
    /// Least speed per GPU after growing, relative to before, for which the growth is kept.
    pub(super) grow_keep: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            slice_s: 60.0,
            scan_s: 60.0,
            max_height: 4,
            pack: true,
            pack_util_cap: 1.0,
            default_util: 0.5,
            pack_mem_margin: 0.1,
            trial_steps: 10.0,
            trial_skip: 2.0,
            trial_s: 5.0,
            keep_gain: 1.05,
            refuse_s: 3_600.0,
            stale_s: 3_600.0,
            migrate: true,
            migrate_gain: 0.05,
            defrag_stop: 0.75,
            cool_s: 300.0,
            balance_s: None,
            grow: true,
            grow_idle_s: 300.0,
            grow_keep: 0.7,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    // Whole seconds, so that everything falls on ticks.
    f.range("slice_s", 1..=6);
    f.range("scan_s", 1..=6);
    f.range("max_height", 1..=4);
    f.flip("pack", 0.7);
    f.pick("pack_util_cap", &[0.9, 1.0, 1.5, 2.0]);
    f.range("trial_steps", 0..=3);
    f.range("trial_skip", 0..=1);
    f.range("trial_s", 1..=3);
    f.pick("keep_gain", &[0.5, 1.05, 2.5]);
    f.pick("stale_s", &[5, 20, 3_600]);
    f.pick("refuse_s", &[2, 10, 3_600]);
    f.flip("migrate", 0.7);
    f.pick("migrate_gain", &[0.0, 0.05, 0.5, 2.0]);
    f.pick("defrag_stop", &[0.25, 0.5, 0.75]);
    f.pick("cool_s", &[0, 3, 20]);
    f.pick("balance_s", &[None, Some(1), Some(3), Some(7)]);
    f.flip("grow", 0.9);
    f.pick("grow_idle_s", &[0, 1, 2, 5]);
    f.pick("grow_keep", &[0.0, 0.4, 0.7, 1.0]);
}
