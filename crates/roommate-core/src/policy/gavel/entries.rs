//! The names of `gavel` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

const OBJECTIVES: [&str; 9] = [
    "las",
    "water_filling",
    "hierarchical",
    "finish_time",
    "makespan",
    "throughput",
    "cost",
    "fifo",
    "isolated",
];

registry! { "../gavel.rs"
    ("gavel", family: Gavel, knows_durations: false, preset: r"{}",
        summary: "max-min fairness of effective speeds over GPU models, carried out in rounds",
        paper: "Narayanan et al., Gavel, OSDI 2020", compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-packed", family: Gavel, knows_durations: false, preset: r#"{"packed": true}"#,
        summary: "gavel with two jobs on the same GPUs where that is known to help",
        paper: "Narayanan et al., Gavel, OSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-makespan", family: Gavel, knows_durations: true, preset: r#"{"objective": "makespan"}"#,
        summary: "gavel that finishes all jobs as early as possible",
        paper: "Narayanan et al., Gavel, OSDI 2020", compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-finish-time", family: Gavel, knows_durations: true,
        preset: r#"{"objective": "finish_time"}"#,
        summary: "gavel that minimises the worst finish time relative to an equal part of the \
            cluster",
        paper: "Narayanan et al., Gavel, OSDI 2020; Mahajan et al., Themis, NSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-fifo", family: Gavel, knows_durations: false, preset: r#"{"objective": "fifo"}"#,
        summary: "gavel with first come, first served on the fastest free GPU model",
        paper: "Narayanan et al., Gavel, OSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-allox", family: Gavel, knows_durations: true, preset: r#"{"objective": "allox"}"#,
        summary: "gavel with the queues behind GPUs that minimise the mean completion time",
        paper: "Narayanan et al., Gavel, OSDI 2020; Le et al., AlloX, EuroSys 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-couples", family: Gavel, knows_durations: false, preset: r#"{"objective": "couples"}"#,
        summary: "gavel with equal time for random couples, which are separated if they lose",
        paper: "Narayanan et al., Gavel, OSDI 2020; Xiao et al., Gandiva, OSDI 2018",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("round_s", 1..=6);
    f.range("reset_s", 0..=11);
    // All objectives, on the entry that sets none.
    if f.entry == "gavel" {
        let objective = f.one_of(&OBJECTIVES);
        f.set("objective", objective);
        let packs = matches!(objective, "las" | "makespan");
        f.flip("packed", if packs { 0.3 } else { 0.0 });
    }
    f.flip("aware", 0.7);
    f.flip("deadlines", 0.5);
    f.pick("choice", &["fastest", "random", "released"]);
    // Released rounds end with their last step, which is not at a tick.
    if !f.case.on_ticks {
        f.flip("released", 0.3);
    }
}
