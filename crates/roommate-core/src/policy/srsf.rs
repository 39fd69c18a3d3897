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
use crate::placement::{Layout, Rule};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::queue::ranked_walk::{Style, Walk, key_of_secs};
use crate::state::State;
use serde::{Deserialize, Serialize};

/// Parameters of `srsf`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// How the GPUs of a gang are chosen among nodes.
    rule: Rule,
    /// Seconds after which a waiting gang accepts a placement that is spread over more nodes.
    patience_s: Option<f64>,
    /// Jobs of at least this many GPUs have their nodes exclusively.
    dedicate_from: Option<u16>,
    /// Whether all jobs are placed anew, on an empty cluster, at every step.
    repack: bool,
}

struct Srsf(Walk);

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::new(params.rule, params.patience_s, params.dedicate_from)?;
    if params.repack && params.patience_s.is_some() {
        // `repack` releases every job at every step, so waiting times would never reach the limit.
        return Err("patience_s: cannot be combined with repack".into());
    }
    let style = Style { layout, preempt: true, repack: params.repack, overtake: true };
    Ok(Srsf(Walk::new(style, remaining_service)))
}

fn remaining_service(state: &State, job: JobIdx) -> u64 {
    let gpus = f64::from(state.spec(job).gpus);
    key_of_secs(state.remaining_s(job).map_or(f64::INFINITY, |s| s * gpus))
}

impl Policy for Srsf {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.schedule(plan);
    }
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
