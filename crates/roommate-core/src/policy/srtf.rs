//! Shortest remaining time first.
//!
//! # Idea
//! The jobs with the least work left run; a newcomer with less left pushes out a running job with
//! more. On one GPU this is optimal for mean completion time, so it is the yardstick for policies
//! that do not know durations.
//!
//! # Reads / does / wakes
//! Reads the declared length, believed progress and the number of GPUs. Starts and stops jobs on
//! whole GPUs; smaller jobs fill holes. Wakes when a job arrives or leaves; never by time, unless
//! `patience_s` says how long a job insists on a compact place. Jobs of `dedicate_from` GPUs or more have
//! their nodes to themselves.
//!
//! The order uses the time left alone on the reference GPU, not the pace where the job happens to
//! run: otherwise two jobs on a slow GPU could push each other out for ever.
//!
//! # Differs from the paper
//! There is none of its own. `--compat muri` places everything anew on an empty cluster at every
//! event (`repack`) on the first node that fits, as the Muri simulator does; the default leaves
//! running jobs where they are and pushes out only those that are in the way.

use crate::idx::JobIdx;
use crate::policy::Policy;
use crate::queue::ranked_walk::{Walk, key_of_secs};
use crate::state::State;

pub(super) use crate::queue::ranked_walk::RankedParams as Params;

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    Ok(Walk::new(params.style()?, time_left))
}

fn time_left(state: &State, job: JobIdx) -> u64 {
    key_of_secs(state.remaining_s(job).unwrap_or(f64::INFINITY))
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn the_newcomer_with_less_left_goes_first() {
        expect![[r#"
            gpu0  abcbbaaaa
        "#]]
        .assert_eq(&picture("srtf", "1x1", "a 0 1 5, b 1 1 3, c 2 1 1"));
    }

    #[test]
    fn only_those_in_the_way_are_stopped() {
        expect![[r#"
            gpu0  bbbbbbbb
            gpu1  aaccaaaaaaa
        "#]]
        .assert_eq(&picture("srtf", "1x2", "a 0 1 9, b 0 1 8, c 2 1 2"));
    }
}
