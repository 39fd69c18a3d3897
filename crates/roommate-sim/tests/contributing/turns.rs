//! Time slices: each of n tenants has the GPU for 1/n of the time. The example of CONTRIBUTING.md.

use super::{Recipe, TruthEntry};
use roommate_core::idx::JobIdx;
use roommate_core::interference::{Estimate, Interference, Truth};
use roommate_core::knobs::Knobs;
use roommate_core::state::State;

pub(super) const ENTRY: TruthEntry = TruthEntry {
    name: "turns",
    summary: "From equal time slices",
    recipe: Recipe::Profiles(|all| (Box::new(Turns), all.len())),
};

struct Turns;

impl Interference for Turns {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], _: usize) -> Estimate {
        Estimate::certain(1.0 / tenants.len() as f64)
    }
}

impl Truth for Turns {}
