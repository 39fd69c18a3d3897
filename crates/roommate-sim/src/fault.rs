//! Seeded faults: node failures and repairs, job crashes.

use roommate_core::idx::NodeIdx;
use roommate_core::math::rng::Rng;
use roommate_core::time::Span;

/// Rates of faults; none by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// Mean time between failures of one node; `None` = nodes do not fail.
    pub node_mtbf: Option<Span>,
    /// Mean time to repair of a failed node.
    pub node_repair: Span,
    /// Probability that an attempt of a job crashes, at a uniformly random point of its remaining
    /// work.
    pub crash: f64,
    /// Fraction of crashing jobs that crash by a user error: they fail at the same point of their
    /// work in every attempt.
    pub user_errors: f64,
    /// Run time between two checkpoints; a crash loses the progress since the last one.
    pub checkpoint: Span,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            node_mtbf: None,
            node_repair: Span::from_secs(3_600.0),
            crash: 0.0,
            user_errors: 0.0,
            checkpoint: Span::from_secs(1_800.0),
        }
    }
}

/// Draws faults from independent random streams for nodes, jobs and user errors, so that changing
/// one rate does not change the draws of the others.
#[derive(Debug)]
pub(crate) struct FaultSource {
    faults: Faults,
    nodes: Rng,
    jobs: Rng,
    users: Rng,
}

impl FaultSource {
    pub(crate) fn new(faults: Faults, seed: u64) -> Self {
        let [nodes, jobs, users] = [1, 2, 3].map(|purpose| Rng::stream(seed, purpose));
        Self { faults, nodes, jobs, users }
    }

    pub(crate) fn checkpoint(&self) -> Span {
        self.faults.checkpoint
    }

    /// Time until the next failure of a node that is up.
    pub(crate) fn next_failure(&mut self, _node: NodeIdx) -> Option<Span> {
        let mean = self.faults.node_mtbf?.secs();
        Some(Span::from_secs(self.nodes.exp(mean).max(1e-6)))
    }

    /// Duration of a node's outage.
    pub(crate) fn repair(&mut self) -> Span {
        Span::from_secs(self.nodes.exp(self.faults.node_repair.secs()).max(1e-6))
    }

    /// Fraction of the remaining work after which this attempt crashes.
    pub(crate) fn crash_point(&mut self) -> Option<f64> {
        let chance = self.faults.crash * (1.0 - self.faults.user_errors);
        (chance > 0.0 && self.jobs.chance(chance)).then(|| self.jobs.unit())
    }

    /// Fraction of its work after which a job fails in every attempt. Drawn once per job in
    /// submission order, so that the same jobs have user errors under every policy.
    pub(crate) fn mistake(&mut self) -> Option<f64> {
        let chance = self.faults.crash * self.faults.user_errors;
        (chance > 0.0 && self.users.chance(chance)).then(|| self.users.unit())
    }
}
