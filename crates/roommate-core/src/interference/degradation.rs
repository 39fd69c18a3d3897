//! The cost of colocation, learnt while jobs run: how much a profile is degraded beside others.
//!
//! Three sources, the best available: the measurement of exactly this profile beside exactly these,
//! a random forest over all measurements, and, before there are enough of those, a rule of thumb.
//! The forest sees either the *pattern* only (which profiles and how many of each, as published) or
//! the *counters* of all tenants, which also say something about profiles that were never
//! colocated, or never measured.

use crate::idx::{IdxVec, ProfileIdx};
use crate::math::forest::{Online, Options};
use crate::reason::Source;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The features of the forest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum View {
    /// Which profiles, and how many of each.
    Pattern,
    /// Resource demand of each.
    Counters,
}

/// Resource demand of a profile that runs alone on a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResourceDemand {
    /// Busy share of the SMs, 0 to 1.
    pub sm: f64,
    /// Busy share of the memory bandwidth, 0 to 1.
    pub dram: f64,
    /// GPU memory, GiB.
    pub mem_gib: f64,
    /// CPU cores.
    pub cpu: f64,
    /// Batch size per GPU.
    pub batch: f64,
}

impl Default for ResourceDemand {
    /// The demand of an unknown profile: two of them take 1.5 times as long beside each other.
    fn default() -> Self {
        Self { sm: 0.7, dram: 0.3, mem_gib: 0.0, cpu: 1.0, batch: 1.0 }
    }
}

/// A prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Degradation: length of a step relative to running alone; 1 = as fast as alone.
    pub pd: f64,
    /// Where it comes from.
    pub source: Source,
}

/// A profile among others, in a form that does not depend on their order: the profile, then the
/// others, each with its count.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key(ProfileIdx, SmallVec<[(ProfileIdx, u8); 4]>);

impl Key {
    fn new(profile: ProfileIdx, others: &[ProfileIdx]) -> Self {
        let mut sorted: SmallVec<[ProfileIdx; 4]> = others.iter().copied().collect();
        sorted.sort_unstable();
        let mut counts: SmallVec<[(ProfileIdx, u8); 4]> = SmallVec::new();
        for other in sorted {
            match counts.last_mut().filter(|c| c.0 == other) {
                Some(last) => last.1 = last.1.saturating_add(1),
                None => counts.push((other, 1)),
            }
        }
        Self(profile, counts)
    }
}

/// Moving average of measurements; the newest has the largest weight.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    ln_pd: f64,
}

/// Weight of a new measurement against the average so far.
const NEW: f64 = 0.5;
/// Number of measurements below which the forest is not used.
const FEWEST: usize = 12;
/// Profiles with a column of their own in the pattern.
const COLUMNS: usize = 32;

/// Predicts degradation from measurements.
#[derive(Clone, Debug)]
pub struct DegradationModel {
    view: View,
    seen: BTreeMap<Key, Seen>,
    forest: Online,
    /// By profile; profiles beyond the end, and `None`, have the default demand.
    demands: IdxVec<ProfileIdx, Option<ResourceDemand>>,
    /// Profiles in order of their first appearance.
    columns: Vec<ProfileIdx>,
    memo: RefCell<Memo>,
}

/// Cached predictions by [`packed`] key: the same one is needed for hundreds of GPUs.
#[derive(Clone, Debug, Default)]
struct Memo {
    /// Valid until a new measurement.
    predictions: BTreeMap<u64, Prediction>,
    /// The forest's predictions; valid until it is refitted or a profile's demand changes.
    forest: BTreeMap<u64, Option<f64>>,
}

/// A colocation packed into one word; `None` if it is too long. The others are ascending.
fn packed(profile: ProfileIdx, others: &[ProfileIdx]) -> Option<u64> {
    let fits = |profile: &ProfileIdx| profile.0 < 0xFFFF;
    let word = |word: u64, profile: &ProfileIdx| word << 16 | u64::from(profile.0 + 1);
    let all = || others.iter().chain([&profile]);
    (others.len() <= 3 && all().all(fits)).then(|| all().fold(0, word))
}

impl DegradationModel {
    /// A predictor without measurements.
    pub fn new(view: View, seed: u64) -> Self {
        Self {
            view,
            seen: BTreeMap::new(),
            forest: Online::new(Options { seed, ..Options::default() }),
            demands: IdxVec::new(),
            columns: Vec::new(),
            memo: RefCell::default(),
        }
    }

    /// Sets the resource demand of a profile.
    pub fn count(&mut self, profile: ProfileIdx, demand: ResourceDemand) {
        self.demands.grow_for(profile, None);
        if self.demands[profile] != Some(demand) {
            self.demands[profile] = Some(demand);
            *self.memo.get_mut() = Memo::default();
        }
    }

    /// The resource demand of a profile, or the default.
    pub fn demand(&self, profile: ProfileIdx) -> ResourceDemand {
        self.demands.get(profile).copied().flatten().unwrap_or_default()
    }

    /// Adds a measurement of the degradation of a profile beside these others.
    pub fn learn(&mut self, profile: ProfileIdx, others: &[ProfileIdx], pd: f64) {
        if others.is_empty() || !pd.is_finite() || pd <= 0.0 {
            return;
        }
        self.memo.get_mut().predictions.clear();
        let ln_pd = pd.ln();
        let key = Key::new(profile, others);
        let seen = self.seen.entry(key).and_modify(|s| s.ln_pd += NEW * (ln_pd - s.ln_pd));
        seen.or_insert(Seen { ln_pd });
        for each in [profile].iter().chain(others) {
            if self.columns.len() < COLUMNS && !self.columns.contains(each) {
                self.columns.push(*each);
            }
        }
        let row = self.row(profile, others);
        let thumb = self.thumb(profile, others).ln();
        // With counters, the forest learns the error of the rule of thumb.
        let target = if self.view == View::Counters { ln_pd - thumb } else { ln_pd };
        self.forest.push(row, target);
    }

    /// Refits the forest if enough was measured since the last fit.
    pub fn refresh(&mut self) {
        if self.forest.len() >= FEWEST && self.forest.refresh() {
            *self.memo.get_mut() = Memo::default();
        }
    }

    /// Predicted degradation of a profile beside these others.
    pub fn predict(&self, profile: ProfileIdx, others: &[ProfileIdx]) -> Prediction {
        if others.is_empty() {
            return Prediction { pd: 1.0, source: Source::Measured };
        }
        // In a fixed order, so that floating-point sums are the same to the last digit.
        let mut others: SmallVec<[ProfileIdx; 4]> = others.iter().copied().collect();
        others.sort_unstable();
        let Some(word) = packed(profile, &others) else {
            return self.reckon(profile, &others, None);
        };
        if let Some(known) = self.memo.borrow().predictions.get(&word) {
            return *known;
        }
        let prediction = self.reckon(profile, &others, Some(word));
        self.memo.borrow_mut().predictions.insert(word, prediction);
        prediction
    }

    fn reckon(&self, profile: ProfileIdx, others: &[ProfileIdx], word: Option<u64>) -> Prediction {
        if let Some(seen) = self.seen.get(&Key::new(profile, others)) {
            return Prediction { pd: seen.ln_pd.exp(), source: Source::Measured };
        }
        let known =
            |profile: &ProfileIdx| self.view == View::Counters || self.columns.contains(profile);
        let all_known = known(&profile) && others.iter().all(known);
        let learnt = self.ask_forest(profile, others, word).filter(|_| all_known);
        let learnt = learnt.map(|ln| match self.view {
            View::Counters => self.thumb(profile, others) * ln.exp(),
            View::Pattern => ln.exp(),
        });
        let (pairs, all_met) = self.by_pairs(profile, others);
        match learnt {
            // A further roommate is assumed never to help: three are no better than the measured
            // two.
            Some(pd) => Prediction { pd: pd.max(pairs), source: Source::Learnt },
            None if all_met => Prediction { pd: pairs, source: Source::Learnt },
            None => {
                let met =
                    |o: &ProfileIdx| self.pair(profile, *o).unwrap_or(self.thumb(profile, &[*o]));
                let pd = 1.0 + others.iter().map(|o| met(o) - 1.0).sum::<f64>();
                Prediction { pd: pd.max(0.1), source: Source::Thumb }
            }
        }
    }

    fn ask_forest(
        &self,
        profile: ProfileIdx,
        others: &[ProfileIdx],
        word: Option<u64>,
    ) -> Option<f64> {
        let known = word.and_then(|word| self.memo.borrow().forest.get(&word).copied());
        known.unwrap_or_else(|| {
            let prediction = self.forest.predict(&self.row(profile, others)).map(|(ln, _)| ln);
            // With patterns, a profile's features change when it gets its column, so they are not
            // cached.
            if let Some(word) = word.filter(|_| self.view == View::Counters) {
                self.memo.borrow_mut().forest.insert(word, prediction);
            }
            prediction
        })
    }

    /// Measured degradation of a profile beside this one roommate.
    fn pair(&self, profile: ProfileIdx, other: ProfileIdx) -> Option<f64> {
        self.seen.get(&Key::new(profile, &[other])).map(|s| s.ln_pd.exp())
    }

    /// Sum of the measured pairwise degradations, and whether all pairs were measured.
    fn by_pairs(&self, profile: ProfileIdx, others: &[ProfileIdx]) -> (f64, bool) {
        let met: SmallVec<[f64; 4]> =
            others.iter().filter_map(|o| self.pair(profile, *o)).collect();
        let pd = 1.0 + met.iter().map(|pd| pd - 1.0).sum::<f64>();
        (pd.max(0.1), met.len() == others.len())
    }

    /// The rule of thumb: kernels of two jobs wait for each other in proportion to the product of
    /// their SM demands.
    fn thumb(&self, profile: ProfileIdx, others: &[ProfileIdx]) -> f64 {
        let own = self.demand(profile);
        1.0 + others.iter().map(|o| own.sm * self.demand(*o).sm).sum::<f64>()
    }

    fn row(&self, profile: ProfileIdx, others: &[ProfileIdx]) -> Vec<f64> {
        match self.view {
            View::Counters => {
                let others: SmallVec<[ResourceDemand; 4]> =
                    others.iter().map(|o| self.demand(*o)).collect();
                row(self.demand(profile), &others)
            }
            View::Pattern => {
                // The number of each profile matters most, and trees cannot add up columns.
                let mut row = vec![0.0; 2 * COLUMNS];
                row.push(others.len() as f64);
                let column = |profile: ProfileIdx| self.columns.iter().position(|c| *c == profile);
                if let Some(at) = column(profile) {
                    row[at] = 1.0;
                }
                for at in others.iter().filter_map(|o| column(*o)) {
                    row[COLUMNS + at] += 1.0;
                }
                row
            }
        }
    }
}

/// Features of a tenant among others: its own demand and the sum of the others' demands.
pub fn row(own: ResourceDemand, others: &[ResourceDemand]) -> Vec<f64> {
    let sum = |of: fn(&ResourceDemand) -> f64| others.iter().map(of).sum::<f64>();
    let most = |of: fn(&ResourceDemand) -> f64| others.iter().map(of).fold(0.0, f64::max);
    let n = others.len() as f64;
    vec![
        own.sm,
        own.dram,
        own.mem_gib,
        own.cpu,
        own.batch.max(1.0).ln(),
        n,
        sum(|a| a.sm),
        most(|a| a.sm),
        sum(|a| a.dram),
        most(|a| a.dram),
        sum(|a| a.mem_gib),
        sum(|a| a.cpu),
        sum(|a| a.batch.max(1.0).ln()) / n.max(1.0),
        own.sm * sum(|a| a.sm),
        own.dram * sum(|a| a.dram),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    const KINDS: u32 = 10;

    fn demand(rng: &mut Rng) -> ResourceDemand {
        let sm = 0.1 + 0.9 * rng.unit();
        ResourceDemand {
            sm,
            dram: sm * rng.unit(),
            mem_gib: 8.0 * rng.unit(),
            cpu: 1.0,
            batch: 64.0,
        }
    }

    fn truth(own: ResourceDemand, others: &[ResourceDemand]) -> f64 {
        let sum = |of: fn(&ResourceDemand) -> f64| others.iter().map(of).sum::<f64>();
        1.0 + 1.4 * own.sm.powf(1.5) * sum(|a| a.sm * a.sm) + 0.8 * own.dram * sum(|a| a.dram)
    }

    /// Learns random groups of the first `profiles` and returns the mean relative error on groups
    /// of `asked`.
    fn error(view: View, taught: usize, profiles: u32, asked: std::ops::Range<u32>) -> f64 {
        let mut rng = Rng::stream(4, 103);
        let demands: IdxVec<ProfileIdx, ResourceDemand> =
            (0..KINDS).map(|_| demand(&mut rng)).collect();
        let mut predictor = DegradationModel::new(view, 1);
        for (profile, a) in demands.iter_enumerated() {
            predictor.count(profile, *a);
        }
        let of = |k: &ProfileIdx| demands[*k];
        let draw = |rng: &mut Rng, from: &std::ops::Range<u32>| -> Vec<ProfileIdx> {
            let profile =
                |rng: &mut Rng| from.start + rng.below(u64::from(from.len() as u32)) as u32;
            (0..=1 + rng.below(2)).map(|_| ProfileIdx(profile(rng))).collect()
        };
        for _ in 0..taught {
            let group = draw(&mut rng, &(0..profiles));
            let others: Vec<ResourceDemand> = group[1..].iter().map(of).collect();
            predictor.learn(group[0], &group[1..], truth(of(&group[0]), &others));
        }
        predictor.refresh();
        let mut errors = 0.0;
        for _ in 0..300 {
            let group = draw(&mut rng, &asked);
            let others: Vec<ResourceDemand> = group[1..].iter().map(of).collect();
            let really = truth(of(&group[0]), &others);
            errors += (predictor.predict(group[0], &group[1..]).pd / really - 1.0).abs() / 300.0;
        }
        errors
    }

    #[test]
    fn it_learns_and_counters_generalise_to_new_profiles() {
        for view in [View::Pattern, View::Counters] {
            let (little, much) =
                (error(view, 15, KINDS, 0..KINDS), error(view, 300, KINDS, 0..KINDS));
            assert!(much < 0.08 && much < little, "{view:?}: {little} {much}");
        }
        let unseen = |view| error(view, 300, 6, 6..KINDS);
        let (pattern, counters) = (unseen(View::Pattern), unseen(View::Counters));
        // The pattern says nothing of new profiles, so there it equals the rule of thumb.
        assert!(counters < 0.15 && counters < 0.7 * pattern, "{pattern} {counters}");
    }

    #[test]
    fn a_pattern_is_the_same_in_any_order_and_only_then() {
        let [a, b, c] = [0, 1, 2].map(ProfileIdx);
        let mut predictor = DegradationModel::new(View::Pattern, 0);
        predictor.learn(a, &[b, c, b], 3.0);
        let measured = |others: &[ProfileIdx]| {
            let prediction = predictor.predict(a, others);
            (prediction.source == Source::Measured).then_some((prediction.pd * 1e9).round() / 1e9)
        };
        assert_eq!(measured(&[c, b, b]), Some(3.0));
        // The published artifact compared a 0/1 flag with a count, and took larger patterns for
        // smaller ones.
        assert_eq!(measured(&[b, c]), None);
        assert_eq!(measured(&[b, c, c]), None);
        assert_eq!(measured(&[a, b, b, c]), None);
        assert_eq!(measured(&[]), Some(1.0));
        assert_eq!(predictor.predict(b, &[a, b, c]).source, Source::Thumb);
        // Three are no better than the two that were measured.
        predictor.learn(a, &[b], 2.5);
        assert!(predictor.predict(a, &[b, c]).pd > 2.5);
        assert!((predictor.predict(a, &[b, b]).pd - 4.0).abs() < 1e-9);
    }

    #[test]
    fn without_data_it_says_so() {
        let predictor = DegradationModel::new(View::Counters, 0);
        let prediction = predictor.predict(ProfileIdx(3), &[ProfileIdx(4)]);
        assert_eq!((prediction.source, predictor.seen.len()), (Source::Thumb, 0));
        assert!((prediction.pd - 1.49).abs() < 1e-9, "{prediction:?}");
    }

    #[test]
    fn nonsense_is_not_learnt() {
        let mut predictor = DegradationModel::new(View::Counters, 0);
        for pd in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            predictor.learn(ProfileIdx(0), &[ProfileIdx(1)], pd);
        }
        predictor.learn(ProfileIdx(0), &[], 2.0);
        assert_eq!(predictor.seen.len(), 0);
    }
}
