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
use crate::placement::{Layout, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk, key_of_secs};
use crate::state::State;
use serde::{Deserialize, Serialize};

registry! { "srtf.rs"
    ("srtf", preset: r"{}",
        summary: "shortest remaining time first, preempts",
        paper: "-", compat: &[("muri", r#"{"rule": "first_fit", "repack": true}"#)])
}

/// Parameters of `srtf`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// How gangs are laid over nodes.
    rule: Rule,
    /// Seconds of waiting after which a job is spread rather than kept waiting for a compact place.
    patience_s: Option<f64>,
    /// Jobs of at least so many GPUs share their nodes with nobody.
    dedicate_from: Option<u16>,
    /// Whether everything is placed anew at every step.
    repack: bool,
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.rule();
    f.dedicate();
    if !f.flip("repack", 0.3) {
        f.patience();
    }
}

struct Srtf(Walk);

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::new(params.rule, params.patience_s, params.dedicate_from)?;
    if params.repack && params.patience_s.is_some() {
        // Placed anew at every step, a job has always only just lost its GPUs.
        return Err("patience_s: cannot be combined with repack".into());
    }
    let style = Style { layout, preempt: true, repack: params.repack, overtake: true };
    Ok(Srtf(Walk::new(style, time_left)))
}

fn time_left(state: &State, job: JobIdx) -> u64 {
    key_of_secs(state.remaining_s(job).unwrap_or(f64::INFINITY))
}

impl Policy for Srtf {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.schedule(plan);
    }
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
