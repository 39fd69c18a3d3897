//! Shortest remaining time first.
//!
//! # Idea
//! The jobs with the least remaining time run; an arriving job with less remaining time preempts a
//! running job with more. On one GPU this minimises the mean completion time, so it is the
//! yardstick for policies that do not know durations.
//!
//! # Reads / does / wakes
//! Reads the declared length, estimated progress and the number of GPUs. Starts and stops jobs on
//! whole GPUs; jobs behind a blocked one start if they fit. Wakes when a job arrives or leaves;
//! never by time, unless `patience_s` says how long a gang waits for a compact placement. Jobs of
//! `dedicate_from` GPUs or more have their nodes exclusively.
//!
//! The order uses the remaining time alone on the reference GPU, not the speed on the GPU where the
//! job runs: otherwise two jobs on a slow GPU could preempt each other for ever.
//!
//! # Differs from the paper
//! There is no paper. `--compat muri` places all jobs anew on an empty cluster at every event
//! (`repack`), each on the first node that fits, as the Muri simulator does; by default running
//! jobs stay where they are and only those that hold the GPUs needed by a better job are preempted.

use crate::idx::JobIdx;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Walk, key_of_secs};
use crate::state::State;

registry! { "srtf.rs"
    ("srtf", family: Priority, knows_durations: true, preset: r"{}",
        summary: "shortest remaining time first, with preemption",
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
    Ok(Walk::new(params.style()?, remaining_time))
}

fn remaining_time(state: &State, job: JobIdx) -> u64 {
    key_of_secs(state.remaining_s(job).unwrap_or(f64::INFINITY))
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn an_arriving_job_with_less_remaining_time_preempts() {
        expect![[r#"
            gpu0  abcbbaaaa
        "#]]
        .assert_eq(&picture("srtf", "1x1", "a 0 1 5, b 1 1 3, c 2 1 1"));
    }

    #[test]
    fn only_the_job_with_most_remaining_time_is_preempted() {
        expect![[r#"
            gpu0  bbbbbbbb
            gpu1  aaccaaaaaaa
        "#]]
        .assert_eq(&picture("srtf", "1x2", "a 0 1 9, b 0 1 8, c 2 1 2"));
    }
}
