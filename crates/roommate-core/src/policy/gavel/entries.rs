//! The names of `gavel` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

const GOALS: [&str; 9] = [
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
        summary: "max-min fairness of effective speeds over GPU kinds, realised by rounds",
        paper: "Narayanan et al., Gavel, OSDI 2020", compat: &[("gavel", r#"{"released": true}"#)])
    ("gavel-packed", family: Gavel, knows_durations: false, preset: r#"{"packed": true}"#,
        summary: "the same, and two jobs share GPUs where they are known to gain by it",
        paper: "Narayanan et al., Gavel, OSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-makespan", family: Gavel, knows_durations: true, preset: r#"{"objective": "makespan"}"#,
        summary: "the same rounds, so that all jobs are done as early as possible",
        paper: "Narayanan et al., Gavel, OSDI 2020", compat: &[("gavel", r#"{"released": true}"#)])
    ("gavel-finish-time", family: Gavel, knows_durations: true, preset: r#"{"objective": "finish_time"}"#,
        summary: "the same rounds, so that nobody ends much later than with an equal part",
        paper: "Narayanan et al., Gavel, OSDI 2020; Mahajan et al., Themis, NSDI 2020",
        compat: &[("gavel", r#"{"released": true}"#)])
    ("gavel-fifo", family: Gavel, knows_durations: false, preset: r#"{"objective": "fifo"}"#,
        summary: "the same rounds, first come, first served on the fastest kind that is free",
        paper: "Narayanan et al., Gavel, OSDI 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-allox", family: Gavel, knows_durations: true, preset: r#"{"objective": "allox"}"#,
        summary: "the same rounds, the best queue behind every GPU, so that the mean completion time is least",
        paper: "Narayanan et al., Gavel, OSDI 2020; Le et al., AlloX, EuroSys 2020",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
    ("gavel-couples", family: Gavel, knows_durations: false, preset: r#"{"objective": "couples"}"#,
        summary: "the same rounds, equal parts; who shares is drawn, and couples that lose by it part",
        paper: "Narayanan et al., Gavel, OSDI 2020; Xiao et al., Gandiva, OSDI 2018",
        compat: &[("gavel", r#"{"released": true, "whole_steps": true}"#)])
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("round_s", 1..=6);
    f.range("reset_s", 0..=11);
    // All goals, on the one entry that has no goal of its own.
    if f.entry == "gavel" {
        let goal = f.one_of(&GOALS);
        f.set("objective", goal);
        let packs = matches!(goal, "las" | "makespan");
        f.flip("packed", if packs { 0.3 } else { 0.0 });
    }
    f.flip("aware", 0.7);
    f.flip("deadlines", 0.5);
    f.pick("choice", &["fastest", "random", "released"]);
    // The released rounds end with their last step, which is not at a tick.
    if !f.case.on_ticks {
        f.flip("released", 0.3);
    }
}
