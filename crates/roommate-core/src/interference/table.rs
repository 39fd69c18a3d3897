//! Speeds by pair of profiles, as somebody measured or invented them.

use crate::idx::{JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference};
use crate::knobs::Knobs;
use crate::state::State;
use std::collections::BTreeMap;

/// Speeds of pairs; of more tenants, the product of the pairs.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    pairs: BTreeMap<(ProfileIdx, ProfileIdx), [f64; 2]>,
    missing: f64,
}

impl Table {
    /// `pairs` holds the speeds of both beside each other, in the order of the key; `missing` is the
    /// speed of either in a pair that is not there.
    pub fn new(pairs: BTreeMap<(ProfileIdx, ProfileIdx), [f64; 2]>, missing: f64) -> Self {
        Self { pairs, missing }
    }

    /// Speed of a job of profile `a` beside one of profile `b`.
    pub fn speed_of(&self, a: ProfileIdx, b: ProfileIdx) -> f64 {
        let forward = self.pairs.get(&(a, b)).map(|speeds| speeds[0]);
        let known = forward.or_else(|| self.pairs.get(&(b, a)).map(|speeds| speeds[1]));
        known.unwrap_or(self.missing)
    }
}

impl Interference for Table {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        let profile = |i: usize| state.spec(tenants[i].0).profile;
        let others = (0..tenants.len()).filter(|i| *i != who);
        Estimate::certain(others.map(|i| self.speed_of(profile(who), profile(i))).product())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interference::testing::{state, whole};

    #[test]
    fn pairs_are_found_from_both_sides_and_multiply() {
        let [a, b, c] = [0, 1, 2].map(ProfileIdx);
        let table = Table::new(BTreeMap::from([((a, b), [0.8, 0.6])]), 0.5);
        let state = state(&[a, b, c]);
        let speed = |tenants: &[u32], who| table.speed(&state, 0, &whole(tenants), who).mean;
        assert_eq!((speed(&[0, 1], 0), speed(&[0, 1], 1)), (0.8, 0.6));
        assert_eq!((speed(&[1, 0], 0), speed(&[1, 0], 1)), (0.6, 0.8));
        assert_eq!((speed(&[0], 0), speed(&[0, 2], 0)), (1.0, 0.5));
        assert_eq!(speed(&[2, 0, 1], 1), 0.5 * 0.8);
    }
}
