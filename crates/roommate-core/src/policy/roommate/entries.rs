//! The names of `roommate` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

registry! { "../roommate.rs"
    ("roommate", family: CoLocation, knows_durations: false, preset: r"{}",
        summary: "most expected completions per second, over speeds learned while jobs run: \
            decides who shares, who waits, who moves",
        paper: "-", compat: &[])
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.pick("max_tasks", &[1, 2, 4]);
    f.pick("keep", &[0.0, 0.02, 0.3]);
    f.pick("apart", &[0.2, 0.6, 5.0]);
    f.pick("push_ratio", &[1.1, 4.0]);
    f.pick("min_run_s", &[0, 3, 30]);
    f.pick("move_gain", &[1, 5]);
    f.pick("spare", &[0.0, 0.1, 1.0]);
    f.pick("scan_s", &[2, 10, 300]);
    f.range("window", 1..=5);
    f.flip("share", 0.8);
    f.flip("push", 0.7);
    f.flip("migrate", 0.7);
    f.flip("promise_parts", 0.5);
}
