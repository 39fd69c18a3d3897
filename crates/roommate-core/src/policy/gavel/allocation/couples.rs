//! Couples found by trial, as Gavel's study has Gandiva: who shares with whom is drawn, couples that turn
//! out badly part, and all rows get equal parts of the time.

use crate::policy::gavel::allocation::program::PairSpeed;
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Market, Pair};
use std::collections::BTreeMap;

/// Draws two of so many.
pub(crate) type DrawTwo<'a> = &'a mut dyn FnMut(usize) -> [usize; 2];

/// Who shares. Jobs are known by a number that grows with their arrival.
#[derive(Clone, Debug)]
pub(crate) struct Couples {
    partner: BTreeMap<u32, u32>,
    /// As in the released code: any two are tried, and they stay together if that is worth it on all
    /// GPU models taken together, instead of on each.
    released: bool,
}

impl Couples {
    /// Nobody shares yet.
    pub(crate) fn new(released: bool) -> Self {
        Self { partner: BTreeMap::new(), released }
    }

    /// Equal parts for couples and those who are alone, if there are more jobs than GPUs. `jobs` are the
    /// numbers of the claims, ascending.
    pub(crate) fn allocate(
        &mut self,
        market: &Market,
        jobs: &[u32],
        speed: PairSpeed<'_>,
        draw: DrawTwo<'_>,
    ) -> Allocation {
        let at = |job: u32| jobs.binary_search(&job).ok();
        let released = self.released;
        self.partner.retain(|job, other| {
            let both = at(*job.min(other)).zip(at(*job.max(other)));
            both.is_some_and(|(a, b)| worth_it(market, [a, b], speed, released))
        });
        let wanted: f64 = market.claims.iter().map(|c| c.gpus).sum();
        if wanted <= market.total() {
            return market.isolated();
        }
        self.marry(market, jobs, speed, draw);
        let mut rows: Vec<[usize; 2]> = Vec::new();
        for (i, job) in jobs.iter().enumerate() {
            match self.partner.get(job).and_then(|other| at(*other)) {
                Some(other) if other > i => rows.push([i, other]),
                Some(_) => {}
                None => rows.push([i, i]),
            }
        }
        let none = ByGpuModel::from_elem(0.0, market.gpus.len());
        let mut found =
            Allocation { alone: vec![none; jobs.len()], value: 1.0, ..Allocation::default() };
        for row in &rows {
            let share = market.piece(&market.claims[row[0]], rows.len());
            if row[0] == row[1] {
                found.alone[row[0]] = share;
            } else {
                found.pairs.push(Pair { who: *row, share });
            }
        }
        found
    }

    /// Draws two of those who are alone, as often as there are such; they become a couple if they are of
    /// the same width, and believed to gain by it.
    fn marry(&mut self, market: &Market, jobs: &[u32], speed: PairSpeed<'_>, draw: DrawTwo<'_>) {
        let mut single: Vec<usize> =
            (0..jobs.len()).filter(|i| !self.partner.contains_key(&jobs[*i])).collect();
        for _ in 0..single.len() {
            if single.len() < 2 {
                break;
            }
            let [a, b] = draw(single.len()).map(|i| single[i]);
            let promising = self.released || worth_it(market, [a.min(b), a.max(b)], speed, false);
            if market.claims[a].gpus == market.claims[b].gpus && promising {
                single.retain(|i| *i != a && *i != b);
                self.partner.insert(jobs[a], jobs[b]);
                self.partner.insert(jobs[b], jobs[a]);
            }
        }
    }
}

/// Whether two are better off together than taking turns.
fn worth_it(market: &Market, pair: [usize; 2], speed: PairSpeed<'_>, summed: bool) -> bool {
    let [a, b] = pair.map(|m| &market.claims[m]);
    let mut sum = 0.0;
    for gpu_model in 0..market.gpus.len() {
        let usable = a.speed[gpu_model] > 0.0 && b.speed[gpu_model] > 0.0;
        if !usable && !summed {
            continue;
        }
        let [x, y] = speed(pair[0], pair[1], gpu_model);
        if x <= 0.0 || y <= 0.0 {
            return false;
        }
        let here = x / a.speed[gpu_model] + y / b.speed[gpu_model];
        if here < 1.0 && !summed {
            return false;
        }
        sum += here;
    }
    sum >= 1.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::testing::{close, market};

    fn first_two(_: usize) -> [usize; 2] {
        [0, 1]
    }

    #[test]
    fn couples_stay_while_it_is_worth_it() {
        let m = market(&[1.0], &[&[1.0]; 3]);
        let mut couples = Couples::new(false);
        let good = |_: usize, _: usize, _: usize| [0.6, 0.6];
        let found = couples.allocate(&m, &[0, 1, 2], &good, &mut first_two);
        assert_eq!((found.pairs[0].who, found.pairs[0].share[0]), ([0, 1], 0.5));
        close(&found.alone, &[&[0.0], &[0.0], &[0.5]]);
        // The same two are kept whatever is drawn, until they turn out badly.
        let found = couples.allocate(&m, &[0, 1, 2], &good, &mut |_| [1, 0]);
        assert_eq!(found.pairs[0].who, [0, 1]);
        let bad = |_: usize, _: usize, _: usize| [0.4, 0.4];
        let found = couples.allocate(&m, &[0, 1, 2], &bad, &mut |_| [1, 2]);
        assert!(found.pairs.is_empty());
        close(&found.alone, &[&[1.0 / 3.0]; 3]);
        // Who is left over by the other's end is alone again.
        let mut two = m.clone();
        two.claims.pop();
        let found = couples.allocate(&two, &[0, 1], &good, &mut first_two);
        assert_eq!(found.pairs[0].who, [0, 1]);
    }

    #[test]
    fn who_fits_does_not_share_and_widths_are_equal() {
        let mut m = market(&[2.0], &[&[1.0]; 2]);
        let good = |_: usize, _: usize, _: usize| [0.9, 0.9];
        let found = Couples::new(false).allocate(&m, &[0, 1], &good, &mut first_two);
        assert!(found.pairs.is_empty());
        close(&found.alone, &[&[1.0], &[1.0]]);
        m.claims[1].gpus = 2.0;
        let found = Couples::new(false).allocate(&m, &[0, 1], &good, &mut first_two);
        assert!(found.pairs.is_empty());
        close(&found.alone, &[&[1.0], &[0.5]]);
    }

    #[test]
    fn the_released_couples_are_blind_and_sum_over_kinds() {
        // Bad on each GPU model, but not in sum.
        let m = market(&[1.0, 1.0], &[&[1.0, 1.0]; 3]);
        let pairs = |released: bool, speed: f64| {
            let speed = |_: usize, _: usize, _: usize| [speed; 2];
            let mut couples = Couples::new(released);
            couples.allocate(&m, &[0, 1, 2], &speed, &mut first_two);
            let found = couples.allocate(&m, &[0, 1, 2], &speed, &mut |n| [n - 2, n - 1]);
            found.pairs.iter().map(|p| p.who).collect::<Vec<_>>()
        };
        assert_eq!(pairs(true, 0.3), [[0, 1]]);
        assert_eq!(pairs(true, 0.2), [[1, 2]]);
        assert!(pairs(false, 0.3).is_empty());
    }
}
