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
use crate::placement::{Layout, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk, key_of_secs};
use crate::state::State;
use serde::{Deserialize, Serialize};

registry! { "srsf.rs"
    ("srsf", preset: r"{}",
        summary: "shortest remaining service (time x GPUs) first, preempts",
        paper: "-", compat: &[("muri", r#"{"rule": "first_fit", "repack": true}"#)])
}

/// Parameters of `srsf`.
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

struct Srsf(Walk);

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::new(params.rule, params.patience_s, params.dedicate_from)?;
    if params.repack && params.patience_s.is_some() {
        // Placed anew at every step, a job has always only just lost its GPUs.
        return Err("patience_s: cannot be combined with repack".into());
    }
    let style = Style { layout, preempt: true, repack: params.repack, overtake: true };
    Ok(Srsf(Walk::new(style, service_left)))
}

fn service_left(state: &State, job: JobIdx) -> u64 {
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
