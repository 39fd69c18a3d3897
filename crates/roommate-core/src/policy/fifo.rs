//! First come, first served.
//!
//! # Idea
//! Jobs start in the order in which they were submitted. Strict: a job that does not fit holds up all
//! behind it, so no job can be overtaken and none starves. With `backfill`, jobs behind a blocked one
//! start if they fit now; wide jobs may then wait long, because nothing is reserved for them.
//!
//! # Reads / does / wakes
//! Reads the order of submission and the number of GPUs. Starts jobs on whole GPUs, never stops one.
//! Wakes when a job arrives or leaves and when a node comes back; never by time, unless
//! `patience_s` says how long a job insists on a compact place. Jobs of `dedicate_from` GPUs or more have
//! their nodes to themselves.
//!
//! # Differs from the paper
//! There is none; it is the baseline of all of them.

use crate::placement::{Layout, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk};
use serde::{Deserialize, Serialize};

registry! { "fifo.rs"
    ("fifo", preset: r"{}",
        summary: "first come, first served; nobody overtakes",
        paper: "-", compat: &[])
    ("fifo-backfill", preset: r#"{"backfill": true}"#,
        summary: "first come, first served; smaller jobs fill the holes",
        paper: "-", compat: &[])
}

/// Parameters of `fifo`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Whether jobs behind a blocked one may start.
    backfill: bool,
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

struct Fifo(Walk);

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let layout = Layout::new(params.rule, params.patience_s, params.dedicate_from)?;
    let style = Style { layout, preempt: false, repack: false, overtake: params.backfill };
    // A job keeps its place in the line when it comes back after a failure.
    Ok(Fifo(Walk::new(style, |_, job| u64::from(job.0))))
}

impl Policy for Fifo {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.schedule(plan);
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn nobody_overtakes_a_wide_job() {
        expect![[r"
            gpu0  aaaabbbbcc
            gpu1  ....bbbbdd
        "]]
        .assert_eq(&picture("fifo", "1x2", "a 0 1 4, b 1 2 4, c 1 1 2, d 1 1 2"));
    }

    #[test]
    fn backfill_fills_the_hole_at_the_wide_jobs_expense() {
        expect![[r#"
            gpu0  aaaa.bbbb
            gpu1  .ccddbbbb
        "#]]
        .assert_eq(&picture("fifo-backfill", "1x2", "a 0 1 4, b 1 2 4, c 1 1 2, d 1 1 2"));
    }
}
