//! Halves: every further tenant of a GPU halves the speed of all.

use super::{Recipe, TruthEntry};
use roommate_core::idx::JobIdx;
use roommate_core::interference::{Estimate, Interference, Truth};
use roommate_core::knobs::Knobs;
use roommate_core::state::State;

pub(super) const ENTRY: TruthEntry = TruthEntry {
    name: "halves",
    summary: "Every further tenant halves the speed",
    recipe: Recipe::Profiles(|all| (Box::new(Halves), all.len())),
};

struct Halves;

impl Interference for Halves {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], _: usize) -> Estimate {
        Estimate::certain(0.5f64.powi(tenants.len() as i32 - 1))
    }
}

impl Truth for Halves {}
