//! The names of `chronus` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

registry! { "../chronus.rs"
    ("chronus", family: Deadlines, knows_durations: true, preset: r"{}",
        summary: "promises deadlines that fit on a timeline of leases; best-effort jobs use the \
            GPUs that are left",
        paper: "Gao et al., Chronus, SoCC 2021", compat: &[])
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.rule();
    // Leases of a few ticks, so that several of them pass in a case.
    let slot_s = 1 + f.below(3);
    let lease_s = slot_s * (1 + f.below(4));
    f.set("slot_s", slot_s);
    f.set("lease_s", lease_s);
    f.pick("safety", &[1.0, 1.1, 2.0]);
    f.pick("tolerance", &[1.0, 1.5]);
    f.pick("sign", &["adaptive", "plus", "minus"]);
    f.pick("short_s", &[0, 1_800]);
    f.pick("exact_cells", &[0, 30, 400]);
    f.pick("profile_gpus", &[0, 0, 4]);
}
