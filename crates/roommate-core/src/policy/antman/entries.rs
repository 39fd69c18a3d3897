//! The names of `antman` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

registry! { "../antman.rs"
    ("antman", family: CoLocation, knows_durations: false, preset: r"{}",
        summary: "resource-guarantee jobs run as if alone, opportunistic jobs on the resources \
            they leave unused",
        paper: "Xiao et al., AntMan, OSDI 2020",
        compat: &[("muri", r#"{"mode": "static"}"#)])
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.pick("quota_gpus", &[None, Some(1), Some(3), Some(8)]);
    f.pick("wait_to_opportunist_s", &[None, Some(2.0), Some(7.0)]);
    f.pick("util_default", &[0.1, 0.3, 0.9]);
    f.pick("eps", &[0.0, 0.01, 0.2]);
    f.pick("min_memory", &[0.0, 0.1, 1.0]);
    f.pick("stall_s", &[3.0, 20.0]);
}
