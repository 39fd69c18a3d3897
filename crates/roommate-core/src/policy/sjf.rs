//! Shortest job first.
//!
//! # Idea
//! Among the waiting jobs the one with the least declared work starts first. A running job is never
//! preempted, so a short job may have to wait for a long one to finish.
//!
//! # Reads / does / wakes
//! Reads the declared length (steps × step time on the reference GPU) and the number of GPUs; jobs
//! without a declared length come last, in order of submission. Starts jobs on whole GPUs and never
//! stops a job; jobs behind a blocked one start if they fit. Wakes when a job arrives or leaves;
//! never by time, unless `patience_s` says how long a gang waits for a compact placement. Jobs of
//! `dedicate_from` GPUs or more have their nodes exclusively.
//!
//! # Differs from the paper
//! There is no paper. `sjf` is the non-preemptive bound for what knowing durations is worth.

use crate::idx::JobIdx;
use crate::placement::{Layout, Rule};
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk, key_of_secs};
use crate::state::State;
use serde::{Deserialize, Serialize};

registry! { "sjf.rs"
    ("sjf", family: Queue, knows_durations: true, preset: r"{}",
        summary: "shortest declared length first, without preemption",
        paper: "-", compat: &[])
}

/// Parameters of `sjf`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// How the GPUs of a gang are chosen among nodes.
    rule: Rule,
    /// Seconds after which a waiting gang accepts a placement that is spread over more nodes.
    patience_s: Option<f64>,
    /// Jobs of at least this many GPUs have their nodes exclusively.
    dedicate_from: Option<u16>,
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.rule();
    f.dedicate();
    f.patience();
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::new(params.rule, params.patience_s, params.dedicate_from)?;
    let style = Style { layout, preempt: false, repack: false, overtake: true };
    Ok(Walk::new(style, declared_length))
}

fn declared_length(state: &State, job: JobIdx) -> u64 {
    key_of_secs(state.length_s(job).unwrap_or(f64::INFINITY))
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn the_shortest_waiting_job_is_next_and_none_is_preempted() {
        expect![[r"
            gpu0  aaaaacbbb
        "]]
        .assert_eq(&picture("sjf", "1x1", "a 0 1 5, b 1 1 3, c 2 1 1"));
    }
}
