//! Named parameter sets with which the simulator reproduces a published simulator.
//!
//! A compat mode changes parameters of the world (here) and of the policies (their registry
//! entries); there is no second simulator and no second copy of a policy.

use roommate_core::interference::Truth;
use roommate_core::interference::shadow::Shadowed;
use roommate_core::interference::stages::Interleaved;
use roommate_core::number::Positive;
use roommate_core::profile::Profile;
use roommate_core::state::{Charge, Costs, Quirks};
use roommate_core::time::Span;

/// A published simulator.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Compat {
    /// Name on the command line.
    pub name: &'static str,
    /// Paper or artifact that the mode reproduces.
    pub summary: &'static str,
    /// Factor on the solo step time of every job.
    step_factor: f64,
    charge: Charge,
    /// Length of a scheduling round in seconds, if only whole steps of a round count and job ends
    /// are observed at the end of the round.
    round_s: Option<f64>,
    /// Policies whose groups pay together: each step of a group costs the sum of its members'
    /// overheads.
    together: &'static [&'static str],
    /// Policies whose best-effort jobs run only in the idle gaps of guaranteed jobs.
    shadowed: &'static [&'static str],
    /// Policies with their own step-time inflation for groups of four jobs.
    inflation_of_four: &'static [(&'static str, f64)],
    /// Restart overhead in seconds by model and GPUs (1, 2, 4, 8, 16, 32).
    restart_s: &'static [(&'static str, [u8; 6])],
    /// Restart overhead in seconds of models that are not in `restart_s`.
    other_restart_s: f64,
    /// Policies that know the speed of every pair from the throughput table. Two jobs that share a
    /// GPU end together.
    know_pairs: &'static [&'static str],
}

/// All compat modes.
pub static COMPATS: &[Compat] = &[MURI, GAVEL, SYNERGY];

/// The simulator of Zhao et al., Multi-resource interleaving for deep learning training, SIGCOMM
/// 2022: solo steps are stretched by a fitted 1.015, and every running job pays its restart
/// overhead at every scheduling event. The overheads are those of the published artifact.
const MURI: Compat = Compat {
    name: "muri",
    summary: "the simulator of the Muri artifact (SIGCOMM 2022)",
    step_factor: 1.015,
    charge: Charge::EveryStep,
    round_s: None,
    together: &["muri-s", "muri-l", "muri-l-worst-ordering", "muri-l-no-blossom"],
    shadowed: &["antman"],
    inflation_of_four: &[("muri-l-no-blossom", 1.30 / 1.015)],
    restart_s: &[
        ("vgg16", [7, 7, 8, 9, 9, 10]),
        ("vgg19", [7, 7, 8, 9, 10, 10]),
        ("resnet18", [4, 5, 5, 7, 7, 7]),
        ("shufflenet_v2_x1_0", [4, 4, 5, 5, 7, 8]),
        ("bert", [10, 10, 10, 10, 10, 10]),
        ("gpt2", [10, 10, 10, 10, 10, 10]),
        ("a2c", [38, 39, 39, 46, 46, 46]),
        ("dqn", [5, 5, 6, 6, 8, 8]),
    ],
    other_restart_s: 10.0,
    know_pairs: &[],
};

/// The simulator of Narayanan et al., Heterogeneity-aware cluster scheduling policies for deep
/// learning workloads, OSDI 2020: starts and migrations are free, and the throughput table is both
/// known to every policy and true. Its rounds, its stale allocations and its FIFO are parameters of
/// the policies.
const GAVEL: Compat = Compat {
    name: "gavel",
    summary: "the simulator of the Gavel artifact (OSDI 2020)",
    step_factor: 1.0,
    charge: Charge::OnRestart,
    round_s: None,
    together: &[],
    shadowed: &[],
    inflation_of_four: &[],
    restart_s: &[],
    other_restart_s: 0.0,
    know_pairs: &["gavel-packed", "gavel-couples"],
};

/// The simulator of Mohan et al., Looking beyond GPUs for DNN scheduling on multi-tenant clusters,
/// OSDI 2022: starts and migrations are free, and a job keeps its GPUs for a whole round of 300 s.
const SYNERGY: Compat = Compat {
    name: "synergy",
    summary: "the simulator of the Synergy artifact (OSDI 2022)",
    step_factor: 1.0,
    charge: Charge::OnRestart,
    round_s: Some(300.0),
    together: &[],
    shadowed: &[],
    inflation_of_four: &[],
    restart_s: &[],
    other_restart_s: 0.0,
    know_pairs: &[],
};

impl Compat {
    /// The true interference model between co-located jobs.
    pub fn truth(&self, policy: &str) -> Box<dyn Truth> {
        if self.shadowed.contains(&policy) {
            return Box::new(Shadowed);
        }
        let mut truth = Interleaved::default();
        if let Some((_, four)) = self.inflation_of_four.iter().find(|(p, _)| *p == policy) {
            truth.inflation[4] = *four;
        }
        Box::new(truth)
    }

    /// Whether this policy knows the speed of every pair from the throughput table, which is then
    /// also the truth.
    pub fn knows_pairs(&self, policy: &str) -> bool {
        self.know_pairs.contains(&policy)
    }

    /// Costs of starts, restarts and migrations under this mode.
    pub fn costs(&self, costs: Costs, policy: &str) -> Costs {
        let restart = Span::from_secs(self.other_restart_s);
        let together = self.together.contains(&policy);
        let charge = if together { Charge::EveryStepTogether } else { self.charge };
        let round = self.round_s.map(Span::from_secs);
        let ends_together = self.knows_pairs(policy);
        let quirks = Quirks { charge, round, ends_together };
        Costs { restart, start: Span::ZERO, migrate: None, quirks, ..costs }
    }

    /// Scales a profile's step time and sets its restart overhead for `gpus` GPUs.
    pub fn adjust(&self, profile: &mut Profile, model: Option<&str>, gpus: u32) {
        profile.step_s = Positive::of(profile.step_s * self.step_factor);
        profile.spread_speed = Positive::of(1.0);
        let row = self.restart_s.iter().find(|(name, _)| Some(*name) == model);
        let column = gpus.is_power_of_two().then(|| gpus.trailing_zeros() as usize);
        let known = row.zip(column).and_then(|((_, by_gpus), c)| by_gpus.get(c));
        profile.restart =
            Some(Span::from_secs(known.map_or(self.other_restart_s, |s| f64::from(*s))));
    }
}

/// Finds a compat mode by its name on the command line.
pub fn find(name: &str) -> Option<&'static Compat> {
    COMPATS.iter().find(|c| c.name == name)
}
