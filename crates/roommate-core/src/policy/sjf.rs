//! Shortest job first.
//!
//! # Idea
//! Among the waiting jobs the one with the least declared work starts first. A running job is left
//! alone, so a long job that got in is never disturbed and a short one may have to wait for it.
//!
//! # Reads / does / wakes
//! Reads the declared length (steps × step time on the reference GPU) and the number of GPUs; jobs
//! that declare nothing come last, in order of submission. Starts jobs on whole GPUs, never stops
//! one; smaller jobs fill holes. Wakes when a job arrives or leaves; never by time, unless
//! `patience_s` says how long a job insists on a compact place. Jobs of `dedicate_from` GPUs or more have
//! their nodes to themselves.
//!
//! # Differs from the paper
//! There is none. It is the non-preemptive bound for what knowing durations is worth.

use crate::idx::JobIdx;
use crate::placement::{Layout, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk, key_of_secs};
use crate::state::State;
use serde::{Deserialize, Serialize};

registry! { "sjf.rs"
    ("sjf", preset: r"{}",
        summary: "shortest declared job first, never preempts",
        paper: "-", compat: &[])
}

/// Parameters of `sjf`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// How gangs are laid over nodes.
    rule: Rule,
    /// Seconds of waiting after which a job is spread rather than kept waiting for a compact place.
    patience_s: Option<f64>,
    /// Jobs of at least so many GPUs share their nodes with nobody.
    dedicate_from: Option<u16>,
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.rule();
    f.dedicate();
    f.patience();
}

struct Sjf(Walk);

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::new(params.rule, params.patience_s, params.dedicate_from)?;
    let style = Style { layout, preempt: false, repack: false, overtake: true };
    Ok(Sjf(Walk::new(style, declared)))
}

fn declared(state: &State, job: JobIdx) -> u64 {
    let seconds = state.spec(job).work.map(|steps| steps * state.profile(job).step_s);
    key_of_secs(seconds.unwrap_or(f64::INFINITY))
}

impl Policy for Sjf {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.schedule(plan);
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn the_shortest_waiting_job_is_next_and_nobody_is_stopped() {
        expect![[r"
            gpu0  aaaaacbbb
        "]]
        .assert_eq(&picture("sjf", "1x1", "a 0 1 5, b 1 1 3, c 2 1 1"));
    }
}
