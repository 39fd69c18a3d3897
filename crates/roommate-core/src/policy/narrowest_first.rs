//! Narrowest first: jobs that need fewest GPUs start before others.
//!
//! # Idea
//! Narrow jobs fit where wide ones do not. Served first, they never wait behind a gang; a gang
//! waits until enough GPUs are free at once.
//!
//! # Reads / does / wakes
//! Reads the number of GPUs. Starts jobs on whole GPUs, never stops one. Wakes when a job arrives
//! or leaves and when a node comes back.
//!
//! # Differs from the paper
//! There is none.

use crate::idx::JobIdx;
use crate::placement::{Layout, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk};
use crate::state::State;
use serde::{Deserialize, Serialize};

registry! { "narrowest_first.rs"
    ("narrowest-first", family: Queue, knows_durations: false, preset: r"{}",
        summary: "jobs that need fewest GPUs first, never preempts",
        paper: "-", compat: &[])
}

/// Parameters of `narrowest-first`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// How gangs are laid over nodes.
    rule: Rule,
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.pick("rule", &["consolidated", "first_fit", "spread", "count"]);
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::from(params.rule);
    let style = Style { layout, preempt: false, repack: false, overtake: true };
    Ok(NarrowestFirst(Walk::new(style, width)))
}

struct NarrowestFirst(Walk);

/// Smaller keys are served first.
fn width(state: &State, job: JobIdx) -> u64 {
    u64::from(state.spec(job).gpus)
}

impl Policy for NarrowestFirst {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.schedule(plan);
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn narrow_jobs_go_before_a_wide_one() {
        expect![[r"
            gpu0  aabddd
            gpu1  aacddd
        "]]
        .assert_eq(&picture("narrowest-first", "1x2", "a 0 2 2, b 1 1 1, c 1 1 1, d 1 2 3"));
    }
}
