//! The names of `horus` in the registry, and the values of its parameters that the laws try.

use super::{Params, build};
use crate::policy::Fuzz;

registry! { "../horus.rs"
    ("horus", family: CoLocation, knows_durations: false, preset: r"{}",
        summary: "packs jobs by utilisation predicted from the model's architecture, up to just \
            under 100 %",
        paper: "Yeung et al., Horus, TPDS 2022", compat: &[])
    ("horus-plus", family: CoLocation, knows_durations: false, preset: r#"{"queues": 3}"#,
        summary: "horus with queues of similar jobs, the one with most waiting time first",
        paper: "Yeung et al., Horus, TPDS 2022", compat: &[])
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.pick("count_weight", &[0.0, 1.0]);
    f.pick("mem_term", &["intended", "released"]);
    f.pick("max_tasks", &[1, 2, 4, 5]);
    f.pick("mem_margin_mib", &[0, 500, 20_000]);
    f.range("window", 1..=5);
    f.flip("cap_resident", 0.5);
    f.pick("overcommit_cap", &[None, Some(100), Some(150)]);
    f.flip("migrate", 0.4);
    f.pick("migrate_pause_s", &[0, 3, 300]);
}
