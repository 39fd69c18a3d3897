//! First come, first served.
//!
//! # Idea
//! Jobs start in the order in which they were submitted. By default the order is strict: a job that
//! does not fit blocks all jobs behind it, so no job is overtaken and none starves. With
//! `backfill`, jobs behind a blocked one start if they fit now; wide jobs may then wait long,
//! because no GPUs are reserved for them.
//!
//! # Reads / does / wakes
//! Reads the order of submission and the number of GPUs. Starts jobs on whole GPUs and never stops
//! a job. Wakes when a job arrives or leaves and when a node comes back; never by time, unless
//! `patience_s` says how long a gang waits for a compact placement. Jobs of `dedicate_from` GPUs or
//! more have their nodes exclusively.
//!
//! # Differs from the paper
//! There is no paper; `fifo` is the baseline of all of them.

use crate::placement::{Layout, Rule};
use crate::policy::{Fuzz, Policy};
use crate::queue::ranked_walk::{Style, Walk};
use serde::{Deserialize, Serialize};

registry! { "fifo.rs"
    ("fifo", family: Queue, knows_durations: false, preset: r"{}",
        summary: "first come, first served; no job overtakes another",
        paper: "-", compat: &[])
    ("fifo-backfill", family: Queue, knows_durations: false, preset: r#"{"backfill": true}"#,
        summary: "first come, first served; jobs behind a blocked one start if they fit",
        paper: "-", compat: &[])
}

/// Parameters of `fifo`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Whether jobs behind a blocked one may start.
    backfill: bool,
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
    let style = Style { layout, preempt: false, repack: false, overtake: params.backfill };
    // A job that is requeued after a failure keeps its position in the queue.
    Ok(Walk::new(style, |_, job| u64::from(job.0)))
}

#[cfg(test)]
mod tests {
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn no_job_overtakes_a_blocked_wide_job() {
        expect![[r"
            gpu0  aaaabbbbcc
            gpu1  ....bbbbdd
        "]]
        .assert_eq(&picture("fifo", "1x2", "a 0 1 4, b 1 2 4, c 1 1 2, d 1 1 2"));
    }

    #[test]
    fn backfill_uses_idle_gpus_and_delays_the_wide_job() {
        expect![[r#"
            gpu0  aaaa.bbbb
            gpu1  .ccddbbbb
        "#]]
        .assert_eq(&picture("fifo-backfill", "1x2", "a 0 1 4, b 1 2 4, c 1 1 2, d 1 1 2"));
    }
}
