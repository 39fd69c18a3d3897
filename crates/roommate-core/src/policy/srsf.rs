//! Shortest remaining service first.
//!
//! # Idea
//! Like shortest remaining time, but jobs are ordered by remaining *service*, remaining time ×
//! GPUs: a wide job goes first only if it is shorter by as much as it is wider, because it blocks
//! more other jobs.
//!
//! # Reads / does / wakes
//! Reads the declared length, estimated progress and the number of GPUs. Starts and stops jobs on
//! whole GPUs; jobs behind a blocked one start if they fit. Wakes when a job arrives or leaves;
//! never by time, unless `patience_s` says how long a gang waits for a compact placement. Jobs of
//! `dedicate_from` GPUs or more have their nodes exclusively.
//!
//! # Differs from the paper
//! There is no paper of its own; it is a baseline of Tiresias and Muri. `--compat muri` repacks the
//! cluster at every event as described for `srtf`.

use crate::idx::JobIdx;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Walk, key_of_secs};
use crate::state::State;

registry! { "srsf.rs"
    ("srsf", family: Priority, knows_durations: true, preset: r"{}",
        summary: "shortest remaining service (time x GPUs) first, with preemption",
        paper: "-", compat: &[("muri", r#"{"rule": "first_fit", "repack": true}"#)])
}

pub(super) use crate::queue::ranked_walk::RankedParams as Params;

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.rule();
    f.dedicate();
    if !f.flip("repack", 0.3) {
        f.patience();
    }
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    Ok(Walk::new(params.style()?, remaining_service))
}

fn remaining_service(state: &State, job: JobIdx) -> u64 {
    let gpus = f64::from(state.spec(job).gpus);
    key_of_secs(state.remaining_s(job).map_or(f64::INFINITY, |s| s * gpus))
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn a_wide_job_goes_first_only_with_less_remaining_service() {
        // b has less remaining time than a but more remaining service (2 × 3 > 5), so a keeps its
        // GPU.
        expect![[r"
            gpu0  aaaaabbb
            gpu1  .....bbb
        "]]
        .assert_eq(&picture("srsf", "1x2", "a 0 1 5, b 1 2 3"));
        expect![[r"
            gpu0  abbbaaaa
            gpu1  .bbb
        "]]
        .assert_eq(&picture("srtf", "1x2", "a 0 1 5, b 1 2 3"));
    }
}
