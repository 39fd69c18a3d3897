//! The names of `synergy` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

/// Parameters of the released simulator.
const RELEASED: &[(&str, &str)] = &[(
    "synergy",
    concat!(
        r#"{"layout": "first_fit", "fill": false, "top_up": false, "repack": true, "#,
        r#""as_released": true}"#
    ),
)];

registry! { "../synergy.rs"
    ("synergy-proportional", family: HostResources, knows_durations: true,
        preset: r#"{"mechanism": "proportional"}"#,
        summary: "every job gets CPU and memory in proportion to its GPUs",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: RELEASED,
        ablates: "synergy-tune", lacks: AboveShare)
    ("synergy-greedy", family: HostResources, knows_durations: true,
        preset: r#"{"mechanism": "greedy"}"#,
        summary: "every job gets the CPU and memory that it demands, or waits",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: RELEASED,
        ablates: "synergy-tune", lacks: BelowDemand)
    ("synergy-tune", family: HostResources, knows_durations: true,
        preset: r#"{"mechanism": "tune"}"#,
        summary: "CPU and memory by the sensitivity of jobs, no job below its proportional share",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: RELEASED)
    ("synergy-opt", family: HostResources, knows_durations: true, preset: r#"{"mechanism": "opt"}"#,
        summary: "CPU and memory allocated to maximise the sum of speeds",
        paper: "Mohan et al., Synergy, OSDI 2022",
        compat: RELEASED)
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    // A round in which no job gets past its restart would be a round for nothing.
    let least_s = f.case.restart_s + 4;
    f.range("round_s", least_s..=least_s + 7);
    f.pick("order", &["fifo", "srtf", "las", "ftf", "drf", "tetris"]);
    f.pick("layout", &["first_fit", "consolidated"]);
    f.pick("first_round_s", &[0, 1, 5]);
    f.pick("starved_h", &[0.01, 1_000.0]);
    for switch in ["fill", "top_up", "repack", "as_released"] {
        f.flip(switch, 0.5);
    }
    f.pick("nodes", &[0, 1, 1_000]);
}
