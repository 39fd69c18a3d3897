//! Shortest remaining service first.
//!
//! # Idea
//! As shortest remaining time, but a job's urgency is its remaining *service*, time left × GPUs: a
//! wide job has to be that much shorter to go first, because it holds up that many more others.
//!
//! # Reads / does / wakes
//! Reads the declared length, believed progress and the number of GPUs. Starts and stops jobs on
//! whole GPUs; smaller jobs fill holes. Wakes when a job arrives or leaves; never by time, unless
//! `patience_s` says how long a job insists on a compact place. Jobs of `dedicate_from` GPUs or more have
//! their nodes to themselves.
//!
//! # Differs from the paper
//! There is none of its own; it is a baseline of Tiresias and Muri. `--compat muri` repacks the
//! cluster at every event as described for `srtf`.

use crate::idx::JobIdx;
use crate::policy::Policy;
use crate::queue::ranked_walk::{Walk, key_of_secs};
use crate::state::State;

pub(super) use crate::queue::ranked_walk::RankedParams as Params;

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    Ok(Walk::new(params.style()?, service_left))
}

fn service_left(state: &State, job: JobIdx) -> u64 {
    let gpus = f64::from(state.spec(job).gpus);
    key_of_secs(state.remaining_s(job).map_or(f64::INFINITY, |s| s * gpus))
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn a_wide_job_must_be_that_much_shorter() {
        // b has less time left than a but more service (2 × 3 > 5), so a keeps its GPU.
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
