//! The tuner on generated curves: how far from the optimum it ends, after how many measurements.

use super::*;
use crate::math::rng::Rng;
use crate::math::stat;
use crate::performance::goodput;
use crate::performance::goodput::MemoryFit;
use expect_test::expect;
use std::fmt::Write as _;

/// A tenant: T(m) = max(floor, fixed + each · m), slowed down by the utilisation of its roommates.
#[derive(Clone, Debug)]
struct Tenant {
    m0: u32,
    axis: Axis,
    phi: f64,
    floor: f64,
    fixed: f64,
    each: f64,
    /// Sensitivity of its slowdown to the utilisation of roommates.
    suffers: f64,
    fixed_mib: f64,
    each_mib: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Family {
    /// A finite noise scale and a fixed part of the step: the best batch size lies inside the
    /// range.
    U,
    /// The largest batch size is best, or the smallest.
    Monotone,
    /// Steps of constant length up to a knee, and a large noise scale: flat beyond the knee.
    Plateau,
    /// Two tenants that interfere more the larger their batch sizes are.
    Two,
    /// Three such tenants.
    Three,
}

const FAMILIES: [Family; 5] =
    [Family::U, Family::Monotone, Family::Plateau, Family::Two, Family::Three];

fn tenant(rng: &mut Rng, family: Family) -> Tenant {
    let m0 = 1u32 << (3 + rng.below(8));
    let m = f64::from(m0);
    let each = 1.0 / m;
    let (phi, fixed, floor) = match family {
        Family::U | Family::Two | Family::Three => {
            (m * (4.0 * rng.unit() - 2.0).exp2(), 0.1 + 2.0 * rng.unit(), 0.0)
        }
        Family::Monotone if rng.chance(0.5) => (m * 1e6, 0.2 + rng.unit(), 0.0),
        Family::Monotone => (0.0, 0.01 + 0.1 * rng.unit(), 0.0),
        Family::Plateau => (m * 1e4, 0.0, 0.3 + 2.0 * rng.unit()),
    };
    let (fixed_mib, each_mib) = (500.0 + 3_000.0 * rng.unit(), 6_000.0 * rng.unit() / m);
    let axis = Axis { low: (m0 / 8).max(1), high: m0 * 8 };
    let suffers = 1.5 * rng.unit();
    Tenant { m0, axis, phi, floor, fixed, each, suffers, fixed_mib, each_mib }
}

impl Tenant {
    fn alone_s(&self, batch: u32) -> f64 {
        (self.fixed + self.each * f64::from(batch)).max(self.floor)
    }

    fn busy(&self, batch: u32) -> f64 {
        self.each * f64::from(batch) / self.alone_s(batch)
    }

    fn mem_mib(&self, batch: u32) -> f64 {
        self.fixed_mib + self.each_mib * f64::from(batch)
    }
}

/// Mean degradation of all tenants.
fn objective(tenants: &[Tenant], batches: &[u32]) -> f64 {
    let busy: Vec<f64> = tenants.iter().zip(batches).map(|(t, b)| t.busy(*b)).collect();
    let all: f64 = busy.iter().sum();
    let of = |i: usize| {
        let (t, b) = (&tenants[i], batches[i]);
        let slowed = 1.0 + t.suffers * (all - busy[i]) * busy[i].max(0.2);
        let (m0, m) = (f64::from(t.m0), f64::from(b));
        goodput::degradation(t.alone_s(t.m0), t.alone_s(b) * slowed, m0, m, t.phi)
    };
    (0..tenants.len()).map(of).sum::<f64>() / tenants.len() as f64
}

struct Case {
    tenants: Vec<Tenant>,
    mem_mib: f64,
}

impl Case {
    fn new(seed: u64, family: Family) -> Self {
        let mut rng = Rng::stream(seed, 101);
        let count = match family {
            Family::Two => 2,
            Family::Three => 3,
            _ => 1,
        };
        let tenants: Vec<Tenant> = (0..count).map(|_| tenant(&mut rng, family)).collect();
        // The batch sizes at the start fit; the largest mostly do not.
        let least: f64 = tenants.iter().map(|t| t.mem_mib(t.m0)).sum();
        Self { tenants, mem_mib: least * (1.1 + 2.0 * rng.unit()) }
    }

    fn really_fits(&self, batches: &[u32]) -> bool {
        let takes = self.tenants.iter().zip(batches).map(|(t, b)| t.mem_mib(*b).round());
        takes.sum::<f64>() <= self.mem_mib
    }

    /// The least objective on a grid that is finer than the tuner's.
    fn best(&self) -> f64 {
        let axes = self.tenants.iter().map(|t| t.axis);
        let steps = if self.tenants.len() > 2 { 22 } else { 80 };
        let grids: Vec<Vec<u32>> =
            axes.zip(&self.tenants).map(|(a, t)| a.candidates(steps, t.m0)).collect();
        let start: Vec<u32> = self.tenants.iter().map(|t| t.m0).collect();
        let mut best = objective(&self.tenants, &start);
        let total: usize = grids.iter().map(Vec::len).product();
        for i in 0..total {
            let mut rest = i;
            let batches: Vec<u32> = grids
                .iter()
                .map(|g| {
                    let at = rest % g.len();
                    rest /= g.len();
                    g[at]
                })
                .collect();
            if self.really_fits(&batches) {
                best = best.min(objective(&self.tenants, &batches));
            }
        }
        best
    }
}

/// Result of a search.
struct Found {
    /// Objective ÷ the best possible, minus 1.
    regret: f64,
    measured: u32,
    start_regret: f64,
}

/// Searches with measurements of this relative noise.
fn search(case: &Case, seed: u64, noise: f64) -> Found {
    let mut rng = Rng::stream(seed, 102);
    let start: Vec<u32> = case.tenants.iter().map(|t| t.m0).collect();
    let axes: Vec<Axis> = case.tenants.iter().map(|t| t.axis).collect();
    let mut tuner = Tuner::new(Options::default(), &axes, &start);
    let mut memory = vec![MemoryFit::default(); axes.len()];
    let settled = loop {
        let upper = |batches: &[u32]| -> f64 {
            let each = memory.iter().zip(batches).map(|(m, b)| m.upper_mib(*b));
            each.map(|m| m.map_or(f64::INFINITY, f64::from)).sum()
        };
        match tuner.next(&|b| upper(b) <= case.mem_mib) {
            Turn::Settle(batches) => break batches,
            Turn::Measure(batches) => {
                assert!(case.really_fits(&batches), "ran out of memory at {batches:?}");
                for ((fit, t), b) in memory.iter_mut().zip(&case.tenants).zip(&batches) {
                    fit.observe(*b, t.mem_mib(*b).round() as u32);
                }
                let exact = objective(&case.tenants, &batches);
                tuner.observe(&batches, exact * (1.0 + noise * rng.normal()));
            }
        }
    };
    assert!(tuner.measured() <= 17);
    let best = case.best();
    Found {
        regret: objective(&case.tenants, &settled) / best - 1.0,
        measured: tuner.measured(),
        start_regret: objective(&case.tenants, &start) / best - 1.0,
    }
}

/// A table row: how many searches end within 5 %, the distribution of their regret and of their
/// measurements.
fn summary(family: Family, noise: f64, seeds: std::ops::Range<u64>) -> (f64, String) {
    let found: Vec<Found> = seeds.map(|s| search(&Case::new(s, family), s, noise)).collect();
    let n = found.len() as f64;
    let within = found.iter().filter(|f| f.regret <= 0.05).count() as f64 / n;
    let sorted = |of: &dyn Fn(&Found) -> f64| {
        let mut all: Vec<f64> = found.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let (regret, start) = (sorted(&|f| f.regret), sorted(&|f| f.start_regret));
    let measured = sorted(&|f| f64::from(f.measured));
    let percent = |v: f64| format!("{:.1}", 100.0 * v);
    let q = |of: &[f64], q: f64| stat::quantile(of, q).unwrap();
    let cells = [
        format!("{family:?}"),
        format!("{noise}"),
        percent(within),
        percent(stat::mean(&regret).unwrap()),
        percent(q(&regret, 0.5)),
        percent(q(&regret, 0.9)),
        percent(q(&regret, 0.99)),
        percent(stat::mean(&start).unwrap()),
        format!("{:.0}/{:.0}/{:.0}", q(&measured, 0.0), q(&measured, 0.5), q(&measured, 1.0)),
    ];
    (within, format!("| {} |\n", cells.join(" | ")))
}

#[test]
fn searches_end_within_five_percent_of_the_best() {
    let mut text = String::new();
    for noise in [0.0, 0.02] {
        for family in FAMILIES {
            let (within, line) = summary(family, noise, 0..200);
            let _ = write!(text, "{line}");
            assert!(within >= 0.93, "{family:?} {noise}: {within}");
        }
    }
    expect![[r#"
        | U | 0 | 100.0 | 0.1 | 0.0 | 0.1 | 2.4 | 6.8 | 4/5/7 |
        | Monotone | 0 | 99.5 | 0.6 | 0.0 | 1.7 | 4.5 | 233.7 | 3/4/15 |
        | Plateau | 0 | 93.5 | 0.8 | 0.0 | 0.0 | 12.8 | 37.9 | 4/9/17 |
        | Two | 0 | 99.5 | 0.3 | 0.1 | 0.3 | 4.4 | 8.8 | 6/10/17 |
        | Three | 0 | 99.0 | 0.6 | 0.6 | 1.1 | 6.4 | 13.0 | 8/13/17 |
        | U | 0.02 | 99.5 | 0.5 | 0.2 | 1.5 | 3.1 | 6.8 | 4/6/10 |
        | Monotone | 0.02 | 98.0 | 0.8 | 0.0 | 2.5 | 7.6 | 233.7 | 3/4/15 |
        | Plateau | 0.02 | 93.5 | 0.8 | 0.0 | 0.1 | 12.8 | 37.9 | 4/6/15 |
        | Two | 0.02 | 97.5 | 0.9 | 0.4 | 2.1 | 12.3 | 8.8 | 5/11/17 |
        | Three | 0.02 | 96.5 | 1.4 | 1.0 | 3.0 | 10.6 | 13.0 | 8/15/17 |
    "#]]
    .assert_eq(&text);
}

const PAIR: [Axis; 2] = [Axis { low: 16, high: 256 }, Axis { low: 2, high: 64 }];

#[test]
fn nothing_is_learnt_without_a_measurement() {
    // The artifact used its own acquisition value as the next observation.
    let mut tuner = Tuner::new(Options::default(), &PAIR, &[64, 8]);
    tuner.observe(&[64, 8], 1.5);
    let first = tuner.next(&|_| true);
    for _ in 0..5 {
        assert_eq!(tuner.next(&|_| true), first);
    }
    assert_eq!(tuner.measured(), 1);
    let Turn::Measure(next) = first else { panic!("the search stops after one measurement") };
    tuner.observe(&next, 1.2);
    assert_ne!(tuner.next(&|_| true), Turn::Measure(next));
}

#[test]
fn every_search_ends_with_a_batch_size_for_each_tenant() {
    // The artifact returned a bare number if it did not converge.
    let mut rng = Rng::stream(1, 104);
    for case in 0..60 {
        let mut tuner = Tuner::new(Options::default(), &PAIR, &[64, 8]);
        let mut measured = 0;
        let settled = loop {
            match tuner.next(&|b| case % 3 > 0 || b[0] < 100) {
                Turn::Settle(batches) => break batches,
                Turn::Measure(batches) => {
                    measured += 1;
                    let within =
                        PAIR.iter().zip(&batches).all(|(a, b)| (a.low..=a.high).contains(b));
                    assert!(within && batches.len() == 2, "{batches:?}");
                    let wild = [rng.exp(1.0), f64::NAN, 0.0, 1e300, f64::INFINITY, 1.0];
                    tuner.observe(&batches, wild[rng.below(6) as usize]);
                }
            }
        };
        assert!(measured <= 17 && settled.len() == 2, "{measured} {settled:?}");
    }
}

#[test]
fn a_suggestion_that_does_not_fit_is_not_tried() {
    let fits = |b: &[u32]| b[0] <= 64;
    for suggested in [[128, 8], [32, 8]] {
        let mut tuner = Tuner::new(Options::default(), &PAIR, &[64, 8]);
        tuner.suggest(&suggested);
        tuner.observe(&[64, 8], 1.5);
        let Turn::Measure(next) = tuner.next(&fits) else { panic!("the search stops at once") };
        assert!(fits(&next), "{next:?}");
        assert_eq!(next[..] == suggested, fits(&suggested), "{next:?}");
    }
}

#[test]
fn candidates_stay_in_range_and_at_least_one() {
    for (low, high) in [(1, 1), (1, 2), (2, 32), (1, u32::MAX)] {
        let axis = Axis { low, high };
        let all = axis.candidates(65, low);
        assert!(all.iter().all(|b| (low..=high).contains(b)), "{all:?}");
        assert!(all.is_sorted_by(|a, b| a < b));
    }
    let mut fixed = Tuner::new(Options::default(), &[Axis { low: 8, high: 8 }], &[8]);
    fixed.observe(&[8], 1.0);
    assert_eq!(fixed.next(&|_| true), Turn::Settle(SmallVec::from_slice(&[8])));
}

#[test]
fn a_warm_start_needs_fewer_measurements() {
    let (mut cold, mut warm, mut worse) = (0, 0, 0);
    for seed in 0..60 {
        let case = Case::new(seed, Family::Two);
        let axes: Vec<Axis> = case.tenants.iter().map(|t| t.axis).collect();
        let start: Vec<u32> = case.tenants.iter().map(|t| t.m0).collect();
        let run = |mut tuner: Tuner| {
            let mut trials = Vec::new();
            loop {
                match tuner.next(&|b| case.really_fits(b)) {
                    Turn::Settle(best) => break (best, tuner.measured(), trials),
                    Turn::Measure(batches) => {
                        let value = objective(&case.tenants, &batches);
                        tuner.observe(&batches, value);
                        trials.push((batches, value));
                    }
                }
            }
        };
        let fresh = || Tuner::new(Options::default(), &axes, &start);
        let (best, measured, trials) = run(fresh());
        let mut again = fresh();
        trials.iter().for_each(|(b, value)| again.recall(b, *value, 0.3));
        again.suggest(&best);
        let (other, fewer, _) = run(again);
        (cold, warm) = (cold + measured, warm + fewer);
        let ratio = objective(&case.tenants, &other) / objective(&case.tenants, &best);
        worse += u32::from(ratio > 1.02);
    }
    assert!(f64::from(warm) < 0.75 * f64::from(cold) && worse <= 3, "{warm} {cold} {worse}");
}
