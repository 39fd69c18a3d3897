//! Speeds by pair of profiles, measured or given.

use crate::idx::{JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::number::Number;
use crate::state::State;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Speeds of pairs; for more tenants, the product over pairs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Rows", into = "Rows")]
pub struct Table {
    pairs: BTreeMap<(u8, ProfileIdx, ProfileIdx), [Number; 2]>,
    missing: Number,
}

/// A table as it is written into a journal.
#[derive(Serialize, Deserialize)]
struct Rows {
    /// GPU model, both profiles, both speeds.
    pairs: Vec<(u8, ProfileIdx, ProfileIdx, [Number; 2])>,
    missing: Number,
}

impl From<Rows> for Table {
    fn from(Rows { pairs, missing }: Rows) -> Self {
        let pairs = pairs
            .into_iter()
            .map(|(gpu_model, a, b, speeds)| ((gpu_model, a, b), speeds))
            .collect();
        Self { pairs, missing }
    }
}

impl From<Table> for Rows {
    fn from(Table { pairs, missing }: Table) -> Self {
        let pairs = pairs
            .into_iter()
            .map(|((gpu_model, a, b), speeds)| (gpu_model, a, b, speeds))
            .collect();
        Self { pairs, missing }
    }
}

/// Matches every GPU model.
const ANY: u8 = u8::MAX;

impl Table {
    /// `pairs` holds the speeds of both beside each other, in the order of the key; `missing` is
    /// the speed of either in a pair without an entry.
    pub fn new(pairs: BTreeMap<(ProfileIdx, ProfileIdx), [f64; 2]>, missing: f64) -> Self {
        let pairs = pairs.into_iter().map(|((a, b), speeds)| ((ANY, a, b), speeds)).collect();
        Self { missing: Number::of(missing), ..Self::by_gpu_model(pairs) }
    }

    /// A table by GPU model. Pairs without an entry have speed 0.
    pub fn by_gpu_model(pairs: BTreeMap<(u8, ProfileIdx, ProfileIdx), [f64; 2]>) -> Self {
        let pairs = pairs.into_iter().map(|(key, speeds)| (key, speeds.map(Number::of))).collect();
        Self { pairs, missing: Number::default() }
    }

    fn find(&self, gpu_model: u8, a: ProfileIdx, b: ProfileIdx) -> Option<Number> {
        let forward = self.pairs.get(&(gpu_model, a, b)).map(|speeds| speeds[0]);
        forward.or_else(|| self.pairs.get(&(gpu_model, b, a)).map(|speeds| speeds[1]))
    }

    fn known(&self, gpu_model: u8, a: ProfileIdx, b: ProfileIdx) -> Option<Number> {
        self.find(gpu_model, a, b).or_else(|| self.find(ANY, a, b))
    }

    /// Speed of a job of profile `a` beside one of profile `b`, on GPUs of a model.
    pub fn speed_on(&self, gpu_model: u8, a: ProfileIdx, b: ProfileIdx) -> f64 {
        self.known(gpu_model, a, b).unwrap_or(self.missing).get()
    }

    /// The same where there is an entry.
    pub fn known_speed(&self, gpu_model: u8, a: ProfileIdx, b: ProfileIdx) -> Option<f64> {
        self.known(gpu_model, a, b).map(Number::get)
    }

    /// The same for tables that do not distinguish GPU models.
    pub fn speed_of(&self, a: ProfileIdx, b: ProfileIdx) -> f64 {
        self.speed_on(ANY, a, b)
    }
}

impl Truth for Table {}

impl Interference for Table {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        index: usize,
    ) -> Estimate {
        let profile = |i: usize| state.spec(tenants[i].0).profile;
        let others = (0..tenants.len()).filter(|i| *i != index);
        Estimate::certain(
            others.map(|i| self.speed_on(gpu_model, profile(index), profile(i))).product(),
        )
    }

    fn knows(&self, state: &State, gpu_model: u8, tenants: &[(JobIdx, Knobs)]) -> bool {
        let profile = |i: usize| state.spec(tenants[i].0).profile;
        let pairs = (0..tenants.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        pairs.into_iter().all(|(i, j)| self.known(gpu_model, profile(i), profile(j)).is_some())
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
        let speed = |tenants: &[u32], index| table.speed(&state, 0, &whole(tenants), index).mean;
        assert_eq!((speed(&[0, 1], 0), speed(&[0, 1], 1)), (0.8, 0.6));
        assert_eq!((speed(&[1, 0], 0), speed(&[1, 0], 1)), (0.6, 0.8));
        assert_eq!((speed(&[0], 0), speed(&[0, 2], 0)), (1.0, 0.5));
        assert_eq!(speed(&[2, 0, 1], 1), 0.5 * 0.8);
        assert!(
            table.knows(&state, 0, &whole(&[1, 0])) && !table.knows(&state, 0, &whole(&[0, 2]))
        );
    }

    #[test]
    fn gpu_models_may_have_different_speeds() {
        let [a, b] = [0, 1].map(ProfileIdx);
        let table = Table::by_gpu_model(BTreeMap::from([((1, a, b), [0.8, 0.6])]));
        let state = state(&[a, b]);
        let speed = |gpu_model, index| table.speed(&state, gpu_model, &whole(&[0, 1]), index).mean;
        assert_eq!((speed(1, 0), speed(1, 1), speed(0, 0)), (0.8, 0.6, 0.0));
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<Table>(&text).unwrap(), table);
        assert!(
            table.knows(&state, 1, &whole(&[0, 1])) && !table.knows(&state, 0, &whole(&[0, 1]))
        );
    }
}
