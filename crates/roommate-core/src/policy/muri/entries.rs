//! The names of `muri` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

/// Parameters of the released simulator.
const RELEASED: &[(&str, &str)] = &[(
    "muri",
    concat!(
        r#"{"weight": "efficiency", "matcher": "released", "guard": false, "budget": null, "#,
        r#""fill": false, "repack": true}"#
    ),
)];

/// Parameters of the released simulator if consecutive jobs are grouped.
const RELEASED_IN_ORDER: &[(&str, &str)] = &[(
    "muri",
    concat!(
        r#"{"guard": false, "budget": null, "fill": false, "repack": true, "#,
        r#""inflation": [1.310344827586207, 1.4778325123152711, 1.2807881773399017]}"#
    ),
)];

registry! { "../muri.rs"
    ("muri-s", family: CoLocation, knows_durations: true, preset: r"{}",
        summary: "interleaves the stages of up to four jobs on the same GPUs, shortest remaining \
            service first",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: RELEASED)
    ("muri-l", family: CoLocation, knows_durations: false, preset: r#"{"urgency": "attained"}"#,
        summary: "muri-s with least attained service first; needs no durations",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: RELEASED)
    ("muri-l-worst-ordering", family: CoLocation, knows_durations: false,
        preset: r#"{"urgency": "attained", "worst_order": true}"#,
        summary: "an ablation of muri-l: stages of a group in the worst order",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: RELEASED,
        ablates: "muri-l", lacks: StageOrder)
    ("muri-l-no-blossom", family: CoLocation, knows_durations: false,
        preset: r#"{"urgency": "attained", "grouping": "in_order"}"#,
        summary: "an ablation of muri-l: consecutive jobs are grouped instead of matched",
        paper: "Zhao et al., Muri, SIGCOMM 2022",
        compat: RELEASED_IN_ORDER,
        ablates: "muri-l", lacks: Matching)
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.rule();
    f.flip("repack", 0.3);
    f.range("packing", 1..=4);
    f.flip("autopack", 0.5);
    f.flip("guard", 0.5);
    f.pick("weight", &["gain", "efficiency"]);
}
