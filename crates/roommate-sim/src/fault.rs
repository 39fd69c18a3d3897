//! Faults from a seed: nodes that go down and come back, jobs that crash.

use roommate_core::idx::NodeIdx;
use roommate_core::math::rng::Rng;
use roommate_core::time::Span;

/// What may go wrong, and how often. Nothing, by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// Mean time between failures of one node; `None` = nodes do not fail.
    pub node_mtbf: Option<Span>,
    /// Mean time until a node that failed is back.
    pub node_repair: Span,
    /// Chance that an attempt of a job crashes, at a random point of the work it has left.
    pub crash: f64,
    /// Part of the jobs that would crash which are wrong themselves: they fail at the same point of their
    /// work in every attempt.
    pub user_errors: f64,
    /// Time of progress between two checkpoints; a crash loses what came after the last one.
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

/// Draws faults. Nodes, jobs and users have streams of their own, so that more of one does not change
/// the others.
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

    /// How long a node stays up from now on.
    pub(crate) fn next_failure(&mut self, _node: NodeIdx) -> Option<Span> {
        let mean = self.faults.node_mtbf?.secs();
        Some(Span::from_secs(self.nodes.exp(mean).max(1e-6)))
    }

    /// How long a node stays down.
    pub(crate) fn repair(&mut self) -> Span {
        Span::from_secs(self.nodes.exp(self.faults.node_repair.secs()).max(1e-6))
    }

    /// The share of the remaining work after which this attempt crashes.
    pub(crate) fn crash_point(&mut self) -> Option<f64> {
        let chance = self.faults.crash * (1.0 - self.faults.user_errors);
        (chance > 0.0 && self.jobs.chance(chance)).then(|| self.jobs.unit())
    }

    /// The share of its work after which a job always fails. Asked once for each job, in the order of
    /// submission, so that the same jobs are wrong under every policy.
    pub(crate) fn mistake(&mut self) -> Option<f64> {
        let chance = self.faults.crash * self.faults.user_errors;
        (chance > 0.0 && self.users.chance(chance)).then(|| self.users.unit())
    }
}
